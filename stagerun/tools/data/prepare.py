"""The work of `stagerun data prepare`: the records of an LMDB, their JPEGs arranged anew so that a part can be decoded alone.

Lossless: each JPEG keeps its coefficients, and `transcode` compares the pixels. A Datum keeps its key, label and all else;
raw pixels, PNGs and CMYK JPEGs are copied as they are, and so is a JPEG that can't be arranged anew, which is noted.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from stagerun.data.fingerprint import set_of
from stagerun.data.index import digest_of
from stagerun.data.lmdb_offsets import offsets_of
from stagerun.data.lmdb_source import LmdbSource
from stagerun.data.records import printable
from stagerun.data.rows import Statistics, look, parse
from stagerun.errors import DataError, UsageError
from stagerun.proto import caffe_pb2
from stagerun.tools.data import transcode
from stagerun.tools.data.importing.engine import Made
from stagerun.tools.data.importing.journal import Note

VERSION = 1  # of the arrangement


class PrepareWork:
    """`Work` of the engine. UsageError where what it takes isn't installed."""

    ignored = ()

    def __init__(self, path: str) -> None:
        if reason := transcode.can_prepare():
            raise UsageError(f"this machine can't prepare JPEGs: {reason}")
        self._source = LmdbSource(path)
        self.title = f"stagerun data prepare: {path}"
        index = self._source.index
        if index is not None and not any("JPEG" in kind for kind, _ in index.facts.kinds):
            raise UsageError(
                f"{path}: holds no JPEGs, so there is nothing to prepare", "train on it as it is; it decodes as fast"
            )
        self.classes = index.facts.classes if index is not None else ()
        # The pixels stay the same, so do their mean and deviation.
        self.statistics: Statistics | None = None
        if index is not None and index.facts.deviation_bgr:
            self.statistics = index.facts.mean_bgr, index.facts.deviation_bgr
        self.prepared_from = set_of(path)
        self.identity: Mapping[str, Any] = {"version": VERSION, "prepared from": _signature(path)}

    def __len__(self) -> int:
        return len(self._source)

    def make(self, position: int) -> Made:
        key, record = self._source.get(position)
        try:
            return self._make(position, key, record)
        except DataError as error:
            raise DataError(
                f"{self._source.name}: record `{printable(key)}`: {error.message}",
                f"`stagerun data verify --decode {self._source.name}` finds all such records",
            ) from None

    def changed(self, position: int, state: int) -> str:
        return ""  # its transaction and places are in the identity

    def _make(self, position: int, key: bytes, record: bytes) -> Made:
        digest = digest_of(record)
        index = self._source.index
        # What has changed on the disk since must not get a fresh digest that says it is right.
        if index is not None and digest != int(index.digests[position]):
            raise DataError("its bytes are not those that its digest was made of")
        found = look(parse(record), False)
        datum = caffe_pb2.Datum.FromString(record)
        notes: tuple[Note, ...] = ()
        if "JPEG" in found.kind and "CMYK" not in found.kind:
            try:
                datum.data = transcode.prepare(datum.data)
                record = datum.SerializeToString()
            except DataError as error:
                # A loader takes it as it is, so it stays: a progressive one without its last scans, for example.
                notes = (Note(printable(key), "copied as it is", error.message),)
        return Made(key, record, datum.label, look(datum, self.statistics is None), notes)


def _signature(path: str) -> str:
    """Which records: any change to an LMDB is a new transaction."""
    offsets = offsets_of(path)
    digest = hashlib.sha256(f"{offsets.file_size} {offsets.transaction}".encode())
    for array in (offsets.offsets, offsets.lengths, offsets.key_ends, offsets.keys):
        digest.update(array.data)
    return digest.hexdigest()
