"""What can be written at a place: fields, values, names of stages and networks, files. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor

from stagerun.language import tree
from stagerun.language.lexer import Kind
from stagerun.language.ranges import CHOICES
from stagerun.language.tree import SOLVER, is_message
from stagerun.manual.fields import enum_name, first_sentence, value_names
from stagerun.tools.lsp.place import Place, Text, fields_in

# Fields that name stages, and fields that name files with the endings of those.
STAGES = ("StageEntry.from", "Sweep.from", "Ensemble.members", "LossParameter.teacher")
_WEIGHTS = (".safetensors", ".pt", ".pth", ".caffemodel", ".caffemodel.h5")
FILES = {
    "StageEntry.solver": (".prototxt",),
    "Solver.net": (".prototxt",),
    "Model.caffe_net": (".prototxt",),
    "Model.name": (".py",),
    "WeightsParameter.file": _WEIGHTS,
    "Solver.solverstate": (".solverstate", ".solverstate.h5"),
}


def full_name(field: FieldDescriptor) -> str:
    return f"{field.containing_type.name}.{field.name}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """`text` takes the place of the part of the text from `first` to the cursor. `kind`: "field", "value", "stage" or "file"."""

    label: str
    text: str
    first: int
    kind: str
    says: str = ""


def proposals(text: Text, place: Place, offset: int, stages: Sequence[str], files: Sequence[str]) -> Iterator[Proposal]:
    """`files`: those of the schedule's folder. The editor compares them with what is typed."""
    if place.is_name and (place.token is None or place.token.kind is Kind.WORD):
        yield from _fields(text, place, offset)
    elif place.field is not None:
        yield from _values(place, place.field, offset, stages, files)


def _fields(text: Text, place: Place, offset: int) -> Iterator[Proposal]:
    inner = place.around[-1]
    if inner.kind is None:
        return
    found = text.tokens()[:-1]
    given = {name.text for name, _ in fields_in(found, inner) if name != place.token}
    rest = text.text[offset + (len(place.token.text) - len(place.typed) if place.token else 0) :].lstrip(" \t")
    followed = rest.startswith((":", "{", "<"))
    for field in tree.fields(inner.kind):
        if field.is_repeated or field.name not in given:
            end = "" if followed else " { " if is_message(field) else ": "
            says = first_sentence(full_name(field))
            yield Proposal(field.name, field.name + end, offset - len(place.typed), "field", says)


def _values(
    place: Place, field: FieldDescriptor, offset: int, stages: Sequence[str], files: Sequence[str]
) -> Iterator[Proposal]:
    if field.type == FieldDescriptor.TYPE_STRING:
        yield from _texts(place, field, offset, stages, files)
        return
    words = {}
    if field.enum_type is not None:
        names = value_names(field)
        words = {name: first_sentence(f"{enum_name(field.enum_type)}.{name}") for name in names}
    elif field.type == FieldDescriptor.TYPE_BOOL:
        words = {"true": "", "false": ""}
    for word, says in words.items():
        yield Proposal(word, word, offset - len(place.typed), "value", says)


def _texts(
    place: Place, field: FieldDescriptor, offset: int, stages: Sequence[str], files: Sequence[str]
) -> Iterator[Proposal]:
    name, token = full_name(field), place.token
    quoted = token is not None and token.kind is Kind.STRING
    if quoted and not place.typed:  # before the quotes
        return
    quote = place.typed[:1] if quoted else '"'
    closed = token is not None and quoted and len(token.text) > 1 and token.text[-1] == quote
    left, right = "" if quoted else quote, "" if closed else quote
    first = offset - len(place.typed) + quoted
    fields = [one.name for one in tree.fields(SOLVER) if one.name != "clear"] if name == "Solver.clear" else []
    named = [one for one in files if one.endswith(FILES.get(name, ()) or ("\0",)) and one != "schedule.prototxt"]
    words = dict.fromkeys(CHOICES.get(name, ()), "value")
    words |= dict.fromkeys(named, "file") | dict.fromkeys(fields, "field")
    words |= {word: "stage" for word in stages if name in STAGES}
    for word, kind in words.items():
        says = first_sentence(f"Solver.{word}") if kind == "field" else ""
        yield Proposal(word, left + word + right, first, kind, says)
