"""JSON that comes from outside, read as dataclasses: each value is checked against the type of its field.

Known are str, bool, int (a count: from 0 to what 64 bits hold), Signed (an int that may be below 0), float (a finite number), lists,
tuples, mappings from names, dataclasses, and each of them with `| None`.
"""

import collections.abc
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1

Signed = Annotated[int, "from -MAX_INTEGER"]


def json_object(text: bytes, once: bool = False) -> dict[str, object]:
    """ValueError for what is not a JSON object, or is nested too deep; with `once` also for one in which a name stands twice, of which
    readers of other programs would take the other, and for NaN and infinity, which are not JSON."""
    strict: dict[str, Any] = {"object_pairs_hook": _once, "parse_constant": _no_number} if once else {}
    try:
        found = json.loads(text, **strict)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice in one object")
    return found


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is not a number")


def read_as(kind: type[T], value: object) -> T:
    """The dataclass `kind` from a JSON object. Names that it doesn't know are passed over: a newer version's. ValueError with the name of a
    field that is missing and has no default, or is of another type."""
    try:
        found: T = _reader(typing.cast(Any, kind))(value)
    except _OtherKind:
        raise ValueError("not an object") from None
    return found


class _OtherKind(ValueError):
    """The value is not of the type. The object that holds it adds the field's name."""


@functools.cache
def _reader(kind: Any) -> Callable[[object], Any]:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if is_dataclass(kind):
        return _object(kind)
    if hasattr(kind, "_fields"):  # a NamedTuple, written as a list
        hints = typing.get_type_hints(kind, include_extras=True)
        return lambda value: kind(*_row([_reader(hints[name]) for name in kind._fields], value))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    readers = [_reader(one) for one in inner if one not in (type(None), ...)]
    if origin in (types.UnionType, typing.Union):
        return lambda value: None if value is None else readers[0](value)
    if origin in (dict, collections.abc.Mapping):
        return lambda value: {name: readers[1](one) for name, one in _of(dict, value).items()}
    if origin is list or inner[-1] is ...:
        return lambda value: origin(map(readers[0], _of(list, value)))
    return lambda value: _row(readers, value)


def _row(readers: Sequence[Callable[[object], Any]], value: object) -> tuple[Any, ...]:
    if len(_of(list, value)) != len(readers):
        raise _OtherKind
    return tuple(read(one) for read, one in zip(readers, _of(list, value), strict=True))


def _object(kind: Any) -> Callable[[object], Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    known = [
        (f.name, _reader(hints[f.name]), f.default is MISSING and f.default_factory is MISSING) for f in fields(kind)
    ]

    def make(value: object) -> Any:
        record, found = _of(dict, value), {}
        for name, read, needed in known:
            if name in record:
                try:
                    found[name] = read(record[name])
                except _OtherKind:
                    raise ValueError(f"{name} is of another kind") from None
            elif needed:  # otherwise it is younger than what was written
                raise ValueError(f"{name} is missing")
        return kind(**found)

    return make


def _of(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise _OtherKind
    return value


def _flag(value: object) -> bool:
    return _of(bool, value)


def count(value: object, least: int = 0) -> int:
    """ValueError for what is not an integer from `least` to MAX_INTEGER."""
    if type(value) is not int or not least <= value <= MAX_INTEGER:  # a bool is an int to isinstance
        raise _OtherKind
    return value


def number(value: object) -> float:
    """ValueError for what is not a finite number."""
    if type(value) not in (int, float):
        raise _OtherKind
    try:
        found = float(typing.cast(float, value))
    except OverflowError:  # an int of hundreds of digits
        raise _OtherKind from None
    if not math.isfinite(found):
        raise _OtherKind
    return found


_PLAIN: Mapping[Any, Callable[[object], Any]] = {
    str: functools.partial(_of, str),
    bool: _flag,
    int: count,
    Signed: functools.partial(count, least=-MAX_INTEGER),
    float: number,
}
