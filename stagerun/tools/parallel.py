"""`run --parallel N`: train stages that don't wait for each other side by side on this machine, each with one worker.

Each stage is trained like `run --only STAGE` by a process in OUT/.parallel/STAGE, which holds links to the snapshots that the stage needs.
So it has the bits that it has alone with as many threads. This process holds OUT. When a stage ends or is stopped, it moves the lines of its
log, its snapshots and its results into OUT; what a kill leaves is moved by the next run. An ordinary run does the rest: ensembles, and
stretches that are trained once more.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StagerunError
from stagerun.base.events import Failed, Note, RunFinished, Stopped
from stagerun.base.recipe import Schedule
from stagerun.command.ending import say, tell
from stagerun.command.options import arguments
from stagerun.launch import StopRequest, start_command
from stagerun.logs.log_file import LOG, JsonLines
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.counting import lineage
from stagerun.store.read import borrow, give_back
from stagerun.system import files, image_sets
from stagerun.train.keeper import Keeper, run_started
from stagerun.train.options import RunOptions

FOLDER = ".parallel"
MARK = ".stage"  # a file in each stage's folder: no other folder is taken over or deleted
_POLL_S = 0.1
_TAIL = 12  # shown lines of a worker that failed
# Events of a worker's log that concern only its run, or positions in its log.
_NOT_TAKEN = {"RunStarted", "RunFinished", "Stopped", "Failed", "Indexed", "Renamed"}


def train_side_by_side(options: RunOptions, schedule: Schedule) -> int | None:
    """Return the exit code; None if an ordinary run is to do the rest."""
    stop = StopRequest("to save", "the current iteration of each stage", grace=options.grace_s)
    stop.install(ExitCode.SAVED)
    stop.begin()
    began, code = time.monotonic(), None
    keeper = Keeper(schedule, options.output(schedule), options.selection, options.retry, tell, stop)
    try:
        keeper.open()
        take_over(keeper)
        with JsonLines(keeper.out / LOG, tell) as log:
            run = _Run(options, keeper, stop, log)
            run.train()
            code = run.code
            if run.failure is not None:
                log(run.failure)
            elif code is not None:
                log(Stopped(stage=run.newest, iter=0, reason="asked to stop"))
                tell("stopped: the same command resumes, with or without --parallel")
            else:
                log(RunFinished(trained=bool(run.ended), seconds=time.monotonic() - began))
    finally:
        keeper.close(code if code is not None or sys.exc_info()[0] is not None else ExitCode.DONE)
    return code


class _Run:
    """The stages at work. `workers`: their processes by stage; `ended`: stages; `newest`: the stage that was started last; `failure`: the first."""

    def __init__(self, options: RunOptions, keeper: Keeper, stop: StopRequest, log: JsonLines) -> None:
        self.options, self.keeper, self.stop, self.log = options, keeper, stop, log
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.ended = set[str]()
        self.newest = ""
        self.failure: Failed | None = None

    @property
    def code(self) -> int | None:
        """The exit code; None while nothing ends the run early."""
        if self.failure is not None:
            return self.failure.code
        return ExitCode.SAVED if self.stop() else None

    def _fail(self, code: int, text: str) -> None:
        """Remember a failure, and let the other stages save."""
        tell(text)
        self.failure = self.failure or Failed(code=code, text=text)

    def train(self) -> None:
        plan, stopping = self.keeper.plan(), False
        self.log(
            run_started(
                self.keeper.schedule, out=str(self.keeper.out), workers=1, device="cpu", threads=self.options.threads,
                iterations_left=plan.iterations_left, hosts=(os.uname().nodename,), attempt=self.keeper.attempt,
                side_by_side=self.options.parallel,
            )
        )  # fmt: skip
        try:
            self._fill()
            while self.workers:
                if self.code is not None and not stopping:
                    stopping = True
                    for worker in self.workers.values():
                        worker.terminate()
                finished = [name for name, worker in self.workers.items() if worker.poll() is not None]
                for name in finished:
                    self._end(name, self.workers.pop(name).returncode)
                if finished:
                    self._fill()  # other stages may start from these
                else:
                    time.sleep(_POLL_S)
        finally:  # if this process fails, the next run takes over what they have saved
            for worker in self.workers.values():
                worker.kill()
                worker.wait()

    def _fill(self) -> None:
        """Start stages until every worker has one. Stages that wait for others, or for a stretch that is trained once more, come later."""
        try:
            while self.code is None and len(self.workers) < (self.options.parallel or 1):
                plan = self.keeper.plan()
                planned = next(filter(self._can_start, plan.work), None)
                if planned is None:
                    return
                self._start(plan, planned)
        except StagerunError as error:
            self._fail(int(error.exit_code), error.render())

    def _can_start(self, planned: PlannedStage) -> bool:
        stage = planned.stage
        if planned.until is not None or stage.name in self.workers or stage.name in self.ended:
            return False
        if stage.solver.teacher is not None and planned.teacher is None:
            return False
        if planned.state is State.FRESH and stage.parent is not None:
            return planned.start is not None and (stage.average is None or bool(planned.averaged))
        return planned.state in (State.FRESH, State.RESUME)

    def _start(self, plan: Plan, planned: PlannedStage) -> None:
        """Start a stage in a folder with the snapshots that it needs; but if one was damaged, set it aside, and do nothing else."""
        stage, keeper = planned.stage, self.keeper
        # All snapshots of a stage that resumes: a rollback may go back further.
        resumed = plan.inventory.of(stage.name) if planned.state is State.RESUME else ()
        needed = {ref.name: ref for ref in (*resumed, *lineage(plan, planned))}
        for ref in needed.values():
            if store.is_harmed(keeper.disk, keeper.out, ref.name):
                keeper.set_aside(ref)
                tell(f"snapshot {ref.name} is damaged and was set aside as .bad-{ref.name}")
                self.ended.discard(ref.stage)
                return
        folder = keeper.out / FOLDER / stage.name
        with store.reporting("make a folder for a stage", folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARK).touch()
            link = folder / image_sets.FOLDER
            if keeper.schedule.imports and not link.is_symlink():  # images are imported once for all stages
                (keeper.out / image_sets.FOLDER).mkdir(exist_ok=True)
                link.symlink_to(Path("..", "..", image_sets.FOLDER))
        borrow(keeper.out, folder, needed)
        words = arguments(
            replace(self.options, out=str(folder), only=(stage.name,), retry=True),
            "folder", "overrides", "out", "only", "threads", "grace", "exact", "retry",
        )  # fmt: skip
        with store.reporting("start a stage", folder), (folder / "stderr").open("wb") as stderr:
            self.workers[stage.name] = start_command(["run", *words], subprocess.DEVNULL, stderr)
        self.newest = stage.name
        start = planned.start.name if planned.start is not None else f"seed {stage.solver.random_seed}"
        if stage.average is not None and planned.state is State.FRESH:
            start = f"the average {stage.average}"
        say(f"stage {stage.name}: iterations {planned.iter} to {planned.last}, from {start}")
        self.log(Note(text=f"stage `{stage.name}` is trained side by side with others, and logged when it ends"))

    def _end(self, name: str, code: int) -> None:
        """Take over what the process of a stage has left, and report how it ended."""
        if code == -signal.SIGTERM and self.code is not None:  # it was asked before it could listen
            code = ExitCode.SAVED
        self.ended.add(name)
        try:
            with store.reporting("read the last lines of a stage", self.keeper.out):
                stderr = (self.keeper.out / FOLDER / name / "stderr").read_text(errors="replace")
            self.keeper.require_held()
            _take_over_stage(self.keeper, name)
        except StagerunError as error:  # the next run takes over the rest
            return self._fail(int(error.exit_code), error.render())
        if code in (ExitCode.DONE, ExitCode.SAVED):
            return say(f"stage {name}: {'done' if code == ExitCode.DONE else 'stopped and saved'}")
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        text = f"stage `{name}` {how}; the same command resumes it from its newest snapshot"
        self._fail(code if code > 0 else int(ExitCode.PEER), "\n".join([text, *stderr.rstrip().splitlines()[-_TAIL:]]))


# -- the folders of stages


def take_over(keeper: Keeper) -> None:
    """Take over the folders that a killed run with --parallel left, while OUT is held, and name their stages."""
    folder = keeper.out / FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and (path / MARK).is_file():
            _take_over_stage(keeper, path.name)
            keeper.say(f"stage {path.name}: took over what a killed run with --parallel left")
    with suppress(OSError):
        folder.rmdir()


def _take_over_stage(keeper: Keeper, stage: str) -> None:
    """Move what the process of a stage has left into OUT. The log comes first: lines that are taken over twice replace each other."""
    folder = keeper.out / FOLDER / stage
    if (folder / LOG).is_file():
        with store.reporting("take over the log", keeper.out):
            lines = [line + b"\n" for line in (folder / LOG).read_bytes().splitlines() if _is_taken(line)]
            with closing(files.LineFile(keeper.out / LOG)) as log:
                log.append(b"".join(lines))
    snapshots = folder / "snapshots"
    if snapshots.is_dir():
        give_back(store.LocalDisk(), folder, keeper.out, stage)
        refs = keeper.inventory().of(stage)
        if refs and any(stage == other.name for other in keeper.schedule.stages):
            with suppress(store.Damaged):  # it is set aside, and all older ones stay
                keeper.retain(refs[-1])
    with suppress(OSError):  # rename: a folder that is half removed at a kill must not count as snapshots
        snapshots.rename(folder / ".gone")
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def _is_taken(line: bytes) -> bool:
    try:
        return json.loads(line).get("event") not in _NOT_TAKEN
    except (ValueError, AttributeError):
        return False
