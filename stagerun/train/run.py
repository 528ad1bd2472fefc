"""`stagerun run` on one worker, whole: it meets the others, reads the schedule, finds its cores, opens the folder, and then runs stage
after stage, to the exit code."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch

from stagerun.base.errors import ExitCode, FolderInUseError, PeerError, StagerunError
from stagerun.base.events import Event, Failed, Note, RunStarted, Stopped
from stagerun.base.recipe import Schedule
from stagerun.comm import Comm
from stagerun.command.ending import tell
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
from stagerun.train.images import KeptImages
from stagerun.train.join import join, load_everywhere, place
from stagerun.train.keeper import Keeper
from stagerun.train.log_file import JsonLines
from stagerun.train.logs.console import Console
from stagerun.train.logs.table import Opened, Screen, Sink, all_logs
from stagerun.train.options import Cut, RunOptions
from stagerun.train.parallel import take_over
from stagerun.train.profiling import Profile
from stagerun.train.walk import run
from stagerun.train.worker import Grace

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
    there = False

    def stopping() -> bool:
        return there or stop()

    here = Here(comm, world, device, stopping, Grace(options.grace_s, stop.left), watch)
    test_iter = cut.final_test_iter if cut is not None else None
    last: Event | None = None
    for last in events(options, schedule, here, placed, test_iter):
        there = cut is not None and cut.until(last)
    comm.close()
    return exit_code(None, last)


@dataclass(frozen=True, slots=True)
class Here:
    """The worker that this process is. `screen` and `say`: where events and words go on rank 0; None: to the terminal."""

    comm: Comm
    world: World
    device: torch.device
    stop: Callable[[], bool]
    grace: Grace
    watch: Monitored | None = None
    screen: Screen | None = None
    say: Callable[[str], None] = tell
    kept: KeptImages | None = None


def events(
    options: RunOptions, schedule: Schedule, here: Here, placed: Note | None = None, test_iter: int | None = None
) -> Iterator[Event]:
    """Trains what is not yet done, and logs it. Collective; the folder is held until the last event, or an error. `placed`: what is
    said about cores."""
    comm, out = here.comm, options.output(schedule)
    schedule = with_imports(schedule, out)
    keeper = Keeper(schedule, out, options.selection, options.retry, here.say, here.stop) if comm.rank == 0 else None
    with Output(options, here, keeper) as output:
        rank0(comm, output.open)
        profile = Profile(options.profile, PROFILED, comm) if options.profile is not None else None
        replay = Path(options.replay).resolve() if options.replay is not None else None
        found = run(
            schedule, str(out), comm, here.world, here.device, keeper, here.stop, test_iter, here.grace, options.exact,
            profile, replay, here.kept,
        )  # fmt: skip
        for event in output.with_failure(after_first(found, placed)):
            if isinstance(event, RunStarted) and (options.parallel or 0) > 1:
                event = replace(event, rest=True)
            output.show(event)
            yield event
        if profile is not None and not profile.over:
            output.note(profile.finish())


class Output:
    """Where the events go: on rank 0 the screen and the logs of the folder that its keeper holds; on other ranks nowhere."""

    def __init__(self, options: RunOptions, here: Here, keeper: Keeper | None) -> None:
        self.options, self.comm, self.keeper, self.watch = options, here.comm, keeper, here.watch
        self._screen = here.screen
        self.last: Event | None = None
        self._sinks: list[Sink] = []  # the screen first
        self._stack = ExitStack()

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def open(self) -> None:
        """Rank 0's: takes the folder, and opens the screen and the logs."""
        options, keeper, stack = self.options, self.keeper, self._stack
        assert keeper is not None
        if options.profile is not None:
            require_writable(options.profile)
        stack.push(lambda kind, error, trace: keeper.close(exit_code(error, self.last)))
        keeper.open()
        take_over(keeper)
        log = keeper.out / "log.jsonl"
        if self.watch is not None:
            self.watch.log(log)
        plan = keeper.plan()
        screen = self._screen or Console(
            {stage.name: stage.solver.display for stage in plan.schedule.stages},
            results.parents(plan, keeper.out),
            results.results(plan, keeper.out),
            ensembles=results.ensembles(plan, keeper.out),
            time_left=TimeLeft(plan, keeper.out),
        )
        stack.callback(self.comm.pulse.prints, False)
        self._sinks.append(stack.enter_context(screen))
        stack.callback(self.comm.pulse.prints, True)  # its end prints, too
        self._sinks.append(stack.enter_context(JsonLines(log, screen.say)))
        opened = Opened(plan, keeper.out, screen.say, self.comm.size, min(30.0, options.grace_s / 4))
        for name in dict.fromkeys(options.log):
            self._sinks.append(stack.enter_context(all_logs()[name].make(opened)))

    def show(self, event: Event) -> None:
        """A monitor's word is the last that the user sees. What is still trained after it may be saved, so it is logged."""
        pulse = self.comm.pulse
        for number, sink in enumerate(self._sinks):
            if number == 0 and self._over:
                continue
            with pulse.section(Section.SAVE) if number else pulse.printing():
                sink(event)
        self.last = event

    def note(self, note: Note) -> None:
        """On the screen alone."""
        if note.text and self._sinks:
            self._sinks[0](note)

    def with_failure(self, events: Iterator[Event]) -> Iterator[Event]:
        """The events, and Failed before an error goes on its way: whoever looks in the morning finds it in the log. Where a monitor ends
        the job, the monitor logs why, and errors only follow from it."""
        try:
            yield from events
        except FolderInUseError:  # the log is that of the run which has taken over
            raise
        except Exception as error:
            if self._sinks and isinstance(error, PeerError) and self.watch is not None:
                self.watch.explain(error)
            if self._sinks and not self._over:
                text = error.render() if isinstance(error, StagerunError) else f"{type(error).__name__}: {error}"
                yield Failed(code=int(exit_code(error, None)), text=text)
            raise

    @property
    def _over(self) -> bool:
        return self.watch is not None and bool(self.watch.verdict)


def exit_code(error: BaseException | None, last: Event | None) -> int:
    """What the run ends with: `error`, or else its last event."""
    if error is not None:
        return error.exit_code if isinstance(error, StagerunError) else ExitCode.BUG
    return ExitCode.SAVED if isinstance(last, Stopped) else ExitCode.DONE


def after_first(events: Iterator[Event], note: Note | None) -> Iterator[Event]:
    """The events, and `note` after the first, which says that the run starts."""
    for number, event in enumerate(events):
        yield event
        if number == 0 and note is not None:
            yield note
