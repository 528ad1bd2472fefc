"""JSON from outside, read as dataclasses: msgspec checks each value against the type of its field.

An int is a count, from 0 to what 64 bits hold. A float is a finite number, at most LARGEST in size.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1
LARGEST = 1e100  # sums and products of a few such numbers are finite


def json_line(value: object) -> bytes:
    """Return a line of JSON of values and dataclasses. Bytes of a path outside of UTF-8 stay."""
    import msgspec  # not needed by every command

    return json.dumps(value, default=msgspec.to_builtins).encode() + b"\n"


def json_object(text: bytes, once: bool = False) -> dict[str, object]:
    """Parse a JSON object. ValueError for other text, or too deep nesting; with `once` also for a repeated name, of which readers take different
    values, and for NaN and infinity, which are not JSON."""
    strict: dict[str, Any] = {"object_pairs_hook": _once, "parse_constant": _no_number} if once else {}
    try:
        value = json.loads(text, **strict)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name twice in one object")
    return fields


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is not a number")


def read_as(kind: type[T], value: object) -> T:
    """Return the dataclass `kind`, or a plain value, from JSON. Unknown names, of a newer version, are skipped. ValueError with the name of a
    missing field without a default, or of another type."""
    import msgspec

    made = msgspec.convert(value, kind)
    _check(made, "")
    return made


def decode(kind: type[T], text: bytes) -> T:
    """Return `read_as(kind, json_object(text))`, several times as fast."""
    try:
        value: T = _decoder(kind).decode(text)  # type: ignore[arg-type]  # a class is hashable
    except (ValueError, RecursionError):  # only `json` reads half a surrogate pair, as in a path outside of UTF-8
        return read_as(kind, json_object(text))
    _check(value, "")
    return value


@cache
def _decoder(kind: Any) -> Any:
    import msgspec

    return msgspec.json.Decoder(kind)


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; () for any other type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def _check(value: Any, name: str) -> None:
    """Raise ValueError for a number out of range. Written for speed: a log has millions."""
    kind = type(value)
    if kind is float:
        if not -LARGEST <= value <= LARGEST:  # also NaN
            raise ValueError(f"{name} is not a finite number up to {LARGEST:g}")
    elif kind is int:
        if not 0 <= value <= MAX_INTEGER:
            raise ValueError(f"{name}: {value} is out of range")
    elif value is None or kind is str or kind is bool:
        return
    elif names := _field_names(kind):  # type: ignore[arg-type]
        for field in names:
            part = getattr(value, field)
            if type(part) is not float or not -LARGEST <= part <= LARGEST:
                _check(part, field)
    elif isinstance(value, Mapping):
        _check(tuple(value.values()), name)
    elif isinstance(value, list | tuple):
        for one in value:
            _check(one, name)
