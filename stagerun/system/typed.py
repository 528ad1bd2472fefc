"""JSON that comes from outside, read as dataclasses: msgspec checks each value against the type of its field.

An int is a count, from 0 to what 64 bits hold. A float is a finite number, at most LARGEST in size.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1
LARGEST = 1e100  # sums and products of a few such numbers are finite


def json_line(value: object) -> bytes:
    """A line of JSON, of values and dataclasses; what was no UTF-8 in a path stays so."""
    import msgspec  # which a command that reads none doesn't wait for

    return json.dumps(value, default=msgspec.to_builtins).encode() + b"\n"


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
    """The dataclass `kind` from a JSON object, or a plain value. Names that it doesn't know are passed over: a newer version's. ValueError with
    the name of a field that is missing and has no default, or is of another type."""
    import msgspec

    found = msgspec.convert(value, kind)
    _check(found, "")
    return found


def _check(value: object, name: str) -> None:
    """ValueError for a number that no field may have."""
    if isinstance(value, int) and not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"{name}: {value} is out of range")
    if isinstance(value, float) and not abs(value) <= LARGEST:  # nor a NaN
        raise ValueError(f"{name} is not a finite number up to {LARGEST:g}")
    if is_dataclass(value):
        for field in fields(value):
            _check(getattr(value, field.name), field.name)
    elif isinstance(value, Mapping):
        _check(tuple(value.values()), name)
    elif isinstance(value, list | tuple):
        for one in value:
            _check(one, name)
