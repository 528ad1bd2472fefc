"""`stagerun verify-resume`: runs the schedule cut down, once straight and once interrupted, and compares what came out."""

import random
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from stagerun.base.errors import EXIT_MEANINGS, ExitCode, StagerunError, UsageError
from stagerun.base.events import Event, PieceStarted, RunStarted, StageStarted
from stagerun.base.recipe import Determinism, Schedule
from stagerun.base.text import count, duration
from stagerun.command.ending import say
from stagerun.command.options import command
from stagerun.command.shared import limits, output_folder
from stagerun.language import load
from stagerun.launch import die_with_launcher
from stagerun.launch.start import Orders, joined, start, work
from stagerun.launch.worker_count import check_short, devices
from stagerun.plan.rehearsal import enough_logical_workers, interruptible, synthetic_images, with_sources
from stagerun.store.layout import choices_folder
from stagerun.store.throw_away import claim
from stagerun.system import signals
from stagerun.system.world import default_threads, launched, started_by
from stagerun.tools.report.read_log import LOG
from stagerun.tools.verify_resume.interruption import LOOK_S, Course, Moment, Stroke, Victim, course_of, strike, strokes
from stagerun.tools.verify_resume.verdict import (
    Compared,
    Ends,
    Lived,
    Verdict,
    VerifyOptions,
    as_record,
    compare_logs,
    ends_of,
    life_line,
    promises,
    render,
    went_on,
)
from stagerun.train.command import job_of
from stagerun.train.log_file import Tail
from stagerun.train.options import Cut, RunOptions

THROW_AWAY = ".verify-resume"
SYNTHETIC_IMAGES = 512
VAIN = 6  # such runs, and it is given up


class LifeFailed(StagerunError):
    """A life that ended as it should not have, with its own exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code)


@command("verify-resume")
def verify_resume(options: VerifyOptions) -> int:
    """Proves on this machine that the interrupted schedule gives the same bits as the uninterrupted one.

    The schedule, cut down as for `rehearse`, is run twice: once straight, and once interrupted --kills times, at random
    moments all over it, and continued each time. In turn, in random order, SIGKILL hits rank 0, another worker, all processes, the launcher; one in five
    is a SIGTERM, after which all must be saved (exit code 75). Then the end of each stage (weights, momentum, averaged
    weights), each loss and each evaluation are compared.

    Takes a minute for a small network on few processors. All is done in a folder below --out that is removed at the end.
    Exit code 0: all bits are equal; 70: they are not, on a CPU, where they should be. On a GPU nothing is promised: what
    came out is shown, with 0 either way.
    """
    if options.life is not None:
        return live(options)
    schedule = load(options.folder, options.overrides)
    nproc = options.nproc or devices(schedule)
    _check(options, schedule, nproc)
    out = output_folder(schedule.name, options.out)
    with ExitStack() as stack:
        folder = claim(out / THROW_AWAY, "work", stack)
        if options.synthetic:
            _make_images(schedule, folder)
        trial = _Trial(options, schedule, folder, nproc)
        verdict = trial.verdict()
    if options.as_json:
        say(as_record(verdict))
    else:
        say(render(verdict))
    return ExitCode.DONE if verdict.equal or not verdict.promised else ExitCode.BUG


def shortened(options: VerifyOptions, schedule: Schedule, batches: int, folder: Path) -> Schedule:
    """The schedule as it is run. With --synthetic its images are in `folder`."""
    short = interruptible(schedule, options.iters, batches, options.device_batch)
    if not options.synthetic:
        return short
    train, val = ((str(folder / kind), SYNTHETIC_IMAGES) for kind in ("train", "val"))
    return with_sources(short, train, val)


def live(options: VerifyOptions) -> int:
    """The process that `verify-resume` started, or a worker of it. The exit code."""
    assert options.life is not None
    out, batches = Path(options.life), options.batches or 1
    nproc, threads = options.nproc or 1, options.threads or 1
    # A life may have been hit before it got any further: that is not a reason to give up here.
    of_run = RunOptions(options.folder, options.overrides, str(out), nproc=nproc, threads=threads, retry=True)
    cut = Cut(lambda schedule: shortened(options, schedule, batches, out.parent), batches)
    job = job_of(of_run, cut)
    orders = Orders(tuple(options.life_arguments(out, batches, threads)), threads, limits=limits(()))
    if joined(options.nproc):
        return work(job, orders)
    die_with_launcher()
    return start(job, orders, nproc)


def _check(options: VerifyOptions, schedule: Schedule, nproc: int) -> None:
    """RecipeError, UsageError, DataError."""
    if launched():
        raise UsageError(
            f"a launcher has started this process as one of several ({started_by()})",
            "verify-resume starts its workers itself, on one machine: run it once, without a launcher",
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


@dataclass(slots=True)
class _Round:
    """One interrupted run, from its first life to its end."""

    out: Path
    tail: Tail
    events: list[tuple[float, Event]] = field(default_factory=list)


class _Trial:
    """One verification. `folder` is its own."""

    def __init__(self, options: VerifyOptions, schedule: Schedule, folder: Path, nproc: int) -> None:
        self.options, self.folder, self.nproc = options, folder, nproc
        then = options.then_workers
        self.threads = options.threads or default_threads(max(nproc, then or 1))
        self.batches = enough_logical_workers(schedule, max(nproc, then or 1))
        self.schedule = shortened(options, schedule, self.batches, folder)
        self.rng = random.Random(options.seed)
        self.lives: list[Lived] = []
        self.vain = 0  # runs in turn that were over before they were hit: the next is to be hit earlier

    def verdict(self) -> Verdict:
        self._say(
            f"verifying {self.schedule.name}: {self._what()}, {self._workers()} with {count(self.threads, 'thread')} each"
        )
        first = time.monotonic()
        straight, started = self._straight(self.folder / "straight")
        whole = time.monotonic() - first
        course = course_of(straight.events)
        wanted = self._ends(straight.out)
        self._say(
            f"  straight: {duration(whole)}; interrupted {count(self.options.kills, 'time')} it will take about "
            f"{duration(self._estimate(whole, started))}"
        )
        ends, compared = self._interrupted(straight, course)
        equal = not compared.different and all(e.same(wanted) for e in ends)
        if equal and not any(life.went_on for life in self.lives):
            raise UsageError(
                f"none of {len(self.lives)} lives went on from a snapshot: all were hit before the first was written",
                "take more --kills, or more --iters",
            )
        return Verdict(
            schedule=self.schedule,
            options=self.options,
            lives=tuple(self.lives),
            wanted=wanted,
            ends=tuple(ends),
            compared=compared,
            repeatable=None if equal else self._repeats(straight, wanted),
            seconds=time.monotonic() - first,
        )

    def _what(self) -> str:
        stages = [s for s in self.schedule.stages if s.enabled]
        iterations = sum(s.solver.max_iter for s in stages)
        return f"{count(len(stages), 'stage')}, {count(iterations, 'iteration')}"

    def _workers(self) -> str:
        then = self.options.then_workers
        return count(self.nproc, "worker") + (f" and {then} in turn" if then is not None else "")

    def _estimate(self, whole: float, started: float) -> float:
        """Seconds for the interrupted run: its starts, its iterations, and those that are trained once more after each kill."""
        kills, training = self.options.kills, max(0.0, whole - started)
        stages = max(1, sum(s.enabled for s in self.schedule.stages))
        return (kills + 1) * started + training * (1 + kills / (3 * stages))

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            say(text)

    # -- runs

    def _straight(self, out: Path) -> tuple[_Round, float]:
        """An uninterrupted run, and the seconds until it could start."""
        one = _Round(out, Tail(out / LOG))
        with self._life(one, self.nproc) as life:
            self._until(life, one, None)
            started = time.monotonic() - life.started
            code = self._end(life, one)
        if code != ExitCode.DONE:
            self._failed("the straight run", code)
        return one, started

    def _interrupted(self, straight: _Round, course: Course) -> tuple[list[Ends], Compared]:
        """The ends of each run that came to its end, and what their logs say. Another run follows one that ended before
        all interruptions, and a few in which no life went on from a snapshot: nothing could differ there."""
        left = strokes(self.options.kills, self.rng)
        ends: list[Ends] = []
        compared = Compared()
        again = 0
        while not ends or left or not any(life.went_on for life in self.lives):
            if ends and not left:
                again += 1
                if again == VAIN or compared.different:
                    break
                left = strokes(self.options.kills, self.rng)
            before = len(left)
            one = self._round(self.folder / f"interrupted-{len(ends) + 1}", course, left)
            ends.append(self._ends(one.out))
            found = compare_logs(straight.events, one.events)
            compared = Compared(
                compared.losses + found.losses,
                compared.tests + found.tests,
                compared.different + found.different,
            )
            shutil.rmtree(one.out, ignore_errors=True)
            self.vain = self.vain + 1 if len(left) == before else 0
            if self.vain == VAIN:
                raise UsageError(
                    f"{VAIN} runs in turn were over before they could be interrupted, {len(left)} of {self.options.kills} times are left",
                    "take more --iters, or fewer --kills",
                )
        return ends, compared

    def _round(self, out: Path, course: Course, left: list[Stroke]) -> _Round:
        """One run from its first life to its end. Removes from `left` what hit it."""
        one = _Round(out, Tail(out / LOG))
        if (
            chosen := choices_folder(self.folder / "straight")
        ).is_dir():  # two runs may choose differently (`method: AUTO`)
            shutil.copytree(chosen, choices_folder(out))
        while left:
            reached = max((course.done(event) for _, event in one.events), default=0)
            moment = course.moment(reached, len(left) + self.vain, self.rng)
            if self._one_life(one, course, moment, left):
                return one
        self._one_life(one, course, None, left)  # not interrupted: it comes to the end, or fails
        return one

    def _one_life(self, one: _Round, course: Course, moment: Moment | None, left: list[Stroke]) -> bool:
        """Whether the run is at its end."""
        then = self.options.then_workers
        workers = then if then is not None and len(self.lives) % 2 else self.nproc
        first = len(one.events)
        with self._life(one, workers) as life:
            alive = moment is not None and self._until(life, one, (course, moment))
            stroke = left[0] if alive else None
            hit = strike(life, stroke, self.rng) if stroke is not None else ""
            code = self._end(life, one)
        self._tell(one, course, first, workers, hit, code)
        if code == ExitCode.DONE:
            return True
        if not hit or stroke is None or code not in stroke.codes:
            self._failed(f"life {len(self.lives)}" + (f", {hit}," if hit else ""), code)
        del left[0]
        return False

    def _tell(self, one: _Round, course: Course, first: int, workers: int, hit: str, code: int) -> None:
        mine = one.events[first:]
        starting = [e for _, e in mine if isinstance(e, StageStarted | PieceStarted)]
        starts = [e.start if e.iter else f"{e.stage} anew" for e in starting]
        done = max((course.done(e) for _, e in mine), default=0)
        lived = Lived(
            workers=workers,
            start=starts[0] if starts else "",
            went_on=went_on(mine),
            promise="; ".join(dict.fromkeys(promises(mine))),
            hit="" if code == ExitCode.DONE else hit,
            at=course.place(done),
            code=code,
            inside=bool(starting) and starting[0].iter > getattr(starting[0], "begins", 0),
        )
        self.lives.append(lived)
        self._say(life_line(len(self.lives), lived))

    def _life(self, one: _Round, workers: int) -> Victim:
        words = [*self.options.life_arguments(one.out, self.batches, self.threads), "--nproc", str(workers)]
        return Victim(words, self.folder / "said")

    def _until(self, life: Victim, one: _Round, moment: tuple[Course, Moment] | None) -> bool:
        """Waits for the moment in the life, or for the first event of it. Whether it is alive then."""
        first = len(one.events)
        while life.ended() is None:
            self._look(one)
            if any(isinstance(event, RunStarted) for _, event in one.events[first:]):
                if moment is None:
                    return True
                course, at = moment
                if max(course.done(event) for _, event in one.events) >= at.done:
                    last = time.monotonic() + at.delay
                    while life.ended() is None and time.monotonic() < last:
                        self._look(one)
                    return life.ended() is None
        return False

    def _look(self, one: _Round) -> None:
        """Reads on in the log after a little while."""
        time.sleep(LOOK_S)
        one.events += one.tail()

    def _end(self, life: Victim, one: _Round) -> int:
        """The exit code, when nothing of the life is left."""
        while (code := life.ended()) is None:
            self._look(one)
        left = life.gone()
        one.events += one.tail()
        if left:
            raise LifeFailed(f"{count(left, 'process')} of the run outlived its launcher", ExitCode.BUG)
        return code

    def _failed(self, who: str, code: int) -> None:
        """Raises LifeFailed, with the last lines that the life printed."""
        known = code in EXIT_MEANINGS
        why = f"exit code {code}: {EXIT_MEANINGS[ExitCode(code)]}" if known else f"exit code {code}"
        try:
            lines = (self.folder / "said").read_text(errors="replace").rstrip().splitlines()
        except OSError:
            lines = []
        last = "".join(f"\n  {line}" for line in lines[-12:])
        expected = known and code not in (ExitCode.DONE, ExitCode.PEER, ExitCode.SAVED)
        raise LifeFailed(f"{who} ended with {why}{last}", code if expected else ExitCode.BUG)

    def _repeats(self, straight: _Round, wanted: Ends) -> bool:
        """Whether a second uninterrupted run gives the bits of the first: if not, it is not the interruptions that matter."""
        self._say("  something differs; an uninterrupted run once more, to see whether that repeats itself")
        again, _ = self._straight(self.folder / "again")
        return self._ends(again.out).same(wanted) and not compare_logs(straight.events, again.events).different

    def _ends(self, out: Path) -> Ends:
        return ends_of(self.schedule, out)
