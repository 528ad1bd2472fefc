"""A snapshot's recipe.prototxt -> recipe.Schedule: the inverse of `values.canonical`. Pure.

Read by the types of recipe's dataclasses, so that a new field there needs nothing here.
"""

import dataclasses
import enum
import math
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base import recipe
from stagerun.base.errors import Span
from stagerun.language import lexer, tree
from stagerun.language.consent import asked, scalars
from stagerun.language.lexer import Kind, Token, tokens
from stagerun.language.nets import of_model
from stagerun.language.networks import is_foreign
from stagerun.language.ranges import CHOICES, RETIRED, bounds_missed
from stagerun.language.tree import SCHEDULE
from stagerun.language.values import NONE, Member, layout

# What divides, or is stepped by: a snapshot need not be ours, and `check` has not seen its recipe.
_POSITIVE = {
    "Model.num_classes", "Model.channels", "Source.images", "Solver.max_iter", "Solver.batch_size", "Solver.device_batch_size",
    "Solver.test_batch_size",
}  # fmt: skip

_UNSAID = recipe.Data(train=recipe.Source(source="", path="", images=0))  # of a stage that has the schedule's

# Retired fields and values, by their names: older snapshots may have them.
_MESSAGES = SCHEDULE.file.message_types_by_name.values()
_LIVE = {field.name for kind in _MESSAGES for field in tree.fields(kind)}
_RETIRED = {field.name: field for kind in _MESSAGES for field in kind.fields if field.name not in _LIVE}
_RETIRED["carry_residual"] = SCHEDULE.file.message_types_by_name["Carry"].fields_by_name["residual"]  # its name there
_ENUMS = [*SCHEDULE.file.enum_types_by_name.values(), *(enum for kind in _MESSAGES for enum in kind.enum_types)]
_RETIRED_VALUES = {value.name: hint for kind in _ENUMS for value in kind.values if (hint := tree.retired_value(value))}

DEEPEST = 20  # messages inside messages; the language has five


@dataclass(frozen=True, slots=True)
class _Block:
    line: int
    fields: dict[str, "list[Token | _Block]"] = field(default_factory=dict)


def read_recipe(text: str) -> recipe.Schedule:
    """The schedule of which `text` is the canonical form. Its stages have no identity and no origins, and it has no files.

    A field that is not there, because an older stagerun wrote the text, has the dataclass's default. ValueError with the
    line if it is something else: an unknown field, a missing one without a default, a value of another type.
    """
    reader = _Reader(tokens(text))
    schedule: recipe.Schedule = _read(recipe.Schedule, reader.block(None))
    stages = tuple(replace(stage, model=stage.solver.model or schedule.model) for stage in schedule.stages)
    return replace(schedule, stages=stages)


def read_foreign(text: str) -> recipe.Schedule:
    """`read_recipe` for a text that someone else may have written. Raises ValueError, too, for a number below 1 where that can't be, for a
    transform with a value out of its range, and for names of code, methods and stages that no schedule has. No code may be run
    (`consent.trusted`)."""
    schedule = read_recipe(text)
    list(asked(schedule))
    for holder, key, member, held in scalars(schedule):
        if key in _POSITIVE and held < 1:
            raise ValueError(f"`{member.name}` must be 1 or more")
        if key in CHOICES and key != "Model.name" and held not in (None, *CHOICES[key]):
            raise ValueError(f"`{member.name}` has no value `{lexer.shown(held)}`")
        named = key == "Source.labels" and held not in (None, recipe.FLOAT_DATA)
        if named and None in (holder.labels_path, holder.labels_digest):
            raise ValueError("`labels` without the place and the digest of its file")
        if key == "Model.net" and held is not None:
            of_model(holder)
    stages, ensembles = {stage.name for stage in schedule.stages}, {one.name for one in schedule.ensembles}
    for name, iter in (place for ensemble in schedule.ensembles for place in ensemble.points):
        if name not in stages or (iter is not None and iter < 1):
            raise ValueError(f"an ensemble has a member `{lexer.shown(name)}` that is no place in a stage")
    before: set[str | None] = {None}
    for stage in schedule.stages:
        if not {stage.parent, stage.solver.teacher} <= before:
            raise ValueError(f"stage `{stage.name}` starts from, or is taught by, no stage before it")
        before.add(stage.name)
        if stage.average is not None and stage.average not in ensembles:
            raise ValueError(f"stage `{stage.name}` starts from the average of no ensemble")
        _require_in_range(stage.solver.transform)
        sync = stage.solver.sync
        if sync is not None and stage.solver.compress is not None:
            raise ValueError(f"stage `{stage.name}` has `compress_param` and `sync_param`, which no longer go together")
        if sync is not None and sync.period is None and not stage.solver.asynchronous:
            raise ValueError(f"`sync_param` of stage `{stage.name}` lacks `period`")
    return schedule


def _require_in_range(transform: recipe.Transform) -> None:
    """By the ranges of what `check` reads; a default needs not be in one."""
    for _, key, member, held in scalars(transform):
        field = SCHEDULE.file.message_types_by_name[key.partition(".")[0]].fields_by_name.get(member.name)
        if field is not None and held not in (None, member.default) and (missed := bounds_missed(field, held)):
            raise ValueError(f"`{member.name}` must be {missed}")


class _Reader:
    """`name: value` and `name { ... }`, nothing else of the text format."""

    def __init__(self, found: list[Token]) -> None:
        self.tokens, self.at = found, 0

    def take(self) -> Token:
        token = self.tokens[self.at]
        self.at += token.kind is not Kind.END
        return token

    def block(self, opening: Token | None, depth: int = 0) -> _Block:
        block = _Block(opening.line if opening else 1)
        if depth > DEEPEST:
            raise ValueError(f"line {block.line}: nested too deep")
        while True:
            name = self.take()
            if (name.text == "}" and opening) or (name.kind is Kind.END and not opening):
                return block
            mark = self.take()
            if name.kind is not Kind.WORD or mark.text not in (":", "{"):
                raise ValueError(f"line {name.line}: `{lexer.shown(name.text)}` is not a field")
            block.fields.setdefault(name.text, []).append(
                self.block(mark, depth + 1) if mark.text == "{" else self.take()
            )


def _read(kind: Any, block: _Block) -> Any:
    """The dataclass `kind` that a block describes."""
    members = {member.name: member for member in layout(kind) if member.stored}
    values: dict[str, Any] = {"data": _UNSAID} if kind is recipe.Stage else {}
    for name, items in block.fields.items():
        if (retired := _RETIRED.get(name)) is not None:
            _require_default(retired, items)
            continue
        if name not in members:
            raise ValueError(f"line {items[0].line}: {kind.__name__} has no field `{name}`")
        values[members[name].attribute] = read = _field(members[name], items)
        if isinstance(read, str) and (hint := RETIRED.get(f"{kind.__name__}.{name}", {}).get(read)):
            raise ValueError(f"line {items[0].line}: `{name}: {read}` was retired: {hint}")
    if kind is recipe.Model and ("net" in values or is_foreign(values.get("name", ""))):
        values = {"moving_average_fraction": None, "eps": None} | values  # not said: those of each layer
    for name, member in members.items():
        if member.default is dataclasses.MISSING and member.attribute not in values:
            raise ValueError(f"line {block.line}: {kind.__name__} lacks `{name}`")
    if kind is recipe.Schedule:
        values["stages"] = tuple(replace(s, data=_data(values["data"], s.data)) for s in values["stages"])
    if kind is recipe.Stage:
        values["parent"] = values["parent"] or None
        # Its model is known when the schedule's is.
        values |= {"model": None, "identity": {}, "origins": {}, "span": Span("recipe.prototxt", block.line, 1)}
    return kind(**values)


def _require_default(retired: FieldDescriptor, items: "list[Token | _Block]") -> None:
    """ValueError for a retired field whose value training depended on, unless it is the one that a schedule without it has."""
    item = items[0]
    if tree.identity(retired) and not (isinstance(item, Token) and item.text == _default(retired)):
        raise ValueError(f"line {item.line}: `{retired.name}` was retired: {tree.retired(retired)}")


def _default(field: FieldDescriptor) -> str:
    value = tree.default(field)
    return NONE if value is None else tree.canonical(value, field)


def _data(shared: recipe.Data, own: recipe.Data) -> recipe.Data:
    """A stage's: of its own it has the images alone."""
    return shared if own is _UNSAID else replace(shared, train=own.train, val=own.val)


def _field(member: Member, items: "list[Token | _Block]") -> Any:
    if member.repeated:
        return tuple(_item(member.kind, member.name, item) for item in items)
    if len(items) > 1:
        raise ValueError(f"line {items[1].line}: `{member.name}` a second time")
    return _item(member.kind, member.name, items[0])


def _item(wanted: Any, name: str, item: "Token | _Block") -> Any:
    if isinstance(item, _Block) and dataclasses.is_dataclass(wanted):
        return _read(wanted, item)
    if isinstance(item, Token) and not dataclasses.is_dataclass(wanted):
        try:
            return _scalar(wanted, item)
        except (ValueError, lexer.WrongValue) as error:
            shown = lexer.shown(item.text)
            if hint := _RETIRED_VALUES.get(item.text, ""):
                raise ValueError(f"line {item.line}: `{name}: {shown}` was retired: {hint}") from error
            raise ValueError(f"line {item.line}: `{name}` can't be `{shown}`") from error
    raise ValueError(f"line {item.line}: `{name}` is of another kind")


def _scalar(wanted: Any, token: Token) -> Any:
    if wanted is str:
        if token.kind is not Kind.STRING:
            raise ValueError("no text in quotes")
        return lexer.utf8(lexer.string(token))
    if token.kind not in (Kind.WORD, Kind.NUMBER):
        raise ValueError("no value")
    if issubclass(wanted, enum.Enum):
        return wanted(token.text)
    if wanted is bool:
        if token.text not in ("true", "false"):
            raise ValueError("neither true nor false")
        return token.text == "true"
    number = wanted(token.text)
    if wanted is float and not math.isfinite(number):
        raise ValueError("not finite")
    return number
