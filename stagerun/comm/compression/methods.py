"""The table of methods: a method is a class, whose docstring is its formula, and a row here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from stagerun.base.recipe import Memory, Method
from stagerun.comm.compression.dense import Dense, Half
from stagerun.comm.compression.operator import Operator
from stagerun.comm.compression.qsgd import Qsgd
from stagerun.comm.compression.sparse import TopK


@dataclass(frozen=True, slots=True)
class Row:
    """`build` gets `residual`, the settings that the method reads and, of those, `as_released` and `shape` if `released`, `shaped`."""

    build: Callable[..., Operator]
    reads: Mapping[str, Any] = field(default_factory=dict)  # setting -> default
    released: bool = False  # the paper released it: FACTS.md D1
    shaped: bool = False


METHODS: Mapping[Method, Row] = {
    Method.NONE: Row(Dense),
    Method.TOP_K: Row(TopK, {"ratio": 0.01}, released=True),
    Method.QSGD: Row(Qsgd, {"qstates": 255}, released=True),
    Method.BF16: Row(lambda residual: Half(residual, torch.bfloat16)),
    Method.FP16: Row(lambda residual: Half(residual, torch.float16)),
}


def make(
    method: Method,
    shape: Sequence[int],
    *,
    ratio: float | None = None,
    threshold: float | None = None,
    qstates: int | None = None,
    rank: int | None = None,
    memory: Memory = Memory.NONE,
    as_released: bool = False,
) -> Operator:
    """The operator of a tensor of that shape. Settings that the method doesn't read are of no effect, and those that are None are the
    method's default. KeyError for AUTO and LOSSLESS, which are no operators."""
    row = METHODS[method]
    given = {"ratio": ratio, "threshold": threshold, "qstates": qstates, "rank": rank}
    settings = {name: default if given[name] is None else given[name] for name, default in row.reads.items()}
    if row.released:
        settings["as_released"] = as_released
    if row.shaped:
        if len(shape) < 2:
            return Dense(memory is Memory.RESIDUAL)
        settings["shape"] = (shape[0], prod(shape[1:]))
    return row.build(residual=memory is Memory.RESIDUAL, **settings)
