"""The frame that every mode measures in: a worker joins its job, trains a cut-down schedule in a folder that is removed, and says what it saw."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from stagerun.base.errors import ExitCode, StagerunError
from stagerun.base.events import Event, Stopped
from stagerun.base.recipe import Schedule
from stagerun.comm import Comm
from stagerun.command.ending import say
from stagerun.launch import StopRequest
from stagerun.system.world import World
from stagerun.tools.rehearse import Mode, RehearseOptions, check
from stagerun.tools.rehearse.schedule import make_images, with_synthetic
from stagerun.train.agreement import everyone, rank0
from stagerun.train.context import Context
from stagerun.train.hooks.profile import Profile
from stagerun.train.keeper import ALL, Keeper, Selection
from stagerun.train.run import run
from stagerun.train.worker import load_everywhere

PREFIX = ".rehearsal-"  # of folders in OUT


class Answer(NamedTuple):
    """`record` is for --json."""

    record: Mapping[str, object]
    text: str
    code: int = ExitCode.DONE


class Interrupted(StagerunError):
    """A stop was asked for. Raised on every worker that trains; rank 0 says so."""

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, rank: int) -> None:
        super().__init__("" if rank else "interrupted: a rehearsal keeps nothing")


def worker(session: "Session") -> int:
    home, _, name = session.mode.measure.partition(".")
    answer: Answer = getattr(import_module(f"stagerun.tools.rehearse.{home}"), name)(session)
    if session.comm.rank == 0:
        say(json.dumps(answer.record, indent=2) if session.options.as_json else answer.text)
    session.comm.close()
    return answer.code


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of killed rehearsals: a living one holds a lock on its folder."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            locked = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(locked)


@dataclass(frozen=True, slots=True)
class Session:
    """A worker of a measurement."""

    options: RehearseOptions
    mode: Mode
    world: World
    stop: StopRequest
    device: torch.device
    comm: Comm
    read_here: Callable[[], Schedule]

    def read(self) -> tuple[Schedule, Schedule]:
        """Return the schedule, and what of it is trained. Collective; RecipeError, UsageError, DataError."""
        whole = load_everywhere(self.comm, self.device, self.read_here)
        return whole, everyone(self.comm, lambda: check(self.options, self.mode, whole, self.comm.size))

    def show(self, text: str) -> None:
        if self.comm.rank == 0 and not self.options.as_json:
            say(text)

    @contextmanager
    def folder(self, comm: Comm, parent: Path | None = None) -> Iterator[Path]:
        """A folder that rank 0 writes to, in `parent` or the system's temporary folder. Collective; StorageError, PermissionDenied."""
        with ExitStack() as stack:

            def make() -> str:
                if parent is not None:
                    os.makedirs(parent, exist_ok=True)
                    _remove_abandoned(parent)
                made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
                folder = stack.enter_context(made)
                locked = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, locked)
                fcntl.flock(locked, fcntl.LOCK_EX)
                return folder

            yield Path(rank0(comm, make))

    @contextmanager
    def images(self, schedule: Schedule, synthetic: bool) -> Iterator[Schedule]:
        """The schedule, with synthetic images in a temporary folder of each node if asked for. Collective."""
        if not synthetic:
            yield schedule
            return
        # One name on every node, which no other rehearsal has.
        name = rank0(self.comm, lambda: f"stagerun-rehearsal-{os.getuid()}-{os.urandom(8).hex()}")
        folder = Path(tempfile.gettempdir()) / name
        try:
            everyone(self.comm, lambda: make_images(schedule, folder) if self.world.local_rank == 0 else None)
            yield with_synthetic(schedule, folder)
        finally:
            if self.world.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # processes that have it open keep what they opened

    def train(
        self,
        short: Schedule,
        folder: Path,
        comm: Comm,
        selection: Selection = ALL,
        tested: int | None = None,
        profile: Profile | None = None,
    ) -> Iterator[Event]:
        """Run the schedule as `run` does, and yield its events. `tested`: batches of the last evaluation. Collective over `comm`;
        Interrupted."""
        world = self.world if comm is self.comm else World()
        keeper = Keeper(short, folder, selection) if comm.rank == 0 else None
        rank0(comm, lambda: keeper.open() if keeper is not None else None)
        try:
            context = Context(
                short, str(folder), comm, world, self.device, keeper, self.stop, final_test_iter=tested, profile=profile
            )
            for event in run(context):
                yield event
                if isinstance(event, Stopped):
                    raise Interrupted(self.comm.rank)
        finally:
            if keeper is not None:
                keeper.close()
