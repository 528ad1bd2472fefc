"""The output of rank 0 during a run: one live line on a terminal, plain lines elsewhere."""

import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.control import Control
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.text import Text

from stagerun.base import events
from stagerun.base.pace import DONE, TO_DO, WINDOW, colour, exchange, pace, progress_line, share, strip
from stagerun.base.recipe import OnNan
from stagerun.base.text import duration, printing_on, shown, wrapped
from stagerun.command.ending import to_nowhere
from stagerun.logs.lines import Before, ensembles_table, finished_line, line_of, results_table, stage_line, warning_of
from stagerun.system.world import relayed

_EVERY_S = 0.5  # between two updates of the live line
_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class Console:
    """A sink for events. `display` maps a stage to the iterations between two plain lines (0: none); `results` and
    `ensembles`: finished before. `time_left`: as `TimeLeft`; by default by the pace alone. `few`: as in
    `results_table`."""

    def __init__(
        self,
        display: dict[str, int],
        parents: Mapping[str, Before],
        results: Sequence[events.StageFinished] = (),
        ensembles: Sequence[events.EnsembleTested] = (),
        time_left: Callable[[str, int, int, float], Mapping[str, float]] | None = None,
        few: Collection[str] = (),
    ) -> None:
        self.rich = Terminal(file=sys.stdout, highlight=False)
        # FORCE_COLOR makes no terminal, and an MPI launcher may write its terminal into a file.
        self.live = sys.stdout.isatty() and not self.rich.is_dumb_terminal and not relayed()
        self._drawn, self._next = False, 0.0
        self.display, self.parents, self.few = display, parents, few
        self.run: events.RunStarted | None = None
        self.stages: tuple[str, ...] = ()
        self.stage: events.StageStarted | None = None
        self.window: deque[events.Iterated] = deque(maxlen=WINDOW)
        self.met: events.Synchronised | None = None  # the stage's newest
        self.retraced: deque[float] = deque(maxlen=WINDOW)  # seconds of the last updates of a piece
        self.left, self._time_left = 0, time_left
        self.results = {result.stage: result for result in results}
        self.ensembles = {tested.name: tested for tested in ensembles}

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self._show()

    def say(self, line: str, style: str = "") -> None:
        """Print a line. After a failure (a closed pipe, a broken connection, a full disk) it prints nowhere: training continues, and
        log.jsonl has everything."""
        self._show(Text(wrapped(line, self.rich.width if self.live else None) + "\n", style))

    def _show(self, *parts: Text | ProgressBar, live: bool = False) -> None:
        """Print over the live line. The cursor is never hidden, and no thread draws, so that any end of this process leaves the terminal
        usable, and another process erases one line (`ending.over_live_line`)."""
        try:
            with self.rich:
                if self._drawn:
                    self.rich.print(_ERASE, end="")
                for part in parts:
                    self.rich.print(
                        part, end="", soft_wrap=not live, no_wrap=live, overflow="ellipsis" if live else None
                    )
        except OSError:
            to_nowhere(sys.stdout)
        self._drawn, self._next = live, time.monotonic() + _EVERY_S if live else 0.0

    def __call__(self, event: events.Event) -> None:
        with printing_on(lambda: self.rich.width if self.live else None):
            self._print(event)

    def _print(self, event: events.Event) -> None:
        if (warning := warning_of(event)) is not None:
            self.say(f"warning: {warning}", "yellow")
        elif (line := line_of(event, self.few)) is not None:
            self.say(line)
        match event:
            case events.Iterated():
                self.window.append(event)
                self._updated(event)
            case events.Retraced():
                self.retraced.append(event.seconds)
                self._updated(event)
            case events.RunStarted():
                self.run, self.stages, self.left = event, event.stages, event.iterations_left
            case events.NotFinite(done=OnNan.SKIP.value):
                self.left -= 1
            case events.Synchronised():
                self.met = event
            case events.StageStarted():
                self.stage, self.met = event, None
                self.ensembles = {k: e for k, e in self.ensembles.items() if not e.undone_by(event.stage, event.iter)}
                self.left = event.iterations_left or self.left  # a damaged snapshot may have added to it
                self.window.clear()
                self.say(stage_line(event, len(self.stages)))
                self._say_strip()
            case events.PieceStarted():
                self.left = event.iterations_left or self.left
                self.retraced.clear()
            case events.StageFinished():
                self.results.pop(event.stage, None)
                self.results[event.stage] = event
                self.say(
                    results_table([*self.results.values()], self.parents, self.ensembles.values(), [event], self.few)
                )
                self._say_strip()
            case events.EnsembleTested():
                self.ensembles[event.name] = event
            case events.RunFinished():
                self._finish(event)

    def _finish(self, event: events.RunFinished) -> None:
        self.say(finished_line(event))
        done = [self.results[name] for name in self.parents if name in self.results]
        self.say(results_table(done, self.parents, self.ensembles.values(), few=self.few))
        if self.ensembles:
            names = dict.fromkeys((*(self.run.ensembles if self.run else ()), *self.ensembles))
            self.say(
                "\n" + ensembles_table([self.ensembles[name] for name in names if name in self.ensembles], self.few)
            )
        if event.trained and self.run and self.live:  # for a person: programs read up to the table
            out = shlex.quote(self.run.out)
            self.say(
                f"next: `stagerun report {out}`, `stagerun eval {out}`; for other images: `stagerun help own images`"
            )

    def _marks(self) -> dict[str, str]:
        marks = {name: DONE if name in self.results else TO_DO for name in self.stages}
        if self.stage is not None and self.stage.stage not in self.results:
            iter = self.window[-1].iter if self.window else self.stage.iter
            marks[self.stage.stage] = share(iter, self.stage.max_iter)
        return marks

    def _say_strip(self) -> None:
        if self.live:
            self._show(_painted(self._marks()), Text("\n"))

    def _updated(self, event: events.Iterated | events.Retraced) -> None:
        self.left -= 1
        every = self.display.get(event.stage, 0)
        drawn = self.live and time.monotonic() >= self._next
        if not drawn and (self.live or not every or event.iter % every):
            return
        if isinstance(event, events.Retraced):
            left = duration((event.until - event.iter) * sum(self.retraced) / len(self.retraced))
            done = f"{event.stage} again  {event.iter}/{event.until}"
            text = f"{done}  LR {event.lr:.4g}  loss {event.loss:.4f}  {left} left in it"
        else:
            assert self.stage is not None
            stage, seconds = self.stage, self._seconds_left(self.stage)
            if drawn:
                width = self.rich.width - 1  # in the last column a terminal may begin a new line
                marks, bar, rest = _live_line(self._marks(), stage, self.window, seconds, width, self.met)
                bars: list[Text | ProgressBar] = (
                    [ProgressBar(stage.max_iter, event.iter, width=bar), Text("  ")] if bar else []
                )
                return self._show(_painted(marks), Text("  "), *bars, Text(rest), live=True)
            text = progress_line(stage, len(self.stages), self.window, seconds, self.met)
        if drawn:
            self._show(Text(text), live=True)
        else:
            self.say(text)

    def _seconds_left(self, stage: events.StageStarted) -> tuple[float, float]:
        """Return the seconds left in the stage, and in all."""
        speed, now = pace(self.window).seconds_per_iteration, self.window[-1].iter
        parts = self._time_left(stage.stage, now, self.left, speed) if self._time_left else {"": self.left * speed}
        return parts.get(stage.stage, (stage.max_iter - now) * speed), sum(parts.values())


def _painted(marks: Mapping[str, str]) -> Text:
    return Text("  ").join(Text(f"{name} {mark}".rstrip(), colour(mark) or "") for name, mark in marks.items())


_LEAST_BAR, _LONGEST_BAR = 6, 40


def _live_line(
    marks: Mapping[str, str],
    stage: events.StageStarted,
    window: Sequence[events.Iterated],
    left: tuple[float, float],
    width: int,
    met: events.Synchronised | None = None,
) -> tuple[dict[str, str], int, str]:
    """Return `progress_line` in at most `width` characters if possible: the marks, the length of the bar (0: no bar), and the rest. A narrow
    terminal omits first epoch, LR and bytes, or other stages, then the bar."""
    now, speed = window[-1], pace(window, met)
    times = f"{duration(left[0])} of {duration(left[1])} left"
    done, per_second, loss = f"{now.iter}/{stage.max_iter}", f"{speed.images_per_second:.0f}", f"loss {speed.loss:.4f}"
    short = f"{done}  {per_second} img/s  {loss}  {times}"
    long = f"{done}  epoch {now.epoch:.2f}  LR {now.lr:.4g}  {per_second} images/s  {loss}  {exchange(stage, speed)}{times}"
    current = {now.stage: share(now.iter, stage.max_iter)}
    for kept, rest in ((dict(marks), long), (dict(marks), short), (current, long), (current, short)):
        bar = width - len(strip(kept)) - len(rest) - 4
        if bar >= _LEAST_BAR:
            return kept, min(bar, _LONGEST_BAR), rest
    return current if bar >= -2 else {now.stage: ""}, 0, short


class Terminal(RichConsole):
    """rich's console, which escapes control characters as `ending.Printable` does. rich ends the program on a closed pipe; here the work
    continues."""

    def on_broken_pipe(self) -> None:
        to_nowhere(self.file)  # type: ignore[arg-type]

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=shown(segment.text))
