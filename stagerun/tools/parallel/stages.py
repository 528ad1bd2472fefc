"""Stages side by side, each trained by one worker.

Each stage is trained as `run --only STAGE` does, by a process of its own in a folder below OUT/.parallel, which has what the stage starts
from under a second name. So it has the bits that it has alone with as many threads. This process holds OUT: when a stage is done, or
stopped, it takes over the lines of its log, then its snapshots and results (`folder`). What is left at the end (ensembles, stretches
that are trained once more) an ordinary run does.
"""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from stagerun import store
from stagerun.base.errors import ExitCode, StagerunError
from stagerun.base.events import Failed, Note, RunFinished, Stopped
from stagerun.base.recipe import Schedule
from stagerun.base.text import count, duration, percent
from stagerun.command.ending import say, tell
from stagerun.launch import StopRequest
from stagerun.logs.log_file import LOG, JsonLines
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.counting import lineage
from stagerun.system.host import host_name
from stagerun.tools.parallel.folder import last_lines, start_worker, take_over, take_over_stage
from stagerun.train.keeper import Keeper, run_started
from stagerun.train.options import RunOptions
from stagerun.train.results import read_result

_LOOK_S = 0.1  # how often is looked who has ended, and for a request to stop


def train_side_by_side(options: RunOptions, schedule: Schedule) -> int | None:
    """The exit code; None where an ordinary run is to do what is left."""
    stop = StopRequest("to save", "the iteration that each stage is at", grace=options.grace_s)
    stop.install(ExitCode.SAVED)
    stop.begin()
    began, code = time.monotonic(), None
    keeper = Keeper(schedule, options.output(schedule), options.selection, options.retry, tell, stop)
    try:
        keeper.open()
        take_over(keeper)
        with ExitStack() as stack:
            log = stack.enter_context(JsonLines(keeper.out / LOG, tell))
            run = _Run(options, keeper, stop, log)
            stack.callback(run.end)
            run.train()
            code = run.code
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
    workers: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)  # by the stage that each trains
    failed: list[tuple[int, str]] = field(default_factory=list)
    over: set[str] = field(default_factory=set)  # stages that ended here
    newest: str = ""  # the stage that was begun last

    @property
    def code(self) -> int | None:
        """The exit code; None while nothing ends the run early."""
        if self.failed:
            return self.failed[0][0]
        return ExitCode.SAVED if self.stop() else None

    def train(self) -> None:
        plan, asked = self.keeper.plan(), False
        self.log(
            run_started(
                self.keeper.schedule, out=str(self.keeper.out), workers=1, device="cpu", threads=self.options.threads,
                iterations_left=plan.iterations_left, hosts=(host_name(),), attempt=self.keeper.attempt,
                side_by_side=self.options.parallel,
            )
        )  # fmt: skip
        self._begin(plan)
        while self.workers:
            if self.code is not None and not asked:
                asked = True
                for worker in self.workers.values():
                    worker.terminate()
            ended = [name for name, worker in self.workers.items() if worker.poll() is not None]
            for name in ended:
                self._ended(name, self.workers.pop(name).returncode)
            if ended and self.code is None:  # others may start from them
                self._begin(self.keeper.plan())
            elif not ended:
                time.sleep(_LOOK_S)

    def _begin(self, plan: Plan) -> None:
        """Start a stage for each worker that there may be. Those that wait for others, or for a stretch that is trained once more, come
        later, or in the ordinary run."""
        try:
            while self.code is None and len(self.workers) < (self.options.parallel or 1):
                if (planned := next(filter(self._can_begin, plan.work), None)) is None:
                    return
                if not self._start(plan, planned):
                    plan = self.keeper.plan()
        except StagerunError as error:  # the others are to be saved first
            self.failed.append((int(error.exit_code), error.render()))

    def _can_begin(self, planned: PlannedStage) -> bool:
        stage = planned.stage
        if planned.until is not None or stage.name in self.workers or stage.name in self.over:
            return False
        if stage.solver.teacher is not None and planned.teacher is None:
            return False
        if planned.state is State.FRESH and stage.parent is not None:
            return planned.start is not None and (stage.average is None or bool(planned.averaged))
        return planned.state in (State.FRESH, State.RESUME)

    def _start(self, plan: Plan, planned: PlannedStage) -> bool:
        """Begin a stage; False where a snapshot that it needs is damaged, and set aside now."""
        stage, keeper = planned.stage, self.keeper
        own = plan.inventory.of(stage.name) if planned.state is State.RESUME else ()  # a rollback may go back further
        needed = {ref.name: ref for ref in (*own, *lineage(plan, planned))}
        if harmed := [ref for ref in needed.values() if store.is_harmed(keeper.disk, keeper.out, ref.name)]:
            for ref in harmed:
                keeper.set_aside(ref)
                tell(f"snapshot {ref.name} is damaged and was set aside as .bad-{ref.name}")
            self.over -= {stage.name, *(ref.stage for ref in harmed)}
            return False
        self.workers[stage.name] = start_worker(self.options, keeper, stage.name, list(needed))
        self.newest = stage.name
        start = planned.start.name if planned.start is not None else f"seed {stage.solver.random_seed}"
        if stage.average is not None and planned.state is State.FRESH:
            start = f"the average {stage.average}"
        say(f"stage {stage.name}: iterations {planned.iter} to {planned.last}, from {start}")
        self.log(Note(text=f"stage `{stage.name}` is trained beside others, and is told of when it ends"))
        return True

    def _ended(self, name: str, code: int) -> None:
        if code == -signal.SIGTERM and self.code is not None:  # it was asked before it could listen
            code = ExitCode.SAVED
        self.over.add(name)
        try:
            said = last_lines(self.keeper.out, name)
            self.keeper.require_held()
            take_over_stage(self.keeper, name)
        except StagerunError as error:  # the others are to be saved first; what is here the next run takes over
            self.failed.append((int(error.exit_code), error.render()))
            return
        own = self.keeper.inventory().of(name)
        if code == ExitCode.SAVED:
            when = f"and saved after iteration {own[-1].iter}" if own else "before its first iteration"
            say(f"stage {name}: stopped {when}")
        elif code != ExitCode.DONE:
            ended = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            text = f"stage `{name}` {ended}; the same command goes on from its newest snapshot{':' if said else ''}"
            self.failed.append((code if code > 0 else int(ExitCode.PEER), "\n".join([text, *said])))
        elif own and (done := read_result(self.keeper.out, own[-1])) is not None:
            top1 = "not evaluated" if done.top1 is None else f"top-1 {percent(done.top1)}"
            iterations = count(done.iterations, "iteration")
            say(
                f"stage {name}: {top1}, train loss {done.loss:.4g}, {iterations} in {duration(done.train_seconds, '.1f')}"
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
            worker.kill()
            worker.wait()
