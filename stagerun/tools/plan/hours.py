"""What `plan` shows beside the stages: ensembles, how long it takes, and where an allocation ends."""

from dataclasses import asdict, dataclass
from pathlib import Path

from stagerun.base.errors import UsageError
from stagerun.plan import Plan
from stagerun.plan.budget import budget, render_budget
from stagerun.plan.ensembles import ensembles_left, ensembles_record, ensembles_text
from stagerun.plan.hours import hours_record, render_hours
from stagerun.train.hours import find_hours
from stagerun.train.results import planned_ensembles

HINT = "give --images-per-second N, `stagerun rehearse` it here, or wait until a stage is trained"


@dataclass(frozen=True, slots=True)
class Beside:
    """As blocks of text, and as members of JSON."""

    blocks: tuple[str, ...]
    record: dict[str, object]


def beside(plan: Plan, out: Path, images_per_second: float | None, allocation: float | None) -> Beside:
    """With the given speed, in images per second of the whole job, or else the one measured here; `allocation` in seconds. UsageError for
    an allocation where no speed is known; StorageError, PermissionDenied for a log that can't be read."""
    hours = find_hours(plan, out, images_per_second)
    ensembles = planned_ensembles(plan, out)
    together = ensembles_left(plan.schedule, ensembles, hours.speeds) if hours else {}
    blocks = [ensembles_text(ensembles)]
    record: dict[str, object] = {"ensembles": ensembles_record(ensembles)}
    if hours:
        blocks.append(render_hours(plan, hours, together))
        record["time"] = hours_record(plan, hours, together)
    if allocation is not None:
        if hours is None:
            raise UsageError("--budget needs to know how fast training is, and nothing was measured here", HINT)
        if unknown := [planned.label for planned in plan.work if planned.stage.name not in hours.speeds]:
            raise UsageError(f"--budget: stage {', '.join(unknown)} {hours.unknown}", HINT)
        seconds = sum(time.total for time in together.values() if time is not None)
        ends = budget(plan, hours, allocation, seconds)
        blocks.append(render_budget(ends))
        record["budget"] = asdict(ends)
    return Beside(tuple(blocks), record)
