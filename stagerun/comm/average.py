"""The average of vectors that several ranks hold, with the same bits for any number of ranks.

Rank r gets slice r of every vector, adds them up in float64 in the order of the vectors, and hands the average out: each rank sends
(W-1)/W of what it holds and as much of one vector, which with one vector per rank is what a ring all-reduce sends.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stagerun.comm.group import Comm
from stagerun.comm.reduce import views_of

# About so much of each vector at a time, which bounds the memory for it. No bit depends on it.
CHUNK_BYTES = 4 << 20


@torch.no_grad()
def average(comm: Comm, holders: Sequence[int], own: Sequence[Sequence[Tensor]], out: Sequence[Tensor]) -> None:
    """Fills `out`, a list of tensors of one dtype, with the mean over vectors, each a list like it. `holders[v]` is the rank that hands
    vector v in, which never falls; `own` are this rank's. Collective."""
    for start, stop in _chunks(out):
        _average(comm, holders, [tensors[start:stop] for tensors in own], out[start:stop])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    start = size = 0
    for index, tensor in enumerate(tensors):
        size += tensor.nbytes
        if size >= CHUNK_BYTES or index == len(tensors) - 1:
            yield start, index + 1
            start, size = index + 1, 0


def _average(comm: Comm, holders: Sequence[int], own: Sequence[Sequence[Tensor]], out: Sequence[Tensor]) -> None:
    length = sum(t.numel() for t in out)
    width = -(-length // comm.size)
    sent = out[0].new_zeros((len(own), comm.size * width))
    for row, tensors in zip(sent, own, strict=True):
        for part, tensor in zip(views_of(row[:length], out), tensors, strict=True):
            part.copy_(tensor)
    # By rank, then by vector.
    sliced = sent.view(len(own), comm.size, width).transpose(0, 1).contiguous().view(-1)
    received = sliced.new_empty(len(holders) * width)
    counts = [sum(holder == rank for holder in holders) * width for rank in range(comm.size)]
    comm.exchange(sliced, [len(own) * width] * comm.size, received, counts)()
    first, *others = received.split(width)
    total = first.double()
    for other in others:
        total.add_(other)
    mean = total.div_(len(holders)).to(first.dtype)
    pieces = [mean if rank == comm.rank else torch.empty_like(mean) for rank in range(comm.size)]
    comm.complete(pieces)()
    for tensor, part in zip(out, views_of(torch.cat(pieces)[:length], out), strict=True):
        tensor.copy_(part)
