"""The state of one worker: for the whole process, and for the current stage."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stagerun.base.events import Note
from stagerun.base.recipe import Schedule, Stage
from stagerun.comm import Comm
from stagerun.command.ending import tell
from stagerun.launch.watch.worker import Monitored
from stagerun.logs.table import Screen
from stagerun.plan import PlannedStage, State
from stagerun.system.world import World
from stagerun.train.environment import environment_of
from stagerun.train.hooks.profile import Profile
from stagerun.train.images import Images
from stagerun.train.keeper import Keeper

if TYPE_CHECKING:
    from stagerun.wire.replay import Replay

# A stop may have to wait for the snapshot under way before it writes its own.
_SNAPSHOTS = 2
# Bytes per second, and seconds for the files and folders themselves, that a slow disk is taken to have before it has shown its own.
_RATE, _FILES_S = 50e6, 1.0


class Stopping:
    """A request to stop. `grace_left`: seconds left, None before anyone has asked. `snapshot_s`: seconds of the slowest snapshot so far, 0 before
    the first; only rank 0 knows, and asks all ranks to stop in time."""

    def __init__(self, grace_left: Callable[[], float | None] = lambda: None) -> None:
        self.grace_left = grace_left
        self.snapshot_s = self._expected_s = 0.0

    @property
    def asked(self) -> bool:
        return self.grace_left() is not None

    def expect(self, size: int) -> None:
        """Set the size of the snapshots to come, in bytes."""
        self._expected_s = _FILES_S + size / _RATE

    def left(self) -> float | None:
        """Seconds that an iteration may still take, with snapshots to be written after it."""
        left = self.grace_left()
        return None if left is None else left - _SNAPSHOTS * (self.snapshot_s or self._expected_s)


@dataclass(slots=True)
class Context:
    """One worker of a run, for the whole process. Only rank 0 has `keeper` (the output folder, which it holds), `screen` (receives events; None: the
    terminal) and `say` (receives messages)."""

    schedule: Schedule
    out: str
    comm: Comm
    world: World
    device: torch.device
    keeper: Keeper | None
    stop: Callable[[], bool]
    _: KW_ONLY
    stopping: Stopping = field(default_factory=Stopping)
    exact: bool = False  # refuse to resume where the same bits are not promised
    final_test_iter: int | None = None  # batches of the evaluation after a stage; None: every image
    profile: Profile | None = None
    replay: Path | None = None  # the output folder whose records of `method: ASYNC` are replayed
    replaying: "Replay | None" = None  # what rank 0 has read there
    watch: Monitored | None = None
    screen: Screen | None = None
    say: Callable[[str], None] = tell
    settle: Callable[[int], object] = lambda code: None  # hears the exit code once all is saved, before anyone is told
    rest: bool = False  # this process has trained stages side by side (`--parallel`), and does now what is left
    placed: Note | None = None  # the cores that the workers are bound to
    others: str = ""  # what other ranks compute with, where that differs from rank 0 (`environment.other_machines`)
    rules_checked: bool = False  # every stage's `param`, `freeze` and weights fit its network
    images: Images = field(init=False)

    def open_images(self) -> AbstractContextManager[Images]:
        self.images = Images(self.schedule, self.device)
        return closing(self.images)

    def environment(self, stage: Stage) -> dict[str, str]:
        """What the bits of a stage depend on besides its definition."""
        return environment_of(self.schedule, stage, self.device, self.comm.size, self.others)


# Iterations over which the loss in the table of results is averaged, at most.
LOSS_WINDOW = 100


@dataclass(slots=True)
class StageRun:
    """A stage, or a piece of one, that comes next on one worker, and what has come of it so far. `files` are the start snapshot's, until
    the state is restored from them, and `teacher` those of the teacher's, on rank 0 alone. `record_ends`: in a replay, the iteration of a
    stage with `method: ASYNC` at which its record ends; None for other stages."""

    worker: Context
    planned: PlannedStage
    number: int = 1  # of its stage among those that are enabled, from 1
    iterations_left: int = 0  # of all stages; 0 but on rank 0
    files: dict[str, bytes] | None = None
    record_ends: int | None = None
    teacher: dict[str, bytes] | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))
    seconds: float = 0.0  # trained, over all process lives
    rollbacks: int | None = None  # in the stage so far, where this life has gone back; else the snapshot knows
    choice: Mapping[str, str] = field(default_factory=dict)  # what `method: AUTO` chose; empty before, and else
    weights: dict[str, dict[str, str]] = field(default_factory=dict)  # where each tensor came from; rank 0's
    weights_table: str = ""  # the same for people, where the stage starts
    drifted: bool = False  # the user knows that ranks which don't compute alike hold other states

    @property
    def stage(self) -> Stage:
        return self.planned.stage

    @property
    def begins_at(self) -> tuple[str, int]:
        return self.stage.name, self.planned.iter

    @property
    def last(self) -> int:
        """The iteration after which training stops: of a replay, where the record ends."""
        ends = self.planned.last
        return ends if self.record_ends is None else min(ends, self.record_ends)

    @property
    def is_piece(self) -> bool:
        """Whether this is a stretch of a stage that is trained once more (`plan.Plan.pieces`)."""
        return self.planned.until is not None

    @property
    def replays(self) -> bool:
        """Whether it is trained as it was before."""
        return self.worker.replay is not None or self.is_piece

    @property
    def resumes(self) -> bool:
        """Whether it goes on from a snapshot of its own."""
        return self.planned.state is State.RESUME

    @property
    def parent_id(self) -> str:
        """The id of the snapshot that the stage started from; '' for the seed."""
        start = self.planned.start
        if start is None:
            return ""
        return start.parent if self.resumes else start.id
