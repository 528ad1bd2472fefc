"""What a stage, or a field of one, may be called where a shell or an editor completes it: `--only STAGE`, `--set STAGE.FIELD=VALUE`."""

from collections.abc import Iterable, Iterator

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import RecipeError
from stagerun.language import files_in, stage_nodes, tree
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stages import Node
from stagerun.language.tree import SCHEDULE, SOLVER, is_message


def words(folder: str, form: str, word: str) -> list[str]:
    """What `word` may become where `form` stands for a stage, or for a field of one, of the schedule in a folder."""
    if "." in form or "NAME" in form:
        return _settings(folder, word, "=" if "=" in form else "")
    return [name for name in stage_names(folder) if name.startswith(word)]


def stage_names(folder: str) -> list[str]:
    """The stages of a schedule, as far as it can be read, and the names that stand for several."""
    try:
        text = files_in(folder)[SCHEDULE_FILE]
    except RecipeError:
        return []
    return names_of(stage_nodes(text))


def names_of(nodes: Iterable[Node]) -> list[str]:
    return list(dict.fromkeys(name for node in nodes for name in (node.name, node.group) if name))


def _settings(folder: str, word: str, end: str) -> list[str]:
    """What `word`, the beginning of a setting, may become: a stage or a field of the schedule, with a `.` where more has to follow, and
    `end` behind a whole name."""
    *path, last = word.split(".")
    before = "".join(f"{one}." for one in path)
    if not path:
        names = [f"{name}." for name in stage_names(folder)] + list(_fields(SCHEDULE, end))
    else:
        kind: Descriptor | None = SCHEDULE if path[0] in SCHEDULE.fields_by_name else SOLVER
        for one in path if kind is SCHEDULE else path[1:]:
            field = kind.fields_by_name.get(one) if kind is not None else None
            kind = field.message_type if field is not None and is_message(field) else None
        names = list(_fields(kind, end)) if kind is not None else []
    return [before + name for name in names if name.startswith(last)]


def _fields(kind: Descriptor, end: str) -> Iterator[str]:
    """Those inside a list of messages can't be set one by one."""
    for field in tree.fields(kind):
        yield field.name + (end if not is_message(field) or field.is_repeated else ".")
