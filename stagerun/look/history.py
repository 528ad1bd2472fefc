"""The history of a run over all its process lives, replayed from OUT/log.jsonl, also while the run appends to it. Takes no lock.

Later work replaces earlier work: an iteration that is repeated after a kill, a rollback (`on_nan: ROLLBACK`) or with `--redo` counts once,
as it was done last; the first try still costs its process life the time. Retraining a finished stretch for a branch replaces nothing.
"""

import math
import os
import statistics
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from stagerun.base import events
from stagerun.base.errors import UsageError
from stagerun.base.recipe import OnNan
from stagerun.base.text import MOST_LISTED, listed
from stagerun.logs.log_file import LOG, Log
from stagerun.store.errors import reporting
from stagerun.store.layout import Place, parse_name, snapshot_name

# Columns of a stage's updates, with array types: fields of Iterated, after the process life, line and time of its event.
OF_UPDATE = {
    "iter": "q", "images": "q", "sent_bytes": "q", "epoch": "d", "lr": "d", "weight_decay": "d", "loss": "d", "seconds": "d",
}  # fmt: skip
COLUMNS = {"life": "q", "line": "q", "time": "d"} | OF_UPDATE


def epoch_number(epoch: float) -> int:
    """Return the epoch, from 1, that ends at or after `epoch`; 1e-6 is rounding."""
    return max(1, math.ceil(epoch - 1e-6))


class Moment(NamedTuple):
    """An event in the log's line number `line`, which counts as long as its stage has `iter` updates."""

    line: int
    time: float
    iter: int
    event: events.Event


@dataclass(slots=True, kw_only=True)
class ProcessLife:
    """`updates` and `seconds` (without evaluation) cover all its iterations, `again` counts the repeated or retraced; `end` is '' if the log
    lacks it."""

    number: int
    began: float
    ended: float
    workers: int = 0
    device: str = ""
    start: str = ""
    end: str = ""
    again: int = 0
    updates: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Stage:
    """The part of a stage's history that counts: `updates` by the columns of COLUMNS, ascending by iteration; `moments`: starts,
    evaluations, snapshots, warnings. `start` is the snapshot it began from, or `seed N`; `weights` the file or ensemble that its
    weights come from. Snapshots of attempt `older` or before were made before the stage last started over.

    Computed by each `Reader.read`: `begin` in epochs along the path of ancestors, `epochs_each`, `losses` (iteration, mean), `gone` from the
    schedule, `disabled`."""

    name: str
    start: str = ""
    weights: str = ""
    started: events.StageStarted | None = None
    finished: events.StageFinished | None = None
    updates: dict[str, "array[Any]"] = field(default_factory=lambda: {name: array(t) for name, t in COLUMNS.items()})
    moments: list[Moment] = field(default_factory=list)
    older: int = 0
    rollbacks: int = 0
    rolled_back: int = 0  # the process life that did, until the stage starts again
    begin: float = 0.0
    epochs_each: float = 0.0
    losses: tuple[tuple[float, float], ...] = ()
    gone: bool = False
    disabled: bool = False

    @property
    def trained(self) -> bool:
        return bool(self.updates["iter"])

    @property
    def left_out(self) -> bool:
        return self.gone or self.disabled

    @property
    def iter(self) -> int:
        return self.updates["iter"][-1] if self.trained else 0

    @property
    def begins(self) -> int:
        return self.started.begins if self.started else 0

    @property
    def length(self) -> int:
        return self.finished.iterations if self.finished else self.started.max_iter if self.started else 0

    @property
    def origin(self) -> Place:
        """Return the snapshot it started from; its stage is '' for a seed."""
        return parse_name(self.start) or Place("", 0, 0)

    def happened(self, kind: type[events.Event]) -> list[Any]:
        return [moment.event for moment in self.moments if isinstance(moment.event, kind)]

    @property
    def tests(self) -> list[events.Tested]:
        """Return the last evaluation for each (iteration, averaged weights), in that order."""
        tests = {(test.iter, test.ema): test for test in self.happened(events.Tested)}
        return [tests[key] for key in sorted(tests)]

    @property
    def resumes(self) -> int:
        return max(0, len({*self.updates["life"]}) - 1)

    @property
    def skips(self) -> int:
        return sum(event.done == OnNan.SKIP.value for event in self.happened(events.NotFinite))

    def displays(self, iter: int) -> bool:
        every = self.started.display if self.started else 1
        return every > 0 and iter % every == 0

    # -- its updates

    def rows(self, *names: str) -> Iterator[tuple[Any, ...]]:
        return zip(*(self.updates[name] for name in names), strict=True)

    def epoch(self, iter: int) -> float:
        """Return the epoch along the path of ancestors, also with `carry { data: RESTART }`."""
        return round(self.begin + (iter - self.begins) * self.epochs_each, 9)

    @property
    def epochs(self) -> float:
        return self.epoch(self.iter) - self.begin

    @property
    def seconds(self) -> float:
        return math.fsum(self.updates["seconds"])

    def seconds_until(self, iter: int) -> float:
        return math.fsum(self.updates["seconds"][: bisect_right(self.updates["iter"], iter)])

    @property
    def images_per_second(self) -> float | None:
        return sum(self.updates["images"]) / self.seconds if self.seconds else None

    @property
    def sent_bytes(self) -> float | None:
        """Return the bytes that rank 0 sent in an iteration, on average; None for a single worker."""
        return statistics.fmean(self.updates["sent_bytes"]) if any(self.updates["sent_bytes"]) else None

    def by_epoch(self) -> Iterator[tuple[int, slice]]:
        """Yield each epoch and its updates; an update across two epochs counts for the later one."""
        end = 0
        for number, same in groupby(epoch_number(self.epoch(iter)) for iter in self.updates["iter"]):
            begin, end = end, end + sum(1 for _ in same)
            yield number, slice(begin, end)

    def curve(self, size: int) -> tuple[tuple[float, float], ...]:
        """Return (iteration, mean loss) of each `size` updates."""
        iters, losses = self.updates["iter"], self.updates["loss"]
        parts = ((iters[i : i + size], losses[i : i + size]) for i in range(0, len(iters), size))
        return tuple((part[-1] - (len(part) - 1) / 2, statistics.fmean(loss)) for part, loss in parts)

    def step(self) -> float:
        """Return the epochs of one update, by the closest of the last updates: a rollback leaves images out in between."""
        points = zip(self.updates["iter"][-50:], self.updates["epoch"][-50:], strict=True)
        least = min(((f - e) / (j - i) for (i, e), (j, f) in pairwise(points)), default=0.0)
        images = self.updates["images"][-1] if least > 0 else 0
        return images / round(images / least) if images else 0.0

    def cut(self, iter: int) -> list[int]:
        """Remove the work after `iter`, since it is repeated; return the process life of each update removed."""
        keep = bisect_right(self.updates["iter"], iter)
        lives = list(self.updates["life"][keep:])
        for column in self.updates.values() if lives else ():
            del column[keep:]
        self.moments = [moment for moment in self.moments if moment.iter <= iter]
        return lives


@dataclass(slots=True, kw_only=True)
class History:
    """`stages` are in running order, then come the disabled and the gone. `moments`: starts and ends of runs. `names`: by snapshot its
    stage, if it was written under an earlier name. `now`: the newest iteration."""

    run: events.RunStarted | None = None
    stages: tuple[Stage, ...] = ()
    by_name: dict[str, Stage] = field(default_factory=dict)
    lives: list[ProcessLife] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    now: tuple[str, int] | None = None
    damaged: int = 0
    unknown: int = 0

    @property
    def schedule(self) -> str:
        return self.run.schedule if self.run else ""

    def stage(self, name: str) -> Stage | None:
        return self.by_name.get(name)

    def parent(self, stage: Stage) -> Stage | None:
        return self.by_name.get(stage.origin.stage)

    def follows(self, stage: Stage) -> Stage | None:
        """Return the stage at whose end it started; None for a start at the seed or inside another stage."""
        parent = self.parent(stage)
        return parent if parent is not None and stage.origin.iter >= parent.length else None

    @property
    def wall_seconds(self) -> float:
        return sum(life.ended - life.began for life in self.lives)


# -- the log

POINTS = 900  # of all loss curves of a run
_of_update = attrgetter(*OF_UPDATE)


class Reader:
    """Reads the history of the run in an output folder. Each `read` continues at the last line of the one before; a log that was replaced
    or cut is read again. Loss curves have `points` in all."""

    def __init__(self, out: Path, points: int = POINTS) -> None:
        self.path, self.points = out / LOG, points
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self._inode, self._log, self._line = inode, Log(self.path), 0
        self._history = History()
        self._stages: dict[str, Stage] = {}  # that have begun

    def read(self) -> History:
        """Return the same history each time, brought up to date. UsageError for a log that is missing or empty, PermissionDenied or
        StorageError for an unreadable log."""
        if not self.path.parent.is_dir() or not os.path.lexists(self.path):
            raise UsageError(
                f"{self.path.parent} has no {LOG}", "name the output folder of a run: ./out/NAME, or what --out named"
            )
        with reporting("read the log", self.path):
            status = os.stat(self.path)
            if status.st_ino != self._inode or status.st_size < self._log.at:
                self._begin(status.st_ino)
            for time, event in self._log:
                self._line += 1
                self._take(time, event)
        if not (history := self._history).lives:
            raise UsageError(f"{self.path} holds no event of a run", "wait until the run has started")
        history.damaged, history.unknown = self._log.damaged, self._log.unknown
        self._arrange(history)
        return history

    def _arrange(self, history: History) -> None:
        """Order the stages, and compute what depends on all of them."""
        planned, off = (history.run.stages, history.run.disabled) if history.run else ((), ())
        rest = [name for name in self._stages if name not in planned]
        names = dict.fromkeys((*planned, *(name for name in off if name in rest), *rest))
        history.stages = tuple(self._stages.get(name) or Stage(name=name) for name in names)
        history.by_name = {stage.name: stage for stage in history.stages}
        size = max(1, -(-sum(len(stage.updates["iter"]) for stage in history.stages) // self.points))
        for stage in history.stages:
            parent = history.parent(stage)
            stage.begin = parent.epoch(stage.origin.iter) if parent else 0.0
            stage.epochs_each = stage.step()
            stage.losses = stage.curve(size)
            stage.disabled = stage.name in off
            stage.gone = bool(planned) and stage.name not in planned and not stage.disabled

    # -- events

    def _take(self, time: float, event: events.Event) -> None:
        life = self._life_of(time, event)
        life.ended = max(life.ended, time)
        match event:
            case events.Iterated():
                self._iterated(life, event, time)
            case events.Retraced():
                life.updates, life.seconds, life.again = life.updates + 1, life.seconds + event.seconds, life.again + 1
            case events.RunStarted():
                life.workers, life.device = life.workers or event.workers, life.device or event.device
                life.end, self._history.run, self._history.names = "", event, {}
                self._history.moments.append(Moment(self._line, time, 0, event))
            case events.StageStarted():
                self._stage_started(life, event, time)
            case events.PieceStarted():
                life.start = life.start or f"{event.stage} {event.iter} again"
            case events.NotFinite(until=None):
                stage = self._stage(event.stage)
                if event.back_to is not None:
                    self._cut(stage, event.back_to)
                    stage.rollbacks, stage.rolled_back = event.number, life.number
                self._note(event.stage, time, event, event.iter + 1 if event.back_to is None else event.back_to)
            case events.Tested() | events.SnapshotWritten() | events.SnapshotFailed():
                self._note(event.stage, time, event, event.iter)
            case events.Note(warning=True) if self._history.now is not None:
                stage_now, iter = self._history.now
                self._note(stage_now, time, event, iter)
            case events.StageFinished():
                self._stage(event.stage).finished = event
            case events.Renamed():
                self._renamed(event)
            case events.Stopped() | events.Failed() | events.RunFinished():
                self._ended(life, event, time)

    def _life_of(self, time: float, event: events.Event) -> ProcessLife:
        """Return the process life of an event. A process that trained stages side by side starts twice in one life."""
        lives, run = self._history.lives, self._history.run
        begins = isinstance(event, events.RunStarted) and not (event.rest and run and run.side_by_side)
        if not lives or begins:
            if lives and not lives[-1].end:
                lives[-1].end = "broken off"
            lives.append(ProcessLife(number=len(lives) + 1, began=time, ended=time))
        return lives[-1]

    def _stage(self, name: str) -> Stage:
        if name not in self._stages:
            self._stages[name] = Stage(name=name)
        return self._stages[name]

    def _note(self, stage: str, time: float, event: events.Event, iter: int) -> None:
        self._stage(stage).moments.append(Moment(self._line, time, iter, event))

    def _iterated(self, life: ProcessLife, e: events.Iterated, time: float) -> None:
        stage = self._stage(e.stage)
        if e.iter <= stage.iter:  # the line of its resume is lost
            self._cut(stage, e.iter - 1)
        row = life.number, self._line, time, *_of_update(e)
        for column, value in zip(stage.updates.values(), row, strict=True):
            column.append(value)
        self._history.now = e.stage, e.iter
        life.updates, life.seconds = life.updates + 1, life.seconds + e.seconds

    def _stage_started(self, life: ProcessLife, event: events.StageStarted, time: float) -> None:
        stage = self._stage(event.stage)
        self._cut(stage, event.iter)
        self._history.now = event.stage, event.iter
        stage.started, stage.finished = event, None
        rolled_back, stage.rolled_back = stage.rolled_back == life.number, 0
        if rolled_back:  # no new start
            return
        life.start = life.start or f"{event.stage} {event.iter}"
        if event.iter == event.begins:
            run = self._history.run
            stage.older = (run.attempt if run and run.attempt else life.number) - 1
            stage.start, stage.weights, stage.rollbacks = self._present(event.start), event.weights, 0
            stage.moments = []
        self._note(event.stage, time, event, event.iter)

    def _cut(self, stage: Stage, iter: int) -> None:
        for life in stage.cut(iter):
            self._history.lives[life - 1].again += 1

    def _ended(self, life: ProcessLife, event: events.Event, time: float) -> None:
        match event:
            case events.Failed():
                life.end = f"ended with exit code {event.code}: {event.text}".partition("\n")[0].removesuffix(": ")
                return
            case events.Stopped():
                life.end = f"stopped ({event.reason})"
            case events.RunFinished():
                skipped = f" (not chosen: {listed(event.not_chosen, MOST_LISTED)})" if event.not_chosen else ""
                life.end = "finished" + skipped
                if not event.trained and not life.updates:  # nothing was left to do
                    self._history.lives.pop()
                    return
        self._history.moments.append(Moment(self._line, time, 0, event))

    def _renamed(self, event: events.Renamed) -> None:
        """Give a stage the work that was done under its earlier name."""
        run, stages = self._history.run, self._stages
        self._history.names |= dict.fromkeys(event.snapshots, event.stage)
        planned = (*run.stages, *run.disabled) if run else ()
        for old, _, _ in filter(None, map(parse_name, event.snapshots)):
            if old in stages and old not in planned and event.stage not in stages:
                stages[event.stage] = stages.pop(old)
                stages[event.stage].name = event.stage
        for stage in stages.values():
            stage.start = self._present(stage.start)

    def _present(self, snapshot: str) -> str:
        """Return the name of a snapshot under its stage's present name."""
        parts, stage = parse_name(snapshot), self._history.names.get(snapshot)
        return snapshot_name(*parts._replace(stage=stage)) if parts and stage else snapshot
