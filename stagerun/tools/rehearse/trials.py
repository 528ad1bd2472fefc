"""Training of a single stage: with several numbers of workers, and at growing rates."""

import math
import shutil
import statistics
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from stagerun.base.errors import Diverged, PeerError, UsageError
from stagerun.base.events import Iterated, NotFinite
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count
from stagerun.comm import Comm, gather_json
from stagerun.comm.spans import DATA, PARTS, WAIT, seconds_of
from stagerun.plan.planned import State
from stagerun.store.layout import snapshots_folder
from stagerun.tools.output import plan_of
from stagerun.tools.rehearse import ROUNDS, WARM_UP
from stagerun.tools.rehearse.frame import Answer, Interrupted, Session
from stagerun.train.agreement import rank0
from stagerun.train.hooks.profile import Profile
from stagerun.train.keeper import Selection

# -- several numbers of workers


class Turn(NamedTuple):
    """`step`: seconds of an iteration of the slowest rank. `parts`: seconds of its parts, summed over ranks."""

    round: int
    workers: int
    step: float
    parts: dict[str, float]


def compare(session: Session) -> Answer:
    """Start all workers together; those without a part in a turn wait, so that no turn includes a start. Turns of a round go up or down, so that
    a machine whose speed drifts slows every number alike."""
    comm, options, (_, schedule) = session.comm, session.options, session.read()
    counts, stage = options.counts, schedule.stages[0]
    if comm.size < max(counts):
        text = f"--workers {options.workers}, but the launcher has started {comm.size}"
        raise PeerError(text, f"start {max(counts)}, or leave the launcher out: then they are started on this machine")
    session.show(f"{schedule.name}, stage {stage.name}: {' and '.join(map(str, counts))} workers on {session.device}")
    turns: list[Turn] = []
    with session.images(schedule, options.synthetic) as source:
        for number in range(ROUNDS):
            for workers in counts if number % 2 == 0 else reversed(counts):
                ranks = list(filter(None, gather_json(comm, turn(session, source, comm.part(range(workers))))))
                if len(ranks) < workers:
                    raise Interrupted(comm.rank)
                parts = {name: sum(parts[name] for _, parts in ranks) for name in ranks[0][1]}
                turns.append(Turn(number, workers, max(step for step, _ in ranks), parts))
                speed = stage.solver.batch_size / turns[-1].step
                session.show(f"  round {number + 1}, {count(workers, 'worker')}: {speed:.4g} images/s")
    table = rows(turns, stage.solver.batch_size)
    cells = [[cell.format(**row) for cell in _COLUMNS.values()] for row in table]
    record = {"schedule": schedule.name, "stage": stage.name, "rows": table}
    return Answer(record, "\n".join(["", *columns([list(_COLUMNS), *cells]), _NOTES]))


def turn(session: Session, source: Schedule, part: Comm | None) -> list[Any] | None:
    """Train as a part of the job. Return this rank's seconds of an iteration, and of each of its parts; [] on a rank that waits, None where a
    stop was asked for."""
    if part is None:
        return []
    steps, profile = list[float](), Profile("", source.stages[0].solver.max_iter + 1, part)  # never written
    try:
        with session.folder(part) as folder:
            for event in session.train(source, folder, part, profile=profile):
                if isinstance(event, Iterated):
                    steps.append(event.seconds)
    except Interrupted:
        return None
    part.barrier()  # after it, the network's threads have noted all their spans
    return [statistics.mean(steps[WARM_UP:]), seconds_of(profile.spans.found)]


def rows(turns: Sequence[Turn], batch_size: int) -> list[dict[str, float]]:
    """Return medians over rounds for each number of workers. `efficiency` is against the fewest workers of the same round; `computing`,
    `communicating` (the wait for the sum of gradients after backward) and `waiting` (for data) are shares of an iteration, means over ranks."""
    fewest = min(turn.workers for turn in turns)
    least = {turn.round: turn.step * fewest for turn in turns if turn.workers == fewest}
    table = []
    for workers in sorted({turn.workers for turn in turns}):
        of = [turn for turn in turns if turn.workers == workers]
        speeds = [batch_size / turn.step for turn in of]
        seconds = {name: sum(turn.parts[name] for turn in of) for name in PARTS}
        waits, whole = seconds[WAIT] + seconds[DATA], sum(seconds.values())
        row = {
            "workers": workers,
            "images_per_second": statistics.median(speeds),
            "low": min(speeds),
            "high": max(speeds),
            "efficiency": statistics.median(least[turn.round] / turn.step / workers for turn in of),
            "step": statistics.median(turn.step for turn in of),  # seconds
            "computing": (whole - waits) / whole,
            "communicating": seconds[WAIT] / whole,
            "waiting": seconds[DATA] / whole,
        }
        table.append(row)
    return table


_COLUMNS = {
    "workers": "{workers}",
    "images/s": "{images_per_second:.4g}",
    "range": "{low:.4g} - {high:.4g}",
    "efficiency": "{efficiency:.3f}",
    "iteration": "{step:.4g} s",
    "computing": "{computing:.1%}",
    "communicating": "{communicating:.1%}",
    "waiting for data": "{waiting:.1%}",
}
_NOTES = """
note: strong scaling: an iteration has the same images for any number of workers; medians and range over rounds
note: communicating: from the end of backward until the gradients are summed, with the wait for slower workers
note: workers that share a machine share its processors, and synthetic images are in memory: a cluster behaves otherwise"""


# -- growing rates: Leslie N. Smith, arXiv:1506.01186, in the form that fastai's `Learner.lr_find` has made usual

BETA = 0.98  # of the smoothed loss
DIVERGED = 4.0  # times the lowest smoothed loss
# Left out of suggestions: the first tenth of a sweep, where the mean has hardly begun, and the last points, where it has diverged.
FIRST, LAST = 10, 5
LEAST = 3  # points without these
SIGNIFICANT = 3  # standard errors that the smoothed loss falls by
ROWS = 12


class Point(NamedTuple):
    """`smoothed`: the exponential mean of the losses so far, corrected for its start like an Adam moment."""

    lr: float
    loss: float
    smoothed: float


def following(points: Sequence[Point], lr: float, loss: float) -> Point:
    before = points[-1].smoothed * (1 - BETA ** len(points)) if points else 0.0
    return Point(lr, loss, (BETA * before + (1 - BETA) * loss) / (1 - BETA ** (len(points) + 1)))


_SWEPT = """
from {start}

{table}

steepest:    {shown[0]:<8}  the smoothed loss falls fastest
minimum/10:  {shown[1]:<8}  a tenth of the rate at which it is lowest"""


def find_lr(session: Session) -> Answer:
    comm, (whole, schedule), points, ended = session.comm, session.read(), list[Point](), ""
    stage, only = schedule.stages[-1], Selection(only=(schedule.stages[-1].name,))
    images = f"{count(stage.solver.max_iter, 'iteration')} of {stage.solver.batch_size} images"
    session.show(f"{whole.name}, stage {stage.name}: {images}, {count(comm.size, 'worker')} on {session.device}")
    out = session.options.output(whole)
    start, *others = rank0(comm, lambda: _starts(schedule, out))
    with session.folder(comm) as folder, suppress(Diverged):  # which follows NotFinite
        for name in (start, *others):
            if name and comm.rank == 0:
                shutil.copytree(snapshots_folder(out) / name, snapshots_folder(folder) / name)
        for event in session.train(schedule, folder, comm, only):
            if isinstance(event, NotFinite):
                ended = f"{event.what} at a rate of {event.lr:.3g}"
            if isinstance(event, Iterated):
                points.append(following(points, event.lr, event.loss))
                if points[-1].smoothed > DIVERGED * min(point.smoothed for point in points):
                    ended = f"the smoothed loss was 4 times its lowest at a rate of {event.lr:.3g}"
                    break
    steepest, tenth, why = suggestion(points, stage.solver.max_iter)
    notes = list(filter(None, (ended and f"the sweep ended early: {ended}", why)))
    record = {
        "schedule": whole.name,
        "stage": stage.name,
        "start": start or f"seed {stage.solver.random_seed}",
        "points": [point._asdict() for point in points],
        "steepest": steepest,
        "minimum_tenth": tenth,
        "ended": ended,
        "notes": notes,
    }
    every = max(1, len(points) // ROWS)
    cells = [(f"{p.lr:.3g}", f"{p.loss:.4f}", f"{p.smoothed:.4f}") for p in points[::every]]
    rates = ["unknown" if rate is None else f"{rate:.3g}" for rate in (steepest, tenth)]
    text = _SWEPT.format(table="\n".join(columns([("rate", "loss", "smoothed"), *cells])), shown=rates, **record)
    return Answer(record, "\n".join([text, *(f"note: {note}" for note in notes)]))


def _starts(schedule: Schedule, out: Path) -> list[str]:
    """Return the snapshot in OUT that the last stage starts from, '' from the seed; and its parent's end, which knows the best evaluation.
    UsageError if it is missing."""
    stage = schedule.stages[-1]
    if stage.parent is None:
        return [""]
    *above, planned = plan_of(schedule, out, Selection(redo=(stage.name,))).stages
    if planned.start is not None and planned.state is State.FRESH:
        ends = [one.end.name for one in above if one.name == stage.parent and one.end is not None]
        return list(dict.fromkeys([planned.start.name, *ends]))
    raise UsageError(
        f"stage `{stage.name}` starts from `{stage.starts_from}`, and {out} has no usable snapshot of that",
        f"train it first, with `stagerun run DIR --until {stage.parent}`, or name another --out",
    )


def suggestion(points: Sequence[Point], iterations: int) -> tuple[float | None, float | None, str]:
    """Return where the smoothed loss falls fastest over the logarithm of the rate, a tenth of the rate at which it is lowest, and what makes
    these doubtful, or unknown."""
    first = iterations // FIRST
    kept = points[first : len(points) - LAST]
    if len(kept) < LEAST:
        few = count(len(points), "iteration")
        return None, None, f"{few} gave too little for a suggestion: take more --iters, or a smaller --last-rate"
    lowest = min(range(len(kept)), key=lambda i: kept[i].smoothed)
    if lowest == 0:
        return None, None, "the loss never fell: take a smaller --first-rate, or more --iters"
    # Standard errors: half of all differences of two losses of deviation 1 are below 0.954, and the first mean is a part of the last one.
    deviation = statistics.median(abs(b.loss - a.loss) for a, b in pairwise(points[: first + lowest + 1])) / 0.954
    noise = deviation * math.sqrt(1 / (first + 1) - 1 / (first + lowest + 1))
    if kept[0].smoothed - kept[lowest].smoothed < SIGNIFICANT * noise:
        return None, None, "the loss fell by no more than chance makes it fall: take more --iters"
    # Behind the lowest loss it falls from where it had diverged to. All steps are equally long on the logarithm's axis.
    before, _ = min(pairwise(kept[: lowest + 1]), key=lambda pair: pair[1].smoothed - pair[0].smoothed)
    last = lowest == len(kept) - 1 and len(points) == iterations
    why = "the loss was still falling at the last rate: take a larger --last-rate" if last else ""
    return before.lr, kept[lowest].lr / 10, why
