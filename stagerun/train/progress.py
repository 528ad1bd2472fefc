"""The files of a snapshot, the content of its state.json, and limits of their sizes. No torch: commands that print tables import it,
too."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache

from stagerun.base.recipe import Model, Schedule
from stagerun.plan import PlannedStage, State
from stagerun.schedule.improvement import BestSoFar, PlateauState
from stagerun.system.typed import json_object, read_as

WEIGHTS, MOMENTUM, AVERAGE = "model.safetensors", "optim.safetensors", "ema.safetensors"
RESIDUAL, REPLICAS = "residual.safetensors", "replicas.safetensors"
ARRIVALS = "arrivals.safetensors"  # in which order the pushes of a stage with `method: ASYNC` were applied
STATE, RECIPE = "state.json", "recipe.prototxt"
CODE = "code.json"  # the Python files that the schedule names, by path, where it names any

# Size limits. The recipe of hundreds of stages has 1 MB.
MOST_STATE, MOST_RECIPE, MOST_CODE = 16_000_000, 4_000_000, 16_000_000


@dataclass(frozen=True, slots=True)
class Progress:
    """Contents of state.json, for people, tables and limits; the weights need nothing from it.

    `position`: images consumed along the path of ancestors. `train_seconds`: over all process lives. `losses`: of the last iterations.
    `bad_records`: empty, except in snapshots of earlier versions. `plateau`: state of lr_policy `plateau`, else None. `skips`,
    `skips_in_all` and `rollbacks`: as in TrainState; the limit `max_nan` uses them. `choice`: result of `method: AUTO`; `weights`:
    sources of the tensors at the start of the stage (`starting_weights.record`); `best`: state of `early_stop`; `proof`: newest link of
    the chain of proofs (`audit_param`); `tested`: iteration of the newest evaluation. The last five are left out of the file when
    empty.
    """

    position: int
    train_seconds: float
    losses: list[float]
    bad_records: list[tuple[int, int, str]] = field(default_factory=list)  # an older snapshot has none
    plateau: PlateauState | None = None
    skips: int = 0
    skips_in_all: int = 0
    rollbacks: int = 0
    choice: dict[str, str] = field(default_factory=dict)
    weights: dict[str, dict[str, str]] = field(default_factory=dict)
    best: BestSoFar | None = None
    proof: str = ""
    tested: int = 0

    def record(self) -> dict[str, object]:
        optional = ("choice", "weights", "best", "proof", "tested")
        return {name: value for name, value in asdict(self).items() if value or name not in optional}


def progress_of(files: Mapping[str, bytes]) -> Progress:
    """Read a snapshot's state.json. KeyError if it is missing, ValueError if no run writes its content; fields of a later version are
    ignored."""
    record = json_object(files[STATE])
    plateau = record.get("plateau")
    if isinstance(plateau, dict) and plateau.keys() != {f.name for f in fields(PlateauState)}:
        raise ValueError("plateau is of another kind")
    return read_as(Progress, record)


# Bytes of a number in precision FP64. Slots of a solver: two at most (Adam).
_WIDEST, _SLOTS = 8, 2
# Bytes of a push in the record of a server.
_PUSH = 64
# For names, and for additions of another version.
SLACK = 16_000_000


def most_bytes(model: Model, senders: int = 0, replicas: int = 0, pushes: int = 0) -> Mapping[str, int]:
    """Return the size limit of each file, as `store.read` takes it: for the network, the residuals of `senders`, `replicas` and a
    record of `pushes` (`ASYNC`); a file with limit 0 is not read."""
    numbers = elements(model)
    tensors = _WIDEST * numbers + SLACK
    return {
        WEIGHTS: tensors,
        AVERAGE: tensors,
        MOMENTUM: _SLOTS * _WIDEST * numbers + SLACK,
        RESIDUAL: (senders + 1) * tensors if senders else 0,
        # Of each its weights and momentum; and twice the weights for the outer update.
        REPLICAS: ((1 + _SLOTS) * replicas + 2) * tensors if replicas else 0,
        ARRIVALS: _PUSH * pushes + SLACK if pushes else 0,
        STATE: MOST_STATE,
        RECIPE: MOST_RECIPE,
        CODE: MOST_CODE,
    }


def most_for(schedule: Schedule, planned: PlannedStage) -> Mapping[str, int]:
    """Return `most_bytes` for the start of a stage: residuals (one per logical worker), replicas and arrivals are read if the stage
    needs them."""
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
    """Return the number of elements in parameters and buffers; the network is made without memory for them."""
    from stagerun.models import without_memory  # loads torch

    return sum(tensor.numel() for tensor in without_memory(model).state_dict().values())
