"""Which lines of OUT/log.jsonl stand for good: those of iterations that a snapshot holds. Pure.

What comes out is a function of the log alone, so a line has the same number in every process life, and a number says how far a tracker
got. A line counts as settled when a snapshot of its stage at its iteration or a later one is written, or when the stage goes on from there.
What is trained again after that (`--redo`, a snapshot that was damaged, a rollback) undoes settled lines: then all begins anew, at number 0,
and lines that were undone are left out from the start.
"""

from dataclasses import dataclass, field

from stagerun.base.events import (
    EnsembleTested,
    Event,
    Failed,
    Iterated,
    Note,
    SnapshotWritten,
    StageFinished,
    StageStarted,
    Tested,
    TestedBeside,
)
from stagerun.logs.tracker import Text


@dataclass(frozen=True, slots=True)
class Restart:
    """From byte `at` of the log on, the stage goes on from `iter`."""

    at: int
    stage: str
    iter: int


class Undone(Exception):
    """A tracker shows what these have undone."""

    def __init__(self, restarts: list[Restart]) -> None:
        super().__init__()
        self.restarts = restarts


@dataclass(frozen=True, slots=True)
class Line:
    at: int
    time: float
    stage: str
    iter: int
    values: dict[str, float]


@dataclass(kw_only=True)
class Settling:
    """What is known after the log's first `at` bytes: to go on from there takes all of it. `count`: lines settled so far. `reached`: of each
    stage the newest iteration among them. `tests`: of each stage the newest evaluations. `waiting`: for a snapshot. `restarts`: those that
    undid something; lines that they undo are left out."""

    at: int = 0
    count: int = 0
    reached: dict[str, int] = field(default_factory=dict)
    tests: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    waiting: list[Line] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)

    def read(self, at: int, end: int, time: float, event: Event) -> list[Line | Text]:
        """What the line from `at` to `end` settles, in order. Undone where it undoes what is."""
        self.at = end
        match event:
            case Iterated():
                self._wait(Line(at, time, event.stage, event.iter, _figures(event)))
            case Tested() | TestedBeside():
                self._wait_for_test(at, time, event)
                if event.iter <= self.reached.get(event.stage, -1):
                    return [*self._settle(event.stage, event.iter)]
            case StageStarted():
                return self._restart(Restart(at, event.stage, event.iter))
            case SnapshotWritten():
                return [*self._settle(event.stage, event.iter), Text(f"{event.stage}/snapshot", event.name)]
            case StageFinished():
                return [*self._settle(event.stage, event.iterations)]
            case EnsembleTested() if not any(r.at > at and r.stage in event.stages for r in self.restarts):
                figures = {"test_top1": event.top1, "test_top5": event.top5}
                figures |= {} if event.loss is None else {"test_loss": event.loss}
                self.count += 1
                return [Line(at, time, event.name, 0, figures)]
            case Note(warning=True):
                return [Text("warning", event.text)]
            case Failed(text=text) if text:
                return [Text("failed", text)]
        return []

    def _restart(self, one: Restart) -> list[Line | Text]:
        """What is settled since the stage goes on from there; what came after it is forgotten. Undone where some of it was settled."""
        if self.reached.get(one.stage, -1) > one.iter:
            raise Undone([*self.restarts, one])
        settled = self._settle(one.stage, one.iter)
        self.waiting = [line for line in self.waiting if line.stage != one.stage]
        tests = self.tests.get(one.stage, {})
        self.tests[one.stage] = {name: found for name, found in tests.items() if found[0] <= one.iter}
        return [*settled]

    def _wait_for_test(self, at: int, time: float, event: Tested | TestedBeside) -> None:
        name = "ema_test" if event.ema else "test"
        name += f"_{event.val}" if isinstance(event, TestedBeside) else ""
        figures = {"top1": event.top1, "top5": event.top5, "loss": event.loss}
        if event.mean_ap is not None:
            figures["mean_ap"] = event.mean_ap
        tests, found = self.tests.setdefault(event.stage, {}), [float(event.iter), *figures.values()]
        if tests.get(name) != found:  # after a kill the last one may be made again
            tests[name] = found
            figures = {f"{name}_{kind}": figure for kind, figure in figures.items()}
            self._wait(Line(at, time, event.stage, event.iter, figures))

    def _wait(self, line: Line) -> None:
        if not any(r.at > line.at and r.stage == line.stage and r.iter < line.iter for r in self.restarts):
            self.waiting.append(line)

    def _settle(self, stage: str, iter: int) -> list[Line]:
        settled = [line for line in self.waiting if line.stage == stage and line.iter <= iter]
        if settled:
            self.waiting = [line for line in self.waiting if line.stage != stage or line.iter > iter]
            self.reached[stage] = max(self.reached.get(stage, -1), *(line.iter for line in settled))
            self.count += len(settled)
        return settled


def _figures(event: Iterated) -> dict[str, float]:
    figures = {
        "loss": event.loss,
        "lr": event.lr,
        "momentum": event.momentum,
        "weight_decay": event.weight_decay,
        "epoch": event.epoch,
    }
    return figures | ({"images_per_second": event.images / event.seconds} if event.seconds else {})
