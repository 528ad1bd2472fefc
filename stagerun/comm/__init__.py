"""Process group and gradient reduction."""

from collections.abc import Sequence

from torch import nn

from stagerun.comm.elastic import TreeReducer
from stagerun.comm.group import PATIENT, TIMEOUT, Comm, SoloComm, TorchComm
from stagerun.comm.reduce import FlatReducer, Reducer, SoloReducer, runs_of
from stagerun.recipe import Determinism

__all__ = ["PATIENT", "TIMEOUT", "Comm", "Reducer", "SoloComm", "TorchComm", "layout_of", "make_reducer", "runs_of"]


def make_reducer(
    determinism: Determinism, parameters: Sequence[nn.Parameter], comm: Comm, logical_workers: int
) -> Reducer:
    """The way to add gradients up that the schedule asks for. `parameters` are those that are trained, in model order."""
    kind = _kind(determinism, comm.size)
    if kind is TreeReducer:
        return TreeReducer(parameters, comm, runs_of(logical_workers, comm.size))
    return SoloReducer(parameters) if kind is SoloReducer else FlatReducer(parameters, comm)


def layout_of(determinism: Determinism, workers: int) -> str:
    """The `layout` of the reducer that `make_reducer` makes."""
    return _kind(determinism, workers).layout


def _kind(determinism: Determinism, workers: int) -> type[TreeReducer] | type[SoloReducer] | type[FlatReducer]:
    if determinism is Determinism.ELASTIC:
        return TreeReducer
    return SoloReducer if workers == 1 else FlatReducer
