"""Compressed gradients: what goes over the wire in the place of a vector, and what it adds to the sum.

A reducer makes one operator per tensor with `make` (ENTIRE_MODEL: one of shape [n]), and drives it once per iteration:

    operator = make(Method.TOP_K, parameter.shape, ratio=0.01, memory=Memory.RESIDUAL)
    steps = operator.steps(vectors, senders, Draw(seed, iter, -1, item), out, state)
    messages = next(steps)                   # round 1: one message per own sender
    try:
        while True:
            received = ...                   # of all senders of the job, in their order; the own ones among them
            messages = steps.send(received)  # the next round's messages
    except StopIteration as ended:
        new_state = ended.value

- `vectors`: what this rank's own senders have to send (gradient plus residual), each contiguous, 1-D, float32 or float64. With a memory
  each is turned into its sender's new residual, c - d; without, what it holds afterwards is of no use.
- `senders`: the numbers of the own senders, growing. A sender's number is its place in `received`.
- `out`: [n], like the vectors, zeros to begin with. At the end it holds the sum of all senders' d, added in their order: the same bits on
  every rank.
- `draw`: of this seed, iteration and tensor. It has the sender -1; operators put their senders in.
- `state`: None at first, then what the iteration before returned: a tensor that is the same on all ranks, and belongs into snapshots. Most
  methods have none and return None. The one given is never changed, so that an update that isn't made keeps it, as it keeps the residuals.

`operator.sizes(n, element_size)` has an entry for each round: the bytes of every sender's message, or None if they vary; lengths must
be sent first then. A message is uint8 [bytes], on the vectors' device. It may have no bytes, is never longer than the vector, and needn't
be aligned when it is received. It stays as it is after the generator has gone on. A length that can't be raises ValueError.

Operators keep nothing between iterations and may be shared by tensors of the same shape. Work is done in the calling thread, on a CPU in
pieces for which torch starts no threads of its own.

What is NaN or infinite in a vector is not finite in `out` somewhere. Residuals and state are of no use then.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from stagerun.base.compression import METHODS
from stagerun.base.recipe import Memory, Method
from stagerun.comm.compression.dense import BFloat16, Dense
from stagerun.comm.compression.operator import Draw, Operator
from stagerun.comm.compression.power import PowerSgd, saves
from stagerun.comm.compression.qsgd import Qsgd
from stagerun.comm.compression.sparse import RandomK, Threshold, TopK
from stagerun.comm.compression.terngrad import TernGrad

__all__ = ["BUILT", "Draw", "Operator", "make"]

# A class for each method, whose docstring is its formula; it is built with `residual` and the settings that
# it reads. What is known without torch is in `base.compression`.
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
