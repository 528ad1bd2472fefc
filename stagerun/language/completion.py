"""What a stage, or a field of one, may be called where a shell or an editor completes it: `--only STAGE`, `--set STAGE.FIELD=VALUE`."""

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import RecipeError
from stagerun.language import files_in, stage_nodes, tree
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stages import names_of
from stagerun.language.tree import SCHEDULE, is_message
from stagerun.language.values import field_of


def words(folder: str, form: str, word: str) -> list[str]:
    """What `word` may become where `form` stands for a stage of the schedule in a folder, or for a field of one: with a `.` where more has to
    follow, and with `=` behind a whole name where that is in `form`."""
    if "." not in form and "NAME" not in form:
        return [name for name in stage_names(folder) if name.startswith(word)]
    *path, last = word.split(".")
    found = [] if path else [f"{name}." for name in stage_names(folder)]
    kind: Descriptor | None = SCHEDULE
    if path:
        names = path if path[0] in SCHEDULE.fields_by_name else ["solver", *path[1:]]
        holder = field_of(".".join(names))
        kind = holder.message_type if holder is not None else None
    end = "=" if "=" in form else ""
    for field in tree.fields(kind) if kind is not None else ():
        # Those inside a list of messages can't be set one by one.
        found.append(field.name + (end if not is_message(field) or field.is_repeated else "."))
    before = word.removesuffix(last)
    return [before + name for name in found if name.startswith(last)]


def stage_names(folder: str) -> list[str]:
    """The stages of a schedule, as far as it can be read, and the names that stand for several."""
    try:
        text = files_in(folder)[SCHEDULE_FILE]
    except RecipeError:
        return []
    return names_of(stage_nodes(text))
