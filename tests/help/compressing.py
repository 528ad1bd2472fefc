"""Drives an operator of compressed gradients as the ranks of a job do, and makes vectors for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from facade import Compression, Draw, Memory, Method, operator
from torch import Tensor

DRAW = Draw(7, 11, -1, 3)
# The methods whose memory is RESIDUAL where none is written.
REMEMBER = (Method.TOP_K, Method.RANDOM_K, Method.THRESHOLD, Method.POWER_SGD)
SMALL = {
    Method.TOP_K: {"ratio": 0.1},
    Method.RANDOM_K: {"ratio": 0.1},
    Method.THRESHOLD: {"threshold": 0.01},
    Method.QSGD: {"qstates": 255},
    Method.POWER_SGD: {"rank": 2},
}
BITS = {np.dtype("f4"): np.uint32, np.dtype("f8"): np.uint64}


def make(method: Method, shape: Sequence[int], memory: Memory = Memory.NONE, **settings: Any) -> Any:
    return operator(Compression(method=method, memory=memory, **settings), shape)


def drive(
    operator: Any, vectors: Sequence[np.ndarray], draw: Draw = DRAW, state: Tensor | None = None, ranks: int = 1
) -> tuple[np.ndarray, list[np.ndarray], list[int], Tensor | None]:
    """What all ranks have at the end, which must be the same: the sum, the senders' residuals, bytes per sender and round, the state.
    Messages arrive at odd addresses, too."""
    held = [torch.from_numpy(v.copy()) for v in vectors]
    shares = [range(len(held))[r::ranks] for r in range(ranks)]
    outs = [torch.zeros_like(held[0]) for _ in shares]
    running = [operator.steps([held[i] for i in s], s, draw, out, state) for s, out in zip(shares, outs, strict=True)]
    answers, sizes, ends = [next(g) for g in running], [], []
    while not ends:
        messages = {i: m for s, a in zip(shares, answers, strict=True) for i, m in zip(s, a, strict=True)}
        sizes.append(max(len(m) for m in messages.values()))
        assert all(m.dtype == torch.uint8 and m.dim() == 1 for m in messages.values())
        answers = []
        for generator in running:
            try:
                sent = [
                    torch.cat((torch.zeros((i + ranks) % 2, dtype=torch.uint8), messages[i])) for i in range(len(held))
                ]
                answers.append(generator.send([m[(i + ranks) % 2 :] for i, m in enumerate(sent)]))
            except StopIteration as ended:
                ends.append(ended.value)
    assert all(same(outs[0].numpy(), o.numpy()) for o in outs)
    for end in ends:
        assert (end is None) == (ends[0] is None) and (end is None or same(end.numpy(), ends[0].numpy()))
    return outs[0].numpy(), [h.numpy() for h in held], sizes, ends[0]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """To the bit, but for the sign of 0."""
    return a.dtype == b.dtype and np.array_equal((a + 0).view(BITS[a.dtype]), (b + 0).view(BITS[b.dtype]))


def one(method: Method, c: np.ndarray, **given: Any) -> np.ndarray:
    return drive(make(method, c.shape, **given), [c])[0]


def numbers(n: int, dtype: str = "f4", seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.01, n).astype(dtype)


def how(method: Method, memory: Memory | None = None, **settings: object) -> Compression:
    """`compress_param` with small numbers where it needs some."""
    if memory is None:
        memory = Memory.RESIDUAL if method in REMEMBER else Memory.NONE
    return Compression(**{"method": method, "memory": memory, **SMALL.get(method, {}), **settings})
