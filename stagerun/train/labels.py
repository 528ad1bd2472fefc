"""Labels of multi-label images, from a file or the records, as a table of rows."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stagerun.base.errors import DataError
from stagerun.base.recipe import FLOAT_DATA, Source
from stagerun.base.text import count, first
from stagerun.comm import Comm
from stagerun.data import datum
from stagerun.data.index import printable
from stagerun.data.records import Records, Room
from stagerun.engine.images import Batch, DeviceBatch
from stagerun.language.labels import WrongLine, digest, parse
from stagerun.train.agreement import everyone

_RECORDS_A_BEAT = 64  # each may be a read from a slow file server


def label_table(records: Records, source: Source, classes: int, device: torch.device, comm: Comm) -> Tensor:
    """Return a uint8 tensor [records, classes] on the device: 1 for the classes of a record. The loader gives each image the number of
    its record in place of a label. Collective. DataError if the file changed since `check`, or lacks a record; or for mistakes in
    float_data."""
    if source.labels == FLOAT_DATA:
        rows = _of_datums(records, classes, comm)
    else:
        rows = everyone(comm, lambda: _of_file(records, source, classes))
    return torch.from_numpy(rows).to(device)


def _of_file(records: Records, source: Source, classes: int) -> NDArray[np.uint8]:
    assert source.labels_path is not None
    path, hint = Path(source.labels_path), "it has the `labels` of the images"
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a regular file", hint)
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}", hint) from None
    if digest(text) != source.labels_digest:
        raise DataError(f"{path} has changed since it was checked", "start the command again")
    labels: dict[str, tuple[int, ...]] = {}
    for line in parse(text.decode(), classes):
        if isinstance(line, WrongLine):  # of a stage with fewer classes than `check` has looked for
            raise DataError(f"{path}:{line.line}:{line.column}: {line.message}", line.hint)
        labels[line[0]] = line[1]
    keys = [records.key(i).decode(errors="replace") for i in range(len(records))]
    if missing := [key for key in keys if key not in labels]:
        lacks = f"{count(len(missing), 'record')} of {records.name}; the first is `{printable(missing[0].encode())}`"
        hint = "write a line for each record; the key alone for a record without classes"
        raise DataError(f"{path}: lacks {lacks}", hint)
    rows = np.zeros((len(records), classes), np.uint8)
    for row, key in zip(rows, keys, strict=True):
        row[list(labels[key])] = 1
    return rows


def _of_datums(records: Records, classes: int, comm: Comm) -> NDArray[np.uint8]:
    """Read float_data, each rank a part of the records, and share the rows. DataError for values that aren't numbers of classes, or if
    no record has any. Collective."""
    bounds = [rank * len(records) // comm.size for rank in range(comm.size + 1)]
    stretches = [range(begin, end) for begin, end in pairwise(bounds)]

    def read() -> NDArray[np.uint8]:
        which, room, wrong = stretches[comm.rank], Room(), list[str]()
        rows = np.zeros((len(which), classes), np.uint8)
        for row, i in enumerate(which):
            if row % _RECORDS_A_BEAT == 0:
                comm.pulse.beat()
            try:
                fields = datum.parse(records.read(i, room))
            except DataError:  # the loader reports it
                continue
            bad = [one for one in fields.floats if not (0 <= one < classes and one == int(one))]
            if bad:
                wrong.append(f"record `{printable(records.key(i))}`: {bad[0]:g} in float_data")
            else:
                rows[row, [int(one) for one in fields.floats]] = 1
        if wrong:
            hint = "change `num_classes`, or make the LMDB with classes that count from 0"
            text = "\n  ".join(first(wrong))
            raise DataError(f"{records.name}: labels that are not 0 to {classes - 1}:\n  {text}", hint)
        return rows

    packed = np.packbits(everyone(comm, read)).tobytes()
    rows = np.empty((len(records), classes), np.uint8)
    for bits, which in zip(comm.gather_bytes(packed), stretches, strict=True):
        whole = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(which) * classes)
        rows[which.start : which.stop] = whole.reshape(len(which), classes)
    if not rows.any():
        hint = "`stagerun data import` of a CSV writes them; or name a file of labels: `stagerun help losses`"
        raise DataError(f"{records.name}: no record has labels in its float_data", hint)
    return rows


def with_labels(batches: Iterator[Batch], table: Tensor) -> Iterator[Batch]:
    """Yield the batches with the rows of their records."""
    for batch in batches:
        labels = table[torch.as_tensor(batch.labels).to(table.device)]
        yield DeviceBatch(batch.images, labels, batch.positions, batch.cutout, batch.crop)
