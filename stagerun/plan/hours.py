"""The time that a schedule takes, stage by stage, from the speeds of its parts. Pure: the speeds are measured elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise

from stagerun.base.errors import listing
from stagerun.base.events import EnsembleTested, RunStarted, SnapshotWritten, StageFinished, StageStarted, Tested
from stagerun.base.recipe import Model, Schedule, Stage
from stagerun.base.text import between, columns, count, duration
from stagerun.language.code import digest
from stagerun.language.values import net_digest, text
from stagerun.plan.planned import Plan, PlannedStage
from stagerun.schedule.image_size import at_largest

# An evaluation's share of the time to train on the same images: the backward pass of a layer takes two products of the size of the forward
# one, for the gradients of its weights and of its input. A teacher's forward pass takes the same share if its network is similar;
# `rehearse` measures others.
EVALUATION_SHARE = 1 / 3
_FORWARD = "an evaluation is counted as a forward pass: a third of what training takes per image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of the parts of one stage. Unknown parts are 0 and listed in `Hours.left_out`."""

    iteration: float
    start: float = 0.0  # before its first iteration, in each process life: reading the snapshot, building the network
    test: float = 0.0  # the evaluation at its end
    inner_test: float = 0.0  # an evaluation inside it
    blocked: float = 0.0  # that training waits for a snapshot inside it
    written: float = 0.0  # until the snapshot at its end is on disk


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
        return Spent(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Spent)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """The speeds of all stages."""

    source: str  # of the speeds, as the end of `4 h left ...`
    speeds: Mapping[str, Speed]  # by name, as far as measured
    opening: float = 0.0  # seconds of each process life before its first stage, including the copying of images
    left_out: tuple[str, ...] = ()  # unknown costs
    notes: tuple[str, ...] = ()  # sentences
    unknown: str = "is of a kind that was not measured"  # the words for a stage that is not in `speeds`


def spent(schedule: Schedule, stage: Stage, speed: Speed, first: int, last: int) -> Spent:
    """Return the time from `first` updates to `last`, with evaluations and snapshots up to `last`, without the stage's start and end."""
    solver = stage.solver
    before = max(first + 1, min(last + 1, solver.max_iter))  # inner evaluations and snapshots are never due at the end
    snapshots = times(first, before, solver.snapshot)
    for point in schedule.saved_at(stage.name):
        snapshots += first < point <= last and not (solver.snapshot and point % solver.snapshot == 0)
    return Spent(
        training=(last - first) * speed.iteration,
        tests=speed.inner_test * times(first, before, solver.test_interval),
        snapshots=speed.blocked * snapshots,
    )


def times(iter: int, max_iter: int, every: int) -> int:
    """Return how often something due `every` iterations (0: never) happens after `iter` and before `max_iter`."""
    return (max_iter - 1) // every - iter // every if every else 0


def stage_left(schedule: Schedule, planned: PlannedStage, speed: Speed) -> Spent:
    """Return the time left of a stage, from its start to its evaluation."""
    speed = of_part(planned, speed)
    stretch = spent(schedule, planned.stage, speed, planned.iter, planned.last)
    return stretch + Spent(start=speed.start, tests=speed.test, snapshots=speed.written)


def of_part(planned: PlannedStage, speed: Speed) -> Speed:
    """Return the speed of a stage, or of a piece, which has no evaluations."""
    return speed if planned.until is None else replace(speed, test=0.0, inner_test=0.0)


def left(plan: Plan, hours: Hours, together: Mapping[str, Spent | None] | None = None) -> dict[str, Spent | None]:
    """Return the time left of each stage or piece to train, None if unknown; then the ensembles in `together`."""
    work = ((planned, hours.speeds.get(planned.name)) for planned in plan.work)
    times_left = {one.label: stage_left(plan.schedule, one, speed) if speed else None for one, speed in work}
    return {**times_left, **(together or {})}


def left_at(
    plan: Plan, hours: Hours | None, together: Mapping[str, Spent | None], stage: str, iter: int, todo: int, pace: float
) -> dict[str, float]:
    """Return the seconds that a run has left, by stage and ensemble: it has done `iter` updates of `stage`, at `pace` seconds each, and has
    `todo` left in all. Stages missing in `plan` or `hours` count with that pace, under ''."""
    speeds = hours.speeds if hours is not None else {}
    names = [one.name for one in plan.schedule.stages]
    seconds: dict[str, float] = {}
    if stage in speeds:
        now, speed = plan.schedule.stage(stage), replace(speeds[stage], iteration=pace)
        last = max(iter, now.solver.max_iter)
        seconds[stage] = spent(plan.schedule, now, speed, iter, last).total + speed.test + speed.written
        todo -= last - iter
        later = {name for name in names[names.index(stage) + 1 :] if name in speeds}
        for planned in plan.work:
            if planned.name in later and planned.iterations_left <= todo:
                seconds[planned.label] = stage_left(plan.schedule, planned, speeds[planned.name]).total
                todo -= planned.iterations_left
        if not todo:
            seconds |= {name: part.total for name, part in together.items() if part is not None}
    return seconds | ({"": todo * pace} if todo > 0 else {})


# -- the speeds: from a number, or from the last run


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the last process life of a run, in seconds as in `Speed` and `Hours`; None: not measured."""

    who: str = ""  # the workers and their device
    test_image: float | None = None  # in an evaluation
    blocked: float | None = None
    written: float | None = None
    start: float | None = None
    opening: float | None = None


def measured(events: Sequence[tuple[float, object]]) -> Measured | None:
    """Return means over the (time, event) pairs of a process life; None if it lacks its start."""
    run = next((event for _, event in events if isinstance(event, RunStarted)), None)
    if run is None:
        return None
    tests = [e for _, e in events if isinstance(e, Tested)]
    written = [e for _, e in events if isinstance(e, SnapshotWritten)]
    steps = [(t, e) for t, e in events if isinstance(e, RunStarted | StageStarted | StageFinished | EnsembleTested)]
    first, starts = list[float](), list[float]()  # from the previous end to a stage's start
    for (time, before), (then, event) in pairwise(steps):
        if isinstance(event, StageStarted) and not isinstance(before, StageStarted):
            (first if before is run else starts).append(max(0.0, then - time))
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


def at_images_per_second(schedule: Schedule, rate: float, costs: Measured = Measured()) -> Hours:
    """Return the speeds if the whole job trains `rate` images per second in a stage without a teacher; evaluations are in proportion."""
    notes = []
    if schedule.validation_sets:
        notes.append(_FORWARD)
    notes += _lessons(schedule, [stage.name for stage in schedule.stages])
    transforms = [stage.solver.transform for stage in schedule.stages]
    if len({t.crop_size for t in transforms}) > 1 or any(t.crop_size_ramp for t in transforms):
        notes.append("the speed is assumed the same for images of all sizes")
    costs = replace(costs, test_image=EVALUATION_SHARE / rate)
    rates = {stage.name: rate / _teacher_factor(schedule, stage) for stage in schedule.stages}
    return _hours(schedule, f"at {rate:g} images/s", rates, costs, notes)


def hours_of_run(schedule: Schedule, run: Measured, images_per_second: Mapping[str, float]) -> Hours:
    """Return the speeds from the stages trained so far (one at least): other stages are as fast as stages of their kind, or as the slowest."""
    kinds: dict[str, list[float]] = {}
    for name, rate in images_per_second.items():
        kinds.setdefault(cost_key(schedule, schedule.stage(name)), []).append(rate)
    slowest = min(_teacher_factor(schedule, schedule.stage(name)) * rate for name, rate in images_per_second.items())
    rates, other = dict(images_per_second), list[str]()
    for stage in schedule.stages:
        if stage.name not in rates:
            alike = _mean(kinds.get(cost_key(schedule, stage), []))
            rates[stage.name] = alike or slowest / _teacher_factor(schedule, stage)
            other += [] if alike else [stage.name]
    unlike = f"{', '.join(other)}: of a kind that was not trained yet, assumed as slow as the slowest stage so far"
    notes = [*([unlike] if other else []), *_lessons(schedule, other)]
    if run.test_image is None and schedule.validation_sets:
        run = replace(run, test_image=EVALUATION_SHARE * len(images_per_second) / sum(images_per_second.values()))
        notes.append(_FORWARD)
    return _hours(schedule, f"{run.who}, as in the last run here", rates, run, notes)


def _hours(schedule: Schedule, source: str, rates: Mapping[str, float], costs: Measured, notes: Sequence[str]) -> Hours:
    """Return the speeds. `rates`: images per second of each stage."""

    def speed(stage: Stage) -> Speed:
        solver, images = stage.solver, [source.images for source in stage.data.val]
        most = None if solver.test_iter is None else solver.test_iter * solver.test_batch_size
        # Averaged weights are evaluated in addition to the trained ones.
        each = (costs.test_image or 0.0) * (1 if solver.ema_decay is None else 2)
        return Speed(
            iteration=solver.batch_size / rates[stage.name],
            start=costs.start or 0.0,
            test=sum(images) * each,
            inner_test=sum(images if most is None else (min(number, most) for number in images)) * each,
            blocked=costs.blocked or 0.0,
            written=costs.written or 0.0,
        )

    return Hours(
        source=source,
        speeds={stage.name: speed(stage) for stage in schedule.stages},
        opening=costs.opening or 0.0,
        left_out=not_measured(schedule, costs),
        notes=tuple(notes),
    )


def _teacher_factor(schedule: Schedule, stage: Stage) -> float:
    """Return the factor by which a teacher slows down an image."""
    return 1 if schedule.teacher_model(stage) is None else 1 + EVALUATION_SHARE


def _lessons(schedule: Schedule, names: Sequence[str]) -> list[str]:
    taught = [name for name in names if schedule.teacher_model(schedule.stage(name)) is not None]
    note = "a teacher's forward pass is counted as a third of what training takes per image"
    return [f"{listing(taught, 'and')}: {note}"] if taught else []


def not_measured(schedule: Schedule, measured: Measured) -> tuple[str, ...]:
    """Name the costs that weren't measured."""
    copying = f", with the copying of images to {schedule.data.scratch}" if schedule.data.scratch else ""
    costs = {
        "evaluations": measured.test_image if schedule.validation_sets else 0.0,
        "snapshots": measured.blocked,
        "the start of each stage": measured.start,
        f"the start of the job{copying}": measured.opening,
    }
    return tuple(name for name, seconds in costs.items() if seconds is None)


def cost_key(schedule: Schedule, stage: Stage) -> str:
    """Return the facts besides machine, workers and length that a stage's times depend on, as text."""
    solver, data = stage.solver, [stage.data.train, *stage.data.val]
    parts = [
        *_network(stage.model),
        (solver.device_batch_size, solver.test_batch_size),
        tuple(rule for rule in solver.param if rule.lr_mult == 0),  # frozen parameters need no gradient
        (solver.type, solver.regularization_type, solver.local_lr_auto),
        (solver.ema_decay is not None, solver.precision, solver.channels_last, solver.compile),
        (solver.clip_gradients is not None, solver.mixup_alpha > 0, solver.cutmix_alpha > 0),
        *(replace(at_largest(t), mean_value=(), std_value=()) for t in (solver.transform, solver.test_transform)),
        (schedule.determinism, schedule.data.cache, schedule.data.loader_threads),
        # Pushes are measured by the time from one to the next.
        (solver.sync, solver.compress, solver.freeze),
    ]
    if solver.loss is not None:
        teacher = schedule.teacher_model(stage)
        parts.append((solver.loss.type, solver.loss.function, *(_network(teacher) if teacher is not None else ())))
    if data != [schedule.data.train, *schedule.data.val]:  # images of another size, perhaps
        parts.append(tuple((source.source, source.images) for source in data))
    return text(tuple(parts))


def _network(model: Model) -> tuple[object, ...]:
    net, code = model.net and net_digest(model.net), model.sources and digest(model.sources.files)
    return model.name, model.num_classes, model.channels, model.blur_pool, net, code, code and model.args


# -- as text and JSON


def render_hours(plan: Plan, hours: Hours, together: Mapping[str, Spent | None] | None = None) -> str:
    """Return the time left, one line per stage, and per ensemble of `together`; '' if nothing is left."""
    parts = left(plan, hours, together)
    timed = list(filter(None, parts.values()))
    unknown = ", ".join(name for name, part in parts.items() if part is None)
    missing = f"stage {unknown} {hours.unknown}"
    if not timed:
        return missing if unknown else ""
    whole = sum(timed, Spent(start=hours.opening))
    titles = {"training": "training", "tests": "evaluation", "snapshots": "snapshots", "start": "start"}
    shown = [name for name in titles if name == "training" or round(getattr(whole, name))]

    def cells(part: Spent) -> list[str]:
        return [duration(seconds) for seconds in (*(getattr(part, name) for name in shown), part.total)]

    rows: list[Sequence[str]] = [("stage", "iterations", *(titles[name] for name in shown), "in all")]
    iterations = {p.label: between(p.least_left, p.iterations_left) for p in plan.work}
    if round(hours.opening):  # less is shown as `0 s`
        rows.append(("(the job)", "", *("" for name in shown[:-1]), *[duration(hours.opening)] * 2))
    for name, part in parts.items():
        rows.append((name, iterations.get(name, ""), *(["?"] * (len(shown) + 1) if part is None else cells(part))))
    rows.append(("total", between(plan.least_left, plan.iterations_left), *cells(whole)))
    at_most = " at the most" if plan.least_left < plan.iterations_left else ""
    some = f" without {unknown}" if unknown else ""
    lines = [f"about {duration(whole.total)} left{at_most}{some} {hours.source}", "", *columns(rows)]
    lines += [missing] if unknown else []
    lines += [f"not counted: {', '.join(hours.left_out)}"] if hours.left_out else []
    return "\n".join([*lines, *hours.notes])


def hours_record(plan: Plan, hours: Hours, together: Mapping[str, Spent | None] | None = None) -> dict[str, object]:
    """Return the time left for `--json`, in seconds; a stage of unknown speed has no times."""
    parts = left(plan, hours, together)
    whole = sum(filter(None, parts.values()), Spent(start=hours.opening if parts else 0.0))
    return {
        "source": hours.source,
        "stages": [{"stage": name, **(_record(part) if part else {})} for name, part in parts.items()],
        "opening": hours.opening,
        "left": _record(whole),
        **({"at_most": True} if plan.least_left < plan.iterations_left else {}),
        "not_counted": list(hours.left_out),
        "notes": list(hours.notes),
    }


def _record(part: Spent) -> dict[str, object]:
    return {**asdict(part), "in_all": part.total}
