"""How large the files of a snapshot may be: a sparse file of 100 GB is refused by its size, and a recipe of an endless network before it is
built."""

from collections.abc import Mapping
from functools import lru_cache

from stagerun.base.recipe import Model, Schedule
from stagerun.models.skeleton import without_memory
from stagerun.plan import PlannedStage, State
from stagerun.train import progress

# Bytes of a number in a tensor of precision FP64. What a solver remembers of a parameter: two tensors at most (Adam's).
_WIDEST, _SLOTS = 8, 2
# Of a push in the record of each server: in which order it was claimed and applied, by whom, what it had seen, and how often it was refused.
_PUSH = 64
# For names, and for what another version's network had more.
SLACK = 16_000_000


def most_bytes(model: Model, senders: int = 0, replicas: int = 0, pushes: int = 0) -> Mapping[str, int]:
    """Bytes by file, as `store.read` takes it: the most that the network, the residuals of `senders`, `replicas` and a record of
    `pushes` (`ASYNC`) can take; for 0 nothing is read."""
    numbers = elements(model)
    tensors = _WIDEST * numbers + SLACK
    return {
        progress.WEIGHTS: tensors,
        progress.AVERAGE: tensors,
        progress.MOMENTUM: _SLOTS * _WIDEST * numbers + SLACK,
        progress.RESIDUAL: (senders + 1) * tensors if senders else 0,
        # Of each its weights and what is remembered of them; and twice the weights for the outer update.
        progress.REPLICAS: ((1 + _SLOTS) * replicas + 2) * tensors if replicas else 0,
        progress.ARRIVALS: _PUSH * pushes + SLACK if pushes else 0,
        progress.STATE: progress.MOST_STATE,
        progress.RECIPE: progress.MOST_RECIPE,
        progress.CODE: progress.MOST_CODE,
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
def elements(model: Model) -> int:
    """Numbers in the parameters and buffers of a network, however large it is: it is made without memory for them."""
    return sum(tensor.numel() for tensor in without_memory(model).state_dict().values())
