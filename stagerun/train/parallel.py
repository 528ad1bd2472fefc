"""`run --parallel N`: stages that don't wait for each other, side by side on one machine, each trained by one worker.

A worker trains one stage after the other as `run --only STAGE` does, in a folder below OUT/.parallel that has what the stage starts from under a second
name. So it has the bits that it has alone with as many threads. This process holds OUT: when a stage is done, or stopped, it takes over the lines of
its log, then its snapshots and results. What a kill leaves in OUT/.parallel the next run takes over first. What is left at the end
(ensembles, stretches that are trained once more) an ordinary run does.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import stagerun
from stagerun import store
from stagerun.base.errors import ExitCode, PeerError, StagerunError, UsageError
from stagerun.base.events import Event, Failed, Note, RunFinished, RunStarted, StageFinished, Stopped
from stagerun.base.recipe import Schedule
from stagerun.base.text import count, duration, percent
from stagerun.command.ending import say, tell
from stagerun.command.options import arguments
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.folder import LAUNCHER_PID
from stagerun.launch.start import Orders, work
from stagerun.launch.watch.worker import Monitored
from stagerun.launch.worker_count import usual_workers
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.counting import lineage
from stagerun.store.errors import reporting
from stagerun.store.layout import snapshots_folder
from stagerun.store.second_names import borrow, give_back
from stagerun.system.files import open_shared
from stagerun.system.host import host_name, nvidia_gpus
from stagerun.system.imports import with_imports
from stagerun.system.process import program
from stagerun.system.world import World, default_threads
from stagerun.train.first_look import look_first
from stagerun.train.keeper import Keeper
from stagerun.train.log_file import JsonLines
from stagerun.train.options import RunOptions

FOLDER = ".parallel"
MARK = ".stage"  # a file in each folder that is ours: nothing else is taken over, or deleted
_LOOK_S = 0.2  # how often is looked for a request to stop
_TAIL = 12  # lines of a worker that was lost which are shown
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


def _take_over(keeper: Keeper, made: Path) -> list[str]:
    """The log first: what is taken over a second time replaces what was there. The snapshots of OUT that were found damaged there: they are set
    aside."""
    out, log, damaged = keeper.out, made / "log.jsonl", list[str]()
    if log.is_file():
        with reporting("take over the log", out):
            lines = [line for line in log.read_bytes().splitlines() if _taken(line)]
            with os.fdopen(open_shared(out / "log.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                torn = file.read(1) not in (b"", b"\n")  # by a kill
                file.write(b"\n" * torn + b"".join(line + b"\n" for line in lines))
    if (made / "snapshots").is_dir():
        disk = store.LocalDisk()
        kept = set(disk.names(snapshots_folder(made)))
        give_back(disk, made, out, made.name)
        if bad := [store.snapshot_name(*place) for place in store.aside(disk, made).values()]:
            known = {ref.name: ref for ref in keeper.inventory().snapshots}
            damaged = [name for name in bad if name not in known or keeper.read(known[name]) is None]
        others = map(store.parse_name, set(disk.names(snapshots_folder(out))) - kept)
        known_to = any(stage.name == made.name for stage in keeper.schedule.stages)
        if known_to and any(place is not None and place.stage == made.name for place in others):
            with suppress(store.Damaged, IndexError):  # it is set aside, and all before it is there
                keeper.retain(keeper.inventory().of(made.name)[-1])
    with suppress(OSError):  # at once: what is half removed when this is killed must not be taken for a snapshot
        (made / "snapshots").rename(made / ".gone")
    shutil.rmtree(made, ignore_errors=True)
    return damaged


def _taken(line: bytes) -> bool:
    try:
        return json.loads(line).get("event") not in _NOT_TAKEN
    except (ValueError, AttributeError):
        return False


@dataclass(slots=True)
class _Worker:
    """A process that trains one stage at a time; `stage` is the one it is at, '' if it waits."""

    process: "subprocess.Popen[bytes]"
    said: IO[bytes]  # what it prints on standard error
    stage: str = ""
    rest: bytes = b""


def train_side_by_side(options: RunOptions, schedule: Schedule) -> int | None:
    """The exit code; None where an ordinary run is to do what is left."""
    assert options.parallel is not None
    done = look_first(options, schedule, 1)
    if done is not None:
        return done
    threads = options.threads or default_threads(options.parallel)
    stop = StopRequest("to save", "the iteration that each stage is at", grace=options.grace_s)
    stop.install(ExitCode.SAVED)
    stop.begin()
    return _Run(replace(options, threads=threads), schedule, stop).train()


@dataclass(slots=True)
class _Run:
    options: RunOptions
    schedule: Schedule
    stop: StopRequest
    workers: list[_Worker] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    over: set[str] = field(default_factory=set)  # stages that ended here
    changed: bool = False  # since the newest plan
    newest: str = ""  # the stage that was given out last
    # As soon as this process holds the folder.
    keeper: Keeper = field(init=False)
    plan: Plan = field(init=False)
    log: JsonLines = field(init=False)

    @property
    def out(self) -> Path:
        return self.keeper.out

    def train(self) -> int | None:
        out, began = self.options.output(self.schedule), time.monotonic()
        keeper = self.keeper = Keeper(self.schedule, out, self.options.selection, self.options.retry, tell, self.stop)
        code: int | None = None
        try:
            keeper.open()
            take_over(keeper)
            self.plan = keeper.plan()
            with ExitStack() as stack:
                stack.callback(self._end)
                self.log = log = stack.enter_context(JsonLines(out / "log.jsonl", tell))
                log(self._started())
                self._loop()
                if self.failed:
                    code = self.failed[0][0]
                elif self.stop():
                    code = ExitCode.SAVED
                log(self._last(code, time.monotonic() - began))
        finally:
            keeper.close(code if code is not None or sys.exc_info()[0] is not None else ExitCode.DONE)
        for _, text in self.failed:
            tell(text)
        if code is None and self.over:
            say(f"{count(len(self.over), 'stage')} trained side by side in {duration(time.monotonic() - began)}")
        if code == ExitCode.SAVED:
            tell("stopped: the same command goes on, with or without --parallel")
        return code

    def _last(self, code: int | None, seconds: float) -> RunFinished | Stopped | Failed:
        if self.failed:
            return Failed(code=self.failed[0][0], text=self.failed[0][1])
        if code is None:
            return RunFinished(trained=bool(self.over), seconds=seconds)
        own = self.keeper.inventory().of(self.newest)
        return Stopped(stage=self.newest, iter=own[-1].iter if own else 0, reason="asked to stop")

    def _started(self) -> RunStarted:
        schedule = self.schedule
        return RunStarted(
            schedule=schedule.name, out=str(self.out), workers=1, device="cpu", threads=self.options.threads or 1,
            stages=tuple(stage.name for stage in schedule.stages if stage.enabled),
            iterations=sum(stage.solver.max_iter for stage in schedule.stages if stage.enabled),
            iterations_left=self.plan.iterations_left, version=stagerun.__version__,
            ensembles=tuple(ensemble.name for ensemble in schedule.ensembles),
            disabled=tuple(stage.name for stage in schedule.stages if not stage.enabled),
            hosts=(host_name(),), attempt=self.keeper.attempt, side_by_side=self.options.parallel or 0,
        )  # fmt: skip

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            # All at once: each loads torch for seconds.
            for _ in range(min(self.options.parallel or 1, len(self.plan.work))):
                worker = self._start()
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            while True:
                if not self.failed and not self.stop():
                    if self.changed:  # a stage has ended: others may start from it
                        self.plan, self.changed = self.keeper.plan(), False
                    self._give_out()
                elif any(worker.stage for worker in self.workers):
                    self._ask_to_stop()
                if not any(worker.stage for worker in self.workers):
                    return
                for key, _ in selector.select(_LOOK_S):
                    self._hear(key.data, selector)

    def _give_out(self) -> None:
        """A stage to each worker that waits."""
        idle = [worker for worker in self.workers if not worker.stage]
        ready = self._ready({worker.stage for worker in self.workers}) if idle else []
        for worker, planned in zip(idle, ready, strict=False):
            try:
                self._give(worker, planned)
            except StagerunError as error:  # the others are to be saved first
                self.failed.append((int(error.exit_code), error.render()))
                return

    def _ready(self, at_work: set[str]) -> list[PlannedStage]:
        """The stages that can be trained now, in running order. Those that wait for others, or for a stretch that is trained once more, come
        later, or in the ordinary run."""

        def can(planned: PlannedStage) -> bool:
            stage, name = planned.stage, planned.stage.name
            if (
                planned.until is not None
                or name in at_work | self.over
                or planned.state not in (State.FRESH, State.RESUME)
            ):
                return False
            if stage.solver.teacher is not None and planned.teacher is None:
                return False
            if planned.state is State.RESUME or stage.parent is None:
                return True
            return planned.start is not None and (stage.average is None or bool(planned.averaged))

        return [planned for planned in self.plan.work if can(planned)]

    def _start(self) -> _Worker:
        same = arguments(self.options, "folder", "overrides", "out", "keep", "threads", "grace", "exact")
        environment = {**os.environ, LAUNCHER_PID: str(os.getpid()), "OMP_NUM_THREADS": str(self.options.threads)}
        said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
        # A session of its own: Ctrl-C is for this process, which asks each worker once.
        process = subprocess.Popen(
            [sys.executable, *program("stagerun"), "run", *same, "--stage-by-stage"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=environment, start_new_session=True,
        )  # fmt: skip
        self.workers.append(_Worker(process, said))
        return self.workers[-1]

    def _give(self, worker: _Worker, planned: PlannedStage) -> None:
        plan, name = self.plan, planned.stage.name
        folder = self.out / FOLDER / name
        own = plan.inventory.of(name) if planned.state is State.RESUME else ()  # a rollback may go back further
        with reporting("make a folder for a stage", folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARK).touch()
        needed = [*own, *lineage(self.schedule, plan, planned)]
        borrow(self.out, folder, list(dict.fromkeys(ref.name for ref in needed)))
        worker.stage = self.newest = name
        assert worker.process.stdin is not None
        with suppress(BrokenPipeError):  # it is heard of when its output ends
            worker.process.stdin.write(json.dumps({"stage": name, "out": str(folder)}).encode() + b"\n")
            worker.process.stdin.flush()
        stage = planned.stage
        start = planned.start.name if planned.start is not None else f"seed {stage.solver.random_seed}"
        if stage.average is not None and planned.state is State.FRESH:
            start = f"the average {stage.average}"
        say(f"stage {name}: iterations {planned.iter} to {planned.last}, from {start}")
        self.log(Note(text=f"stage `{name}` is trained beside others, and is told of when it ends"))

    def _hear(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        assert worker.process.stdout is not None
        new = os.read(worker.process.stdout.fileno(), 1 << 16)
        *lines, worker.rest = (worker.rest + new).split(b"\n")
        for line in lines:
            self._ended(worker, json.loads(line))
        if not new:
            selector.unregister(worker.process.stdout)
            self.workers.remove(worker)
            code = worker.process.wait()
            if worker.stage and self.stop() and code in (-signal.SIGTERM, ExitCode.SAVED):
                # It was asked before it could listen: nothing was trained since its newest snapshot.
                self._ended(worker, {"code": int(ExitCode.SAVED)})
            elif worker.stage:
                worker.said.seek(0)
                said = worker.said.read().decode(errors="replace").rstrip().splitlines()[-_TAIL:]
                error = PeerError(
                    "\n".join([f"the worker that trained stage `{worker.stage}` ended with {code}", *said]),
                    "the same command goes on from its newest snapshot",
                )
                self._ended(worker, {"code": int(error.exit_code), "text": error.render()})

    def _ended(self, worker: _Worker, answer: dict[str, Any]) -> None:
        name, code, known = worker.stage, answer["code"], not self.changed
        worker.stage, self.changed = "", True
        self.over.add(name)
        if code == ExitCode.DONE and known and not self.failed and not self.stop():
            self._give_out()  # what doesn't wait for this one, so that the worker needn't wait either
        try:
            self.keeper.require_held()
            damaged = _take_over(self.keeper, self.out / FOLDER / name)
        except StagerunError as error:  # the others are to be saved first; what is here the next run takes over
            self.failed.append((int(error.exit_code), error.render()))
            return
        with suppress(OSError):
            (self.out / FOLDER).rmdir()
        for one in damaged:  # its stage is trained again from what is left, and then this one
            tell(f"snapshot {one} is damaged and was set aside as .bad-{one}")
            place = store.parse_name(one)
            self.over -= {name, place.stage if place is not None else name}
        if damaged and code not in (ExitCode.DONE, ExitCode.SAVED):
            return
        if code == ExitCode.DONE:
            say(f"stage {name}: {answer['text']}")
        elif code == ExitCode.SAVED:
            say(f"stage {name}: {self._stopped(name, answer.get('iter'))}")
        else:
            text = answer["text"]
            self.failed.append((code, text if f"`{name}`" in text else f"stage `{name}`: {text}"))

    def _stopped(self, name: str, iter: int | None) -> str:
        places = map(store.parse_name, store.LocalDisk().names(snapshots_folder(self.out)))
        if any(place is not None and (place.stage, place.iter) == (name, iter) for place in places):
            return f"stopped and saved after iteration {iter}"
        return "stopped before its first iteration"

    def _ask_to_stop(self) -> None:
        """Each worker once; those that wait end with their input."""
        for worker in self.workers:
            if worker.process.stdin is not None and not worker.process.stdin.closed:
                with suppress(BrokenPipeError):
                    worker.process.stdin.close()
                if worker.stage:
                    with suppress(ProcessLookupError):
                        worker.process.send_signal(signal.SIGTERM)

    def _end(self) -> None:
        """No worker is left. One that is at work here is so because this process failed: what it has saved is taken over later."""
        for worker in self.workers:
            if worker.process.stdin is not None:
                with suppress(OSError):
                    worker.process.stdin.close()
            if worker.stage:
                worker.process.kill()
            worker.process.wait()
            worker.said.close()


# -- in a worker


def serve(options: RunOptions) -> int:
    """The worker's side: trains the stages that it reads of, a line each, and answers with a line for each."""

    def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
        answers = os.dup(1)
        os.dup2(2, 1)  # nothing else may come between them
        schedule = load(options.folder, options.overrides)
        schedule = with_imports(schedule, options.output(schedule))  # once for all: the folder of a stage goes with it
        stop.begin()
        # And with it torch, while another worker trains the stage that all start from.
        from stagerun.train.guest import train_as_guest
        from stagerun.train.images import KeptImages

        with closing(KeptImages()) as kept:
            for name, out in _orders():
                one = replace(options, out=out, only=(name,), until=None, retry=True, stage_by_stage=False)
                events = train_as_guest(schedule, one, stop, stop.left, lambda note: None, kept)
                os.write(answers, json.dumps(_answer(events)).encode() + b"\n")
                if stop():
                    break
        return ExitCode.DONE

    return work(job, Orders((), options.threads, options.grace_s))


def _orders() -> Iterator[tuple[str, str]]:
    for line in sys.stdin.buffer:
        order = json.loads(line)
        yield order["stage"], order["out"]


def _answer(events: Iterator[Event]) -> dict[str, Any]:
    last, text = None, ""
    try:
        for last in events:
            if isinstance(last, StageFinished):
                text = _in_words(last)
    except StagerunError as error:
        return {"code": int(error.exit_code), "text": error.render()}
    if isinstance(last, Stopped):
        return {"code": int(ExitCode.SAVED), "iter": last.iter}
    return {"code": int(ExitCode.DONE), "text": text}


def _in_words(finished: StageFinished) -> str:
    top1 = "not evaluated" if finished.top1 is None else f"top-1 {percent(finished.top1)}"
    return f"{top1}, train loss {finished.loss:.4g}, {count(finished.iterations, 'iteration')} in {finished.train_seconds:.1f} s"
