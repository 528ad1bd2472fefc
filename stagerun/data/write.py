"""Writing LMDBs: commits, errors of the disk, and locks that the kernel releases when their process ends (flock(2))."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb

from stagerun.base.errors import PermissionDenied, StorageError
from stagerun.system.files import hint_for, open_lock, why

FIRST_MAP_SIZE = 1 << 26
_PAUSE_S = 0.1  # between two attempts to lock: a wait inside the kernel would not hear a request to stop


Stop = Callable[[], bool]  # returns whether to stop


class CopyStopped(Exception):
    """A request to stop came before the copies were complete. The next job continues them."""


@contextlib.contextmanager
def writing(out: str, or_else: str = "") -> Iterator[None]:
    """Turn errors of writing an LMDB in folder `out` into PermissionDenied or StorageError; append `or_else` to their hints."""
    try:
        yield
    except PermissionError as error:
        text = f"{error.filename or out}: may not be written"
        raise PermissionDenied(text, f"give a folder that you may write to{or_else}") from None
    except OSError as error:
        text = f"{error.filename or out}: can't be written: {why(error, Path(out).parent)}"
        raise StorageError(text, hint_for(error) + or_else) from None
    except lmdb.Error as error:
        # After a failed sync the kernel may call lost pages clean. No commit refers to them: its meta page is written after
        # the sync, so they are written again.
        raise StorageError(f"{out}: can't be written: {error}", hint_for(error) + or_else) from None


@contextlib.contextmanager
def held(path: Path, stop: Stop, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait for the lock and hold it; call `waiting` at each attempt. CopyStopped, OSError."""
    while True:
        with held_now(path) as locked:
            if locked:
                yield
                return
        if stop():
            raise CopyStopped
        waiting()
        time.sleep(_PAUSE_S)


@contextlib.contextmanager
def held_now(path: Path) -> Iterator[bool]:
    """Hold the lock if it is free; yield whether it was. OSError."""
    while True:
        fd = open_lock(path)
        try:
            locked, named = True, False
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked = False
            # The holder may have removed the lock's file: the name may be another file's by now, or gone.
            with contextlib.suppress(FileNotFoundError):
                named = os.path.samestat(os.fstat(fd), path.lstat())
            if named or not locked:
                yield locked
                return
        finally:
            os.close(fd)


def commit(env: lmdb.Environment, records: Sequence[tuple[bytes, bytes]]) -> None:
    """Append (key, value) pairs in one transaction; repeat it in a larger map if the map is full. Map sizes are powers of two wherever an
    import was interrupted. lmdb.Error."""
    while True:
        try:
            with env.begin(write=True) as txn:
                for key, value in records:
                    txn.put(key, value, append=True)
            return
        except lmdb.MapFullError:
            env.set_mapsize(1 << int(env.info()["map_size"]).bit_length())
