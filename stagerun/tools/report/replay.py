"""Makes the history of a run from the events of its log. Pure.

What was done later takes the place of what was done before. After a kill, the iterations since the resumed snapshot are done again;
with `on_nan: ROLLBACK`, others replace those since the snapshot that training went back to; after `--redo` a stage starts over. The
time that the first took stays with its process life. A piece of a stage that is trained once more replaces nothing, and its time
counts for its life.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from stagerun.base import events
from stagerun.base.recipe import OnNan
from stagerun.base.staleness import staleness_of
from stagerun.base.text import MOST_LISTED, listed
from stagerun.store.layout import parse_name, snapshot_name
from stagerun.tools.report.history import History, Life, StageHistory
from stagerun.tools.report.read_log import Columns, Log, Updates, Work, chunk_size
from stagerun.train.choices import in_words

MOST = 900  # points of a curve


def history(log: Log, most: int = MOST) -> History:
    """A curve keeps at most `most` points. UsageError, PermissionDenied, StorageError as of `read_log`."""
    replay = Replay()
    for time, event in log.events:
        replay.take(time, event)
    return replay.history(log, most)


@dataclass(slots=True)
class _Stage:
    name: str
    started: events.StageStarted | None = None
    start: str = ""
    weights: str = ""
    points: Columns = field(default_factory=Columns)
    tests: dict[tuple[int, bool], events.Tested] = field(default_factory=dict)
    beside: dict[tuple[int, bool, str], events.TestedBeside] = field(default_factory=dict)
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
        return self.started.batch_size if self.started else self.points.images[-1] if self.points.iter else 0

    @property
    def begins(self) -> int:
        return self.started.begins if self.started else 0

    def value(self, size: int, zero: float, step: float | None, gone: bool, disabled: bool) -> StageHistory:
        """`zero`: the epoch of its iteration 0."""
        return StageHistory(
            name=self.name,
            start=self.start,
            weights=self.weights,
            begin=zero + self.begins * (step or 0.0),
            begins=self.begins,
            max_iter=self.started.max_iter if self.started else self.finished.iterations if self.finished else 0,
            batch_size=self.batch_size,
            trained=self.points.trained(size, zero, step),
            tests=tuple((zero + key[0] * (step or 0.0), self.tests[key]) for key in sorted(self.tests)),
            beside=tuple((zero + key[0] * (step or 0.0), self.beside[key]) for key in sorted(self.beside)),
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


@dataclass(slots=True)
class _Life:
    began: float
    ended: float
    run: events.RunStarted | None = None
    start: str = ""
    end: str = ""
    work: Work = field(default_factory=Work)
    again: int = 0


class Replay:
    """Takes events one by one, and has their history at any time."""

    def __init__(self) -> None:
        self.schedule = ""
        self.planned: tuple[str, ...] = ()
        self.disabled: tuple[str, ...] = ()
        self.together: tuple[str, ...] = ()  # the ensembles of the schedule
        self.ensembles: dict[str, events.EnsembleTested] = {}
        self.stages: dict[str, _Stage] = {}
        self.lives: list[_Life] = []
        self.complete = False
        self.names: dict[str, str] = {}  # of snapshots, and their stages', where they were written under another

    def history(self, log: Log, most: int) -> History:
        """A curve keeps at most `most` points."""
        return History(
            schedule=self.schedule,
            stages=tuple(self.staged(most)),
            lives=tuple(self.values(most)),
            complete=self.complete,
            damaged=log.damaged,
            unknown=log.unknown,
            ensembles=tuple(self.ensembles[name] for name in self.together if name in self.ensembles),
            planned_ensembles=self.together,
            names=self.names,
        )

    def order(self) -> list[str]:
        """Stages in running order, then those with training behind them that the schedule no longer trains."""
        others = [name for name in self.stages if name not in self.planned]
        off = [name for name in self.disabled if name in others]
        for name in self.planned:
            self.stages.setdefault(name, _Stage(name))
        return [*self.planned, *off, *(name for name in others if name not in off)]

    def staged(self, most: int) -> Iterator[StageHistory]:
        """As the schedule of the last events.RunStarted has them. Epochs count along the path of ancestors, also where a stage starts at
        the first image again (`carry { data: RESTART }`), and for tests too."""
        names = self.order()
        stages = [self.stages[name] for name in names]
        images = _epoch_images(stages)
        steps = {stage.name: stage.batch_size / images for stage in stages} if images else {}  # epochs per iteration
        size = chunk_size(sum(len(stage.points.iter) for stage in stages), most)
        zeros: dict[str, float] = {}  # where the stage's iteration 0 is, or would be
        for stage in stages:
            place, name = parse_name(stage.start), stage.name
            step = steps.get(name, 0.0)
            zeros[name] = zeros.get(place.stage, 0.0) + place.iter * steps.get(place.stage, 0.0) if place else 0.0
            zeros[name] -= step * stage.begins
            disabled = name in self.disabled
            gone = bool(self.planned) and name not in self.planned and not disabled
            yield stage.value(size, zeros[name], steps.get(name), gone, disabled)

    def values(self, most: int) -> Iterator[Life]:
        size = chunk_size(sum(len(life.work.time) for life in self.lives), most)
        for number, life in enumerate(self.lives, 1):
            run = life.run
            yield Life(
                number=number,
                began=life.began,
                ended=life.ended,
                workers=run.workers if run else 0,
                threads=run.threads if run else 0,
                device=run.device if run else "",
                version=run.version if run else "",
                start=life.start,
                end=life.end,
                again=life.again,
                updates=len(life.work.time),
                images=sum(life.work.images),
                seconds=sum(life.work.seconds),
                speeds=life.work.speeds(size, life.began),
            )

    def take(self, time: float, event: events.Event | Updates) -> None:
        # A process may fail before its events.RunStarted.
        new = (isinstance(event, events.RunStarted) and not self._goes_on(event)) or (
            isinstance(event, events.Failed) and self.lives and self.lives[-1].end
        )
        if new or not self.lives:
            self.lives.append(_Life(time, time))
        life = self.lives[-1]
        life.ended = max(life.ended, time)
        match event:
            case Updates():
                life.ended = max(life.ended, *event.time)
                self._updates(life, event)
            case events.Iterated():
                self._updates(life, _one(time, event, event.epoch, event.weight_decay))
            case events.Retraced():
                # It is not part of the stage's history, which has the iteration already, but it took its time.
                life.work.extend(_one(time, event, 0.0, 0.0))
                life.again += 1
            case events.Synchronised():
                self._stage(event.stage).met.add(event.iter)
            case events.CompressionChosen():
                self._stage(event.stage).chosen = in_words((method, tensors) for method, tensors, *_ in event.methods)
            case events.NotFinite() if event.until is None:
                self._failed(event)
            case events.RunStarted():
                life.run, life.end, self.complete = life.run or event, "", False
                for stage in self.stages.values():  # a kill came before it went on
                    stage.went_back = False
                self.schedule, self.planned, self.together = event.schedule, event.stages, event.ensembles
                self.disabled, self.names = event.disabled, {}
            case events.Renamed():
                self._renamed(event)
            case events.StageStarted():
                self._started(life, event)
            case events.PieceStarted():
                life.start = life.start or f"{event.stage} {event.iter} again"
            case events.Tested():
                self._stage(event.stage).tests[event.iter, event.ema] = event
            case events.TestedBeside():
                self._stage(event.stage).beside[event.iter, event.ema, event.val] = event
            case events.SnapshotWritten():
                if place := parse_name(event.name):
                    stage = self._stage(event.stage)
                    stage.attempt = max(stage.attempt, place.attempt)
            case events.StageFinished():
                self._stage(event.stage).finished = event
            case events.EnsembleTested():
                self.ensembles[event.name] = event
            case events.Stopped():
                life.end = f"stopped ({event.reason})"
            case events.Failed():
                first = event.text.partition("\n")[0]
                life.end = f"ended with exit code {event.code}" + (f": {first}" if first else "")
            case events.RunFinished():
                left = f" (not chosen: {listed(event.not_chosen, MOST_LISTED)})" if event.not_chosen else ""
                life.end, self.complete = "finished" + left, not event.not_chosen
                if not event.trained and not life.work.time:  # it looked, and there was nothing to do
                    self.lives.pop()

    def _goes_on(self, event: events.RunStarted) -> bool:
        """Whether it is of the process of the last life, which has trained stages side by side."""
        before = self.lives[-1].run if self.lives else None
        return event.rest and before is not None and before.side_by_side > 0

    def _stage(self, name: str) -> _Stage:
        return self.stages.setdefault(name, _Stage(name))

    def _started(self, life: _Life, event: events.StageStarted) -> None:
        stage = self._stage(event.stage)
        if stage.finished is not None and 0 < stage.finished.iterations <= event.iter < event.max_iter:
            self._raised(stage.name, stage.finished.iterations)
        self._cut(stage, event.iter)
        back, stage.went_back = stage.went_back, False
        stage.started, stage.finished, stage.chosen = event, None, ""
        if back:  # the same life, and no new beginning
            return
        if event.iter == event.begins:
            stage.rollbacks = 0
        self.ensembles = {k: e for k, e in self.ensembles.items() if not e.undone_by(event.stage, event.iter)}
        life.start = life.start or f"{event.stage} {event.iter}"
        if event.iter == event.begins:
            place, now = parse_name(event.start), self.names.get(event.start)
            stage.start = snapshot_name(*place._replace(stage=now)) if place and now else event.start
            stage.weights, stage.older = event.weights, stage.attempt
        else:
            stage.resumes.append(event.iter)

    def _raised(self, name: str, end: int) -> None:
        """An ensemble of the stage's old end is one of a snapshot in its midst by now."""
        for key, tested in self.ensembles.items():
            members = tuple(f"{name}@{end}" if member == name else member for member in tested.members)
            best = f"{name}@{end}" if tested.best == name else tested.best
            self.ensembles[key] = replace(tested, members=members, best=best)

    def _failed(self, event: events.NotFinite) -> None:
        stage = self._stage(event.stage)
        if event.done == OnNan.SKIP.value:
            stage.skips.add(event.iter)
        elif event.back_to is not None:
            self._cut(stage, event.back_to)
            stage.rollbacks, stage.went_back = event.number, True

    def _renamed(self, event: events.Renamed) -> None:
        """What was done under another name is the stage's own."""
        self.names |= dict.fromkeys(event.snapshots, event.stage)
        for name in event.snapshots:
            place = parse_name(name)
            old = self.stages.get(place.stage) if place else None
            if place is None or old is None or place.attempt <= old.older or event.stage in self.stages:
                continue
            if old.name in (*self.planned, *self.disabled):
                continue
            self._move(self.stages.pop(old.name), event.stage)

    def _move(self, stage: _Stage, name: str) -> None:
        old, stage.name = stage.name, name
        self.stages[name] = stage
        if stage.finished is not None:
            stage.finished = replace(stage.finished, stage=name)
        for child in self.stages.values():
            place = parse_name(child.start)
            if place is not None and place.stage == old:
                child.start = snapshot_name(*place._replace(stage=name))
        for key, tested in self.ensembles.items():
            members = tuple(_renamed(member, old, name) for member in tested.members)
            best = _renamed(tested.best, old, name)
            self.ensembles[key] = replace(tested, members=members, best=best)

    def _updates(self, life: _Life, updates: Updates) -> None:
        stage, iters = self._stage(updates.stage), updates.iter
        falls = [i for i in range(1, len(iters)) if iters[i] <= iters[i - 1]]
        for begin, end in pairwise([0, *falls, len(iters)]):
            # The line that said where it went on is lost.
            if stage.points.iter and stage.points.iter[-1] >= iters[begin]:
                self._cut(stage, iters[begin] - 1)
            dense = stage.started.dense_bytes if stage.started else 0
            stage.points.extend(updates, begin, end, len(self.lives), dense)
        life.work.extend(updates)

    def _cut(self, stage: _Stage, iter: int) -> None:
        """Removes what was done after `iter`: it is done again."""
        for life in stage.points.cut(iter):
            self.lives[life - 1].again += 1
        stage.tests = {key: test for key, test in stage.tests.items() if key[0] <= iter}
        stage.beside = {key: test for key, test in stage.beside.items() if key[0] <= iter}
        stage.resumes = [i for i in stage.resumes if i <= iter]
        stage.skips = {i for i in stage.skips if i < iter}
        stage.met = {i for i in stage.met if i <= iter}


def _one(time: float, e: events.Iterated | events.Retraced, epoch: float, decay: float) -> Updates:
    figures = (e.lr,), (decay,), (e.loss,), (e.images,), (e.seconds,), (e.sent_bytes,)
    pushed = staleness_of([(e.staleness, e.replica)]) if isinstance(e, events.Iterated) else None
    stale, rank = (pushed.largest, *pushed.by_replica) if pushed else (-1, -1)
    return Updates(e.stage, (time,), (e.iter,), (epoch,), *figures, (stale,), (rank,))


def _epoch_images(stages: Sequence[_Stage]) -> int | None:
    """Images of an epoch, from two updates of one stage, or the first one of a stage that starts from the seed."""
    for stage in stages:
        iter, epoch, images = stage.points.iter, stage.points.epoch, stage.points.images
        if len(iter) > 1:
            a, b = 0, len(iter) - 1
            if stage.rollbacks:  # images may be left out in between, but not between the two that lie closest
                b = min(range(1, len(iter)), key=lambda i: (epoch[i] - epoch[i - 1]) / (iter[i] - iter[i - 1]))
                a = b - 1
            if epoch[b] > epoch[a]:
                return round(images[b] * (iter[b] - iter[a]) / (epoch[b] - epoch[a])) or None
        elif iter and parse_name(stage.start) is None and epoch[0] > 0:
            return round(images[0] * iter[0] / epoch[0]) or None
    return None


def _renamed(member: str, old: str, name: str) -> str:
    """A member of an ensemble, `old` or `old@6000`, under the name that its stage has now."""
    stage, mark, iter = member.partition("@")
    return f"{name}{mark}{iter}" if stage == old else member
