"""Which lines of OUT/log.jsonl stand for good: those of iterations that a snapshot holds. Pure.

What comes out is a function of the log alone, so a line has the same number in every process life, and a number says how far a tracker
got. A line counts as settled when a snapshot of its stage at its iteration or a later one is written, or when the stage goes on from there.
What is trained again after that (`--redo`, a snapshot that was damaged, a rollback) undoes settled lines: then all begins anew, at number 0,
and lines that were undone are left out from the start. So the starts of stages are read ahead of all else (`expect`).
"""

from collections import defaultdict
from dataclasses import dataclass

from stagerun.base import events
from stagerun.logs.tracker import Text


@dataclass(frozen=True, slots=True)
class Line:
    time: float
    stage: str
    iter: int
    values: dict[str, float]


class Settling:
    """What the log's first lines have settled. `count`: lines settled so far. `reached`: of each stage the newest iteration among them.
    `ahead`: of each stage the iterations of its starts that are still to be read. `waiting`: lines without a snapshot."""

    def __init__(self) -> None:
        self.count = 0
        self.reached: defaultdict[str, int] = defaultdict(lambda: -1)
        self.ahead: defaultdict[str, list[int]] = defaultdict(list)
        self.waiting: list[Line] = []

    def expect(self, start: events.StageStarted) -> bool:
        """Take the start of a stage that `read` will come to. Return whether it undoes what is settled."""
        self.ahead[start.stage].append(start.iter)
        return start.iter < self.reached[start.stage]

    def read(self, time: float, event: events.Event) -> list[Line | Text]:
        """What the next line of the log settles, in order."""
        match event:
            case events.Iterated():
                self._wait(Line(time, event.stage, event.iter, figures_of(event)))
            case events.Tested() | events.TestedBeside():
                name = "ema_test_" if event.ema else "test_"
                name += f"{event.val}_" if isinstance(event, events.TestedBeside) else ""
                self._wait(Line(time, event.stage, event.iter, figures_of(event, name)))
                if event.iter <= self.reached[event.stage]:
                    return [*self._settle(event.stage, event.iter)]
            case events.StageStarted():
                self.ahead[event.stage].pop(0)
                settled = self._settle(event.stage, event.iter)
                self.waiting = [line for line in self.waiting if line.stage != event.stage]
                return [*settled]
            case events.SnapshotWritten():
                return [*self._settle(event.stage, event.iter), Text(f"{event.stage}/snapshot", event.name)]
            case events.StageFinished():
                return [*self._settle(event.stage, event.iterations)]
            case events.EnsembleTested() if all(self._stands(stage, self.reached[stage]) for stage in event.stages):
                self.count += 1
                return [Line(time, event.name, 0, figures_of(event, "test_"))]
            case events.Note(warning=True):
                return [Text("warning", event.text)]
            case events.Failed(text=text) if text:
                return [Text("failed", text)]
        return []

    def _stands(self, stage: str, iter: int) -> bool:
        """Whether no later start of the stage undoes the iteration."""
        return all(iter <= start for start in self.ahead[stage])

    def _wait(self, line: Line) -> None:
        if self._stands(line.stage, line.iter):
            self.waiting.append(line)

    def _settle(self, stage: str, iter: int) -> list[Line]:
        settled = [line for line in self.waiting if line.stage == stage and line.iter <= iter]
        if settled:
            self.waiting = [line for line in self.waiting if line.stage != stage or line.iter > iter]
            self.reached[stage] = max(self.reached[stage], *(line.iter for line in settled))
            self.count += len(settled)
        return settled


def figures_of(
    event: events.Iterated | events.Tested | events.TestedBeside | events.EnsembleTested, before: str = ""
) -> dict[str, float]:
    """The numbers of an event that trackers and TensorBoard show, `before` in front of their names."""
    if isinstance(event, events.Iterated):
        names: tuple[str, ...] = ("loss", "lr", "momentum", "weight_decay", "epoch")
    else:
        names = ("top1", "top5", "loss", "mean_ap")
    figures = {f"{before}{name}": getattr(event, name, None) for name in names}
    if isinstance(event, events.Iterated) and event.seconds:
        figures["images_per_second"] = event.images / event.seconds
    return {name: figure for name, figure in figures.items() if figure is not None}
