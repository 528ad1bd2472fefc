"""From the events of a log to the history of its run. Pure.

After a kill the iterations since the snapshot that was resumed are done again, with `on_nan: ROLLBACK` others take the place of
those since the snapshot that training went back to, and after `--redo` a stage begins anew: what was done later takes the place of
what was done before. The time that the first took stays with its process life. A piece of a stage that is trained once more takes
nobody's place, and its time is its life's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stagerun.events import (
    EnsembleTested,
    Event,
    Failed,
    Iterated,
    NotFinite,
    PieceStarted,
    Renamed,
    Retraced,
    RunFinished,
    RunStarted,
    SnapshotWritten,
    StageFinished,
    StageStarted,
    Stopped,
    Tested,
)
from stagerun.recipe import OnNan
from stagerun.report.history import History, Life, Point, StageHistory
from stagerun.report.read_log import Log
from stagerun.store.layout import parse_name, snapshot_name


def history(log: Log) -> History:
    reader = _Reader()
    for time, event in log.events:
        reader.take(time, event)
    stages = _with_epochs([reader.value(name) for name in reader.order()])
    return History(
        schedule=reader.schedule,
        stages=tuple(stages),
        lives=tuple(reader.values()),
        complete=reader.complete,
        damaged=log.damaged,
        unknown=log.unknown,
        ensembles=tuple(reader.ensembles[name] for name in reader.together if name in reader.ensembles),
        planned_ensembles=reader.together,
        names=reader.names,
    )


@dataclass(slots=True)
class _Stage:
    name: str
    started: StageStarted | None = None
    start: str = ""
    points: list[Point] = field(default_factory=list)
    tests: dict[tuple[int, bool], Tested] = field(default_factory=dict)
    resumes: list[int] = field(default_factory=list)
    finished: StageFinished | None = None
    attempt: int = 0
    older: int = 0
    skips: set[int] = field(default_factory=set)
    rollbacks: int = 0
    went_back: bool = False

    def value(self, gone: bool, disabled: bool) -> StageHistory:
        return StageHistory(
            name=self.name,
            start=self.start,
            max_iter=self.started.max_iter if self.started else self.finished.iterations if self.finished else 0,
            batch_size=self.started.batch_size if self.started else self.points[-1].images if self.points else 0,
            points=tuple(self.points),
            tests=tuple((0.0, self.tests[key]) for key in sorted(self.tests)),
            resumes=tuple(self.resumes),
            finished=self.finished,
            skips=self.finished.skips if self.finished else len(self.skips),
            rollbacks=self.finished.rollbacks if self.finished else self.rollbacks,
            older=self.older,
            gone=gone,
            disabled=disabled,
        )


@dataclass(slots=True)
class _Life:
    begun: float
    ended: float
    run: RunStarted | None = None
    start: str = ""
    end: str = ""
    work: list[Point] = field(default_factory=list)
    again: int = 0


class _Reader:
    """Takes events one by one."""

    def __init__(self) -> None:
        self.schedule = ""
        self.planned: tuple[str, ...] = ()
        self.disabled: tuple[str, ...] = ()
        self.together: tuple[str, ...] = ()  # the ensembles of the schedule
        self.ensembles: dict[str, EnsembleTested] = {}
        self.stages: dict[str, _Stage] = {}
        self.lives: list[_Life] = []
        self.complete = False
        self.names: dict[str, str] = {}  # of snapshots, and their stages', where they were written under another

    def order(self) -> list[str]:
        """Stages in running order, and then of those that the schedule does not train what was trained before."""
        others = [name for name in self.stages if name not in self.planned]
        off = [name for name in self.disabled if name in others]
        for name in self.planned:
            self.stages.setdefault(name, _Stage(name))
        return [*self.planned, *off, *(name for name in others if name not in off)]

    def value(self, stage: str) -> StageHistory:
        """As the schedule of the last RunStarted has it."""
        disabled = stage in self.disabled
        return self.stages[stage].value(bool(self.planned) and stage not in self.planned and not disabled, disabled)

    def values(self) -> Iterable[Life]:
        for number, life in enumerate(self.lives, 1):
            run = life.run
            yield Life(
                number=number,
                begun=life.begun,
                ended=life.ended,
                workers=run.workers if run else 0,
                threads=run.threads if run else 0,
                device=run.device if run else "",
                version=run.version if run else "",
                start=life.start,
                end=life.end,
                work=tuple(life.work),
                again=life.again,
            )

    def take(self, time: float, event: Event) -> None:
        # A process may fail before its RunStarted.
        new = isinstance(event, RunStarted) or (isinstance(event, Failed) and self.lives and self.lives[-1].end)
        if new or not self.lives:
            self.lives.append(_Life(time, time))
        life = self.lives[-1]
        life.ended = max(life.ended, time)
        match event:
            case Iterated():
                self._iterated(life, time, event)
            case Retraced():
                self._retraced(life, time, event)
            case NotFinite() if event.until is None:
                self._failed(event)
            case RunStarted():
                life.run, self.complete = event, False
                for stage in self.stages.values():  # a kill came before it went on
                    stage.went_back = False
                self.schedule, self.planned, self.together = event.schedule, event.stages, event.ensembles
                self.disabled, self.names = event.disabled, {}
            case Renamed():
                self._renamed(event)
            case StageStarted():
                self._started(life, event)
            case PieceStarted():
                life.start = life.start or f"{event.stage} {event.iter} again"
            case Tested():
                self._stage(event.stage).tests[event.iter, event.ema] = event
            case SnapshotWritten():
                if place := parse_name(event.name):
                    stage = self._stage(event.stage)
                    stage.attempt = max(stage.attempt, place.attempt)
            case StageFinished():
                self._stage(event.stage).finished = event
            case EnsembleTested():
                self.ensembles[event.name] = event
            case Stopped():
                life.end = f"stopped ({event.reason})"
            case Failed():
                life.end = _error(event)
            case RunFinished():
                left = f" (not chosen: {', '.join(event.not_chosen)})" if event.not_chosen else ""
                life.end, self.complete = "finished" + left, not event.not_chosen
                if not event.trained:  # it looked, and there was nothing to do
                    self.lives.pop()

    def _stage(self, name: str) -> _Stage:
        return self.stages.setdefault(name, _Stage(name))

    def _started(self, life: _Life, event: StageStarted) -> None:
        stage = self._stage(event.stage)
        self._cut(stage, event.iter)
        back, stage.went_back = stage.went_back, False
        stage.started, stage.finished = event, None
        if back:  # the same life, and no new beginning
            return
        if event.iter == 0:
            stage.rollbacks = 0
        self.ensembles = {k: e for k, e in self.ensembles.items() if event.stage not in e.members}
        life.start = life.start or f"{event.stage} {event.iter}"
        if event.iter == 0:
            place, now = parse_name(event.start), self.names.get(event.start)
            stage.start = snapshot_name(*place._replace(stage=now)) if place and now else event.start
            stage.older = stage.attempt
        else:
            stage.resumes.append(event.iter)

    def _failed(self, event: NotFinite) -> None:
        stage = self._stage(event.stage)
        if event.done == OnNan.SKIP.value:
            stage.skips.add(event.iter)
        elif event.back_to is not None:
            self._cut(stage, event.back_to)
            stage.rollbacks, stage.went_back = event.number, True

    def _renamed(self, event: Renamed) -> None:
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
            members = tuple(name if member == old else member for member in tested.members)
            best = name if tested.best == old else tested.best
            self.ensembles[key] = replace(tested, members=members, best=best)

    def _iterated(self, life: _Life, time: float, event: Iterated) -> None:
        stage = self._stage(event.stage)
        if stage.points and stage.points[-1].iter >= event.iter:  # the line that said where it went on is lost
            self._cut(stage, event.iter - 1)
        life_number = len(self.lives)
        point = Point(
            event.iter, event.epoch, event.lr, event.weight_decay, event.loss, event.images, event.seconds, time, life_number,
        )  # fmt: skip
        stage.points.append(point)
        life.work.append(point)

    def _retraced(self, life: _Life, time: float, event: Retraced) -> None:
        """It is no part of the stage's history, which has the iteration already, but it took its time."""
        point = Point(
            event.iter, 0.0, event.lr, 0.0, event.loss, event.images, event.seconds, time, len(self.lives),
        )  # fmt: skip
        life.work.append(point)
        life.again += 1

    def _cut(self, stage: _Stage, iter: int) -> None:
        """Takes back what was done after `iter`: it is done again."""
        while stage.points and stage.points[-1].iter > iter:
            self.lives[stage.points.pop().life - 1].again += 1
        stage.tests = {key: test for key, test in stage.tests.items() if key[0] <= iter}
        stage.resumes = [i for i in stage.resumes if i <= iter]
        stage.skips = {i for i in stage.skips if i < iter}


def _error(event: Failed) -> str:
    first = event.text.partition("\n")[0]
    return f"ended with exit code {event.code}" + (f": {first}" if first else "")


def _with_epochs(stages: list[StageHistory]) -> list[StageHistory]:
    """With epochs counted along the path of ancestors, also where a stage starts at the first image again
    (`carry { data: RESTART }`), and for tests too."""
    images = _epoch_images(stages)
    if images is None:
        return stages
    begins: dict[str, float] = {}
    steps = {stage.name: stage.batch_size / images for stage in stages}  # epochs per iteration
    found = []
    for stage in stages:
        place, step = parse_name(stage.start), steps[stage.name]
        begin = begins.get(place.stage, 0.0) + place.iter * steps.get(place.stage, 0.0) if place else 0.0
        begins[stage.name] = begin
        points = tuple(p._replace(epoch=begin + p.iter * step) for p in stage.points)
        tests = tuple((begin + test.iter * step, test) for _, test in stage.tests)
        found.append(replace(stage, begin=begin, points=points, tests=tests))
    return found


def _epoch_images(stages: list[StageHistory]) -> int | None:
    """Images of an epoch, from two updates of one stage, or the first one of a stage that starts from the seed."""
    for stage in stages:
        if len(stage.points) > 1:
            a, b = stage.points[0], stage.points[-1]
            if stage.rollbacks:  # images may be left out in between, but not between the two that lie closest
                pairs = zip(stage.points, stage.points[1:], strict=False)
                a, b = min(pairs, key=lambda pair: (pair[1].epoch - pair[0].epoch) / (pair[1].iter - pair[0].iter))
            if b.epoch > a.epoch:
                return round(b.images * (b.iter - a.iter) / (b.epoch - a.epoch)) or None
        elif stage.points and stage.parent is None and stage.points[0].epoch > 0:
            return round(stage.points[0].images * stage.points[0].iter / stage.points[0].epoch) or None
    return None
