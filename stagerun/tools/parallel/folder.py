"""The folders below OUT/.parallel, in each of which one stage is trained by a process of its own: how one is made, and how OUT takes over
what came of it. What a kill leaves there the next run takes over."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.command.options import arguments
from stagerun.launch.folder import LAUNCHER_PID
from stagerun.logs.log_file import LOG, Life, read_last_life
from stagerun.store.errors import reporting
from stagerun.store.side_folders import borrow, give_back
from stagerun.system.files import LineFile
from stagerun.system.imports import FOLDER as IMPORTED
from stagerun.system.process import program
from stagerun.train.keeper import Keeper
from stagerun.train.options import RunOptions

FOLDER = ".parallel"
MARK = ".stage"  # a file in each folder that is ours: nothing else is taken over, or deleted
_SAID = "stderr"
_TAIL = 12  # lines of a worker that failed which are shown
# What a worker's log says of its own run, and the places that an index names.
_NOT_TAKEN = {"RunStarted", "RunFinished", "Stopped", "Failed", "Indexed", "Renamed"}


def start_worker(options: RunOptions, keeper: Keeper, stage: str, needed: Collection[str]) -> "subprocess.Popen[bytes]":
    """Start the process that trains the stage, in a folder with the snapshots `needed` under a second name. StorageError,
    PermissionDenied."""
    out, folder = keeper.out, keeper.out / FOLDER / stage
    with reporting("make a folder for a stage", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
        if keeper.schedule.imports and not (folder / IMPORTED).is_symlink():  # all import into one place
            (out / IMPORTED).mkdir(exist_ok=True)
            (folder / IMPORTED).symlink_to(Path("..", "..", IMPORTED))
    borrow(out, folder, needed)
    same = arguments(
        replace(options, out=str(folder), only=(stage,), retry=True),
        "folder", "overrides", "out", "only", "threads", "grace", "exact", "retry",
    )  # fmt: skip
    with reporting("start a stage", folder), (folder / _SAID).open("wb") as said:
        # A session of its own: Ctrl-C is for this process, which asks each worker once.
        return subprocess.Popen(
            [sys.executable, *program("stagerun"), "run", *same],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
            env={**os.environ, LAUNCHER_PID: str(os.getpid())},
        )  # fmt: skip


def last_lines(out: Path, stage: str) -> list[str]:
    """The end of what the stage's process printed on standard error."""
    with reporting("read what a stage said", out):
        return (out / FOLDER / stage / _SAID).read_text(errors="replace").rstrip().splitlines()[-_TAIL:]


def last_lives(out: Path) -> dict[str, Life]:
    """What the stages that are trained side by side have logged, by stage."""
    stages = sorted(mark.parent for mark in (out / FOLDER).glob(f"*/{MARK}"))
    return {stage.name: read_last_life(stage / LOG) for stage in stages}


def take_over(keeper: Keeper) -> None:
    """What a run with --parallel that was killed has left in OUT/.parallel, OUT being held; says of which stages."""
    folder = keeper.out / FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return
    for one in sorted(folder.iterdir()):
        if one.is_dir() and not one.is_symlink() and (one / MARK).is_file():
            before = len(keeper.inventory().of(one.name))
            take_over_stage(keeper, one.name)
            own = keeper.inventory().of(one.name)
            what = f"its snapshots up to iteration {own[-1].iter}" if len(own) > before else "its log, and no snapshot"
            keeper.say(f"stage {one.name}: took over what a run with --parallel has left: {what}")
    with suppress(OSError):
        folder.rmdir()


def take_over_stage(keeper: Keeper, stage: str) -> None:
    """What the process of a stage has left. The log first: what is taken over a second time replaces what was there. StorageError,
    PermissionDenied."""
    out, made = keeper.out, keeper.out / FOLDER / stage
    if (made / LOG).is_file():
        with reporting("take over the log", out):
            lines = [line + b"\n" for line in (made / LOG).read_bytes().splitlines() if _is_taken(line)]
            with closing(LineFile(out / LOG)) as log:
                log.append(b"".join(lines))
    if (made / "snapshots").is_dir():
        give_back(store.LocalDisk(), made, out, stage)
        own = keeper.inventory().of(stage)
        if own and any(known.name == stage for known in keeper.schedule.stages):
            with suppress(store.Damaged):  # it is set aside, and all before it is there
                keeper.retain(own[-1])
    with suppress(OSError):  # at once: what is half removed when this is killed must not be taken for a snapshot
        (made / "snapshots").rename(made / ".gone")
    shutil.rmtree(made, ignore_errors=True)
    with suppress(OSError):
        made.parent.rmdir()


def _is_taken(line: bytes) -> bool:
    try:
        return json.loads(line).get("event") not in _NOT_TAKEN
    except (ValueError, AttributeError):
        return False
