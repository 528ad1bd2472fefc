"""The side file of an LMDB that someone else wrote: every record is read once, by several threads."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagerun.base.errors import DataError
from stagerun.base.text import count, first
from stagerun.data.importing.engine import in_order
from stagerun.data.index import Index, digest_of, printable
from stagerun.data.records import LmdbSource
from stagerun.data.rows import ROW, UNUSABLE, Look, index_of, look, parse


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """`unusable` says of each record that can't be used what is wrong with it, in key order."""

    index: Index
    unusable: tuple[str, ...]


def build(
    path: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    threads: int = 1,
    pixels: bool = True,
    classes: tuple[str, ...] = (),
    max_bad: int = 0,
) -> Built:
    """The index of the LMDB in folder `path`. Without `pixels` no image is decoded, and the mean stays unknown.

    A record that a loader couldn't use has the size 0 x 0 and the kind UNUSABLE. DataError with all of them if they are more than
    `max_bad`, or all there are; StorageError if the disk fails. `progress` gets (done, total).
    """
    source = LmdbSource(path, side_file=False)
    total = len(source)

    def row(i: int) -> tuple[bytes, str]:
        key, record = source.get(i)
        label, digest = -1, digest_of(record)
        try:
            datum = parse(record)
            label = datum.one_label
            return look(datum, pixels).row(label, digest), ""
        except DataError as error:
            return Look(UNUSABLE, 0, 0).row(label, digest), f"record `{printable(key)}`: {error.message}"

    rows, unusable = bytearray(), list[str]()
    for done, (made, mistake) in enumerate(in_order(row, 0, total, threads), start=1):
        rows += made
        unusable += [mistake] if mistake else []
        progress(done, total)
    if len(unusable) > max_bad or len(unusable) == total:
        raise DataError(
            f"{path}: {count(len(unusable), 'record')} of {total} can't be used:\n  " + "\n  ".join(first(unusable)),
            "make the LMDB again from its source, with `stagerun data import`"
            + (f"; to make the side file all the same, add --max-bad {len(unusable)}" if len(unusable) < total else ""),
        )
    return Built(index_of(source, np.frombuffer(rows, ROW), classes), tuple(unusable))
