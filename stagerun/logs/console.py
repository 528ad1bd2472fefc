"""What rank 0 shows while it runs: one live line on a terminal, plain lines elsewhere."""

import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.control import Control
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.text import Text

from stagerun.base import events
from stagerun.base.pace import DONE, TO_DO, WINDOW, colour, live_line, pace, progress_line, share
from stagerun.base.recipe import OnNan
from stagerun.base.text import count, duration, percent, size, to_nowhere, wrapped
from stagerun.command.progress import Terminal
from stagerun.logs.lines import (
    Before,
    choice_text,
    ensemble_line,
    ensembles_table,
    finished_line,
    piece_line,
    results_table,
    warning_of,
)
from stagerun.system.world import relayed

_EVERY_S = 0.5  # between two pictures of the live line
_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class _Terminal(Terminal):
    """rich ends the program when no one reads its output any more; training goes on."""

    def on_broken_pipe(self) -> None:
        to_nowhere(sys.stdout)


class Console:
    """A sink for events. `display` maps a stage to the iterations between two plain lines (0: none); `results` and
    `ensembles` are those of stages and ensembles finished before. `live`: whether to show a live line; by default on a terminal,
    but not on an MPI launcher's, which may write what is printed into a file. `time_left`: as `TimeLeft`; by default by the pace alone."""

    def __init__(
        self,
        display: dict[str, int],
        parents: Mapping[str, Before],
        results: Sequence[events.StageFinished] = (),
        live: bool | None = None,
        ensembles: Sequence[events.EnsembleTested] = (),
        time_left: Callable[[str, int, int, float], Mapping[str, float]] | None = None,
    ) -> None:
        self.rich = _Terminal(file=sys.stdout, highlight=False)
        here = sys.stdout.isatty() and not self.rich.is_dumb_terminal and not relayed()  # FORCE_COLOR makes no terminal
        self.live = here if live is None else live
        self._drawn, self._next = False, 0.0
        self.display, self.parents = display, parents
        self.started: events.RunStarted | None = None
        self.stage: events.StageStarted | None = None
        self.window: deque[events.Iterated] = deque(maxlen=WINDOW)
        self.met: events.Synchronised | None = None  # the stage's newest
        self.retraced: deque[float] = deque(maxlen=WINDOW)  # seconds of the last updates of a piece
        self.left, self._time_left = 0, time_left
        self.results = list(results)
        self.ensembles = {tested.name: tested for tested in ensembles}

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self._show()

    def say(self, line: str, style: str = "") -> None:
        """Prints a line. Once that fails (a closed pipe, a terminal whose connection broke, a full disk) it prints nowhere:
        training goes on, and log.jsonl has everything."""
        self._show(Text(wrapped(line, self.rich.width if self.live else None) + "\n", style))

    def _show(self, *parts: Text | ProgressBar, live: bool = False) -> None:
        """In place of the live line, if there is one. The cursor is never hidden, and no thread draws: whatever ends this process leaves
        a terminal in order, and another process that writes erases one line (`ending.over_live_line`)."""
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

    def _marks(self) -> dict[str, str]:
        done = {result.stage for result in self.results}
        marks = {name: DONE if name in done else TO_DO for name in (self.started.stages if self.started else ())}
        if self.stage is not None and self.stage.stage not in done:
            iter = self.window[-1].iter if self.window else self.stage.iter
            marks[self.stage.stage] = share(iter, self.stage.max_iter)
        return marks

    def _say_strip(self) -> None:
        if self.live:
            self._show(_painted(self._marks()), Text("\n"))

    def __call__(self, event: events.Event) -> None:
        if (warning := warning_of(event)) is not None:
            self.say(f"warning: {warning}", "yellow")
        match event:
            case events.Iterated():
                self.window.append(event)
                self._updated(event)
            case events.RunStarted():
                self.started, self.left = event, event.iterations_left
                self.say(
                    f"{event.schedule}: {event.iterations_left} of {event.iterations} iterations to do, "
                    f"{count(event.workers, 'worker')} on {event.device}, {count(event.threads, 'thread')} each, output in {event.out}"
                )
            case events.NotFinite(done=OnNan.SKIP.value):
                self.left -= 1
            case events.Note(warning=False):
                self.say(f"note: {event.text}")
            case events.Synchronised():
                self.met = event
            case events.StageStarted():
                self.stage, self.met = event, None
                self.ensembles = {k: e for k, e in self.ensembles.items() if not e.undone_by(event.stage, event.iter)}
                self.left = event.iterations_left or self.left  # a damaged snapshot may have added to it
                self.window.clear()
                start = "its .solverstate" if 0 < event.iter == event.begins else event.weights or event.start
                self.say(
                    f"stage {event.number}/{self._stages} {event.stage}: iterations {event.iter} to {event.max_iter}, batch "
                    f"{event.batch_size}, from {start}"
                )
                self._say_strip()
            case events.CompressionChosen():
                self.say(choice_text(event))
            case events.PieceStarted():
                self.left = event.iterations_left or self.left
                self.retraced.clear()
                self.say(piece_line(event))
            case events.Retraced():
                self.retraced.append(event.seconds)
                self._updated(event)
            case events.Tested() | events.TestedBeside():
                which = ("EMA test" if event.ema else "test") + (f" on {event.val}:" if event.val else "")
                mean_ap = "" if event.mean_ap is None else f"mAP {percent(event.mean_ap)}, "
                self.say(
                    f"{event.stage} {event.iter}: {which} top-1 {percent(event.top1)}, top-5 {percent(event.top5)}, "
                    f"{mean_ap}loss {event.loss:.4f} on {event.images} images in {duration(event.seconds)}"
                )
            case events.SnapshotWritten():
                self.say(
                    f"{event.stage} {event.iter}: snapshot {event.name}, {size(event.bytes)} in {event.seconds:.2f} s"
                )
            case events.StageFinished():
                self.results = [r for r in self.results if r.stage != event.stage] + [event]
                self.say(results_table(self.results, self.parents, self.ensembles.values(), shown=[event]))
                self._say_strip()
            case events.EnsembleTested():
                self.ensembles[event.name] = event
                self.say(ensemble_line(event))
            case events.Stopped():
                self.say(
                    f"stopped in {event.stage} after iteration {event.iter} ({event.reason}), everything is saved: "
                    "run the same command again to go on"
                )
            case events.RunFinished():
                self._finish(event)

    def _finish(self, event: events.RunFinished) -> None:
        self.say(finished_line(event))
        order = list(self.parents)
        done = sorted(self.results, key=lambda r: order.index(r.stage))
        self.say(results_table(done, self.parents, self.ensembles.values()))
        if self.ensembles:
            names = dict.fromkeys((*(self.started.ensembles if self.started else ()), *self.ensembles))
            self.say("\n" + ensembles_table([self.ensembles[name] for name in names if name in self.ensembles]))
        if event.trained and self.started and self.live:  # for a person: what programs read ends with the table
            out = shlex.quote(self.started.out)
            self.say(
                f"next: `stagerun report {out}`, `stagerun eval {out}`; for other images: `stagerun help own images`"
            )

    @property
    def _stages(self) -> int:
        return len(self.started.stages) if self.started else 0

    def _updated(self, event: events.Iterated | events.Retraced) -> None:
        self.left -= 1
        every = self.display.get(event.stage, 0)
        if self.live and time.monotonic() >= self._next:
            self._draw(event)
        elif not self.live and every and event.iter % every == 0:
            self.say(self._line(event))

    def _draw(self, event: events.Iterated | events.Retraced) -> None:
        if isinstance(event, events.Retraced):
            return self._show(Text(self._line(event)), live=True)
        assert self.stage is not None
        width = self.rich.width - 1  # in the last column a terminal may begin a new line
        left = self._seconds_left(self.stage)
        marks, bar, rest = live_line(self._marks(), self.stage, self.window, left, width, self.met)
        parts: list[Text | ProgressBar] = [_painted(marks), Text("  ")]
        if bar:
            parts += [ProgressBar(self.stage.max_iter, self.window[-1].iter, width=bar), Text("  ")]
        self._show(*parts, Text(rest), live=True)

    def _line(self, event: events.Iterated | events.Retraced) -> str:
        if isinstance(event, events.Retraced):
            left = duration((event.until - event.iter) * sum(self.retraced) / len(self.retraced))
            done = f"{event.stage} again  {event.iter}/{event.until}"
            return f"{done}  LR {event.lr:.4g}  loss {event.loss:.4f}  {left} left in it"
        assert self.stage is not None
        seconds = self._seconds_left(self.stage)
        return progress_line(self.stage, self._stages, self.window, seconds, self.met)

    def _seconds_left(self, stage: events.StageStarted) -> tuple[float, float]:
        speed, now = pace(self.window).seconds_per_iteration, self.window[-1].iter
        parts = self._time_left(stage.stage, now, self.left, speed) if self._time_left else {"": self.left * speed}
        return parts.get(stage.stage, (stage.max_iter - now) * speed), sum(parts.values())


def _painted(marks: Mapping[str, str]) -> Text:
    return Text("  ").join(Text(f"{name} {mark}".rstrip(), colour(mark) or "") for name, mark in marks.items())
