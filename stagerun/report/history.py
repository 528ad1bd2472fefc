"""What a run has done over all its process lives, as values. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stagerun.events import EnsembleTested, StageFinished, Tested
from stagerun.store.layout import parse_name


class Bin(NamedTuple):
    """Consecutive updates of a stage as a curve shows them. `iter` is the last one's number; `epoch` and `loss` are means. `rates`
    are (epoch, learning rate) of the first, the least, the largest and the last, in their order: no peak and no step is lost."""

    iter: int
    updates: int
    epoch: float
    loss: float
    rates: tuple[tuple[float, float], ...]


class Span(NamedTuple):
    """Updates of a stage in one epoch or one process life: sums over all of them. `lr` is the last one's; `batches` are the
    different numbers of images of an update."""

    updates: int
    images: int
    seconds: float
    loss: float
    lr: float
    batches: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the updates of a stage come to. Numbers are over every update; `bins` alone are thinned, for curves. Epochs count along
    the stage's path of ancestors; `loss` is the mean over the last updates, 100 at most. `epochs` and `lives` (1-based) are
    in order."""

    iter: int
    epoch: float
    updates: int
    images: int
    seconds: float
    first_lr: float
    last_lr: float
    weight_decay: float
    loss: float
    bins: tuple[Bin, ...]
    epochs: Mapping[int, Span]
    lives: Mapping[int, Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process life, from RunStarted to its last line. Where that line is lost, workers is 0 and device ''.

    `updates`, `images` and `seconds` (of training, without evaluation) are of all its iterations, those of pieces of stages among
    them. `again` of them were done twice: by a later life, too, or as a piece. `speeds`: (seconds since `begun`, images/s), thinned.
    `end` is '' where the log doesn't say how it ended.
    """

    number: int
    begun: float
    ended: float
    workers: int
    threads: int
    device: str
    version: str
    start: str
    end: str
    again: int
    updates: int
    images: int
    seconds: float
    speeds: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHistory:
    """What counts of a stage. `start` is the snapshot it began from or `seed N`; `resumes` are the iterations at which a
    later life went on. `begin` is in epochs along its path. `max_iter` is 0 where the log has lost it. `older` is the
    highest attempt at a snapshot of this stage from before it last began anew. `gone`: the schedule has it no longer.
    `disabled`: it has it, with `enabled: false`. `skips` and `rollbacks`: as of StageFinished, so far.
    """

    name: str
    start: str = ""
    begin: float = 0.0
    max_iter: int = 0
    batch_size: int = 0
    trained: Trained | None = None  # where the log has updates of it
    tests: tuple[tuple[float, Tested], ...] = ()  # with the epoch, in the order of (iter, ema)
    resumes: tuple[int, ...] = ()
    finished: StageFinished | None = None
    skips: int = 0
    rollbacks: int = 0
    older: int = 0
    gone: bool = False
    disabled: bool = False

    @property
    def left_out(self) -> bool:
        """Whether a run of the schedule passes it over."""
        return self.gone or self.disabled

    @property
    def parent(self) -> str | None:
        return place.stage if (place := parse_name(self.start)) else None

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

    @property
    def epochs(self) -> float:
        return self.trained.epoch - self.begin if self.trained else 0.0

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
    """`stages` in running order, those that are still to come among them, and then those that are not enabled or gone.
    `complete`: nothing was left to do at its end.

    `ensembles` are those of the schedule that were evaluated, and whose members have not been trained since. `names`: by its name
    the stage of a snapshot that was written when the stage was called otherwise.
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

    def stage(self, name: str) -> StageHistory | None:
        return next((s for s in self.stages if s.name == name), None)

    def follows(self, stage: StageHistory) -> StageHistory | None:
        """The stage at whose end it started; None for one that started from the seed or from the midst of another."""
        parent = self.stage(stage.parent) if stage.parent else None
        length = parent.finished.iterations if parent and parent.finished else parent.max_iter if parent else 0
        return parent if parent is not None and stage.parent_iter >= length else None

    @property
    def wall_seconds(self) -> float:
        """Over all process lives, without the time between them."""
        return sum(life.ended - life.begun for life in self.lives)
