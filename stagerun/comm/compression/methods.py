"""The operator of each method: a class, whose docstring is its formula, and a row here. What is known without torch is in
`base.compression`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from stagerun.base.compression import METHODS
from stagerun.base.recipe import Memory, Method
from stagerun.comm.compression.dense import Dense, Half
from stagerun.comm.compression.levels import Int8, Sign, TernGrad, TwoBit
from stagerun.comm.compression.operator import Operator
from stagerun.comm.compression.power import PowerSgd, saves
from stagerun.comm.compression.qsgd import Qsgd
from stagerun.comm.compression.sparse import AdaptiveThreshold, RandomK, RandomKReleased, Threshold, TopK

# A method is built with `residual` and the settings that it reads (`base.compression`).
BUILT: Mapping[Method, Callable[..., Operator]] = {
    Method.NONE: Dense,
    Method.TOP_K: TopK,
    Method.RANDOM_K: RandomK,
    Method.THRESHOLD: Threshold,
    Method.ADAPTIVE_THRESHOLD: AdaptiveThreshold,
    Method.TERNGRAD: TernGrad,
    Method.QSGD: Qsgd,
    Method.TWO_BIT: TwoBit,
    Method.SIGN: Sign,
    Method.POWER_SGD: PowerSgd,
    Method.INT8: Int8,
    Method.BF16: partial(Half, dtype=torch.bfloat16),
    Method.FP16: partial(Half, dtype=torch.float16),
}
# What the paper's code has in the place of some.
RELEASED: Mapping[Method, Callable[..., Operator]] = {
    Method.TOP_K: partial(TopK, as_released=True),
    Method.RANDOM_K: RandomKReleased,
    Method.TERNGRAD: partial(TernGrad, as_released=True),
    Method.QSGD: partial(Qsgd, as_released=True),
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
    given = {"ratio": ratio, "threshold": threshold, "qstates": qstates, "rank": rank}
    defaults = METHODS[method].reads
    settings: dict[str, Any] = {n: default if given[n] is None else given[n] for n, default in defaults.items()}
    residual = memory is Memory.RESIDUAL
    if method is Method.POWER_SGD:
        settings["shape"] = (shape[0], prod(shape[1:])) if shape else (1, 1)
        if not saves(settings["rank"], settings["shape"]):
            return Dense(residual)
    build = RELEASED.get(method, BUILT[method]) if as_released else BUILT[method]
    return build(residual=residual, **settings)
