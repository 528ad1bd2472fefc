"""Where the events of a run go: on rank 0 to the screen and to the logs of the output folder, which is held meanwhile; elsewhere nowhere."""

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
from stagerun.system.pulse import Section
from stagerun.train import results
from stagerun.train.context import Context
from stagerun.train.hours import TimeLeft
from stagerun.train.keeper import Keeper
from stagerun.train.options import RunOptions


class Output:
    """The screen and the logs: `sinks`, the screen first."""

    def __init__(self, context: Context, stack: ExitStack) -> None:
        self.context, self._stack = context, stack
        self.last: Event | None = None
        self.sinks: list[Sink] = []

    def open(self, options: RunOptions) -> None:
        """Rank 0's: takes the folder, and opens the screen and the logs."""
        context, stack, pulse = self.context, self._stack, self.context.comm.pulse
        out = Path(context.out)
        keeper = Keeper(context.schedule, out, options.selection, options.retry, context.say, context.stop)
        context.keeper = keeper
        if options.profile is not None:
            require_writable(options.profile)
        stack.push(lambda kind, error, trace: keeper.close(exit_code(error, self.last)))
        keeper.open()
        if (take_over := wing("tools.parallel.folder.take_over")) is not None:
            take_over(keeper)  # what a run with --parallel that was killed has left
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
        )
        stack.callback(pulse.prints, False)
        self.sinks.append(stack.enter_context(screen))
        stack.callback(pulse.prints, True)  # its end prints, too
        self.sinks.append(stack.enter_context(JsonLines(log, screen.say)))
        opened = Opened(plan, out, screen.say, context.comm.size, min(30.0, options.grace_s / 4))
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
