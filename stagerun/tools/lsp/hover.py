"""What the manual and the schedule say of the field or value at a place. Pure."""

from stagerun.base.errors import UsageError
from stagerun.language.tree import SCHEDULE
from stagerun.manual.fields import help_text, value_text
from stagerun.tools.lsp.complete import full_name
from stagerun.tools.lsp.folder import Folder
from stagerun.tools.lsp.place import Place, Text, fields_in, text_in
from stagerun.tools.plan.why import explained


def hover_text(folder: Folder, path: str, text: Text, place: Place) -> str:
    """'' where there is nothing to say. Where the schedule loads, what the field comes to in its stage, too."""
    field = place.field
    if field is None or place.token is None:
        return ""
    kind, word = field.enum_type, place.token.text
    if kind is not None and not place.is_name and word in kind.values_by_name:
        return value_text(kind, word)
    name = asked(folder, path, text, place)
    if folder.schedule is not None and name:
        try:
            return explained(folder.schedule, name)
        except UsageError:  # a field inside of a list of messages, a stage's `name`
            pass
    return help_text(full_name(field))


def asked(folder: Folder, path: str, text: Text, place: Place) -> str:
    """What `plan --why` calls the field, `cyc1.transform_param.mirror`; '' where it has no name for it."""
    words, stage = place.path, stage_at(folder, path, text, place)
    if folder.kind(path) is not SCHEDULE:
        return ".".join([stage, *words]) if stage and words else ""
    if words[:1] not in (("stage",), ("ensemble",)) or len(words) < 2:
        return ".".join(words)
    words = words[1:]
    if words[0] == "sweep":
        words = words[1:]
    if words[:1] in (("solver_param",), ("solver",)):
        words = words[1:] or words
    return ".".join([stage, *words]) if stage and words and words != ("name",) else ""


def stage_at(folder: Folder, path: str, text: Text, place: Place) -> str:
    """The stage, group or ensemble that a place speaks of; ''."""
    if folder.kind(path) is SCHEDULE:
        names = fields_in(text.tokens(), place.around[1]) if len(place.around) > 1 else ()
        inside = place.around[1].name in ("stage", "ensemble") if len(place.around) > 1 else False
        return next((text_in(value) for name, value in names if inside and name.text == "name"), "")
    file = folder.name(path)
    return next((node.group or node.name for node in folder.nodes() if node.file == file), "")
