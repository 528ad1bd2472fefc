"""The table of methods: a method is a class, whose docstring is its formula, and a row here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from stagerun.base.recipe import Memory, Method
from stagerun.comm.compression.dense import Dense, Half
from stagerun.comm.compression.levels import Int8, Sign, TernGrad, TwoBit
from stagerun.comm.compression.operator import Operator
from stagerun.comm.compression.power import PowerSgd, saves
from stagerun.comm.compression.qsgd import Qsgd
from stagerun.comm.compression.sparse import AdaptiveThreshold, RandomK, RandomKReleased, Threshold, TopK


@dataclass(frozen=True, slots=True)
class Row:
    """`build` gets `residual` and the settings that the method reads; `released` likewise makes the operator of the paper's code."""

    build: Callable[..., Operator]
    reads: Mapping[str, Any] = field(default_factory=dict)  # setting -> default
    released: Callable[..., Operator] | None = None  # None: the paper didn't release it
    shaped: bool = False  # `build` gets the `shape` too: a parameter as a matrix


METHODS: Mapping[Method, Row] = {
    Method.NONE: Row(Dense),
    Method.TOP_K: Row(TopK, {"ratio": 0.01}, partial(TopK, as_released=True)),
    Method.RANDOM_K: Row(RandomK, {"ratio": 0.01}, RandomKReleased),
    Method.THRESHOLD: Row(Threshold, {"threshold": 0.001}, Threshold),
    Method.ADAPTIVE_THRESHOLD: Row(AdaptiveThreshold, {}, AdaptiveThreshold),
    Method.TERNGRAD: Row(TernGrad, {}, partial(TernGrad, as_released=True)),
    Method.QSGD: Row(Qsgd, {"qstates": 255}, partial(Qsgd, as_released=True)),
    Method.TWO_BIT: Row(TwoBit, {"threshold": None}),
    Method.SIGN: Row(Sign),
    Method.POWER_SGD: Row(PowerSgd, {"rank": 4}, shaped=True),
    Method.INT8: Row(Int8),
    Method.BF16: Row(partial(Half, dtype=torch.bfloat16)),
    Method.FP16: Row(partial(Half, dtype=torch.float16)),
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
    method's default. `as_released` is of no effect where the paper released nothing. KeyError for AUTO and LOSSLESS, which are no operators."""
    row = METHODS[method]
    given = {"ratio": ratio, "threshold": threshold, "qstates": qstates, "rank": rank}
    settings: dict[str, Any] = {
        name: default if given[name] is None else given[name] for name, default in row.reads.items()
    }
    residual = memory is Memory.RESIDUAL
    if row.shaped:
        matrix = (shape[0], prod(shape[1:])) if shape else (1, 1)
        if not saves(settings["rank"], matrix):
            return Dense(residual)
        settings["shape"] = matrix
    build = row.released if as_released and row.released else row.build
    return build(residual=residual, **settings)
