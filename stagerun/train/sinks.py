"""A run with its output: rank 0 holds the output folder, and sends the events to the screen and to the logs."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from stagerun.base.errors import ExitCode, FolderInUseError, PeerError, StagerunError
from stagerun.base.events import Event, Failed, RunFinished, Stopped
from stagerun.base.wings import wing
from stagerun.logs.console import Console
from stagerun.logs.log_file import LOG, JsonLines
from stagerun.logs.table import Opened, Sink, all_logs
from stagerun.system.files import require_writable
from stagerun.system.image_sets import with_imports
from stagerun.system.pulse import Section
from stagerun.train import results
from stagerun.train.agreement import rank0
from stagerun.train.context import Context
from stagerun.train.hours import TimeLeft
from stagerun.train.options import RunOptions
from stagerun.train.run import run


def logged_run(options: RunOptions, context: Context) -> Iterator[Event]:
    """Run the schedule, with the events on the screen and in the logs of the output folder, which rank 0 holds until the last event or an
    error. Collective."""
    out, comm = options.output(context.schedule), context.comm
    context.schedule, context.out, context.exact = with_imports(context.schedule, out), str(out), options.exact
    context.replay = Path(options.replay).resolve() if options.replay is not None else None
    context.rest = (options.parallel or 0) > 1
    with ExitStack() as stack:
        output = Output(context, stack)
        rank0(comm, lambda: output.open(options))
        profile = context.open_profile(options.profile) if options.profile is not None else None
        for event in output.with_failure(run(context)):
            output.show(event)
            yield event
        if profile is not None and not profile.over:
            note = profile.finish()
            if note.text and output.sinks:
                output.sinks[0](note)  # on the screen alone


class Output:
    """The screen and the logs: `sinks`, the screen first."""

    def __init__(self, context: Context, stack: ExitStack) -> None:
        self.context, self._stack = context, stack
        self.last: Event | None = None
        self.sinks: list[Sink] = []

    def open(self, options: RunOptions) -> None:
        """Take the folder, and open the screen and the logs, on rank 0."""
        context, stack, pulse = self.context, self._stack, self.context.comm.pulse
        out = Path(context.out)
        keeper = context.open_keeper(options.selection, options.retry)
        if options.profile is not None:
            require_writable(options.profile)
        stack.push(lambda kind, error, trace: keeper.close(exit_code(error, self.last)))
        keeper.open()
        if (take_over := wing("tools.parallel.take_over")) is not None:
            take_over(keeper)  # snapshots of a killed run with --parallel
        log = out / LOG
        if context.watch is not None:
            context.watch.log(log)
        plan = keeper.plan()
        screen = context.screen or Console(
            {stage.name: stage.solver.display for stage in plan.schedule.stages},
            results.parents(plan, out),
            results.results(plan, out),
            ensembles=results.ensembles(plan, out),
            time_left=TimeLeft(plan, out),
            few=plan.schedule.few_classes,
        )
        stack.callback(pulse.prints, False)
        self.sinks.append(stack.enter_context(screen))
        stack.callback(pulse.prints, True)  # its end prints, too
        self.sinks.append(stack.enter_context(JsonLines(log, screen.say)))
        opened = Opened(plan, out, screen.say, context.comm.size, min(30.0, options.grace_s / 4))
        for name in dict.fromkeys(options.log):
            self.sinks.append(stack.enter_context(all_logs()[name].make(opened)))

    def show(self, event: Event) -> None:
        """Send the event to the sinks. A monitor's message is the last on the screen; later events are only logged, since what is
        trained then may be saved."""
        pulse = self.context.comm.pulse
        if isinstance(event, Stopped | RunFinished):
            self.context.settle(exit_code(None, event))
        for number, sink in enumerate(self.sinks):
            if number or not self._over:
                with pulse.section(Section.SAVE) if number else pulse.printing():
                    sink(event)
        self.last = event

    def with_failure(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield the events, and Failed before an error is raised, so that the log has it. If a monitor ends the job, it logs the
        reason, and the errors only follow."""
        try:
            yield from events
        except FolderInUseError:  # the log belongs to the run that took over
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
    """Return the exit code for `error`, or else for the last event."""
    if error is not None:
        return error.exit_code if isinstance(error, StagerunError) else ExitCode.BUG
    return ExitCode.SAVED if isinstance(last, Stopped) else ExitCode.DONE
