"""A schedule, cut down, run once straight and once interrupted at random moments: both must end in the same bits."""

import hashlib
import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StorageError, UsageError
from stagerun.base.events import (
    Event,
    Iterated,
    PieceStarted,
    RunStarted,
    StageFinished,
    StageStarted,
    Tested,
)
from stagerun.base.recipe import Determinism, Schedule, Stage
from stagerun.base.text import columns, count
from stagerun.command.ending import say
from stagerun.language import load
from stagerun.launch.options import devices
from stagerun.logs.log_file import LOG, Log
from stagerun.plan import make_plan
from stagerun.plan.choice import check_short
from stagerun.store.layout import choices_folder
from stagerun.system import signals
from stagerun.system.world import default_threads, launched, started_by
from stagerun.tools.rehearse.schedule import rehearsal
from stagerun.tools.verify.child import POLL_S, Child
from stagerun.tools.verify.command import ChildFailed, VerifyOptions
from stagerun.train import results

MOST_VAIN = 6  # runs in which no life was hit and resumed from a snapshot

Numbers = tuple[object, ...]


def verify(options: VerifyOptions) -> int:
    schedule = load(options.folder, options.overrides)
    nproc = options.nproc or devices(schedule)
    _check(options, schedule, nproc)
    with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
        if options.synthetic:
            from stagerun.tools.rehearse.synthetic import make_images

            make_images(schedule, Path(name))
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


def shortened(options: VerifyOptions, schedule: Schedule, batches: int, folder: Path) -> Schedule:
    """Return the schedule as it is run. With --synthetic its images are in `folder`."""
    short = interruptible(schedule, options.iters, batches, options.device_batch)
    if not options.synthetic:
        return short
    from stagerun.tools.rehearse.synthetic import with_synthetic

    return with_synthetic(short, folder)


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


def resumed(events: Iterable[Event]) -> bool:
    """Return whether a life started from a snapshot of an earlier one, and not from the seed."""
    for event in events:
        if isinstance(event, StageStarted | PieceStarted):
            begins = event.begins if isinstance(event, StageStarted) else 0
            return event.iter > begins or not event.start.startswith("seed ")
        if isinstance(event, Tested):  # only the evaluation of a finished stage was missing
            return True
    return False


# -- the runs


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
    """`stages`: by name, (straight, interrupted), the latter of the first run that differs; `different`: their names."""

    schedule: str
    verdict: str
    promised: bool
    lives: list[Life]
    stages: dict[str, tuple[End, End | None]]
    environment: dict[str, str]
    different: list[str] = field(default_factory=list)


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
        iterations, then = sum(stage.solver.max_iter for stage in stages), self.options.then_workers
        self._say(
            f"verifying {self.schedule.name}: {count(len(stages), 'stage')}, {count(iterations, 'iteration')}, {count(self.nproc, 'worker')}"
            f"{f' and {then} in turn' if then is not None else ''} with {count(self.threads, 'thread')} each"
        )
        out, began = self.folder / "straight", time.monotonic()
        code, _ = self._run(out, self.nproc, Log(out / LOG), [])
        if code != ExitCode.DONE:
            raise ChildFailed("the straight run", code, self.folder / "said")
        per_iteration = (time.monotonic() - began) / iterations
        wanted, environment = ends_of(self.schedule, out)
        promised, ends = environment.get("device") == "cpu", {name: (end, end) for name, end in wanted.items()}
        found = Verdict(self.schedule.name, "", promised, self.lives, {**ends}, environment)
        left, vain = self.options.kills, 0
        # Where nothing resumed from a snapshot nothing could differ.
        while not found.different and (left > 0 or not any(life.resumed for life in self.lives)):
            before, out = len(self.lives), self.folder / "interrupted"
            self._interrupted(out, iterations, max(1, left), per_iteration)
            ends_here, _ = ends_of(self.schedule, out)
            found.different = [name for name, end in wanted.items() if ends_here.get(name) != end]
            for name in found.different:
                found.stages[name] = wanted[name], ends_here.get(name)
            shutil.rmtree(out)
            hits = sum(bool(life.hit) for life in self.lives[before:])
            left, vain = left - hits, vain + (not any(life.resumed for life in self.lives[before:]))
            if vain == MOST_VAIN:
                text = f"no life of {vain} runs was interrupted and resumed from a snapshot"
                raise UsageError(text, "take more --kills, or more --iters")
        found.verdict = "DIFFERENT" if found.different else "BIT-EXACT" if promised else "EQUAL"
        return found

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            say(text)

    def _interrupted(self, out: Path, iterations: int, hits: int, per_iteration: float) -> None:
        """Run from the first life to the end, and hit up to `hits` lives."""
        chosen = choices_folder(self.folder / "straight")
        if chosen.is_dir():  # of `method: AUTO`, which may choose differently
            shutil.copytree(chosen, choices_folder(out))
        events: list[Event] = []
        log = Log(out / LOG)
        while True:
            then = self.options.then_workers
            workers = then if then is not None and len(self.lives) % 2 else self.nproc
            first, moment = len(events), None
            if hits:
                left = iterations - len({(e.stage, e.iter) for e in events if isinstance(e, Iterated)})
                moment = self.rng.randint(0, max(0, left // hits)), self.rng.random() * per_iteration
            code, hit = self._run(out, workers, log, events, moment)
            mine = events[first:]
            starts = [
                e.start if e.iter else f"{e.stage} anew" for e in mine if isinstance(e, StageStarted | PieceStarted)
            ]
            hit = "" if code == ExitCode.DONE else hit
            self.lives.append(Life(workers, next(iter(starts), ""), resumed(mine), hit, code))
            start = f"from {starts[0]}" if starts else "at its start" if hit else "nothing left to train"
            self._say(
                f"  life {len(self.lives)}, {count(workers, 'worker')}: {start}; {f'{hit}, exit code {code}' if hit else 'to the end'}"
            )
            if code == ExitCode.DONE:
                return
            # A kill of the only worker is one of the command itself.
            wanted = (ExitCode.SAVED,) if hit.startswith("SIGTERM") else (-signal.SIGKILL, ExitCode.PEER)
            if not hit or code not in wanted:
                raise ChildFailed(f"life {len(self.lives)}{f', {hit},' if hit else ''}", code, self.folder / "said")
            hits -= 1

    def _run(
        self, out: Path, workers: int, log: Log, events: list[Event], moment: tuple[int, float] | None = None
    ) -> tuple[int, str]:
        """Run one life, which is hit so many iterations and seconds after it has started. Return its exit code, and what was hit."""
        words = [*self.options.of_run(out, self.batches, self.threads), "--nproc", str(workers)]
        first, deadline, hit = len(events), None, ""
        with Child(words, self.folder / "said") as child:
            while (code := child.process.poll()) is None:
                time.sleep(POLL_S)
                events += [event for _, event in log]
                kinds = [type(event) for event in events[first:]]
                if moment is not None and RunStarted in kinds and kinds.count(Iterated) >= moment[0]:
                    deadline, moment = time.monotonic() + moment[1], None
                if deadline is not None and time.monotonic() >= deadline:
                    hit, deadline = child.strike(self.rng), None
            if left := child.outlived():
                text = f"{count(left, 'process')} of the run outlived its launcher, which"
                raise ChildFailed(text, code, self.folder / "said")
            events += [event for _, event in log]
        return code, hit


def render(found: Verdict, options: VerifyOptions) -> str:
    """Return the table and the answer."""
    rows: list[Sequence[str]] = [("stage", "iterations", "digest straight", "digest interrupted", "")]
    for name, (wanted, end) in found.stages.items():
        digests = wanted.digest[:16], end.digest[:16] if end is not None else "none"
        rows.append((name, str(wanted.iterations), *digests, "equal" if end == wanted else "DIFFERENT"))
    hits, went_on = sum(bool(life.hit) for life in found.lives), sum(life.resumed for life in found.lives)
    took = (
        f"({count(hits, 'interruption')} in {len(found.lives)} lives, {went_on} of which resumed from a snapshot; "
        f"`--kills {options.kills} --seed {options.seed}`)"
    )
    lines = ["", *columns(rows), ""]
    if found.verdict == "DIFFERENT":
        lines.append(f"DIFFERENT: interrupted does not equal uninterrupted {took}.")
        if found.promised:
            lines.append(
                "On a CPU it should: this is a bug of stagerun or of torch, or a defect of processor or memory."
            )
        else:
            lines.append("On a GPU nothing is promised: a run that resumes there is EQUIVALENT.")
    else:
        on_gpu = "" if found.promised else " A GPU does not promise it another time."
        where = ", ".join(f"{name} {text}" for name, text in found.environment.items() if name != "processor flags")
        lines += [f"{found.verdict}: interrupted equals uninterrupted {took}.{on_gpu}", f"It holds for {where}."]
    return "\n".join(lines)


def interruptible(schedule: Schedule, iters: int, logical_workers: int, device_batch: int | None) -> Schedule:
    """The rehearsal with as many device batches per iteration as asked for, and snapshots inside the stages: wherever a run of it is
    interrupted, the next most often continues inside a stage."""
    short = rehearsal(schedule, iters, logical_workers, device_batch)

    def saved(stage: Stage) -> Stage:
        return replace(stage, solver=replace(stage.solver, snapshot=max(1, stage.solver.max_iter // 3)))

    return replace(short, stages=tuple(saved(stage) for stage in short.stages))


def enough_logical_workers(schedule: Schedule, workers: int) -> int:
    """Device batches per iteration for up to `workers`: one more than these, so that one of them adds up several, or as many as the
    stage with the fewest has."""
    return min([workers + 1, *(stage.solver.most_workers for stage in schedule.stages if stage.enabled)])
