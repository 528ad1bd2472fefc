"""What rank 0 shows while it runs: one live line on a terminal, plain lines elsewhere."""

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from stagerun.events import (
    EnsembleTested,
    Event,
    Iterated,
    Note,
    NotFinite,
    PieceStarted,
    Retraced,
    RunFinished,
    RunStarted,
    SnapshotFailed,
    SnapshotWritten,
    StageFinished,
    StageStarted,
    Stopped,
    Tested,
)
from stagerun.pace import WINDOW, progress_line
from stagerun.recipe import OnNan
from stagerun.report.failed import failed_line
from stagerun.report.table import ensembles_table, ordered, results_table
from stagerun.text import duration, shown, size
from stagerun.world import relayed


class Terminal(RichConsole):
    """rich's console, for words as of `cli.ending.Printable`."""

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


class _Terminal(Terminal):
    """rich ends the program when nobody reads its output any more; training doesn't end with its audience."""

    def on_broken_pipe(self) -> None:
        print_nowhere()


def print_nowhere() -> None:
    """Sends stdout to /dev/null from now on, so that neither a later line nor the flush at exit fails."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


class Console:
    """A sink for events. `display` maps a stage to the iterations between two plain lines (0: none); `results` and
    `ensembles` are those of stages and ensembles finished before. `live`: whether to show a live line; by default on a terminal that
    isn't an MPI's launcher's, by way of which what is printed may come to a file."""

    def __init__(
        self,
        display: dict[str, int],
        parents: dict[str, str | None],
        results: Sequence[StageFinished] = (),
        live: bool | None = None,
        ensembles: Sequence[EnsembleTested] = (),
    ) -> None:
        self.rich = _Terminal(file=sys.stdout, highlight=False)
        self.live = (
            Live(console=self.rich, refresh_per_second=4, transient=True)
            if live or (live is None and self.rich.is_terminal and not relayed())
            else None
        )
        self.display, self.parents = display, parents
        self.started: RunStarted | None = None
        self.stage: StageStarted | None = None
        self.window: deque[Iterated] = deque(maxlen=WINDOW)
        self.retraced: deque[float] = deque(maxlen=WINDOW)  # seconds of the last updates of a piece
        self.left = 0
        self.results = list(results)
        self.ensembles = {tested.name: tested for tested in ensembles}

    def __enter__(self) -> "Console":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def say(self, line: str) -> None:
        """Prints a line. When nobody reads any more (a closed pipe, a terminal whose connection broke, a full disk) it
        prints nowhere from then on: training goes on, and log.jsonl has everything."""
        try:
            self.rich.print(Text(line), soft_wrap=True)
        except OSError:
            print_nowhere()

    def __call__(self, event: Event) -> None:
        match event:
            case Iterated():
                self._iterated(event)
            case RunStarted():
                self.started, self.left = event, event.iterations_left
                workers = f"{event.workers} worker{'s' if event.workers > 1 else ''}"
                self.say(
                    f"{event.schedule}: {event.iterations_left} of {event.iterations} iterations to do, {workers} on "
                    f"{event.device}, {event.threads} thread{'s' if event.threads > 1 else ''} each, output in {event.out}"
                )
            case NotFinite():
                self.left -= event.done == OnNan.SKIP.value
                self.say(f"warning: {failed_line(event)}")
            case Note():
                self.say(f"{'warning' if event.warning else 'note'}: {event.text}")
            case StageStarted():
                self.stage = event
                self.ensembles = {k: e for k, e in self.ensembles.items() if event.stage not in e.members}
                self.left = event.iterations_left or self.left  # a damaged snapshot may have added to it
                self.window.clear()
                count = len(self.started.stages) if self.started else 0
                self.say(
                    f"stage {event.number}/{count} {event.stage}: iterations {event.iter} to {event.max_iter}, batch "
                    f"{event.batch_size}, from {event.start}"
                )
            case PieceStarted():
                self.left = event.iterations_left or self.left
                self.retraced.clear()
                self.say(piece_line(event))
            case Retraced():
                self._retraced(event)
            case Tested():
                weights = "EMA test" if event.ema else "test"
                self.say(
                    f"{event.stage} {event.iter}: {weights} top-1 {100 * event.top1:.2f} %, top-5 {100 * event.top5:.2f} %, "
                    f"loss {event.loss:.4f} on {event.images} images in {duration(event.seconds)}"
                )
            case SnapshotWritten():
                self.say(
                    f"{event.stage} {event.iter}: snapshot {event.name}, {size(event.bytes)} in {event.seconds:.2f} s"
                )
            case SnapshotFailed():
                self.say(f"warning: no snapshot of {event.stage} at {event.iter}: {event.message}")
            case StageFinished():
                self.results = [r for r in self.results if r.stage != event.stage] + [event]
                self.say(results_table(self.results, self.parents, shown=[event]))
            case EnsembleTested():
                self.ensembles[event.name] = event
                self.say(ensemble_line(event))
            case Stopped():
                self.say(
                    f"stopped in {event.stage} after iteration {event.iter} ({event.reason}), everything is saved: "
                    "run the same command again to go on"
                )
            case RunFinished():
                self.say(finished_line(event))
                order = list(self.parents)
                self.say(results_table(sorted(self.results, key=lambda r: order.index(r.stage)), self.parents))
                if self.ensembles:
                    self.say("\n" + ensembles_table(ordered(self.ensembles, self.started)))

    def _iterated(self, event: Iterated) -> None:
        self.window.append(event)
        self.left -= 1
        every = self.display.get(event.stage, 0)
        if self.live:
            self.live.update(Text(self._line()))
        elif every and event.iter % every == 0:
            self.say(self._line())

    def _retraced(self, event: Retraced) -> None:
        self.retraced.append(event.seconds)
        self.left -= 1
        every = self.display.get(event.stage, 0)
        left = (event.until - event.iter) * sum(self.retraced) / len(self.retraced)
        line = (
            f"{event.stage} again  {event.iter}/{event.until}  LR {event.lr:.4g}  loss {event.loss:.4f}  "
            f"{duration(left)} left in it"
        )
        if self.live:
            self.live.update(Text(line))
        elif every and event.iter % every == 0:
            self.say(line)

    def _line(self) -> str:
        assert self.stage is not None
        count = len(self.started.stages) if self.started else 0
        return progress_line(self.stage, count, self.window, self.left)


def piece_line(event: PieceStarted) -> str:
    children = ", ".join(event.children)
    return f"{event.stage} again: iterations {event.iter} to {event.until}, for {children}, from {event.start}"


def finished_line(event: RunFinished) -> str:
    """What a run that came to its end has done, and what it has left out."""
    left = f"; not chosen, and not done: {', '.join(event.not_chosen)}" if event.not_chosen else ""
    if event.trained:
        return f"done in {duration(event.seconds)}{left}"
    return "nothing to do: every stage that was chosen is done" + left if left else "nothing to do: every stage is done"


def ensemble_line(event: EnsembleTested) -> str:
    loss = "" if event.loss is None else f", loss {event.loss:.4f}"
    return (
        f"ensemble {event.name}: {event.rule} of {len(event.members)} stages, top-1 {100 * event.top1:.2f} % "
        f"({100 * event.gain:+.2f} against {event.best}), top-5 {100 * event.top5:.2f} %{loss} on {event.images} images in "
        f"{duration(event.seconds)}"
    )
