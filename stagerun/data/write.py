"""Records into an LMDB, and what can go wrong."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb

from stagerun.base.errors import PermissionDenied, StorageError
from stagerun.system.files import hint_for, why

FIRST_MAP_SIZE = 1 << 26


@contextmanager
def writing(out: str, or_else: str = "") -> Iterator[None]:
    """Errors of writing an LMDB in folder `out`: PermissionDenied, StorageError. `or_else`: what else to do, behind their hints."""
    try:
        yield
    except PermissionError as error:
        text = f"{error.filename or out}: may not be written"
        raise PermissionDenied(text, f"give a folder that you may write to{or_else}") from None
    except OSError as error:
        text = f"{error.filename or out}: can't be written: {why(error, Path(out).parent)}"
        raise StorageError(text, hint_for(error) + or_else) from None
    except lmdb.Error as error:
        # After a sync that failed, pages may be lost though the kernel calls them clean. No commit refers to them: its
        # meta page is written after the sync, so they are written again.
        raise StorageError(f"{out}: can't be written: {error}", hint_for(error) + or_else) from None


def commit(env: lmdb.Environment, records: Sequence[tuple[bytes, bytes]]) -> None:
    """Writes (key, value) pairs in one transaction, behind all that are there; where the map is full, all of them again in a larger one: its
    sizes are powers of two, wherever an import was interrupted. lmdb.Error."""
    while True:
        try:
            with env.begin(write=True) as txn:
                for key, value in records:
                    txn.put(key, value, append=True)
            return
        except lmdb.MapFullError:
            env.set_mapsize(1 << int(env.info()["map_size"]).bit_length())
