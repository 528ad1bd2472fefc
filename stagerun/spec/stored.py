"""A snapshot's recipe.prototxt -> recipe.Schedule: the inverse of `digest.canonical`. Pure.

Read by the types of recipe's dataclasses, so that a new field there needs nothing here.
"""

import dataclasses
import enum
import math
import types
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from stagerun import recipe
from stagerun.errors import Span
from stagerun.spec import ranges, scalars
from stagerun.spec.digest import NAMES
from stagerun.spec.lexer import Kind, Token, tokens

# `canonical` writes these two by hand.
_NAMES = {**NAMES, "stages": "stage", "parent": "from", "ensembles": "ensemble"}
# What it leaves out: where the values came from, and what is derived from the text as it was written.
_LEFT_OUT = {
    recipe.Schedule: {"files", "sets"},
    recipe.Stage: {"identity", "origins", "span"},
    recipe.Ensemble: {"span"},
    recipe.Model: {"spare_classes"},
}

# What divides, or is stepped by: a snapshot need not be ours, and `check` has not seen its recipe.
_OF_SOLVER = ("max_iter", "batch_size", "device_batch_size", "test_batch_size")

DEEPEST = 20  # messages inside messages; the language has five


@dataclass(frozen=True, slots=True)
class _Block:
    line: int
    fields: dict[str, "list[Token | _Block]"] = field(default_factory=dict)


def read_recipe(text: str) -> recipe.Schedule:
    """The schedule of which `text` is the canonical form. Its stages have no identity and no origins, and it no files.

    A field that is not there, because an older stagerun wrote the text, has the dataclass's default. ValueError with the
    line for what is no such text: an unknown field, a missing one without a default, a value of another type.
    """
    reader = _Reader(tokens(text))
    schedule: recipe.Schedule = _read(recipe.Schedule, reader.block(None))
    return schedule


def read_foreign(text: str) -> recipe.Schedule:
    """`read_recipe` of what somebody else may have written. ValueError, too, for a number below 1 where that can't be, and for a
    transform with a value out of its range."""
    schedule = read_recipe(text)
    counts = {"num_classes": schedule.model.num_classes, "channels": schedule.model.channels}
    counts |= {"images": min(s.images for s in (schedule.data.train, schedule.data.val) if s is not None)}
    for name in _OF_SOLVER:
        counts[name] = min((getattr(stage.solver, name) for stage in schedule.stages), default=1)
    for name, least in counts.items():
        if least < 1:
            raise ValueError(f"`{name}` must be 1 or more")
    for stage in schedule.stages:
        _require_in_range(stage.solver.transform)
    return schedule


def _require_in_range(value: Any) -> None:
    """A message of the recipe and those in it, by the ranges of what `check` reads; a default needs not be in one."""
    for one in dataclasses.fields(value):
        found, name = getattr(value, one.name), _NAMES.get(one.name, one.name)
        allowed = ranges.RANGES.get(f"{type(value).__name__}Parameter.{name}")
        if dataclasses.is_dataclass(found):
            _require_in_range(found)
        elif allowed is not None and found is not None and found != one.default and found not in allowed:
            raise ValueError(f"`{name}` must be {allowed}")


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
                raise ValueError(f"line {name.line}: `{scalars.shown(name.text)}` is no field")
            block.fields.setdefault(name.text, []).append(
                self.block(mark, depth + 1) if mark.text == "{" else self.take()
            )


def _read(kind: type, block: _Block) -> Any:
    """The dataclass `kind` that a block describes."""
    left_out = _LEFT_OUT.get(kind, set())
    fields = {_NAMES.get(f.name, f.name): f for f in dataclasses.fields(kind) if f.name not in left_out}
    wanted = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, items in block.fields.items():
        if name not in fields:
            raise ValueError(f"line {items[0].line}: {kind.__name__} has no field `{name}`")
        values[fields[name].name] = _field(wanted[fields[name].name], name, items)
    for name, one in fields.items():
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if required and one.name not in values:
            raise ValueError(f"line {block.line}: {kind.__name__} lacks `{name}`")
    if kind is recipe.Stage:
        values["parent"] = values["parent"] or None
        values |= {"identity": {}, "origins": {}, "span": Span("recipe.prototxt", block.line, 1)}
    return kind(**values)


def _field(wanted: Any, name: str, items: "list[Token | _Block]") -> Any:
    """The value of a field of type `wanted`, of which `items` are the values."""
    if get_origin(wanted) in (Union, types.UnionType):  # `X | None`; None is not written
        (wanted,) = (part for part in get_args(wanted) if part is not types.NoneType)
    if get_origin(wanted) is tuple:
        return tuple(_item(get_args(wanted)[0], name, item) for item in items)
    if len(items) > 1:
        raise ValueError(f"line {items[1].line}: `{name}` a second time")
    return _item(wanted, name, items[0])


def _item(wanted: Any, name: str, item: "Token | _Block") -> Any:
    if isinstance(item, _Block) and dataclasses.is_dataclass(wanted):
        return _read(wanted, item)  # type: ignore[arg-type]
    if isinstance(item, Token) and not dataclasses.is_dataclass(wanted):
        try:
            return _scalar(wanted, item)
        except (ValueError, scalars.WrongValue) as error:
            shown = scalars.shown(item.text)
            raise ValueError(f"line {item.line}: `{name}` can't be `{shown}`") from error
    raise ValueError(f"line {item.line}: `{name}` is of another kind")


def _scalar(wanted: Any, token: Token) -> Any:
    if wanted is str:
        if token.kind is not Kind.STRING:
            raise ValueError("no text in quotes")
        return scalars.utf8(scalars.string(token))
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
