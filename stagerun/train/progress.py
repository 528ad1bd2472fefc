"""The files of a snapshot, and what its state.json says. No torch: tables are made from it, too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from stagerun.schedule.plateau import FRESH

WEIGHTS, MOMENTUM, AVERAGE = "model.safetensors", "optim.safetensors", "ema.safetensors"
STATE, RECIPE = "state.json", "recipe.prototxt"

# What these two may be at most. Of a thousand bad records state.json has some 100 kB, of hundreds of stages the recipe 1 MB.
MOST_STATE, MOST_RECIPE = 16_000_000, 4_000_000


@dataclass(frozen=True, slots=True)
class Progress:
    """What a snapshot says besides tensors, for people, tables and limits; the weights need none of it.

    `position`: images consumed along the path of ancestors. `train_seconds`: over all process lives. `losses`: those of the
    last iterations. `bad_records`: [index, position, text] of those that were replaced, by all workers in all process lives.
    `plateau`: what lr_policy `plateau` goes on from, the fields of PlateauState; None of a stage with another policy. `skips`,
    `skips_in_all` and `rollbacks`: those of TrainState; the limit `max_nan` goes by them.
    """

    position: int
    train_seconds: float
    losses: list[float]
    bad_records: list[list[int | str]] = field(default_factory=list)  # an older snapshot has none
    plateau: dict[str, Any] | None = None
    skips: int = 0
    skips_in_all: int = 0
    rollbacks: int = 0


def progress_of(files: Mapping[str, bytes]) -> Progress:
    """KeyError without a state.json; ValueError if it is none that a run writes. What a later version may say besides is passed
    over."""
    try:
        found = json.loads(files[STATE])
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError("not an object")
    known = {f.name for f in fields(Progress)}
    try:
        progress = Progress(**{name: value for name, value in found.items() if name in known})
    except TypeError as error:  # one is missing
        raise ValueError(str(error)) from error
    wrong = [name for name in known if not _CHECKS.get(name, _anything)(getattr(progress, name))]
    if wrong:
        raise ValueError(f"{sorted(wrong)[0]} is of another kind")
    return progress


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63  # a bool is an int to isinstance


def _number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _records(value: object) -> bool:
    def record(row: object) -> bool:
        return isinstance(row, list) and [type(item) for item in row] == [int, int, str] and all(map(_whole, row[:2]))

    return isinstance(value, list) and all(map(record, value))


def _plateau(value: object) -> bool:
    if not isinstance(value, dict):
        return value is None
    lowest = value.get("lowest")
    return (
        value.keys() == {f.name for f in fields(FRESH)}
        and _whole(value["drops"])
        and _whole(value["since"])
        and (lowest is None or _number(lowest))
        and _numbers(value["losses"])
    )


def _anything(value: object) -> bool:
    return True


_CHECKS = {
    "position": _whole,
    "train_seconds": _number,
    "losses": _numbers,
    "bad_records": _records,
    "plateau": _plateau,
    "skips": _whole,
    "skips_in_all": _whole,
    "rollbacks": _whole,
}
