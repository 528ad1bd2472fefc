"""An LMDB of Datum records, made complete or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import lmdb

from stagerun.base.errors import DataError, PermissionDenied, StorageError
from stagerun.system.files import hint_for, sync_folder, why
from stagerun.system.lmdb_file import check_file

FIRST_MAP_SIZE = 1 << 26
RECORDS_PER_COMMIT = 1000


def write_lmdb(out: str, values: Iterable[bytes]) -> int:
    """Writes the values, in order, as records `00000000`, `00000001`, ... of a new LMDB in folder `out`; their number.

    The folder appears under its name only when it is complete and on disk; a crash leaves at most `out.partial-*`,
    and an exception, one of `values` included, leaves nothing. DataError if `out` exists or there are no values,
    StorageError if the disk is full.
    """
    target = Path(out)
    partial = target.with_name(f"{target.name}.partial-{uuid.uuid4().hex}")
    with writing(out):
        if os.path.lexists(target):  # a link that leads nowhere, too
            raise DataError(f"{out}: exists already", "remove it, or give another folder")
        partial.mkdir(parents=True)
        try:
            count = _write(partial, values)
            if count == 0:
                raise DataError(f"{out}: there is nothing to write into it", "check where the images come from")
            check_file(str(partial))
            # No other run can be writing to this partial name; where another one made `out` meanwhile, rename refuses
            # (a folder with something in it is not replaced).
            partial.rename(target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return count


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


def _write(folder: Path, values: Iterable[bytes]) -> int:
    # No one else knows the folder yet: no lock file, and one sync at the end instead of one per commit.
    with lmdb.open(str(folder), map_size=FIRST_MAP_SIZE, lock=False, sync=False, metasync=False) as env:
        pairs = ((b"%08d" % i, value) for i, value in enumerate(values))
        records = 0
        while chunk := list(islice(pairs, RECORDS_PER_COMMIT)):
            commit(env, chunk)
            records += len(chunk)
        env.sync(True)
    sync_folder(folder)
    return records


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
