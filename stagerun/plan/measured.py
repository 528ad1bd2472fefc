"""What the last run here says about the hours of what is left. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stagerun.events import EnsembleTested, RunStarted, SnapshotWritten, StageFinished, StageStarted, Tested
from stagerun.plan.hours import Hours, Speed, not_known, tested_images
from stagerun.plan.rehearsal import cost_key
from stagerun.recipe import Schedule, Solver
from stagerun.text import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the last process life of a run, in seconds as in `Speed` and `Hours`; None: it had nothing of the kind.

    `test_image`: one image of an evaluation.
    """

    who: str  # how many workers, on what
    test_image: float | None = None
    blocked: float | None = None
    written: float | None = None
    start: float | None = None
    opening: float | None = None


def measured(events: Sequence[tuple[float, object]]) -> Measured | None:
    """Of the (time, event) of a process life; None if it doesn't begin with its start."""
    run = next((event for _, event in events if isinstance(event, RunStarted)), None)
    if run is None:
        return None
    tests = [e for _, e in events if isinstance(e, Tested)]
    written = [e for _, e in events if isinstance(e, SnapshotWritten)]
    begins = [
        (time, e) for time, e in events if isinstance(e, RunStarted | StageStarted | StageFinished | EnsembleTested)
    ]
    first: list[float] = []
    starts: list[float] = []
    for (before, one), (after, two) in pairwise(begins):
        if isinstance(two, StageStarted) and not isinstance(one, StageStarted):
            (first if isinstance(one, RunStarted) else starts).append(max(0.0, after - before))
    start = _mean(starts)
    images = sum(e.images for e in tests)
    return Measured(
        who=f"with {count(run.workers, 'worker')} on {run.device}",
        test_image=sum(e.seconds for e in tests) / images if images else None,
        blocked=_mean([e.blocked_seconds for e in written]),
        written=_mean([e.seconds for e in written]),
        start=start,
        opening=max(0.0, first[0] - (start or 0.0)) if first else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def hours_of_run(schedule: Schedule, run: Measured, images_per_second: Mapping[str, float]) -> Hours:
    """By how fast stages were trained (one at least): a stage that was not goes as those of its kind, or as the slowest."""
    kinds: dict[str, list[float]] = {}
    for name, measured_rate in images_per_second.items():
        kinds.setdefault(cost_key(schedule, schedule.stage(name).solver), []).append(measured_rate)
    slowest = min(images_per_second.values())
    other = []

    def rate(name: str, solver: Solver) -> float:
        if name in images_per_second:
            return images_per_second[name]
        alike = kinds.get(cost_key(schedule, solver))
        if alike is None:
            other.append(name)
            return slowest
        return sum(alike) / len(alike)

    def speed(name: str, solver: Solver) -> Speed:
        whole, one = tested_images(schedule, solver)
        return Speed(
            iteration=solver.batch_size / rate(name, solver),
            start=run.start or 0.0,
            test=whole * (run.test_image or 0.0),
            inner_test=one * (run.test_image or 0.0),
            blocked=run.blocked or 0.0,
            written=run.written or 0.0,
        )

    speeds = {stage.name: speed(stage.name, stage.solver) for stage in schedule.stages}
    unlike = f"{', '.join(other)}: of a kind that was not trained yet, taken to be as slow as the slowest stage so far"
    return Hours(
        source=f"{run.who}, as in the last run here",
        speeds=speeds,
        opening=run.opening or 0.0,
        left_out=not_known(schedule, run.test_image, run.blocked, run.start, run.opening),
        notes=(unlike,) if other else (),
    )
