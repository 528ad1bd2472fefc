"""How fast a schedule would train on many workers, from what one does alone and what the link between them does. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count, size
from stagerun.plan.estimate import Figures, pass_of, passes_of, speeds_of
from stagerun.plan.hours import Hours, at_images_per_second, not_known

# Backward's share of a pass: through a layer it takes two products, each of the size of the one forward.
BACKWARD_SHARE = 2 / 3
# How much of backward is left when the first gradients leave: 0.84 in one profile (`run --profile`) of one iteration of `resnet18`.
# Where the last layer alone fills a piece, as in ResNet-50, it is more.
OVERLAP = 0.84


@dataclass(frozen=True, slots=True)
class Link:
    """The link of each host to the others. `bandwidth` in bytes per second, each way; `latency` in seconds, of one message."""

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of an iteration. `communicating`: all that the link does for it; `exposed`: what of that is left after backward."""

    computing: float
    communicating: float
    exposed: float

    @property
    def total(self) -> float:
        return self.computing + self.exposed


def ring(size: float, workers: int, link: Link) -> float:
    """Seconds of a ring all-reduce of `size` bytes over p workers: 2 (p-1)/p * size / bandwidth + 2 (p-1) * latency. Each worker sends
    2 (p-1) messages, each a p-th of the whole: p-1 until one of them has the sum of each part, p-1 until all have it."""
    steps = 2 * (workers - 1)
    return steps / workers * size / link.bandwidth + steps * link.latency


def step(pieces: Sequence[float], workers: int, link: Link, one_pass: float, passes: int, update: float) -> Step:
    """An iteration of `passes` device batches, `one_pass` seconds of forward and backward each, and an update of `update` seconds, in
    which `pieces` (bytes, in the order in which they leave) are summed, one after the other on the same link.

    They leave while the last pass goes backward, which hides as much as is left of it after the first has left (OVERLAP), but never the
    last piece: that is full when backward is over.
    """
    times = [ring(size, workers, link) for size in pieces] if workers > 1 else [0.0]
    hidden = min(OVERLAP * BACKWARD_SHARE * one_pass, sum(times[:-1]))
    return Step(computing=passes * one_pass + update, communicating=sum(times), exposed=sum(times) - hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One stage. `bytes` are summed in an iteration, in so many `pieces`. `passes` of the busiest worker per iteration; `efficiency`
    against one worker that does all of it alone."""

    stage: str
    bytes: float
    pieces: int
    passes: int
    step: Step
    images_per_second: float
    efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`pieces`: by stage, bytes of the gradients and of what travels with them, as they leave. `images_per_second`: of one worker alone,
    where it was given; None: as in `figures`. `elastic`: as of `determinism`."""

    workers: int
    link: Link
    pieces: Mapping[str, tuple[float, ...]]
    elastic: bool = False
    not_plain: bool = False  # whether a stage has `compress_param` or `sync_param`
    images_per_second: float | None
    figures: Figures | None


def predict(schedule: Schedule, job: Job) -> dict[str, Predicted]:
    """By stage; those of a kind that was not rehearsed are left out."""
    found = {}
    for stage in schedule.stages:
        solver, workers = stage.solver, job.workers
        if job.images_per_second is not None:
            one_pass, update = solver.device_batch_size / job.images_per_second, 0.0
        elif job.figures is not None and (cost := pass_of(schedule, stage, job.figures)) is not None:
            one_pass, update = cost
        else:
            continue
        passes = passes_of(solver, workers)
        pieces = job.pieces[stage.name]
        taken = step(pieces, workers, job.link, one_pass, passes, update)
        alone = solver.logical_workers * one_pass + update
        found[stage.name] = Predicted(
            stage=stage.name,
            bytes=sum(pieces),
            pieces=len(pieces),
            passes=passes,
            step=taken,
            images_per_second=solver.batch_size / taken.total,
            efficiency=alone / (workers * taken.total),
        )
    return found


def hours_of(schedule: Schedule, job: Job, found: Mapping[str, Predicted]) -> Hours:
    """For the table of hours: evaluations are dealt out to the workers, and everything but training is as it was measured."""
    source = f"predicted for {_place(job)}"
    if job.images_per_second is not None:
        hours = at_images_per_second(schedule, job.images_per_second * job.workers)
        speeds = {n: replace(speed, iteration=found[n].step.total) for n, speed in hours.speeds.items() if n in found}
        return replace(hours, source=source, speeds=speeds)
    assert job.figures is not None
    speeds = speeds_of(schedule, job.figures, job.workers)
    return Hours(
        source=source,
        speeds={n: replace(speed, iteration=found[n].step.total) for n, speed in speeds.items() if n in found},
        left_out=not_known(schedule, 0.0, 0.0, 0.0, None),
        unknown=f"was left out of the rehearsal of {job.figures.date}, or has changed since: rehearse again",
    )


def _place(job: Job) -> str:
    gbit = 8 * job.link.bandwidth / 1e9
    return f"{count(job.workers, 'worker')} over {gbit:g} Gbit/s, {1e6 * job.link.latency:g} us"


def render_prediction(job: Job, found: Mapping[str, Predicted]) -> str:
    rows: list[Sequence[str]] = [
        ("stage", "passes", "computing", "communicating", "of it exposed", "iteration", "images/s", "efficiency")
    ]
    for p in found.values():
        rows.append(
            (
                p.stage,
                str(p.passes),
                _time(p.step.computing),
                _time(p.step.communicating),
                _time(p.step.exposed),
                _time(p.step.total),
                f"{p.images_per_second:.4g}",
                f"{p.efficiency:.3f}",
            )
        )
    sent = dict.fromkeys(f"{size(p.bytes)} in {count(p.pieces, 'piece')}" for p in found.values())
    head = f"{_place(job)}, predicted from {_basis(job)}; summed in an iteration: {' or '.join(sent)}"
    return "\n".join([head, "", *columns(rows), *(f"note: {text}" for text in remarks(job))])


def remarks(job: Job) -> list[str]:
    """What the model is, and what it leaves out; one sentence each."""
    said = [
        f"ring all-reduce: 2 (p-1)/p * bytes / bandwidth + 2 (p-1) * latency for each piece; {OVERLAP:.0%} of the last backward pass hide it; "
        "what networking takes of the processors, slow workers and other traffic are not in it",
        "--link is the speed that an all-reduce reaches: over TCP it was measured at 0.75 to 0.93 of the line's",
    ]
    if job.not_plain:
        said.append(
            "it is of gradients as they are, summed at every iteration: what `compress_param` and `sync_param` change is not in it"
        )
    if job.elastic:
        said.append(
            "`determinism: ELASTIC` sends as much as a ring where the workers and the device batches of an iteration are powers of 2, "
            "else more; what it takes to add up in its order is not in it"
        )
    if job.figures is not None and job.images_per_second is None and job.figures.workers > 1:
        said.append(
            f"the update was timed among {job.figures.workers} workers, with their wait for each other in it: rehearse with one for a "
            "prediction without"
        )
    return said


def _basis(job: Job) -> str:
    if job.images_per_second is not None:
        return f"{job.images_per_second:g} images/s of one worker alone"
    assert job.figures is not None
    return f"the rehearsal of {job.figures.date} on {job.figures.host}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def prediction_record(job: Job, found: Mapping[str, Predicted]) -> dict[str, object]:
    """For `--json`, in seconds and bytes."""
    return {
        "workers": job.workers,
        "bandwidth": job.link.bandwidth,
        "latency": job.link.latency,
        "overlap": OVERLAP,
        "stages": [{**asdict(p), "iteration": p.step.total} for p in found.values()],
        "notes": remarks(job),
    }
