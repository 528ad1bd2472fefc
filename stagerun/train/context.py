"""The state of one worker: for the whole process, and for the current stage."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stagerun.base.events import Note
from stagerun.base.recipe import Schedule, Stage
from stagerun.comm import Comm
from stagerun.command.ending import tell
from stagerun.launch.watched import Monitored
from stagerun.logs.table import Screen
from stagerun.plan import PlannedStage, State
from stagerun.system.world import World
from stagerun.train.environment import environment_of
from stagerun.train.hooks.profile import PROFILED, Profile
from stagerun.train.images import Images
from stagerun.train.keeper import Keeper, Selection

if TYPE_CHECKING:
    from stagerun.wire.replay import Replay

# A stop may have to wait for a snapshot in flight before it writes another.
_SNAPSHOTS = 2
# Assumed speed of a disk before the first snapshot: bytes per second, and seconds for files and folders.
_RATE, _FILES_S = 50e6, 1.0


class Stopping:
    """A request to stop. `grace_left`: seconds left, None before a request. `snapshot_s`: seconds of the slowest snapshot so far, 0
    before the first; only rank 0 measures it, and asks all ranks to stop in time."""

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
    """The state of a worker, for the whole process. Only rank 0 has `keeper` (the output folder, which it holds), `screen` (receives
    events; None: the terminal) and `say` (receives messages)."""

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
    replaying: "Replay | None" = None  # its records, on rank 0
    watch: Monitored | None = None
    screen: Screen | None = None
    say: Callable[[str], None] = tell
    settle: Callable[[int], object] = lambda code: None  # gets the exit code once all is saved, before any message
    rest: bool = False  # the rest after stages side by side (`--parallel`)
    placed: Note | None = None  # the cores that the workers are bound to
    others: str = ""  # machines of other ranks that differ from rank 0's (`environment.other_machines`)
    rules_checked: bool = False  # every stage's `param`, `freeze` and weights fit its network
    images: Images = field(init=False)

    @property
    def rank0_keeper(self) -> Keeper:
        """The keeper, in functions that only rank 0 calls."""
        assert self.keeper is not None
        return self.keeper

    def open_keeper(self, selection: Selection, retry: bool) -> Keeper:
        """Make the keeper, on rank 0; the caller opens and closes it."""
        self.keeper = Keeper(self.schedule, Path(self.out), selection, retry, self.say, self.stop)
        return self.keeper

    def open_profile(self, file: str) -> Profile:
        self.profile = Profile(file, PROFILED, self.comm)
        return self.profile

    def environment(self, stage: Stage) -> dict[str, str]:
        """Return what the bits of a stage depend on besides its definition."""
        return environment_of(self.schedule, stage, self.device, self.comm.size, self.others)


# Iterations over which the loss in the table of results is averaged, at most.
LOSS_WINDOW = 100


@dataclass(slots=True)
class StageRun:
    """A stage, or a piece of one, on one worker, with its progress so far. On rank 0 alone: `files` of the start snapshot, until the
    state is restored, and of the `teacher`. `record_ends`: in a replay, the iteration at which the record of a stage with `method:
    ASYNC` ends; else None."""

    worker: Context
    planned: PlannedStage
    number: int = 1  # of its stage among the enabled ones, from 1
    iterations_left: int = 0  # of all stages; 0 but on rank 0
    files: dict[str, bytes] | None = None
    record_ends: int | None = None
    teacher: dict[str, bytes] | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))
    seconds: float = 0.0  # trained, over all process lives
    rollbacks: int | None = None  # in the stage so far, after one in this life; else in the snapshot
    choice: Mapping[str, str] = field(default_factory=dict)  # result of `method: AUTO`
    weights: dict[str, dict[str, str]] = field(default_factory=dict)  # source of each tensor, on rank 0
    weights_table: str = ""  # the same for people, where the stage starts
    drifted: bool = False  # the user was warned that ranks on different machines hold other states

    @property
    def stage(self) -> Stage:
        return self.planned.stage

    @property
    def begins_at(self) -> tuple[str, int]:
        return self.stage.name, self.planned.iter

    @property
    def last(self) -> int:
        """The iteration after which training stops: in a replay, the end of the record."""
        ends = self.planned.last
        return ends if self.record_ends is None else min(ends, self.record_ends)

    @property
    def is_piece(self) -> bool:
        """True for a stretch of a stage that is retrained (`plan.Plan.pieces`)."""
        return self.planned.until is not None

    @property
    def replays(self) -> bool:
        """True if it repeats earlier training."""
        return self.worker.replay is not None or self.is_piece

    @property
    def resumes(self) -> bool:
        """True if it starts from a snapshot of the stage."""
        return self.planned.state is State.RESUME

    @property
    def parent_id(self) -> str:
        """The id of the snapshot that the stage started from; '' for the seed."""
        start = self.planned.start
        if start is None:
            return ""
        return start.parent if self.resumes else start.id
