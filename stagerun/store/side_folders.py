"""Output folders that a command makes for itself beside OUT: one with some of OUT's snapshots, and the way back; one of which nothing is left.
Not for a folder that others may write."""

import os
import shutil
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from stagerun.base.errors import FolderInUseError, StorageError
from stagerun.store.disk import Disk, LocalDisk
from stagerun.store.errors import reporting
from stagerun.store.layout import choices_folder, lock_file, parse_name, results_folder, snapshots_folder
from stagerun.store.lock import Lock
from stagerun.store.write import prepare

_TRIES = 3


def borrow(source: Path, target: Path, names: Collection[str]) -> None:
    """`target` becomes an output folder with these snapshots of `source`, and with its results and choices, which then are not made again.

    The files are hard links, or copies where they can't be: a run adds folders and deletes names, and never writes into a snapshot.
    StorageError, PermissionDenied.
    """
    with reporting("make a folder with snapshots of another", target):
        snapshots_folder(target).mkdir(parents=True, exist_ok=True)
        for folder in (results_folder, choices_folder):
            if folder(source).is_dir():
                shutil.copytree(folder(source), folder(target), dirs_exist_ok=True)
        for name in names:
            made = snapshots_folder(target) / name
            if made.exists():
                continue
            made.mkdir()
            for file in (snapshots_folder(source) / name).iterdir():
                try:
                    os.link(file, made / file.name, follow_symlinks=False)
                except OSError:
                    shutil.copy(file, made / file.name)


def give_back(disk: Disk, source: Path, target: Path, stage: str) -> None:
    """Moves the snapshots of a stage, the results and the choices that `target` has not, from `source`, which no run holds any more. Each is
    whole under its name at any moment; a call after a crash does the rest. StorageError, PermissionDenied."""
    with reporting("take over what was trained", target):
        for name in sorted(disk.names(snapshots_folder(source))):
            place = parse_name(name)
            if place is not None and place.stage == stage and not (snapshots_folder(target) / name).exists():
                disk.rename(snapshots_folder(source) / name, snapshots_folder(target) / name)
        disk.sync_folder(snapshots_folder(target))
        for folder in (results_folder, choices_folder):
            if not folder(source).is_dir():
                continue
            with suppress(FileExistsError):
                disk.mkdir(folder(target))
            for file in sorted(folder(source).iterdir()):
                if file.is_file() and not (folder(target) / file.name).exists():
                    disk.rename(file, folder(target) / file.name)
            disk.sync_folder(folder(target))


def claim(folder: Path, name: str, stack: ExitStack) -> Path:
    """`folder`/`name`, new and empty, and `folder` held, until `stack` is closed; then nothing of it is left.

    FolderInUseError while another command like this goes on, StorageError, PermissionDenied.
    """
    lock = _held(folder)
    made = folder / name
    stack.callback(_clear, made, lock)
    shutil.rmtree(made, ignore_errors=True)  # what a killed command left
    with reporting(f"make {name}", folder):
        made.mkdir()
    return made


def _held(folder: Path) -> Lock:
    """A process that waits for the lock while its file is deleted gets one on a file without a name, which keeps no one out: it notices, and
    tries again. Only the holder deletes the file."""
    for _ in range(_TRIES):
        prepare(LocalDisk(), folder)
        lock = Lock(folder)
        try:
            lock.acquire()
        except StorageError:
            if folder.exists():
                raise
            continue  # who held it has just left, and taken the folder along
        if lock.named():
            return lock
        lock.release()
    raise FolderInUseError(f"others take {folder} and leave it all the time", "try again")


def _clear(made: Path, lock: Lock) -> None:
    """Everything of the holder goes before the lock's file does: what is in the folder after that may be another's, and then the folder
    stays, too."""
    folder = made.parent
    try:
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(snapshots_folder(folder), ignore_errors=True)
        with suppress(OSError):
            lock_file(folder).unlink()
            folder.rmdir()
    finally:
        lock.release()
