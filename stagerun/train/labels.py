"""The labels of images that have several, from their file, as a table that batches are looked up in."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from stagerun.base.errors import DataError
from stagerun.base.recipe import Source
from stagerun.base.text import count
from stagerun.data.lmdb_offsets import printable
from stagerun.data.records import Records
from stagerun.engine.feed import DeviceBatch
from stagerun.engine.images import Batch
from stagerun.language.labels import WrongLine, digest, parse


class Table:
    """uint8 [records, classes] on the device: 1 for the classes of a record. The loader gives each image the number of its record in
    the place of a label."""

    def __init__(self, records: Records, source: Source, classes: int, device: torch.device) -> None:
        """DataError if the file is not the one that `check` read, or lacks a record."""
        assert source.labels_path is not None
        text = _read(source.labels_path)
        if digest(text) != source.labels_digest:
            raise DataError(f"{source.labels_path} has changed since it was checked", "start the command again")
        known: dict[str, tuple[int, ...]] = {}
        for line in parse(text.decode(), classes):
            if isinstance(line, WrongLine):  # of a stage with fewer classes than `check` has looked for
                raise DataError(f"{source.labels_path}:{line.line}:{line.column}: {line.message}", line.hint)
            known[line[0]] = line[1]
        rows = np.zeros((len(records), classes), np.uint8)
        missing: list[str] = []
        for i in range(len(records)):
            key = records.key(i).decode(errors="replace")
            if key in known:
                rows[i, list(known[key])] = 1
            else:
                missing.append(key)
        if missing:
            raise DataError(
                f"{source.labels_path}: says nothing of {count(len(missing), 'record')} of {records.name}; the first is "
                f"`{printable(missing[0].encode())}`",
                "write a line for each record; one without classes is the key alone",
            )
        self.rows = torch.from_numpy(rows).to(device)

    def __call__(self, numbers: np.ndarray | Tensor) -> Tensor:
        """uint8 [N, classes] of int64 [N]."""
        return self.rows[torch.as_tensor(numbers).to(self.rows.device)]


def with_labels(batches: Iterator[Batch], table: Table) -> Iterator[Batch]:
    """The batches with the labels that their records have in the table."""
    for batch in batches:
        yield DeviceBatch(batch.images, table(batch.labels), batch.positions, batch.lighting, batch.cutout, batch.crop)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}", "it has the `labels` of the images") from None
