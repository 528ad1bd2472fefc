"""Reads OUT/log.jsonl into the history of a run, also while the run appends to it. Takes no lock.

What was done later takes the place of what was done before. After a kill, the iterations since the resumed snapshot are done again;
with `on_nan: ROLLBACK`, others replace those since the snapshot that training went back to; after `--redo` a stage starts over. The
time that the first took stays with its process life. A piece of a stage that is trained once more replaces nothing, and its time
counts for its life.
"""

import os
import statistics
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import ClassVar

from stagerun.base import events
from stagerun.base.errors import PermissionDenied, StorageError, UsageError
from stagerun.base.pace import staleness_of
from stagerun.base.recipe import OnNan
from stagerun.base.text import MOST_LISTED, listed
from stagerun.logs.lines import failed_line
from stagerun.logs.log_file import LOG, Log
from stagerun.store.layout import parse_name, snapshot_name
from stagerun.tools.report.history import History, Incident, Life, Span, StageHistory, Trained, epoch_number

POINTS = 900  # of all curves of a run
MOST_INCIDENTS = 1000  # the newest: a broken run may warn at every iteration


class Reader:
    """The history of the run in an output folder. Each `read` goes on where the one before ended, and from the start of a log that was
    replaced or cut. Curves keep `points` in all."""

    def __init__(self, out: Path, points: int = POINTS) -> None:
        self.out, self.points = out, points
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self._inode, self._log, self._replay = inode, Log(self.out / LOG), _Replay()

    def read(self) -> History:
        """UsageError if there is no log or nothing in it, PermissionDenied or StorageError if it can't be read."""
        with _reading(self.out) as found:
            if found.st_ino != self._inode or found.st_size < self._log.at:
                self._begin(found.st_ino)
            for time, event in self._log:
                self._replay.take(time, event)
        if not self._replay.lives:
            hint = "wait until the run has started, or name another folder"
            raise UsageError(f"{self.out / LOG} holds no event of a run", hint)
        return self._replay.history(self._log, self.points)


def events_in(out: Path) -> Iterator[tuple[float, events.Event]]:
    """All events of the log. Errors as of `Reader.read`."""
    with _reading(out):
        yield from Log(out / LOG)


@contextmanager
def _reading(out: Path) -> Iterator[os.stat_result]:
    path = out / LOG
    try:
        yield os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(*_no_log(out)) from error
    except PermissionError as error:
        raise PermissionDenied(f"{path} may not be read", "ask its owner for permission") from error
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}", "check the disk") from error


def is_schedule(folder: Path) -> bool:
    return os.path.isfile(folder / "schedule.prototxt")


def _no_log(out: Path) -> tuple[str, str]:
    """Message and hint."""
    if os.path.isfile(out):
        hint = f"name the output folder: {out.parent}" if out.name == LOG else "name an output folder"
        return f"{out} is a file", hint
    hint = "name the output folder of a run: ./out/NAME, or what --out named"
    if not os.path.exists(out):
        return f"there is no folder {out}", hint
    return f"{out} is the folder of a schedule" if is_schedule(out) else f"{out} has no {LOG}", hint


# -- what counts of a stage


class _Updates:
    """The updates that count of a stage, `iter` ascending, field by field: a log may have millions. `life`: which process life did each;
    `dense`: the bytes that rank 0 would have sent without compression; `staleness`: -1 where an iteration is no push."""

    KINDS: ClassVar[dict[str, str]] = {
        "iter": "q", "images": "q", "sent_bytes": "q", "epoch": "d", "lr": "d", "weight_decay": "d", "loss": "d", "seconds": "d",
        "life": "i", "dense": "q", "staleness": "q",
    }  # fmt: skip

    def __init__(self) -> None:
        self.of = {name: array(kind) for name, kind in self.KINDS.items()}
        self._sums: tuple[tuple[object, ...], Trained | None] | None = (
            None  # as of the last look: few stages have changed
        )

    def __len__(self) -> int:
        return len(self.of["iter"])

    @property
    def last(self) -> int:
        return self.of["iter"][-1] if len(self) else -1

    def append(self, event: events.Iterated, life: int, dense: int) -> None:
        self._sums = None
        e, stale = event, -1 if event.staleness is None else event.staleness
        own = e.iter, e.images, e.sent_bytes, e.epoch, e.lr, e.weight_decay, e.loss, e.seconds, life, dense, stale
        for column, value in zip(self.of.values(), own, strict=True):
            column.append(value)  # type: ignore[arg-type]

    def cut(self, iter: int) -> Sequence[int]:
        """Removes what was done after `iter`. Returns the lives that had done it."""
        keep = bisect_right(self.of["iter"], iter)
        lives = self.of["life"][keep:]
        if lives:
            self._sums = None
            for column in self.of.values():
                del column[keep:]
        return lives

    def trained(self, size: int, zero: float, step: float) -> Trained | None:
        """A point of the curve stands for `size` updates. Epochs are `zero + iter * step`."""
        if self._sums is None or self._sums[0] != (size, zero, step):
            self._sums = (size, zero, step), self._summed(size, zero, step) if len(self) else None
        return self._sums[1]

    def _summed(self, size: int, zero: float, step: float) -> Trained:
        of = self.of
        iters, lr, loss = of["iter"], of["lr"], of["loss"]

        def point(a: int) -> tuple[float, float]:
            b = min(a + size, len(self))
            return iters[b - 1] - (b - a - 1) / 2, sum(loss[a:b]) / (b - a)

        epochs, begin = {}, 0
        for number, same in groupby(epoch_number(zero + i * step) for i in iters):
            end = begin + sum(1 for _ in same)
            images, seconds = sum(of["images"][begin:end]), sum(of["seconds"][begin:end])
            epochs[number] = Span(end - begin, images, seconds, sum(loss[begin:end]), lr[end - 1])
            begin = end
        sent = [sent for sent, dense in zip(of["sent_bytes"], of["dense"], strict=True) if dense]
        return Trained(
            iter=iters[-1],
            updates=len(self),
            images=sum(of["images"]),
            seconds=sum(of["seconds"]),
            first_lr=lr[0],
            last_lr=lr[-1],
            weight_decay=of["weight_decay"][-1],
            loss=statistics.fmean(loss[-100:]),
            losses=tuple(map(point, range(0, len(self), size))),
            epochs=epochs,
            lives=tuple(dict.fromkeys(of["life"])),
            # Over the iterations of which it is known what dense would have sent; over all where that is what they sent.
            sent=statistics.fmean(sent or of["sent_bytes"]) if any(of["sent_bytes"]) else None,
            of_dense=sum(sent) / sum(of["dense"]) if sent else None,
            staleness=staleness_of(stale for stale in of["staleness"] if stale >= 0),
        )

    def images_of_epoch(self, start: str) -> int | None:
        """By the two neighbours that lie closest among the last ones: a rollback may leave images out in between. Of a stage that starts from
        a seed the first update is enough."""
        iters, epochs, images = self.of["iter"][-50:], self.of["epoch"][-50:], self.of["images"]
        steps = [(f - e) / (j - i) for (i, j), (e, f) in zip(pairwise(iters), pairwise(epochs), strict=True)]
        if not steps and iters and parse_name(start) is None:
            steps = [epochs[0] / iters[0]] if iters[0] else []
        least = min(steps, default=0.0)
        return round(images[-1] / least) or None if least > 0 else None


@dataclass(slots=True)
class _Stage:
    name: str
    started: events.StageStarted | None = None
    start: str = ""
    weights: str = ""
    updates: _Updates = field(default_factory=_Updates)
    tests: dict[tuple[int, bool], events.Tested] = field(default_factory=dict)
    resumes: list[int] = field(default_factory=list)
    finished: events.StageFinished | None = None
    attempt: int = 0
    older: int = 0
    skips: set[int] = field(default_factory=set)
    rollbacks: int = 0
    went_back: bool = False
    chosen: str = ""  # by AUTO, in words
    met: set[int] = field(default_factory=set)  # iterations

    @property
    def batch_size(self) -> int:
        return self.started.batch_size if self.started else self.updates.of["images"][-1] if len(self.updates) else 0

    @property
    def begins(self) -> int:
        return self.started.begins if self.started else 0

    def value(self, size: int, zero: float, step: float, gone: bool, disabled: bool) -> StageHistory:
        """`zero`: the epoch of its iteration 0; `step`: epochs of an iteration."""
        return StageHistory(
            name=self.name,
            start=self.start,
            weights=self.weights,
            begin=zero + self.begins * step,
            epochs_each=step,
            begins=self.begins,
            max_iter=self.started.max_iter if self.started else self.finished.iterations if self.finished else 0,
            batch_size=self.batch_size,
            trained=self.updates.trained(size, zero, step),
            tests=tuple(self.tests[key] for key in sorted(self.tests)),
            resumes=tuple(self.resumes),
            finished=self.finished,
            skips=self.finished.skips if self.finished else len(self.skips),
            rollbacks=self.finished.rollbacks if self.finished else self.rollbacks,
            older=self.older,
            gone=gone,
            disabled=disabled,
            gradients=f"AUTO: {self.chosen}" if self.chosen else self.started.gradients if self.started else "",
            synchronisations=len(self.met),
        )


class _Replay:
    """Takes events one by one, and has their history at any time."""

    def __init__(self) -> None:
        self.run: events.RunStarted | None = None
        self.ensembles: dict[str, events.EnsembleTested] = {}
        self.stages: dict[str, _Stage] = {}
        self.lives: list[Life] = []
        self.complete = False
        self.names: dict[str, str] = {}  # of snapshots, and their stages', where they were written under another
        self.now: tuple[str, int] | None = None
        self.incidents: deque[Incident] = deque(maxlen=MOST_INCIDENTS)
        self._resumed = False  # this life has yet to say where it goes on

    # -- as a value

    def history(self, log: Log, points: int) -> History:
        run = self.run
        together = run.ensembles if run else ()
        return History(
            schedule=run.schedule if run else "",
            stages=tuple(self._staged(points)),
            lives=tuple(replace(life) for life in self.lives),
            complete=self.complete,
            damaged=log.damaged,
            unknown=log.unknown,
            ensembles=tuple(self.ensembles[name] for name in together if name in self.ensembles),
            planned_ensembles=together,
            names=dict(self.names),
            now=self.now,
            incidents=tuple(self.incidents),
        )

    def _staged(self, points: int) -> Iterator[StageHistory]:
        """In running order, then those with training behind them that the schedule no longer trains. Epochs count along the path of
        ancestors, also where a stage starts at the first image again (`carry { data: RESTART }`)."""
        planned, disabled = (self.run.stages, self.run.disabled) if self.run else ((), ())
        others = [name for name in self.stages if name not in planned]
        off = [name for name in disabled if name in others]
        names = [*planned, *off, *(name for name in others if name not in off)]
        stages = [self.stages.get(name) or _Stage(name) for name in names]
        images = next((n for s in stages if (n := s.updates.images_of_epoch(s.start))), None)
        steps = {stage.name: stage.batch_size / images if images else 0.0 for stage in stages}
        size = max(1, -(-sum(len(stage.updates) for stage in stages) // points))
        zeros: dict[str, float] = {}  # where the stage's iteration 0 is, or would be
        for stage in stages:
            place, step = parse_name(stage.start), steps[stage.name]
            above = zeros.get(place.stage, 0.0) + place.iter * steps.get(place.stage, 0.0) if place else 0.0
            zeros[stage.name] = above - step * stage.begins
            gone = bool(planned) and stage.name not in planned and stage.name not in disabled
            yield stage.value(size, zeros[stage.name], step, gone, stage.name in disabled)

    # -- events

    def take(self, time: float, event: events.Event) -> None:
        started, ended = isinstance(event, events.RunStarted), bool(self.lives) and bool(self.lives[-1].end)
        # A process that has trained stages side by side starts once more for the rest. One may fail before its RunStarted.
        goes_on = isinstance(event, events.RunStarted) and event.rest and self.run is not None and self.run.side_by_side
        if not self.lives or (started and not goes_on) or (isinstance(event, events.Failed) and ended):
            self.lives.append(Life(number=len(self.lives) + 1, began=time, ended=time))
            self._resumed = len(self.lives) > 1
        life = self.lives[-1]
        life.ended = max(life.ended, time)
        match event:
            case events.Iterated():
                self._iterated(life, event)
            case events.Retraced():
                # It is not part of the stage's history, which has the iteration already, but it took its time.
                _work(life, event)
                life.again += 1
            case events.RunStarted():
                self._run_started(life, event)
            case events.Renamed():
                self._renamed(event)
            case events.StageStarted():
                self._stage_started(life, event)
            case events.PieceStarted():
                life.start = life.start or f"{event.stage} {event.iter} again"
            case events.Synchronised():
                self._stage(event.stage).met.add(event.iter)
            case events.CompressionChosen():
                self._stage(event.stage).chosen = event.words
            case events.NotFinite():
                self._not_finite(event)
            case events.Tested():
                self._stage(event.stage).tests[event.iter, event.ema] = event
            case events.SnapshotWritten():
                if place := parse_name(event.name):
                    stage = self._stage(event.stage)
                    stage.attempt = max(stage.attempt, place.attempt)
            case events.SnapshotFailed():
                self._incident("warning", event.message)
            case events.Note(warning=True):
                self._incident("warning", event.text)
            case events.StageFinished():
                self._stage(event.stage).finished = event
            case events.EnsembleTested():
                self.ensembles[event.name] = event
            case events.Stopped():
                life.end = f"stopped ({event.reason})"
            case events.Failed():
                first = event.text.partition("\n")[0]
                life.end = f"ended with exit code {event.code}" + (f": {first}" if first else "")
                if first:
                    self._incident("warning", first)
            case events.RunFinished():
                left = f" (not chosen: {listed(event.not_chosen, MOST_LISTED)})" if event.not_chosen else ""
                life.end, self.complete = "finished" + left, not event.not_chosen
                if not event.trained and not life.updates:  # it looked, and there was nothing to do
                    self.lives.pop()

    def _stage(self, name: str) -> _Stage:
        if name not in self.stages:
            self.stages[name] = _Stage(name)
        return self.stages[name]

    def _incident(self, kind: str, text: str) -> None:
        if self.now is not None:
            self.incidents.append(Incident(*self.now, kind, text))

    def _run_started(self, life: Life, event: events.RunStarted) -> None:
        if not life.device:
            life.workers, life.threads = event.workers, event.threads
            life.device, life.version = event.device, event.version
        life.end, self.complete, self.run, self.names = "", False, event, {}
        for stage in self.stages.values():  # a kill came before it went on
            stage.went_back = False

    def _iterated(self, life: Life, event: events.Iterated) -> None:
        stage = self._stage(event.stage)
        if event.iter <= stage.updates.last:  # the line that said where it went on is lost
            self._cut(stage, event.iter - 1)
        stage.updates.append(event, len(self.lives), stage.started.dense_bytes if stage.started else 0)
        self.now = event.stage, event.iter
        _work(life, event)

    def _stage_started(self, life: Life, event: events.StageStarted) -> None:
        stage = self._stage(event.stage)
        if stage.finished is not None and 0 < stage.finished.iterations <= event.iter < event.max_iter:
            # An ensemble of the stage's old end is one of a snapshot in its midst by now.
            self._rename_members(stage.name, f"{stage.name}@{stage.finished.iterations}", whole=True)
        self._cut(stage, event.iter)
        self.now = event.stage, event.iter
        anew = event.iter == event.begins
        if anew:  # what happened before is not of this training
            self.incidents = deque((one for one in self.incidents if one.stage != event.stage), MOST_INCIDENTS)
        if self._resumed:
            where = f"process life {len(self.lives)} goes on with {event.stage} at {event.iter}"
            self._incident("restart", where)
        self._resumed = False
        back, stage.went_back = stage.went_back, False
        stage.started, stage.finished, stage.chosen = event, None, ""
        if back:  # the same life, and no new beginning
            return
        self.ensembles = {k: e for k, e in self.ensembles.items() if not e.undone_by(event.stage, event.iter)}
        life.start = life.start or f"{event.stage} {event.iter}"
        if anew:
            place, now = parse_name(event.start), self.names.get(event.start)
            stage.start = snapshot_name(*place._replace(stage=now)) if place and now else event.start
            stage.weights, stage.older, stage.rollbacks = event.weights, stage.attempt, 0
        else:
            stage.resumes.append(event.iter)

    def _not_finite(self, event: events.NotFinite) -> None:
        self._incident("rollback" if event.back_to is not None else "warning", failed_line(event))
        if event.until is not None:  # in a piece
            return
        stage = self._stage(event.stage)
        if event.done == OnNan.SKIP.value:
            stage.skips.add(event.iter)
        elif event.back_to is not None:
            self._cut(stage, event.back_to)
            stage.rollbacks, stage.went_back = event.number, True

    def _cut(self, stage: _Stage, iter: int) -> None:
        """Removes what was done after `iter`: it is done again."""
        for life in stage.updates.cut(iter):
            self.lives[life - 1].again += 1
        stage.tests = {key: test for key, test in stage.tests.items() if key[0] <= iter}
        stage.resumes = [i for i in stage.resumes if i <= iter]
        stage.skips = {i for i in stage.skips if i < iter}
        stage.met = {i for i in stage.met if i <= iter}

    def _renamed(self, event: events.Renamed) -> None:
        """What was done under another name is the stage's own."""
        self.names |= dict.fromkeys(event.snapshots, event.stage)
        for place in filter(None, map(parse_name, event.snapshots)):
            old = self.stages.get(place.stage)
            planned = (*self.run.stages, *self.run.disabled) if self.run else ()
            if old is None or place.attempt <= old.older or event.stage in self.stages or old.name in planned:
                continue
            stage = self.stages[event.stage] = self.stages.pop(old.name)
            stage.name = event.stage
            if stage.finished is not None:
                stage.finished = replace(stage.finished, stage=event.stage)
            for child in self.stages.values():
                start = parse_name(child.start)
                if start is not None and start.stage == place.stage:
                    child.start = snapshot_name(*start._replace(stage=event.stage))
            self._rename_members(place.stage, event.stage)

    def _rename_members(self, old: str, new: str, whole: bool = False) -> None:
        """Members of ensembles are `old` or `old@6000`; `whole`: the former alone."""

        def renamed(member: str) -> str:
            stage, mark, iter = member.partition("@")
            return f"{new}{mark}{iter}" if stage == old and not (whole and mark) else member

        for key, tested in self.ensembles.items():
            members = tuple(map(renamed, tested.members))
            self.ensembles[key] = replace(tested, members=members, best=renamed(tested.best))


def _work(life: Life, event: events.Iterated | events.Retraced) -> None:
    life.updates += 1
    life.images += event.images
    life.seconds += event.seconds
