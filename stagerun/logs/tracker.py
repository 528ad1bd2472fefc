"""Trackers: what one gets and does, the log lines that are final, and Weights & Biases.

A package that adds a tracker needs only `TrackedRun`, `Point`, `Text` and `Tracker`.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stagerun.base import events


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run of a tracker: a whole schedule, over all its process lives, which share `id`. A run with undone points is abandoned for another
    with another id. `settings`: of the schedule, by stage."""

    id: str
    name: str
    project: str
    out: Path
    settings: Mapping[str, Mapping[str, Any]]
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A final line. `number` counts from 0 without a gap, the same in every process life. `iteration`: including the ancestors' along the
    path. Names of `values` begin with the stage's, `trunk/loss`."""

    number: int
    time: float  # seconds since the epoch
    stage: str
    iteration: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Text:
    """A text with a name, such as a snapshot or a warning. The newest counts; it may be sent again."""

    name: str
    text: str


class Tracker(Protocol):
    """Made without arguments, in a separate process, for which training never waits. An error costs one warning; then a new object asks for
    its state again."""

    def begin(self, run: TrackedRun) -> int | None:
        """Create the run, or resume it. Return how many points its store holds, counted from the first; None if unclear: then `send` may get
        points again."""

    def send(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        """Return once they are queued; if `begin` returned None, once they are stored."""

    def end(self, status: str) -> None:
        """Wait for queued points. `status`: finished, stopped (it will resume), failed, or undone (another run replaces it)."""


@dataclass(frozen=True, slots=True)
class Line:
    time: float
    stage: str
    iter: int
    values: dict[str, float]


class Settling:
    """The lines of OUT/log.jsonl that are final: a snapshot holds their iterations. Pure.

    The result depends on the log alone, so a line has the same number in every process life, and a number is a tracker's progress. A line
    settles when a snapshot of its stage at its iteration or later is written, or the stage resumes from there. Training a stage again after
    that (`--redo`, a damaged snapshot, a rollback) undoes settled lines: then the count restarts at 0, without the undone lines. So starts
    of stages are read ahead of all else (`expect`).

    `count`: lines settled so far. `reached`: the newest settled iteration per stage. `ahead`: iterations of starts still to be read.
    `waiting`: lines without a snapshot."""

    def __init__(self) -> None:
        self.count = 0
        self.reached: defaultdict[str, int] = defaultdict(lambda: -1)
        self.ahead: defaultdict[str, list[int]] = defaultdict(list)
        self.waiting: list[Line] = []

    def expect(self, start: events.StageStarted) -> bool:
        """Take the start of a stage that `read` will come to. Return whether it undoes settled lines."""
        self.ahead[start.stage].append(start.iter)
        return start.iter < self.reached[start.stage]

    def read(self, time: float, event: events.Event) -> list[Line | Text]:
        """Return the lines that the next line of the log settles, in order."""
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
        """Return whether no later start of the stage undoes the iteration."""
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
    """Return an event's numbers for trackers and TensorBoard, with the prefix `before`."""
    if isinstance(event, events.Iterated):
        names: tuple[str, ...] = ("loss", "lr", "momentum", "weight_decay", "epoch")
    else:
        names = ("top1", "top5", "loss", "mean_ap")
    figures = {f"{before}{name}": getattr(event, name, None) for name in names}
    if isinstance(event, events.Iterated) and event.seconds:
        figures["images_per_second"] = event.images / event.seconds
    return {name: figure for name, figure in figures.items() if figure is not None}


class Wandb:
    """Weights & Biases: a row of its history per line, numbered by `_step`, so that the server keeps each once; a stage's charts count
    `iteration`. Offline (WANDB_MODE=offline) the rows are in OUT/wandb, for `wandb sync`."""

    def begin(self, run: TrackedRun) -> int | None:
        import wandb

        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project), id=run.id, name=run.name, dir=os.environ.get("WANDB_DIR") or str(run.out), resume="allow",
            config={**run.settings, "workers": run.workers}, settings=settings, reinit="finish_previous",
        )  # fmt: skip
        self.stages: set[str] = set()
        # The server's count. Offline it is unclear: a row may be in two files, and the server keeps one after `wandb sync`.
        return None if self.run.settings._offline else self.run.step

    def send(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        for point in points:
            if point.stage not in self.stages:
                self.stages.add(point.stage)
                self.run.define_metric(f"{point.stage}/*", step_metric="iteration")
            self.run.log({**point.values, "iteration": point.iteration, "time": point.time}, step=point.number)
        for text in texts:
            self.run.summary[text.name] = text.text

    def end(self, status: str) -> None:
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status == "failed"))
