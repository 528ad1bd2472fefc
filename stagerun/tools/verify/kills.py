"""A schedule, cut down, run once straight and once interrupted at random moments: both must end in the same bits."""

import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StorageError, UsageError
from stagerun.base.events import (
    EnsembleTested,
    Event,
    Iterated,
    NotFinite,
    PieceStarted,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Tested,
    TestedBeside,
)
from stagerun.base.recipe import Determinism, Schedule
from stagerun.base.text import columns, count
from stagerun.command.ending import say
from stagerun.language import load
from stagerun.launch.worker_count import check_short, devices
from stagerun.plan import make_plan
from stagerun.plan.rehearsal import enough_logical_workers, interruptible, synthetic_images, with_sources
from stagerun.store.layout import choices_folder
from stagerun.system import signals
from stagerun.system.world import default_threads, launched, started_by
from stagerun.tools.verify.child import POLL_S, Child, Stroke, strike, strokes
from stagerun.tools.verify.command import ChildFailed, VerifyOptions
from stagerun.train import results
from stagerun.train.log_file import Tail
from stagerun.train.output import LOG

SYNTHETIC_IMAGES = 512
MOST_VAIN = 6  # runs in turn that were over before they were hit, or in which no life resumed from a snapshot

Timed = Sequence[tuple[float, Event]]
Numbers = tuple[object, ...]


def verify(options: VerifyOptions) -> int:
    schedule = load(options.folder, options.overrides)
    nproc = options.nproc or devices(schedule)
    _check(options, schedule, nproc)
    with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
        if options.synthetic:
            _make_images(schedule, Path(name))
        verdict = _Trial(options, schedule, Path(name), nproc).verdict()
    say(json.dumps(asdict(verdict), indent=2) if options.as_json else render(verdict, options))
    return ExitCode.BUG if verdict.verdict == "DIFFERENT" and verdict.promised else ExitCode.DONE


def _check(options: VerifyOptions, schedule: Schedule, nproc: int) -> None:
    """RecipeError, UsageError, DataError."""
    if launched():
        raise UsageError(
            f"a launcher has started this process as one of several ({started_by()})",
            "verify starts its workers itself, on one machine: run it once, without a launcher",
        )
    then = options.then_workers
    if then is not None and schedule.determinism is not Determinism.ELASTIC:
        raise UsageError(
            f"--then-workers {then}: the bits don't depend on the number of workers with `determinism: ELASTIC` alone",
            "write that into schedule.prototxt, or `--set determinism=ELASTIC`",
        )
    pushing = [stage.name for stage in schedule.stages if stage.enabled and stage.solver.asynchronous]
    if pushing and max(nproc, then or 1) > 1:
        raise UsageError(
            f"stage `{pushing[0]}` has `method: ASYNC`: no two runs of several workers have the same bits",
            "`--nproc 1` has them; `stagerun run DIR --replay OUT` repeats a run, and compares what came out",
        )
    check_short(schedule, max(nproc, then or 1), options.device_batch, options.synthetic, "verifies")
    if not options.synthetic:
        with signals.held():
            from stagerun.data.preflight import preflight

        preflight(schedule)


def _make_images(schedule: Schedule, folder: Path) -> None:
    from stagerun.data.synthetic import write_synthetic

    shape, classes = synthetic_images(schedule), min(stage.model.num_classes for stage in schedule.stages)
    for kind in ("train", "val"):
        where = str(folder / kind)
        write_synthetic(where, SYNTHETIC_IMAGES, shape.height, shape.width, shape.channels, classes, shape.encoded)


def shortened(options: VerifyOptions, schedule: Schedule, batches: int, folder: Path) -> Schedule:
    """Return the schedule as it is run. With --synthetic its images are in `folder`."""
    short = interruptible(schedule, options.iters, batches, options.device_batch)
    if not options.synthetic:
        return short
    train, val = ((str(folder / kind), SYNTHETIC_IMAGES) for kind in ("train", "val"))
    return with_sources(short, train, val)


# -- what is compared


@dataclass(frozen=True, slots=True)
class End:
    """The end of a stage: the sha256 of the tensors in its last snapshot (weights, momentum, averages), and its evaluations."""

    iterations: int
    digest: str
    result: Numbers


def ends_of(schedule: Schedule, out: Path) -> tuple[dict[str, End], dict[str, str]]:
    """Return the end of each stage of a finished run, and the environment. StorageError if one is missing or damaged."""
    disk = store.LocalDisk()
    ends, environment = {}, {}
    for planned in make_plan(schedule, store.inventory(disk, out)).stages:
        if not planned.stage.enabled:
            continue
        result = results.read_result(out, planned.end) if planned.end is not None else None
        if planned.end is None or result is None:
            raise StorageError(f"{out}: the run ended without the end of stage `{planned.stage.name}`")
        try:
            files = store.read(disk, out, planned.end)
        except store.Damaged as error:
            raise StorageError(f"{out}: snapshot {planned.end.name} is damaged: {error}", "check the disk") from error
        whole = hashlib.sha256()
        for name in sorted(name for name in files if name.endswith(".safetensors")):
            whole.update(f"{name} {hashlib.sha256(files[name]).hexdigest()}\n".encode())
        ends[planned.stage.name] = End(planned.end.iter, whole.hexdigest(), _result(result))
        environment = dict(planned.end.environment)
    return ends, environment


def _result(r: StageFinished) -> Numbers:
    """Return what follows from training alone, and not from time or place."""
    beside = (figure for _, top1, top5, loss, _ in r.beside for figure in (top1, top5, loss))
    return (r.loss, r.top1, r.top5, r.test_loss, r.ema_top1, r.ema_top5, r.ema_test_loss, *beside)


def numbers_in(events: Timed) -> Iterator[tuple[str, Numbers]]:
    """Yield the numbers in a log, each with where it belongs. After a rollback an iteration comes again, with other images, at another epoch."""
    for _, event in events:
        match event:
            case Iterated():
                yield f"loss of {event.stage} at iteration {event.iter}, epoch {event.epoch}", (event.loss,)
            case NotFinite() if event.until is None:
                failure = (event.what, event.lr, event.done, event.number, event.back_to)
                yield f"failure of {event.stage} at iteration {event.iter}, image {event.position}", failure
            case Tested() | TestedBeside():
                on = f" on {event.val}" if isinstance(event, TestedBeside) else ""
                which = f"evaluation{' of averaged weights' if event.ema else ''}{on}"
                yield f"{which} of {event.stage} at iteration {event.iter}", (event.top1, event.top5, event.loss)
            case StageFinished():
                yield f"result of {event.stage}", _result(event)
            case EnsembleTested():
                yield f"ensemble {event.name}", (event.top1, event.top5, event.loss)


def compare_logs(straight: Timed, other: Timed) -> tuple[int, list[str]]:
    """Return how many numbers of `other` were compared, and those that differ, in words. `other` may have one several times, trained again, or
    lack it, lost in a kill; where `straight` has several, before and after a rollback, each will do."""
    expected: dict[str, list[Numbers]] = {}
    for where, numbers in numbers_in(straight):
        expected.setdefault(where, []).append(numbers)

    def said(numbers: Numbers) -> str:
        return ", ".join(map(repr, numbers))

    compared, different = 0, []
    for where, numbers in numbers_in(other):
        compared += 1
        if numbers not in expected.get(where, []):
            wanted = " or ".join(map(said, expected.get(where, []))) or "nothing"
            different.append(f"{where}: {wanted} straight, {said(numbers)} interrupted")
    return compared, different


def resumed(events: Timed) -> bool:
    """Return whether a life started from a snapshot of an earlier one, and not from the seed."""
    for _, event in events:
        if isinstance(event, StageStarted | PieceStarted):
            begins = event.begins if isinstance(event, StageStarted) else 0
            return event.iter > begins or not event.start.startswith("seed ")
        if isinstance(event, Tested):  # only the evaluation of a finished stage was missing
            return True
    return False


# -- the runs


class Course:
    """The log of an uninterrupted run: the time at which each iteration was done."""

    def __init__(self, events: Timed) -> None:
        (self.start,) = (at for at, event in events if isinstance(event, RunStarted))
        (self.end,) = (at for at, event in events if isinstance(event, RunFinished))
        self.times = {(e.stage, e.iter, e.epoch): at for at, e in events if isinstance(e, Iterated)}

    def seconds_left(self, events: Timed) -> float:
        """Return how long a run with these events would train on, at the pace of this one."""
        done = [self.times.get((e.stage, e.iter, e.epoch), 0.0) for _, e in events if isinstance(e, Iterated)]
        return max(0.0, self.end - max([self.start, *done]))


@dataclass(frozen=True, slots=True)
class Life:
    """A process life. `hit`: what interrupted it, '' if it came to the end; `start`: what it resumed from, '' if it trained nothing."""

    workers: int
    start: str
    resumed: bool
    hit: str
    code: int


@dataclass(slots=True)
class Verdict:
    """`stages`: by name, (straight, interrupted), the latter of the first run that differs; `repeatable`: where something differs, whether a
    second straight run equals the first."""

    schedule: str
    verdict: str
    promised: bool
    lives: list[Life]
    stages: dict[str, tuple[End, End | None]]
    environment: dict[str, str]
    compared: int = 0
    different: list[str] = field(default_factory=list)
    repeatable: bool | None = None


class _Trial:
    def __init__(self, options: VerifyOptions, schedule: Schedule, folder: Path, nproc: int) -> None:
        self.options, self.folder, self.nproc = options, folder, nproc
        most = max(nproc, options.then_workers or 1)
        self.threads = options.threads or default_threads(most)
        self.batches = enough_logical_workers(schedule, most)
        self.schedule = shortened(options, schedule, self.batches, folder)
        self.rng = random.Random(options.seed)
        self.lives: list[Life] = []

    def verdict(self) -> Verdict:
        stages = [stage for stage in self.schedule.stages if stage.enabled]
        then = self.options.then_workers
        self._say(
            f"verifying {self.schedule.name}: {count(len(stages), 'stage')}, "
            f"{count(sum(stage.solver.max_iter for stage in stages), 'iteration')}, {count(self.nproc, 'worker')}"
            f"{f' and {then} in turn' if then is not None else ''} with {count(self.threads, 'thread')} each"
        )
        straight = self._straight(self.folder / "straight")
        wanted, environment = ends_of(self.schedule, self.folder / "straight")
        promised = environment.get("device") == "cpu"
        found = Verdict(
            self.schedule.name, "", promised, self.lives, {n: (end, end) for n, end in wanted.items()}, environment
        )
        left, course, vain = strokes(self.options.kills, self.rng), Course(straight), 0
        # Where nothing resumed from a snapshot nothing could differ.
        while not found.different and (left or not any(life.resumed for life in self.lives)):
            if vain == MOST_VAIN:
                raise UsageError(
                    f"no life of {vain} runs in turn was interrupted and resumed from a snapshot",
                    "take more --kills, or more --iters",
                )
            left = left or strokes(self.options.kills, self.rng)
            before, lives = len(left), len(self.lives)
            out = self.folder / "interrupted"
            events = self._interrupted(out, course, left, vain)
            useless = len(left) == before or not any(life.resumed for life in self.lives[lives:])
            vain = vain + 1 if useless else 0
            self._compare(found, straight, events, ends_of(self.schedule, out)[0])
            shutil.rmtree(out)
        equal = "BIT-EXACT" if promised else "EQUAL"
        found.verdict = "DIFFERENT" if found.different else equal
        if found.different:
            self._say("  something differs; one more straight run, to see whether that repeats itself")
            again = self._straight(self.folder / "again")
            same = ends_of(self.schedule, self.folder / "again")[0] == wanted
            found.repeatable = same and not compare_logs(straight, again)[1]
        return found

    def _compare(self, found: Verdict, straight: Timed, events: Timed, ends: dict[str, End]) -> None:
        compared, different = compare_logs(straight, events)
        for name, (wanted, _) in found.stages.items():
            if ends.get(name) != wanted:
                found.stages[name] = (wanted, ends.get(name))
                different.append(f"the end of {name}")
        found.compared += compared
        found.different += different

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            say(text)

    def _straight(self, out: Path) -> Timed:
        events: list[tuple[float, Event]] = []
        code, _ = self._run(out, self.nproc, Tail(out / LOG), events)
        if code != ExitCode.DONE:
            raise ChildFailed("the straight run", code, self.folder / "said")
        return events

    def _interrupted(self, out: Path, course: Course, left: list[Stroke], vain: int) -> Timed:
        """Run from the first life to the end. Removes from `left` what hit it. `vain`: hit earlier by so much."""
        chosen = choices_folder(self.folder / "straight")
        if chosen.is_dir():  # of `method: AUTO`, which may choose differently
            shutil.copytree(chosen, choices_folder(out))
        events: list[tuple[float, Event]] = []
        tail = Tail(out / LOG)
        while True:
            then = self.options.then_workers
            workers = then if then is not None and len(self.lives) % 2 else self.nproc
            first, stroke = len(events), left[0] if left else None
            delay = self.rng.random() * course.seconds_left(events) / (len(left) + vain) if left else 0.0
            code, hit = self._run(out, workers, tail, events, stroke, delay)
            mine = events[first:]
            starts = [
                e.start if e.iter else f"{e.stage} anew" for _, e in mine if isinstance(e, StageStarted | PieceStarted)
            ]
            hit = "" if code == ExitCode.DONE else hit
            self.lives.append(Life(workers, next(iter(starts), ""), resumed(mine), hit, code))
            start = f"from {starts[0]}" if starts else "at its start" if hit else "nothing left to train"
            self._say(
                f"  life {len(self.lives)}, {count(workers, 'worker')}: {start}; {f'{hit}, exit code {code}' if hit else 'to the end'}"
            )
            if code == ExitCode.DONE:
                return events
            if stroke is None or not hit or code not in stroke.codes:
                raise ChildFailed(f"life {len(self.lives)}{f', {hit},' if hit else ''}", code, self.folder / "said")
            del left[0]

    def _run(
        self,
        out: Path,
        workers: int,
        tail: Tail,
        events: list[tuple[float, Event]],
        stroke: Stroke | None = None,
        delay: float = 0.0,
    ) -> tuple[int, str]:
        """Run one life, which `stroke` hits `delay` seconds after it has started. Return its exit code, and what was hit."""
        words = [*self.options.of_run(out, self.batches, self.threads), "--nproc", str(workers)]
        first, deadline, hit = len(events), None, ""
        with Child(words, self.folder / "said") as child:
            while (code := child.ended()) is None:
                time.sleep(POLL_S)
                events += tail()
                if deadline is None and any(isinstance(event, RunStarted) for _, event in events[first:]):
                    deadline = time.monotonic() + delay
                if stroke is not None and deadline is not None and time.monotonic() >= deadline:
                    hit, stroke = strike(child, stroke, self.rng), None
            if left := child.outlived():
                raise ChildFailed(
                    f"{count(left, 'process')} of the run outlived its launcher, which", code, self.folder / "said"
                )
            events += tail()
        return code, hit


# -- the answer


def render(found: Verdict, options: VerifyOptions) -> str:
    """Return the table and the answer."""
    rows: list[Sequence[str]] = [("stage", "iterations", "digest straight", "digest interrupted", "")]
    for name, (wanted, end) in found.stages.items():
        digests = wanted.digest[:16], end.digest[:16] if end is not None else "none"
        rows.append((name, str(wanted.iterations), *digests, "equal" if end == wanted else "DIFFERENT"))
    hits, went_on = sum(bool(life.hit) for life in found.lives), sum(life.resumed for life in found.lives)
    took = (
        f"({count(hits, 'interruption')} in {len(found.lives)} lives, {went_on} of which resumed from a snapshot; {found.compared} losses and "
        f"evaluations compared; `--kills {options.kills} --seed {options.seed}`)"
    )
    lines = ["", *columns(rows), "", *(f"  {text}" for text in found.different[:5])]
    if found.verdict != "DIFFERENT":
        on_gpu = "" if found.promised else " A GPU does not promise it another time."
        where = ", ".join(f"{name} {text}" for name, text in found.environment.items() if name != "processor flags")
        return "\n".join(
            [*lines, f"{found.verdict}: interrupted equals uninterrupted {took}.{on_gpu}", f"It holds for {where}."]
        )
    lines.append(f"DIFFERENT: interrupted does not equal uninterrupted {took}.")
    if found.repeatable:
        lines.append("An uninterrupted run repeats itself here: what differs comes from the interruptions.")
    else:
        lines.append(
            "A second uninterrupted run differs from the first, too: what computes here does not repeat itself."
        )
    if found.promised:
        lines.append("On a CPU it should: this is a bug of stagerun or of torch, or a defect of processor or memory.")
    else:
        lines.append("On a GPU nothing is promised: a run that resumes there is EQUIVALENT.")
    return "\n".join(lines)
