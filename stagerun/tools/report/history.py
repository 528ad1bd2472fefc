"""What a run has done over all its process lives, and how its report sees it: values. No I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stagerun.base.events import EnsembleTested, StageFinished, Tested
from stagerun.base.pace import Staleness
from stagerun.store.layout import parse_name

# An epoch ends with an update, but for what sums of fractions may be off by.
_ROUNDING = 1e-6


def epoch_number(epoch: float) -> int:
    """The epoch, 1-based, that ends at or after `epoch` epochs."""
    return max(1, math.ceil(epoch - _ROUNDING))


class Span(NamedTuple):
    """Updates of a stage in one epoch: sums over all of them. `lr` is the last one's."""

    updates: int
    images: int
    seconds: float
    loss: float
    lr: float


class Incident(NamedTuple):
    """What happened to a run, and where. `kind`: rollback, warning or restart."""

    stage: str
    iter: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the updates of a stage come to. `losses`, (iteration, mean), are thinned for curves; all else is over every update. `loss` is the
    mean over the last updates, 100 at most. `epochs` count along the stage's path of ancestors. `lives`: the process lives (1-based)
    that did the updates."""

    iter: int
    updates: int
    images: int
    seconds: float
    first_lr: float
    last_lr: float
    weight_decay: float
    loss: float
    losses: tuple[tuple[float, float], ...]
    epochs: Mapping[int, Span]
    lives: tuple[int, ...]
    sent: float | None = None  # bytes of rank 0 in an iteration, with several workers
    of_dense: float | None = None  # where the stage doesn't add up all gradients as they are
    staleness: Staleness | None = None  # of a stage with `method: ASYNC`


@dataclass(slots=True, kw_only=True)
class Life:
    """One process life, from RunStarted to its last line. Where that line is lost, workers is 0 and device ''.

    `updates`, `images` and `seconds` (of training, without evaluation) are of all its iterations, those of pieces of stages among
    them. `again` of them were done twice: by a later life, too, or as a piece. `end` is '' where the log doesn't say how it ended.
    """

    number: int
    began: float
    ended: float
    workers: int = 0
    threads: int = 0
    device: str = ""
    version: str = ""
    start: str = ""
    end: str = ""
    again: int = 0
    updates: int = 0
    images: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHistory:
    """What counts of a stage. `start` is the snapshot it began from or `seed N`, `weights` the file with its weights; `resumes` are the
    iterations at which a later life went on. `begin` is in epochs along its path, of which each iteration is `epochs_each`. `max_iter` is 0
    where the log has lost it. `older` is the highest attempt at a snapshot of this stage from before it last started over. `gone`: the
    schedule has it no longer. `disabled`: it has it, with `enabled: false`. `skips` and `rollbacks`: as of StageFinished, so far.
    """

    name: str
    start: str = ""
    weights: str = ""
    begin: float = 0.0
    epochs_each: float = 0.0
    begins: int = 0  # the first iteration, that of a `solverstate`
    max_iter: int = 0
    batch_size: int = 0
    trained: Trained | None = None  # where the log has updates of it
    tests: tuple[Tested, ...] = ()  # in the order of (iter, ema)
    resumes: tuple[int, ...] = ()
    finished: StageFinished | None = None
    skips: int = 0
    rollbacks: int = 0
    older: int = 0
    gone: bool = False
    disabled: bool = False
    gradients: str = ""  # how they are sent, in words, where they aren't added up as they are at every iteration
    synchronisations: int = 0  # of replicas

    @property
    def left_out(self) -> bool:
        """Whether a run of the schedule passes it over."""
        return self.gone or self.disabled

    @property
    def parent(self) -> str | None:
        return place.stage if (place := parse_name(self.start)) else None

    @property
    def average(self) -> str:
        """The ensemble whose averaged weights it started with; '' for another stage."""
        return self.weights if self.parent else ""

    @property
    def parent_iter(self) -> int:
        """The iteration of its parent that it started from; 0 for the seed."""
        return place.iter if (place := parse_name(self.start)) else 0

    @property
    def parent_attempt(self) -> int:
        """The attempt of the snapshot that it started from; 0 for the seed."""
        return place.attempt if (place := parse_name(self.start)) else 0

    @property
    def iter(self) -> int:
        return self.trained.iter if self.trained else 0

    def epoch(self, iter: int) -> float:
        """Along its path of ancestors."""
        return self.begin + (iter - self.begins) * self.epochs_each

    @property
    def epochs(self) -> float:
        return self.epoch(self.iter) - self.begin if self.trained else 0.0

    @property
    def seconds(self) -> float:
        return self.finished.train_seconds if self.finished else self.trained.seconds if self.trained else 0.0

    @property
    def images_per_second(self) -> float | None:
        if self.finished and self.finished.images_per_second:
            return self.finished.images_per_second
        return self.trained.images / self.trained.seconds if self.trained and self.trained.seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`stages` are in running order, with those still to come; then those that are disabled or gone.
    `complete`: nothing was left to do at its end.

    `ensembles` are those of the schedule that were evaluated, and whose members have not been trained since. `names`: by its name
    the stage of a snapshot that was written when the stage was called otherwise. `now`: where the run is; None before its first stage.
    """

    schedule: str
    stages: tuple[StageHistory, ...]
    lives: tuple[Life, ...]
    complete: bool
    damaged: int
    unknown: int
    ensembles: tuple[EnsembleTested, ...] = ()
    planned_ensembles: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    now: tuple[str, int] | None = None
    incidents: tuple[Incident, ...] = ()
    _named: Mapping[str, StageHistory] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_named", {stage.name: stage for stage in reversed(self.stages)})

    def stage(self, name: str) -> StageHistory | None:
        return self._named.get(name)

    def follows(self, stage: StageHistory) -> StageHistory | None:
        """The stage at whose end it started; None for one that started from the seed or from the midst of another."""
        parent = self.stage(stage.parent) if stage.parent else None
        length = parent.finished.iterations if parent and parent.finished else parent.max_iter if parent else 0
        return parent if parent is not None and stage.parent_iter >= length else None

    @property
    def wall_seconds(self) -> float:
        """Over all process lives, without the time between them."""
        return sum(life.ended - life.began for life in self.lives)


# -- with what its snapshots were made from


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`identities` and `environments` (`snapshots.SnapshotRef`) hold, for each stage that has a snapshot, those of its end, or
    of the newest one that counts; identities in the words of this version. `stale` are finished stages that were trained from
    another end of their parent than it has now, and what follows from them. `results` are those of the snapshots that ensembles
    were made from, as far as they are there, by the snapshot's id. `before`: by stage, top-1 of the average or snapshot that it started from,
    where that is known and is not its parent's end as it is now. `word` is what
    `status` says of a process life whose end the log doesn't have; `alive`: whether it still runs. `snapshots`: (stage, iteration) of those
    on disk.
    """

    label: str
    history: History
    identities: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stale: frozenset[str] = frozenset()
    results: Mapping[str, StageFinished] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    alive: bool = False
    word: str = ""
    out: Path = Path()
    snapshots: frozenset[tuple[str, int]] = frozenset()

    def path(self, stage: StageHistory) -> list[StageHistory]:
        """The stage and its ancestors, itself first."""
        found = {stage.name: stage}  # a damaged log may lead in a circle
        while stage.parent and (parent := self.history.stage(stage.parent)) and parent.name not in found:
            found[parent.name] = stage = parent
        return [*found.values()]

    def seed(self, stage: StageHistory) -> str:
        """The seeds that the stage and its ancestors drew from, oldest first, `3` or `3, 7`; '' if nothing says."""
        seeds: list[str] = []
        for step in reversed(self.path(stage)):
            identity = self.identities.get(step.name)
            seed = identity.get("solver.random_seed", "") if identity else step.start.removeprefix("seed ")
            if seed and seed not in seeds and (identity or step.parent is None):
                seeds.append(seed)
        return ", ".join(seeds)

    def gain(self, stage: StageHistory) -> float | None:
        """Top-1 against the stage where it started, or the average, as a fraction; None where one of them was not evaluated, or is
        another now."""
        before, after = self._before(stage), stage.finished.top1 if stage.finished else None
        return None if before is None or after is None else after - before

    def _before(self, stage: StageHistory) -> float | None:
        if stage.average or stage.name in self.before:
            return self.before.get(stage.name)
        if stage.name in self.stale:
            return None
        if (parent := self.history.follows(stage)) is not None:
            return parent.finished.top1 if parent.finished else None
        # From the midst of a stage: the evaluation there, of as many images.
        above, own = self.history.stage(stage.parent or ""), {test.images for test in stage.tests if not test.ema}
        tests = [test for test in above.tests if not test.ema and test.images in own] if above else []
        return next((test.top1 for test in tests if test.iter == stage.parent_iter), None)

    def alone(self, tested: EnsembleTested) -> list[StageFinished | None]:
        """How each member of an ensemble does by itself: the results of the snapshots that it was made from, which need not be those that the
        stages ended with last. None where they are gone."""
        ids = dict(zip(tested.members, tested.snapshots, strict=False))
        return [self.results.get(ids.get(name, "")) for name in tested.members]

    def earlier(self, tested: EnsembleTested) -> list[StageFinished]:
        """Those of them that the stages have other results than now."""
        ends = {stage.name: stage.finished for stage in self.history.stages}
        found = zip(tested.members, self.alone(tested), strict=True)
        return [result for name, result in found if result is not None and not _alike(result, ends.get(name))]

    def state(self, stage: StageHistory) -> str:
        if stage.gone:
            return "no longer in the schedule"
        if stage.disabled:
            return "not enabled"
        if stage.finished:
            return f"done, from an earlier {stage.parent}" if stage.name in self.stale else "done"
        if not stage.trained:
            return "not started"
        if stage.iter == stage.max_iter:
            return "trained, not evaluated"
        return f"at {stage.iter} of {stage.max_iter}"

    def leaves(self) -> list[StageHistory]:
        """Stages at whose end no other starts, the ends of the schedule as it is now; as far as it has come."""
        started = [s for s in self.history.stages if (s.trained or s.finished) and not s.left_out]
        parents = {parent.name for s in started if (parent := self.history.follows(s)) is not None}
        return [s for s in started if s.name not in parents]

    def seconds(self, stage: StageHistory) -> float:
        """Seconds of training along its path. A stage that it left early counts up to there."""
        found, child = stage.seconds, stage
        for above in self.path(stage)[1:]:
            length = above.finished.iterations if above.finished else above.iter
            share = min(1.0, child.parent_iter / length) if length else 1.0
            found += above.seconds * share
            child = above
        return found

    @property
    def state_in_words(self) -> str:
        h = self.history
        stages = [s for s in h.stages if not s.left_out]
        done = sum(s.finished is not None for s in stages)
        stale = [s.name for s in stages if s.name in self.stale]
        if done == len(stages) and (h.complete or not stale) and not self.alive:
            return "finished"
        end = h.lives[-1].end if h.lives else ""
        if end.startswith("finished"):  # with what it was to train
            end = "the last run did all it was asked for" + end.removeprefix("finished")
        words = [
            f"{done} of {len(stages)} stages done",
            self.word if self.alive else end or self.word or "at work or broken off",
        ]
        if stale:
            words.insert(1, f"of them {', '.join(stale)} from an earlier parent")
        return ", ".join(words)


def start_in_words(run: Run, stage: StageHistory) -> str:
    """What it was trained from: `seed`, `main`, `main@7638`, or `lenet_iter_5000.solverstate`."""
    if stage.parent is None:
        return stage.weights or "seed"
    midst = run.history.stage(stage.parent) is not None and run.history.follows(stage) is None
    return stage.weights or (f"{stage.parent}@{stage.parent_iter}" if midst else stage.parent)


def _alike(one: StageFinished, other: StageFinished | None) -> bool:
    """Whether two results say the same of the weights."""
    return other is not None and (one.top1, one.top5, one.test_loss) == (other.top1, other.top5, other.test_loss)


def lived_on(run: Run, stage: StageHistory, what: str) -> str:
    """`workers`, `threads`, `device` or `version` of the lives that trained the stage, in order: `2` or `2, 4`."""
    used = stage.trained.lives if stage.trained else ()
    found = dict.fromkeys(str(getattr(life, what) or "unknown") for life in run.history.lives if life.number in used)
    return ", ".join(found)


def notes(runs: Sequence[Run]) -> list[str]:
    """What a reader must know about the runs besides the numbers: one sentence each."""
    found = []
    for run in runs:
        h = run.history
        if h.damaged:
            found.append(
                f"{run.label}: lines of log.jsonl that can't be read, so that what they said is missing here: "
                f"{h.damaged} (a kill in mid-line, or a full disk)"
            )
        if h.unknown:
            found.append(
                f"{run.label}: lines of log.jsonl with events that this version of stagerun doesn't know: {h.unknown}"
            )
        for stage in h.stages:
            if stage.trained and (missing := stage.iter - stage.begins - stage.trained.updates):
                found.append(f"{run.label}: iterations of {stage.name} without a line in log.jsonl: {missing}")
            images = [test.images for test in stage.tests]
            if images and (least := min(images)) < max(images):
                found.append(
                    f"{run.label}: tests inside {stage.name} cover {least} of {max(images)} images (`test_iter`)"
                )
    return found
