"""How long a schedule takes, stage by stage, from how fast each part of it goes. Pure: the speeds are measured elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from stagerun.base.errors import listing
from stagerun.base.events import EnsembleTested, RunStarted, SnapshotWritten, StageFinished, StageStarted, Tested
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.text import between, columns, count, duration
from stagerun.plan.plan import Plan, PlannedStage
from stagerun.plan.rehearsal import cost_key

# An evaluation's share of the time to train on as many images: backward through a layer takes two products of the size of the one
# forward, for the gradients of its weights and of its input.
EVALUATION_SHARE = 1 / 3
# A teacher's forward pass, of a network like the stage's; `rehearse` measures another one.
LESSON_SHARE = EVALUATION_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of the parts of one stage. What is not known is 0, and `Hours.left_out` says so."""

    iteration: float
    start: float = 0.0  # before its first iteration, in each process life: reading the snapshot, building the network
    test: float = 0.0  # the evaluation at its end
    inner_test: float = 0.0  # one inside it
    blocked: float = 0.0  # that training stands still for a snapshot inside it
    written: float = 0.0  # until the one at its end is on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a stretch of a stage."""

    start: float = 0.0
    training: float = 0.0
    tests: float = 0.0
    snapshots: float = 0.0

    @property
    def total(self) -> float:
        return self.start + self.training + self.tests + self.snapshots

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            start=self.start + other.start,
            training=self.training + other.training,
            tests=self.tests + other.tests,
            snapshots=self.snapshots + other.snapshots,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """How fast every stage goes, by name; for those that are not in `speeds` nothing was measured.

    `source` says where that is from, as the end of `4 h left ...`. `opening`: seconds of each process life before its first
    stage, the copying of images among them. `left_out` and `notes` are sentences.
    """

    source: str
    speeds: Mapping[str, Speed]
    opening: float = 0.0
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unknown: str = "is of a kind that was not measured"  # the words for a stage that is not in `speeds`


def spent(schedule: Schedule, stage: Stage, speed: Speed, first: int, last: int) -> Spent:
    """The way from `first` updates to `last`, with what is due on it and after the last, but not the stage's own start and end."""
    solver = stage.solver
    before = max(first + 1, min(last + 1, solver.max_iter))  # nothing of the kind is due at the end
    snapshots = times(first, before, solver.snapshot)
    for point in schedule.branch_points(stage.name):
        snapshots += first < point <= last and not (solver.snapshot and point % solver.snapshot == 0)
    return Spent(
        training=(last - first) * speed.iteration,
        tests=speed.inner_test * times(first, before, solver.test_interval),
        snapshots=speed.blocked * snapshots,
    )


def times(iter: int, max_iter: int, every: int) -> int:
    """How often something that is due `every` iterations (0: never) comes after `iter` and before `max_iter`."""
    return (max_iter - 1) // every - iter // every if every else 0


def stage_left(schedule: Schedule, planned: PlannedStage, speed: Speed) -> Spent:
    """What is left of a stage, from its start to its evaluation."""
    speed = of_part(planned, speed)
    way = spent(schedule, planned.stage, speed, planned.iter, planned.last)
    return way + Spent(start=speed.start, tests=speed.test, snapshots=speed.written)


def of_part(planned: PlannedStage, speed: Speed) -> Speed:
    """The speed of a stage, or of a piece of one, in which nothing is evaluated."""
    return speed if planned.until is None else replace(speed, test=0.0, inner_test=0.0)


def left(plan: Plan, hours: Hours) -> dict[str, Spent | None]:
    """For each stage, or piece of one, with something to train, what is left of it; None where that is not known."""
    return {
        planned.label: stage_left(plan.schedule, planned, speed) if speed else None
        for planned in plan.work
        for speed in [hours.speeds.get(planned.stage.name)]
    }


def left_at(
    plan: Plan, hours: Hours | None, together: Mapping[str, Spent | None], stage: str, iter: int, todo: int, pace: float
) -> dict[str, float]:
    """Seconds that a run has left, by stage and ensemble: it has done `iter` updates of `stage`, at `pace` seconds each, and has `todo` to do in
    all, as the ones that it was told to do. What `plan` or `hours` don't know counts with that pace, under ''."""
    speeds = hours.speeds if hours is not None else {}
    place = {one.name: number for number, one in enumerate(plan.schedule.stages)}
    found: dict[str, float] = {}
    if stage in speeds:
        now, speed = plan.schedule.stage(stage), replace(speeds[stage], iteration=pace)
        last = max(iter, now.solver.max_iter)
        found[stage] = spent(plan.schedule, now, speed, iter, last).total + speed.test + speed.written
        todo -= last - iter
        for planned in plan.work:
            name = planned.stage.name
            if place[name] > place[stage] and name in speeds and 0 < planned.iterations_left <= todo:
                found[planned.label] = stage_left(plan.schedule, planned, speeds[name]).total
                todo -= planned.iterations_left
        if not todo:
            found |= {name: part.total for name, part in together.items() if part is not None}
    return found | ({"": todo * pace} if todo > 0 else {})


def seconds_at(schedule: Schedule, hours: Hours, name: str, iter: int) -> float | None:
    """Seconds from the seed to `iter` updates of a stage, along its path of ancestors and in one process life. The
    ancestors' evaluations and snapshots are in it; None if the speed of one of them is not known.
    """
    stage = schedule.stage(name)
    speed = hours.speeds.get(name)
    if speed is None:
        return None
    before: float | None = hours.opening
    if stage.parent is not None:
        parent, end = schedule.stage(stage.parent), schedule.start_iter(stage)
        before = seconds_at(schedule, hours, parent.name, end)
        if before is not None and end == parent.solver.max_iter:
            before += hours.speeds[parent.name].written + hours.speeds[parent.name].test
    return None if before is None else before + speed.start + spent(schedule, stage, speed, 0, iter).total


def at_images_per_second(
    schedule: Schedule,
    rate: float,
    *,
    blocked: float | None = None,
    written: float | None = None,
    start: float | None = None,
    opening: float | None = None,
) -> Hours:
    """At so many images per second of the whole job, in training; the seconds as in `Speed` and `Hours`, None where they are
    not known."""

    def speed(stage: Stage) -> Speed:
        whole, one = tested_images(stage)
        return Speed(
            iteration=with_lesson(schedule, stage) * stage.solver.batch_size / rate,
            start=start or 0.0,
            test=whole * EVALUATION_SHARE / rate,
            inner_test=one * EVALUATION_SHARE / rate,
            blocked=blocked or 0.0,
            written=written or 0.0,
        )

    notes = []
    if schedule.validation_sets:
        notes.append("an evaluation is counted as a forward pass: a third of what training takes per image")
    taught = [stage.name for stage in schedule.stages if schedule.teacher_model(stage) is not None]
    notes += [_lessons(taught)] if taught else []
    transforms = [s.solver.transform for s in schedule.stages]
    if len({t.crop_size for t in transforms}) > 1 or any(t.crop_size_ramp for t in transforms):
        notes.append("the speed is taken to be the same for images of all sizes")
    return Hours(
        source=f"at {rate:g} images/s",
        speeds={stage.name: speed(stage) for stage in schedule.stages},
        opening=opening or 0.0,
        left_out=not_known(schedule, 0.0, blocked, start, opening),
        notes=tuple(notes),
    )


def with_lesson(schedule: Schedule, stage: Stage) -> float:
    """How many times as long an image takes as in a stage without a teacher."""
    return 1 + LESSON_SHARE * (schedule.teacher_model(stage) is not None)


def _lessons(stages: Sequence[str]) -> str:
    return f"{listing(stages, 'and')}: a teacher's forward pass is counted as a third of what training takes per image"


def not_known(
    schedule: Schedule, test: float | None, blocked: float | None, start: float | None, opening: float | None
) -> tuple[str, ...]:
    """Name the costs that weren't measured: those that are None."""
    found = []
    if test is None and schedule.validation_sets:
        found.append("evaluations")
    if blocked is None:
        found.append("snapshots")
    if start is None:
        found.append("the start of each stage")
    if opening is None:
        copying = f", with the copying of images to {schedule.data.scratch}" if schedule.data.scratch else ""
        found.append(f"the start of the job{copying}")
    return tuple(found)


def tested_images(stage: Stage) -> tuple[int, int]:
    """Images that the evaluation at the end of a stage goes through, and one inside it; twice as many where averaged weights
    are evaluated beside the trained ones."""
    solver = stage.solver
    passes = 1 if solver.ema_decay is None else 2
    most = None if solver.test_iter is None else solver.test_iter * solver.test_batch_size
    whole = [source.images for source in stage.data.val]
    one = [images if most is None else min(images, most) for images in whole]
    return passes * sum(whole), passes * sum(one)


# -- what the last run here says about the hours of what is left


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
    """Means over the (time, event) pairs of a process life; None if it doesn't begin with its start."""
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
        kinds.setdefault(cost_key(schedule, schedule.stage(name)), []).append(measured_rate)
    slowest = min(with_lesson(schedule, schedule.stage(name)) * found for name, found in images_per_second.items())
    other = []

    def rate(stage: Stage) -> float:
        if stage.name in images_per_second:
            return images_per_second[stage.name]
        alike = kinds.get(cost_key(schedule, stage))
        if alike is None:
            other.append(stage.name)
            return slowest / with_lesson(schedule, stage)
        return sum(alike) / len(alike)

    def speed(stage: Stage) -> Speed:
        whole, one = tested_images(stage)
        return Speed(
            iteration=stage.solver.batch_size / rate(stage),
            start=run.start or 0.0,
            test=whole * (run.test_image or 0.0),
            inner_test=one * (run.test_image or 0.0),
            blocked=run.blocked or 0.0,
            written=run.written or 0.0,
        )

    speeds = {stage.name: speed(stage) for stage in schedule.stages}
    unlike = f"{', '.join(other)}: of a kind that was not trained yet, taken to be as slow as the slowest stage so far"
    taught = [name for name in other if schedule.teacher_model(schedule.stage(name)) is not None]
    return Hours(
        source=f"{run.who}, as in the last run here",
        speeds=speeds,
        opening=run.opening or 0.0,
        left_out=not_known(schedule, run.test_image, run.blocked, run.start, run.opening),
        notes=(*([unlike] if other else []), *([_lessons(taught)] if taught else [])),
    )


# -- as text and JSON


def render_hours(plan: Plan, hours: Hours, together: Mapping[str, Spent | None] | None = None) -> str:
    """How long what is left takes, one line per stage, and per ensemble of `together`; '' if nothing is left."""
    parts = {**left(plan, hours), **(together or {})}
    known = [part for part in parts.values() if part is not None]
    unknown = [name for name, part in parts.items() if part is None]
    if not known:
        return f"stage {', '.join(unknown)} {hours.unknown}" if unknown else ""
    whole = sum(known, Spent(start=hours.opening))
    some = f" without {', '.join(unknown)}" if unknown else ""
    at_most = " at the most" if plan.least_left < plan.iterations_left else ""
    lines = [f"about {duration(whole.total)} left{at_most}{some} {hours.source}", ""]
    shown = [n for n in ("training", "tests", "snapshots", "start") if n == "training" or round(getattr(whole, n))]
    titles = {"training": "training", "tests": "evaluation", "snapshots": "snapshots", "start": "start"}
    rows: list[Sequence[str]] = [("stage", "iterations", *(titles[n] for n in shown), "in all")]
    iterations = {p.label: between(p.least_left, p.iterations_left) for p in plan.work}
    if round(hours.opening):  # less is shown as `0 s`
        rows.append(("(the job)", "", *("" for n in shown[:-1]), *[duration(hours.opening)] * 2))
    for name, part in parts.items():
        times = ["?"] * (len(shown) + 1) if part is None else _times(part, shown)
        rows.append((name, iterations.get(name, ""), *times))
    rows.append(("total", between(plan.least_left, plan.iterations_left), *_times(whole, shown)))
    lines += columns(rows)
    lines += [f"stage {', '.join(unknown)} {hours.unknown}"] if unknown else []
    lines += [f"not counted: {', '.join(hours.left_out)}"] if hours.left_out else []
    return "\n".join([*lines, *hours.notes])


def _times(part: Spent, shown: Sequence[str]) -> list[str]:
    return [*(duration(getattr(part, name)) for name in shown), duration(part.total)]


def hours_record(plan: Plan, hours: Hours, together: Mapping[str, Spent | None] | None = None) -> dict[str, object]:
    """The same for `--json`, in seconds; a stage that nothing is known about has none."""
    parts = {**left(plan, hours), **(together or {})}
    known = [part for part in parts.values() if part is not None]
    return {
        "source": hours.source,
        "stages": [{"stage": name, **(_record(part) if part else {})} for name, part in parts.items()],
        "opening": hours.opening,
        "left": _record(sum(known, Spent(start=hours.opening if parts else 0.0))),
        **({"at_most": True} if plan.least_left < plan.iterations_left else {}),
        "not_counted": list(hours.left_out),
        "notes": list(hours.notes),
    }


def _record(part: Spent) -> dict[str, object]:
    return {**asdict(part), "in_all": part.total}
