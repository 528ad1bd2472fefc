"""`stagerun run` on one worker, whole: it meets the others, reads the schedule, finds its cores, opens the folder, and then runs stage
after stage, to the exit code."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from stagerun.base.errors import ExitCode, FolderInUseError, PeerError, StagerunError
from stagerun.base.events import Event, Failed, Note, RunFinished, RunStarted, Stopped
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.watch.worker import Monitored
from stagerun.system.files import require_writable
from stagerun.system.imports import with_imports
from stagerun.system.pulse import Section
from stagerun.system.world import World
from stagerun.train import results
from stagerun.train.agreement import rank0
from stagerun.train.hours import TimeLeft
from stagerun.train.join import join, load_everywhere, place
from stagerun.train.keeper import Keeper
from stagerun.train.log_file import JsonLines
from stagerun.train.logs.console import Console
from stagerun.train.logs.table import Opened, Sink, all_logs
from stagerun.train.options import Cut, RunOptions
from stagerun.train.parallel import take_over
from stagerun.train.profiling import Profile
from stagerun.train.walk import run
from stagerun.train.worker import Context, Stopping

PROFILED = 10  # iterations of --profile


def train(
    options: RunOptions,
    world: World,
    stop: StopRequest,
    watch: Monitored | None,
    cut: Cut | None = None,
) -> int:
    """The exit code. `cut` makes the run short, to try something."""
    device, comm = join(world, options.threads, stop, watch, patient=True)
    read = cut.read if cut is not None else load
    schedule = load_everywhere(options.folder, options.overrides, comm, read)
    placed = place(world, comm, watch) if options.bind == "numa" else None
    if cut is not None:
        schedule = cut.schedule(schedule)
    limit_reached = False

    def stopping() -> bool:
        return limit_reached or stop()

    context = Context(
        schedule, "", comm, world, device, None, stopping, stopping=Stopping(stop.left), watch=watch,
        final_test_iter=cut.final_test_iter if cut is not None else None, settle=stop.settle,
    )  # fmt: skip
    last: Event | None = None
    for last in events(options, context, placed):
        limit_reached = cut is not None and cut.until(last)
    comm.close()
    return exit_code(None, last)


def events(options: RunOptions, context: Context, placed: Note | None = None) -> Iterator[Event]:
    """Train what is not yet done, and log it. Collective; the folder is held until the last event, or an error. `placed`: what is
    said about cores, after the first event, which says that the run starts."""
    comm, out = context.comm, options.output(context.schedule)
    context.schedule, context.out, context.exact = with_imports(context.schedule, out), str(out), options.exact
    context.replay = Path(options.replay).resolve() if options.replay is not None else None
    with ExitStack() as stack:
        output = Output(context, stack)
        rank0(comm, lambda: output.open(options))
        profile = context.profile = Profile(options.profile, PROFILED, comm) if options.profile is not None else None
        for event in output.with_failure(run(context)):
            if isinstance(event, RunStarted) and (options.parallel or 0) > 1:
                event = replace(event, rest=True)
            output.show(event)
            yield event
            if isinstance(event, RunStarted) and placed is not None:
                output.show(placed)
                yield placed
        if profile is not None and not profile.over:
            note = profile.finish()
            if note.text and output.sinks:
                output.sinks[0](note)  # on the screen alone


class Output:
    """Where the events go: on rank 0 the screen and the logs of the folder that its keeper holds; on other ranks nowhere."""

    def __init__(self, context: Context, stack: ExitStack) -> None:
        self.context, self._stack = context, stack
        self.last: Event | None = None
        self.sinks: list[Sink] = []  # the screen first

    def open(self, options: RunOptions) -> None:
        """Rank 0's: takes the folder, and opens the screen and the logs."""
        context, stack, pulse = self.context, self._stack, self.context.comm.pulse
        keeper = context.keeper = Keeper(
            context.schedule, Path(context.out), options.selection, options.retry, context.say, context.stop
        )
        if options.profile is not None:
            require_writable(options.profile)
        stack.push(lambda kind, error, trace: keeper.close(exit_code(error, self.last)))
        keeper.open()
        take_over(keeper)
        log = keeper.out / "log.jsonl"
        if context.watch is not None:
            context.watch.log(log)
        plan = keeper.plan()
        screen = context.screen or Console(
            {stage.name: stage.solver.display for stage in plan.schedule.stages},
            results.parents(plan, keeper.out),
            results.results(plan, keeper.out),
            ensembles=results.ensembles(plan, keeper.out),
            time_left=TimeLeft(plan, keeper.out),
        )
        stack.callback(pulse.prints, False)
        self.sinks.append(stack.enter_context(screen))
        stack.callback(pulse.prints, True)  # its end prints, too
        self.sinks.append(stack.enter_context(JsonLines(log, screen.say)))
        opened = Opened(plan, keeper.out, screen.say, context.comm.size, min(30.0, options.grace_s / 4))
        for name in dict.fromkeys(options.log):
            self.sinks.append(stack.enter_context(all_logs()[name].make(opened)))

    def show(self, event: Event) -> None:
        """A monitor's word is the last that the user sees. What is still trained after it may be saved, so it is logged."""
        pulse = self.context.comm.pulse
        if isinstance(event, Stopped | RunFinished):
            self.context.settle(exit_code(None, event))
        for number, sink in enumerate(self.sinks):
            if number or not self._over:
                with pulse.section(Section.SAVE) if number else pulse.printing():
                    sink(event)
        self.last = event

    def with_failure(self, events: Iterator[Event]) -> Iterator[Event]:
        """The events, and Failed before an error goes on its way: whoever looks in the morning finds it in the log. Where a monitor ends
        the job, the monitor logs why, and errors only follow from it."""
        try:
            yield from events
        except FolderInUseError:  # the log is that of the run which has taken over
            raise
        except Exception as error:
            if self.sinks and isinstance(error, PeerError) and self.context.watch is not None:
                self.context.watch.explain(error)
            if self.sinks and not self._over:
                text = error.render() if isinstance(error, StagerunError) else f"{type(error).__name__}: {error}"
                yield Failed(code=int(exit_code(error, None)), text=text)
            raise

    @property
    def _over(self) -> bool:
        return self.context.watch is not None and bool(self.context.watch.verdict)


def exit_code(error: BaseException | None, last: Event | None) -> int:
    """What the run ends with: `error`, or else its last event."""
    if error is not None:
        return error.exit_code if isinstance(error, StagerunError) else ExitCode.BUG
    return ExitCode.SAVED if isinstance(last, Stopped) else ExitCode.DONE
