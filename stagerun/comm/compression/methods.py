"""The operator of each method: a class, whose docstring is its formula, and a row here. What is known without torch is in
`base.compression`."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from stagerun.base.compression import METHODS
from stagerun.base.recipe import Memory, Method
from stagerun.comm.compression.dense import BFloat16, Dense
from stagerun.comm.compression.operator import Operator
from stagerun.comm.compression.power import PowerSgd, saves
from stagerun.comm.compression.qsgd import Qsgd
from stagerun.comm.compression.sparse import RandomK, Threshold, TopK
from stagerun.comm.compression.terngrad import TernGrad

# A method is built with `residual` and the settings that it reads (`base.compression`).
BUILT: Mapping[Method, Callable[..., Operator]] = {
    Method.NONE: Dense,
    Method.TOP_K: TopK,
    Method.RANDOM_K: RandomK,
    Method.THRESHOLD: Threshold,
    Method.TERNGRAD: TernGrad,
    Method.QSGD: Qsgd,
    Method.POWER_SGD: PowerSgd,
    Method.BF16: BFloat16,
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
) -> Operator:
    """The operator of a tensor of that shape. Settings that the method doesn't read are of no effect, and those that are None are the
    method's default. KeyError for AUTO, which is no operator."""
    given = {"ratio": ratio, "threshold": threshold, "qstates": qstates, "rank": rank}
    defaults = METHODS[method].reads
    settings: dict[str, Any] = {n: default if given[n] is None else given[n] for n, default in defaults.items()}
    residual = memory is Memory.RESIDUAL
    if method is Method.POWER_SGD:
        settings["shape"] = (shape[0], prod(shape[1:])) if shape else (1, 1)
        if not saves(settings["rank"], settings["shape"]):
            return Dense(residual)
    return BUILT[method](residual=residual, **settings)
