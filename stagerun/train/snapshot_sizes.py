"""How large the files of a snapshot may be: a sparse file of 100 GB is refused by its size, and a recipe of an endless network before it is
built."""

from collections.abc import Mapping
from functools import lru_cache

from stagerun.base.errors import ResumeRefused
from stagerun.base.recipe import Model, Schedule
from stagerun.base.text import size
from stagerun.models.skeleton import without_memory
from stagerun.plan import PlannedStage, State
from stagerun.system.host import available_memory
from stagerun.train.progress import (
    ARRIVALS,
    AVERAGE,
    CODE,
    MOMENTUM,
    MOST_CODE,
    MOST_RECIPE,
    MOST_STATE,
    RECIPE,
    REPLICAS,
    RESIDUAL,
    STATE,
    WEIGHTS,
)

# Bytes of a number in a tensor: precision FP64, and less than any. What a solver remembers of a parameter: two tensors at most (Adam's).
_NARROWEST, _WIDEST, _SLOTS = 2, 8, 2
# Of a push in the record of each server: in which order it was claimed and applied, by whom, what it had seen, and how often it was refused.
_PUSH = 64
# For names, and for what another version's network had more.
_SLACK = 16_000_000


def most_bytes(model: Model, senders: int = 0, replicas: int = 0, pushes: int = 0) -> Mapping[str, int]:
    """Bytes by file, as `store.read` takes it: the most that the network, the residuals of `senders`, `replicas` and a record of
    `pushes` (`ASYNC`) can take; for 0 nothing is read."""
    numbers = _elements(model)
    tensors = _WIDEST * numbers + _SLACK
    return {
        WEIGHTS: tensors,
        AVERAGE: tensors,
        MOMENTUM: _SLOTS * _WIDEST * numbers + _SLACK,
        RESIDUAL: (senders + 1) * tensors if senders else 0,
        # Of each its weights and what is remembered of them; and twice the weights for the outer update.
        REPLICAS: ((1 + _SLOTS) * replicas + 2) * tensors if replicas else 0,
        ARRIVALS: _PUSH * pushes + _SLACK if pushes else 0,
        STATE: MOST_STATE,
        RECIPE: MOST_RECIPE,
        CODE: MOST_CODE,
    }


def most_for(schedule: Schedule, planned: PlannedStage) -> Mapping[str, int]:
    """`most_bytes` of what a stage goes on from: residuals, replicas and arrivals are read where it has a use for them. There is a residual
    per logical worker."""
    stage, solver = planned.stage, planned.stage.solver
    if planned.state is not State.RESUME:
        starts = planned.state is State.FRESH and stage.parent is not None
        return most_bytes(schedule.stage(stage.parent or "").model if starts else stage.model)
    if solver.asynchronous:
        return most_bytes(stage.model, solver.logical_workers if solver.compress else 0, pushes=planned.iter)
    replicas = solver.sync.replicas if solver.sync else 0
    return most_bytes(stage.model, solver.logical_workers if solver.compress else 0, replicas)


@lru_cache(maxsize=16)
def _elements(model: Model) -> int:
    """Numbers in the parameters and buffers of a network, however large it is: it is made without memory for them."""
    return sum(tensor.numel() for tensor in without_memory(model).state_dict().values())


def require_buildable(name: str, model: Model) -> Mapping[str, int]:
    """`most_bytes` of the network that a snapshot's own recipe names. ResumeRefused for one that stagerun doesn't know, or that
    doesn't fit into the memory that is free: whoever wrote the recipe may have meant harm."""
    try:
        most = most_bytes(model)
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise ResumeRefused(
            f"the recipe in snapshot {name} names a network that can't be made: {type(error).__name__}: {error}",
            "it was made by another version of stagerun, or not by a run",
        ) from error
    needed, free = most[WEIGHTS] - _SLACK, available_memory()
    if needed > free:
        raise ResumeRefused(
            f"the network in snapshot {name} may need {size(needed)} of memory, and {size(free)} are free here",
            "take a machine with more memory, if that network is meant",
        )
    return most


def require_large_enough(name: str, model: Model, weights: bytes) -> None:
    """ResumeRefused if a file is too small to be the weights of a network, which then need not be built to see that they are not."""
    if len(weights) < _NARROWEST * _elements(model):
        raise ResumeRefused(
            f"snapshot {name} does not fit network `{model.name}`: its weights have {len(weights)} bytes, and the network has "
            f"{_elements(model)} numbers",
            "no run has written that",
        )
