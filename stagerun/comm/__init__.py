"""The process group and the sum of gradients over workers. `elastic` sums in an order that doesn't depend on the number of workers."""

# ruff: noqa: F401 (its imports are its names)

from collections.abc import Sequence

from torch import nn

from stagerun.base.recipe import Determinism
from stagerun.comm.elastic import TreeReducer, cover
from stagerun.comm.group import PATIENT, TIMEOUT, Comm, SoloComm, TorchComm, Traffic, Wait, gather_json, peers
from stagerun.comm.reduce import FlatReducer, Reducer, SoloReducer, runs_of


def make_reducer(
    determinism: Determinism,
    parameters: Sequence[nn.Parameter],
    comm: Comm,
    logical_workers: int,
    runs: Sequence[range] | None = None,
) -> Reducer:
    """Return the reducer that the schedule asks for. `parameters`: the trained ones, in model order; `runs[r]`: the logical workers of
    rank r, by default `runs_of` all."""
    kind = _kind(determinism, comm.size)
    if kind is TreeReducer:
        return TreeReducer(parameters, comm, runs or runs_of(logical_workers, comm.size))
    return SoloReducer(parameters) if kind is SoloReducer else FlatReducer(parameters, comm)


def dense_bytes(
    determinism: Determinism, elements: int, element_size: int, workers: int, logical_workers: int, tail: int
) -> int:
    """Return the bytes that rank 0 sends in an iteration without compression, with `tail` float64 numbers.

    With W workers a ring all-reduce (FIXED) sends 2 (W - 1) / W of all bytes. The tree (ELASTIC) sends (n + 1) (W - 1) / W, where n is the
    number of its nodes that make up rank 0's logical workers: 1 if they are a subtree. Alignment is left out."""
    times = 2
    if determinism is not Determinism.FIXED:
        times = 1 + len(cover(runs_of(logical_workers, workers)[0], logical_workers))
    return times * (workers - 1) * (elements * element_size + 8 * tail) // workers


def layout_of(determinism: Determinism, workers: int) -> str:
    """Return the `layout` of the reducer that `make_reducer` makes."""
    return _kind(determinism, workers).layout


def _kind(determinism: Determinism, workers: int) -> type[TreeReducer] | type[SoloReducer] | type[FlatReducer]:
    if determinism is not Determinism.FIXED:
        return TreeReducer
    return SoloReducer if workers == 1 else FlatReducer
