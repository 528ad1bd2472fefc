"""Process group and gradient reduction."""

from collections.abc import Sequence

from torch import nn

from stagerun.comm.group import Comm, SoloComm, TorchComm
from stagerun.comm.reduce import FlatReducer, Reducer, SoloReducer, TreeReducer, runs_of
from stagerun.recipe import Determinism

__all__ = ["Comm", "Reducer", "SoloComm", "TorchComm", "make_reducer", "runs_of"]


def make_reducer(
    determinism: Determinism, parameters: Sequence[nn.Parameter], comm: Comm, logical_workers: int
) -> Reducer:
    """The way to add gradients up that the schedule asks for. `parameters` are those that are trained, in model order."""
    if determinism is Determinism.ELASTIC:
        return TreeReducer(parameters, comm, runs_of(logical_workers, comm.size))
    if comm.size == 1:
        return SoloReducer(parameters)
    return FlatReducer(parameters, comm)
