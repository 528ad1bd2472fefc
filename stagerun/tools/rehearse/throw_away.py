"""A folder for the time of a rehearsal, of which nothing is left. Not for a folder that others may write."""

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from stagerun import store
from stagerun.base.errors import FolderInUseError, StorageError
from stagerun.store.layout import lock_file, snapshots_folder

_TRIES = 3


def claim(folder: Path, name: str, stack: ExitStack) -> Path:
    """`folder`/`name`, new and empty, and `folder` held, until `stack` is closed; then nothing of it is left.

    FolderInUseError while another command like this goes on, StorageError, PermissionDenied.
    """
    lock = _held(folder)
    made = folder / name
    stack.callback(_clear, made, lock)
    shutil.rmtree(made, ignore_errors=True)  # what a killed command left
    with store.reporting(f"make {name}", folder):
        made.mkdir()
    return made


def _held(folder: Path) -> store.Lock:
    """A process that waits for the lock while its file is deleted gets one on a file without a name, which keeps no one out: it notices, and
    tries again. Only the holder deletes the file."""
    for _ in range(_TRIES):
        store.prepare(store.LocalDisk(), folder)
        lock = store.Lock(folder)
        try:
            lock.acquire()
        except StorageError:
            if folder.exists():
                raise
            continue  # who held it has just left, and taken the folder along
        if not lock.held:
            raise StorageError(
                f"the file system of {folder} has no locks",
                "choose a folder on another file system with --out, or have this one mounted with locks "
                "(Lustre: `flock`; NFS: a running lock service)",
            )
        if lock.named():
            return lock
        lock.release()
    raise FolderInUseError(f"others take {folder} and leave it all the time", "try again")


def _clear(made: Path, lock: store.Lock) -> None:
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
