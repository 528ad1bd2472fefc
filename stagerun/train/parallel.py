"""`run --parallel N`: stages that don't wait for each other, side by side on one machine, each trained by one worker.

Each stage is trained as `run --only STAGE` does, by a process of its own in a folder below OUT/.parallel, which has what the stage starts
from under a second name. So it has the bits that it has alone with as many threads. This process holds OUT: when a stage is done, or
stopped, it takes over the lines of its log, then its snapshots and results. What a kill leaves in OUT/.parallel the next run takes over
first. What is left at the end (ensembles, stretches that are trained once more) an ordinary run does.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from stagerun import store
from stagerun.base.errors import ExitCode, StagerunError, UsageError
from stagerun.base.events import Failed, Note, RunFinished, StageFinished, Stopped
from stagerun.base.recipe import Schedule
from stagerun.base.text import count, duration, percent
from stagerun.command.ending import say, tell
from stagerun.command.options import arguments
from stagerun.launch import StopRequest
from stagerun.launch.folder import LAUNCHER_PID
from stagerun.launch.worker_count import usual_workers
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.counting import lineage
from stagerun.store.errors import reporting
from stagerun.store.second_names import borrow, give_back
from stagerun.system.files import open_shared
from stagerun.system.host import host_name, nvidia_gpus
from stagerun.system.imports import FOLDER as IMPORTED
from stagerun.system.process import program
from stagerun.system.world import default_threads
from stagerun.train.first_look import look_first
from stagerun.train.keeper import Keeper, run_started
from stagerun.train.log_file import JsonLines
from stagerun.train.options import RunOptions
from stagerun.train.results import read_result

FOLDER = ".parallel"
MARK = ".stage"  # a file in each folder that is ours: nothing else is taken over, or deleted
_LOOK_S = 0.1  # how often is looked who has ended, and for a request to stop
_TAIL = 12  # lines of a worker that failed which are shown
# What a worker's log says of its own run, and the places that an index names.
_NOT_TAKEN = {"RunStarted", "RunFinished", "Stopped", "Failed", "Indexed", "Renamed"}


def refuse(options: RunOptions, others: bool) -> None:
    """UsageError for what can't go with --parallel."""
    wrong = {
        "--nproc": options.nproc not in (None, 1), "--hosts": others, "--profile": options.profile is not None,
        "--replay": options.replay is not None, "--log": bool(options.log),
        "--bind numa": options.bind == "numa", "--timeout": bool(options.timeouts),
    }  # fmt: skip
    if names := [name for name, given in wrong.items() if given]:
        raise UsageError(
            f"--parallel with {' and '.join(names)}: stages side by side have one worker each, on this machine",
            "leave one of them out",
        )
    if usual_workers(None) > 1 or nvidia_gpus(Path("/proc")):
        raise UsageError("--parallel with a GPU", "stages side by side are for processors: leave --parallel out")


def take_over(keeper: Keeper) -> None:
    """What a run with --parallel that was killed has left in OUT/.parallel, OUT being held; says of which stages."""
    folder = keeper.out / FOLDER
    if folder.is_dir() and not folder.is_symlink():
        for one in sorted(folder.iterdir()):
            if one.is_dir() and not one.is_symlink() and (one / MARK).is_file():
                before = len(keeper.inventory().of(one.name))
                _take_over(keeper, one)
                own = keeper.inventory().of(one.name)
                what = (
                    f"its snapshots up to iteration {own[-1].iter}" if len(own) > before else "its log, and no snapshot"
                )
                keeper.say(f"stage {one.name}: took over what a run with --parallel has left: {what}")
        with suppress(OSError):
            folder.rmdir()


def _take_over(keeper: Keeper, made: Path) -> None:
    """The log first: what is taken over a second time replaces what was there."""
    out, log = keeper.out, made / "log.jsonl"
    if log.is_file():
        with reporting("take over the log", out):
            lines = [line for line in log.read_bytes().splitlines() if _taken(line)]
            with os.fdopen(open_shared(out / "log.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                torn = file.read(1) not in (b"", b"\n")  # by a kill
                file.write(b"\n" * torn + b"".join(line + b"\n" for line in lines))
    if (made / "snapshots").is_dir():
        give_back(store.LocalDisk(), made, out, made.name)
        own = keeper.inventory().of(made.name)
        if own and any(stage.name == made.name for stage in keeper.schedule.stages):
            with suppress(store.Damaged):  # it is set aside, and all before it is there
                keeper.retain(own[-1])
    with suppress(OSError):  # at once: what is half removed when this is killed must not be taken for a snapshot
        (made / "snapshots").rename(made / ".gone")
    shutil.rmtree(made, ignore_errors=True)


def _taken(line: bytes) -> bool:
    try:
        return json.loads(line).get("event") not in _NOT_TAKEN
    except (ValueError, AttributeError):
        return False


@dataclass(frozen=True, slots=True)
class _Worker:
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]  # what it prints on standard error


def train_side_by_side(options: RunOptions, schedule: Schedule) -> int | None:
    """The exit code; None where an ordinary run is to do what is left."""
    assert options.parallel is not None
    done = look_first(options, schedule, 1)
    if done is not None:
        return done
    options = replace(options, threads=options.threads or default_threads(options.parallel))
    stop = StopRequest("to save", "the iteration that each stage is at", grace=options.grace_s)
    stop.install(ExitCode.SAVED)
    stop.begin()
    began, code = time.monotonic(), None
    keeper = Keeper(schedule, options.output(schedule), options.selection, options.retry, tell, stop)
    try:
        keeper.open()
        take_over(keeper)
        with ExitStack() as stack:
            log = stack.enter_context(JsonLines(keeper.out / "log.jsonl", tell))
            run = _Run(options, keeper, stop, log)
            stack.callback(run.end)
            run.train()
            if run.failed:
                code = run.failed[0][0]
            elif stop():
                code = ExitCode.SAVED
            log(run.last_event(code, time.monotonic() - began))
    finally:
        keeper.close(code if code is not None or sys.exc_info()[0] is not None else ExitCode.DONE)
    for _, text in run.failed:
        tell(text)
    if code is None and run.over:
        say(f"{count(len(run.over), 'stage')} trained side by side in {duration(time.monotonic() - began)}")
    if code == ExitCode.SAVED:
        tell("stopped: the same command goes on, with or without --parallel")
    return code


@dataclass(slots=True)
class _Run:
    options: RunOptions
    keeper: Keeper
    stop: StopRequest
    log: JsonLines
    workers: dict[str, _Worker] = field(default_factory=dict)  # by the stage that each trains
    failed: list[tuple[int, str]] = field(default_factory=list)
    over: set[str] = field(default_factory=set)  # stages that ended here
    newest: str = ""  # the stage that was begun last

    def train(self) -> None:
        plan, asked = self.keeper.plan(), False
        self.log(
            run_started(
                self.keeper.schedule, out=str(self.keeper.out), workers=1, device="cpu", threads=self.options.threads,
                iterations_left=plan.iterations_left, hosts=(host_name(),), attempt=self.keeper.attempt,
                side_by_side=self.options.parallel,
            )
        )  # fmt: skip
        while True:
            if not self.failed and not self.stop():
                plan = self._begin(plan)
            elif not asked:
                asked = True
                for worker in self.workers.values():
                    worker.process.terminate()
            if not self.workers:
                return
            while not (ended := [name for name, worker in self.workers.items() if worker.process.poll() is not None]):
                if (self.failed or self.stop()) and not asked:
                    break
                time.sleep(_LOOK_S)
            for name in ended:
                self._ended(name, self.workers.pop(name))
            if ended and not self.failed and not self.stop():  # others may start from them
                plan = self.keeper.plan()

    def _begin(self, plan: Plan) -> Plan:
        """Start a stage for each worker that there may be. Those that wait for others, or for a stretch that is trained once more, come
        later, or in the ordinary run."""
        try:
            while len(self.workers) < (self.options.parallel or 1):
                if (planned := next(filter(self._can, plan.work), None)) is None:
                    break
                if not self._start(plan, planned):
                    plan = self.keeper.plan()
        except StagerunError as error:  # the others are to be saved first
            self.failed.append((int(error.exit_code), error.render()))
        return plan

    def _can(self, planned: PlannedStage) -> bool:
        stage = planned.stage
        if planned.until is not None or stage.name in self.workers or stage.name in self.over:
            return False
        if stage.solver.teacher is not None and planned.teacher is None:
            return False
        if planned.state is State.RESUME or stage.parent is None:
            return planned.state in (State.FRESH, State.RESUME)
        return (
            planned.state is State.FRESH
            and planned.start is not None
            and (stage.average is None or bool(planned.averaged))
        )

    def _start(self, plan: Plan, planned: PlannedStage) -> bool:
        """Begin a stage; False where a snapshot that it needs is damaged, and set aside now."""
        stage, out = planned.stage, self.keeper.out
        folder = out / FOLDER / stage.name
        own = plan.inventory.of(stage.name) if planned.state is State.RESUME else ()  # a rollback may go back further
        needed = {ref.name: ref for ref in (*own, *lineage(self.keeper.schedule, plan, planned))}
        if harmed := [ref for ref in needed.values() if store.is_harmed(self.keeper.disk, out, ref.name)]:
            for ref in harmed:
                self.keeper.set_aside(ref)
                tell(f"snapshot {ref.name} is damaged and was set aside as .bad-{ref.name}")
            self.over -= {stage.name, *(ref.stage for ref in harmed)}
            return False
        with reporting("make a folder for a stage", folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARK).touch()
            if self.keeper.schedule.imports and not (folder / IMPORTED).is_symlink():  # all import into one place
                (out / IMPORTED).mkdir(exist_ok=True)
                (folder / IMPORTED).symlink_to(Path("..", "..", IMPORTED))
        borrow(out, folder, list(needed))
        same = arguments(
            replace(self.options, out=str(folder), only=(stage.name,), retry=True),
            "folder", "overrides", "out", "only", "threads", "grace", "exact", "retry",
        )  # fmt: skip
        with reporting("start a stage", folder):
            said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
            # A session of its own: Ctrl-C is for this process, which asks each worker once.
            process = subprocess.Popen(
                [sys.executable, *program("stagerun"), "run", *same],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
                env={**os.environ, LAUNCHER_PID: str(os.getpid())},
            )  # fmt: skip
        self.workers[stage.name], self.newest = _Worker(process, said), stage.name
        start = planned.start.name if planned.start is not None else f"seed {stage.solver.random_seed}"
        if stage.average is not None and planned.state is State.FRESH:
            start = f"the average {stage.average}"
        say(f"stage {stage.name}: iterations {planned.iter} to {planned.last}, from {start}")
        self.log(Note(text=f"stage `{stage.name}` is trained beside others, and is told of when it ends"))
        return True

    def _ended(self, name: str, worker: _Worker) -> None:
        code = worker.process.returncode
        if code == -signal.SIGTERM and (self.failed or self.stop()):  # it was asked before it could listen
            code = ExitCode.SAVED
        worker.said.seek(0)
        said = worker.said.read().decode(errors="replace").rstrip().splitlines()[-_TAIL:]
        worker.said.close()
        self.over.add(name)
        try:
            self.keeper.require_held()
            _take_over(self.keeper, self.keeper.out / FOLDER / name)
        except StagerunError as error:  # the others are to be saved first; what is here the next run takes over
            self.failed.append((int(error.exit_code), error.render()))
            return
        with suppress(OSError):
            (self.keeper.out / FOLDER).rmdir()
        own = self.keeper.inventory().of(name)
        if code == ExitCode.DONE and own and (result := read_result(self.keeper.out, own[-1])) is not None:
            say(f"stage {name}: {_in_words(result)}")
        elif code == ExitCode.SAVED and own:
            say(f"stage {name}: stopped and saved after iteration {own[-1].iter}")
        elif code == ExitCode.SAVED:
            say(f"stage {name}: stopped before its first iteration")
        elif code != ExitCode.DONE:
            ended = f"stage `{name}` ended with exit code {code}" if code > 0 else f"stage `{name}` was killed"
            code = code if code > 0 else int(ExitCode.PEER)
            self.failed.append(
                (code, "\n".join([f"{ended}; the same command goes on from its newest snapshot:", *said]))
            )

    def last_event(self, code: int | None, seconds: float) -> RunFinished | Stopped | Failed:
        if self.failed:
            return Failed(code=self.failed[0][0], text=self.failed[0][1])
        if code is None:
            return RunFinished(trained=bool(self.over), seconds=seconds)
        own = self.keeper.inventory().of(self.newest)
        return Stopped(stage=self.newest, iter=own[-1].iter if own else 0, reason="asked to stop")

    def end(self) -> None:
        """Leave no worker. One that is at work here is so because this process failed: what it has saved is taken over later."""
        for worker in self.workers.values():
            worker.process.kill()
            worker.process.wait()
            worker.said.close()


def _in_words(finished: StageFinished) -> str:
    top1 = "not evaluated" if finished.top1 is None else f"top-1 {percent(finished.top1)}"
    return f"{top1}, train loss {finished.loss:.4g}, {count(finished.iterations, 'iteration')} in {finished.train_seconds:.1f} s"
