"""The files of a snapshot, and what its state.json says. No torch: commands that print tables read it, too."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from stagerun.schedule.early_stop import BestSoFar
from stagerun.schedule.plateau import PlateauState
from stagerun.system.typed import json_object, read_as

WEIGHTS, MOMENTUM, AVERAGE = "model.safetensors", "optim.safetensors", "ema.safetensors"
RESIDUAL, REPLICAS = "residual.safetensors", "replicas.safetensors"
ARRIVALS = "arrivals.safetensors"  # in which order the pushes of a stage with `method: ASYNC` were applied
STATE, RECIPE = "state.json", "recipe.prototxt"
CODE = "code.json"  # the Python files that the schedule names, by path, where it names any

# What these may be at most. Of hundreds of stages the recipe 1 MB.
MOST_STATE, MOST_RECIPE, MOST_CODE = 16_000_000, 4_000_000, 16_000_000


@dataclass(frozen=True, slots=True)
class Progress:
    """What a snapshot says besides tensors, for people, tables and limits; the weights need none of it.

    `position`: images consumed along the path of ancestors. `train_seconds`: over all process lives. `losses`: those of the last
    iterations. `bad_records`: empty, but in snapshots of earlier versions. `plateau`: what lr_policy `plateau` goes on from; None of a stage with another
    policy. `skips`, `skips_in_all` and `rollbacks`: those of TrainState; the limit `max_nan` goes by them. `choice`: what `method: AUTO`
    chose; `weights`: of each tensor where it came from when the stage started (`given.record`); `best`: what `early_stop` goes by; `proof`:
    the newest link of the chain of proofs (`audit_param`); `tested`: the iteration of the newest evaluation. These are left out of the file
    where there is none.
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
        found = asdict(self)
        for name in ("choice", "weights", "best", "proof", "tested"):
            if not found[name]:
                del found[name]
        return found


def progress_of(files: Mapping[str, bytes]) -> Progress:
    """Read a snapshot's state.json. KeyError if it is missing, ValueError if no run writes such a one; fields of a later version are ignored."""
    record = json_object(files[STATE])
    plateau = record.get("plateau")
    if isinstance(plateau, dict) and plateau.keys() != {f.name for f in fields(PlateauState)}:
        raise ValueError("plateau is of another kind")
    return read_as(Progress, record)
