"""The side file of an LMDB that somebody else wrote: every record read once."""

from collections.abc import Callable

import numpy as np

from stagerun.data.importing.parallel import in_order
from stagerun.data.index import Index, digest_of
from stagerun.data.lmdb_offsets import offsets_of
from stagerun.data.lmdb_source import LmdbSource
from stagerun.data.records import printable
from stagerun.data.rows import ROW, index_of, look, parse
from stagerun.errors import DataError
from stagerun.text import count

_SHOWN = 20


def build(
    path: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    threads: int = 1,
    pixels: bool = True,
    classes: tuple[str, ...] = (),
) -> Index:
    """The index of the LMDB in folder `path`. Without `pixels` no image is decoded, and the mean stays unknown.

    DataError with all records that a loader couldn't use; StorageError if the disk fails. `progress` gets (done, total).
    """
    source = LmdbSource(path, side_file=False)
    offsets = offsets_of(path)
    total = len(source)

    def row(i: int) -> bytes | str:
        key, record = source.get(i)
        try:
            datum = parse(record)
            return look(datum, pixels).row(datum.label, digest_of(record))
        except DataError as error:
            return f"record `{printable(key)}`: {error.message}"

    rows, mistakes = bytearray(), []
    for done, made in enumerate(in_order(row, 0, total, threads), start=1):
        if isinstance(made, str):
            mistakes.append(made)
        else:
            rows += made
        progress(done, total)
    if mistakes:
        shown = mistakes[:_SHOWN] + ([f"and {len(mistakes) - _SHOWN} more"] if len(mistakes) > _SHOWN else [])
        raise DataError(
            f"{path}: {count(len(mistakes), 'record')} of {total} can't be used:\n  " + "\n  ".join(shown),
            "no stage could train on it either: make the LMDB again from its source, with `stagerun data import`",
        )
    return index_of(offsets, np.frombuffer(rows, ROW), classes)
