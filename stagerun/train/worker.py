"""What a worker has for the whole of its process life, and for the stage that it is in."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stagerun.base.compression import Choice
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.text import duration
from stagerun.comm import Comm
from stagerun.plan import PlannedStage
from stagerun.system.world import World
from stagerun.train.images import Images
from stagerun.train.keeper import Keeper
from stagerun.train.profiling import Profile
from stagerun.train.replay import Replay

# A stop may have to wait for the snapshot under way before it writes its own.
_SNAPSHOTS = 2
# Bytes per second, and seconds for the files and folders themselves, that a slow disk is taken to have before it has shown its own.
_RATE, _FILES_S = 50e6, 1.0


@dataclass(frozen=True, slots=True)
class Grace:
    """`seconds` from a request to stop to the end of the process, and what is `left` of them now; None: no one has asked."""

    seconds: float
    left: Callable[[], float | None]


class Stopping:
    """`snapshot_s`: the longest that a snapshot has taken, 0 before the first; rank 0 alone knows, and asks for a stop in time for all."""

    def __init__(self, grace: Grace | None = None) -> None:
        self.grace = grace
        self.snapshot_s = self._expected_s = 0.0
        self._warned = False

    @property
    def asked(self) -> bool:
        return self.grace is not None and self.grace.left() is not None

    def expect(self, size: int) -> None:
        """Snapshots will have so many bytes."""
        self._expected_s = _FILES_S + size / _RATE

    def left(self) -> float | None:
        """Seconds that an iteration may still take, with snapshots to be written after it."""
        left = self.grace.left() if self.grace is not None else None
        return None if left is None else left - _SNAPSHOTS * (self.snapshot_s or self._expected_s)

    def warning(self, step_s: float, step: str) -> Note | None:
        """Once, when it turns out that the time may not do. `step_s`: what a `step` takes, which a stop doesn't break off."""
        needed = step_s + _SNAPSHOTS * self.snapshot_s
        if self._warned or self.grace is None or not self.snapshot_s or needed <= self.grace.seconds:
            return None
        self._warned = True
        return Note(
            text=f"a stop may take {duration(needed)}: {step_s:.1f} s for {step}, {self.snapshot_s:.1f} s for a snapshot, "
            f"which may have to wait for another; the grace period is {duration(self.grace.seconds)}: what was trained since the "
            "last snapshot may be lost (--grace says how long the scheduler waits)",
            warning=True,
        )


@dataclass(frozen=True, slots=True)
class Worker:
    """One of the workers of a run. `keeper` is rank 0's."""

    schedule: Schedule
    out: str
    comm: Comm
    world: World
    device: torch.device
    keeper: Keeper | None
    stop: Callable[[], bool]
    images: Images
    stopping: Stopping = field(default_factory=Stopping)
    exact: bool = False  # go on where the bits are promised, and nowhere else
    others: str = ""  # `environment.other_machines`
    final_test_iter: int | None = None  # batches of the evaluation after a stage; None: every image
    profile: Profile | None = None
    replay: Path | None = None  # the output folder whose records are replayed
    replaying: Replay | None = None  # what rank 0 has read there


@dataclass(frozen=True, slots=True)
class Step:
    """A stage, or a piece of one, that comes next. `files` are the start snapshot's, on rank 0 alone. `record_ends`: in a replay, the
    iteration of a stage with `method: ASYNC` at which its record ends; None of others."""

    planned: PlannedStage
    number: int  # of its stage among those that are enabled, from 1
    iterations_left: int  # of all stages; 0 but on rank 0
    files: dict[str, bytes] | None
    record_ends: int | None = None
    teacher: dict[str, bytes] | None = None  # the files of the teacher's snapshot, on rank 0 alone


# Iterations over which the loss in the table of results is averaged, at most.
LOSS_WINDOW = 100


@dataclass(slots=True)
class StageRun:
    """One step on one worker, and what has come of it so far."""

    worker: Worker
    step: Step
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))
    seconds: float = 0.0  # trained, over all process lives
    saved: int = -1  # iteration of the newest snapshot asked for
    rollbacks: int | None = None  # in the stage so far, where this life has gone back; else the snapshot knows
    # Positions of iterations that failed, and were come to again since the snapshot to go back to was lost.
    again: frozenset[int] = frozenset()
    choice: Choice = field(default_factory=dict)  # what `method: AUTO` chose; empty before, and of other methods
    weights: dict[str, dict[str, str]] = field(default_factory=dict)  # where each tensor came from; rank 0's
    weights_table: str = ""  # the same for people, where the stage starts
    said_ended: bool = False  # by the newest snapshot asked for: that `early_stop` ends the stage there
    proof: str = ""  # the newest link of the stage's chain (`audit_param`); rank 0's
    drifted: bool = False  # the user knows that ranks which don't compute alike hold other states

    @property
    def planned(self) -> PlannedStage:
        return self.step.planned

    @property
    def stage(self) -> Stage:
        return self.planned.stage

    @property
    def last(self) -> int:
        """The iteration after which training stops: of a replay, where the record ends."""
        ends = self.step.record_ends
        return self.planned.last if ends is None else min(ends, self.planned.last)

    @property
    def is_piece(self) -> bool:
        """Whether this is a stretch of a stage that is trained once more (`plan.Plan.pieces`)."""
        return self.planned.until is not None

    @property
    def replays(self) -> bool:
        """Whether it is trained as it was before."""
        return self.worker.replay is not None or self.is_piece
