"""An LMDB of Datum records, made complete or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import lmdb

from stagerun.base.errors import DataError
from stagerun.data.write import FIRST_MAP_SIZE, commit, writing
from stagerun.system.files import sync_folder
from stagerun.system.lmdb_file import check_file

_RECORDS_PER_COMMIT = 1000


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


def _write(folder: Path, values: Iterable[bytes]) -> int:
    # No one else knows the folder yet: no lock file, and one sync at the end instead of one per commit.
    with lmdb.open(str(folder), map_size=FIRST_MAP_SIZE, lock=False, sync=False, metasync=False) as env:
        pairs = ((b"%08d" % i, value) for i, value in enumerate(values))
        records = 0
        while chunk := list(islice(pairs, _RECORDS_PER_COMMIT)):
            commit(env, chunk)
            records += len(chunk)
        env.sync(True)
    sync_folder(folder)
    return records
