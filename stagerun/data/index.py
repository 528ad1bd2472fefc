"""The side file of an LMDB: what is known about each record, so that the LMDB needn't be walked to find out.

    LMDB/data.mdb                       the records, Caffe's own format
    LMDB/stagerun-index.safetensors     this file: arrays with one row per record in key order, and facts as JSON

It is data alone: arrays in safetensors' format, and JSON. It carries a digest of itself, and the size and transaction of the
data.mdb that it was made from: a damaged one, or one of another state of the LMDB, is refused; and since two LMDBs made in the
same way may be equal in both, the digests of three records are compared too.
"""

import hashlib
import json
import os
import uuid
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as from_safetensors
from safetensors.numpy import save as to_safetensors

from stagerun.base.errors import DataError, PermissionDenied, StorageError
from stagerun.system.files import hint_for, why, write_whole
from stagerun.system.image_sets import SIDE_FILE
from stagerun.system.lmdb_file import LmdbFile, reading
from stagerun.system.typed import json_object, read_as

_VERSION = 1
_MADE_AGAIN = "make it again with `stagerun data index --force {folder}`"

# The arrays of the file. `key_ends` is one longer than the records, `keys` as long as all keys.
_ARRAYS = {
    "offsets": "<i8", "lengths": "<i8", "labels": "<i4", "heights": "<i4", "widths": "<i4", "digests": "<u8", "keys": "u1", "key_ends": "<i8"
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """One row per record, in key order: where it lies in data.mdb."""

    offsets: NDArray[np.int64]  # of the value's (the Datum's) first byte
    lengths: NDArray[np.int64]  # of the value, bytes
    keys: NDArray[np.uint8]  # all keys, one after the other
    key_ends: NDArray[np.int64]  # [records + 1]; key i is keys[key_ends[i] : key_ends[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets)

    def key(self, i: int) -> bytes:
        return self.keys[self.key_ends[i] : self.key_ends[i + 1]].tobytes()


def places_in(lmdb: LmdbFile) -> Table:
    """Read from the file's own tree. Errors as of `LmdbFile.records`."""
    offsets, lengths, ends, keys = array("q"), array("q"), array("q", [0]), bytearray()
    for offset, length, key in lmdb.records():
        offsets.append(offset)
        lengths.append(length)
        keys += key
        ends.append(len(keys))
    return Table(
        offsets=np.array(offsets, np.int64),
        lengths=np.array(lengths, np.int64),
        keys=np.frombuffer(bytes(keys), np.uint8),
        key_ends=np.array(ends, np.int64),
    )


def printable(key: bytes) -> str:
    """A key as a message shows it: text where it is text, else escaped."""
    return key.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is true of an LMDB as a whole."""

    records: int
    file_size: int  # of data.mdb in bytes, and its newest transaction: another value means that it was changed since
    transaction: int
    fingerprint: str  # sha256 over key_ends, keys and digests, in hex: the same for every LMDB of the same records
    classes: tuple[str, ...] = ()  # names by label; () where unknown
    # Mean of all pixels per channel (B, G, R; or one of grey images); () where unknown.
    mean_bgr: tuple[float, ...] = ()
    # ("baseline JPEG", 1281145), ("PNG", 1) ...: how the images are stored, most first.
    kinds: tuple[tuple[str, int], ...] = ()
    deviation_bgr: tuple[float, ...] = ()  # standard deviation of all pixels, as mean_bgr; () in an older side file
    restart_interval: int = 0  # 4 where the JPEGs (99 % of them) are as `prepare` makes them, 0 else
    prepared_from: str = ""  # `image_sets.set_of` the LMDB that `prepare` made this one from: the same pixels


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Index(Table):
    """What is known about each record, and about all of them."""

    facts: Facts
    labels: NDArray[np.int32]  # -1 where there is none to be read
    # Pixels of the image, as stored (EXIF rotation not applied); 0 x 0 where it can't be used.
    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    digests: NDArray[np.uint64]  # blake2b of 8 bytes, little-endian, over the Datum


def digest_of(record: bytes) -> int:
    """The digest of one Datum, as in `Index.digests`."""
    return int.from_bytes(hashlib.blake2b(record, digest_size=8).digest(), "little")


def save(index: Index, folder: str) -> None:
    """Writes the side file of the LMDB in `folder`, whole or not at all, in place of another. StorageError, PermissionDenied."""
    file = Path(folder) / SIDE_FILE
    arrays = {name: np.ascontiguousarray(getattr(index, name), kind) for name, kind in _ARRAYS.items()}
    # One entry of metadata, since safetensors writes several in no order: the same index is the same bytes.
    said = asdict(index.facts)
    if not said["prepared_from"]:  # the bytes of before there was such a thing
        del said["prepared_from"]
    facts = json.dumps({"version": _VERSION, **said})
    partial = file.with_name(f"{file.name}.partial-{uuid.uuid4().hex}")
    try:
        write_whole(file, to_safetensors(arrays, {"stagerun": f"{_digest(facts, arrays)} {facts}"}), aside=partial)
    except PermissionError:
        raise PermissionDenied(f"{folder}: may not be written", "ask the owner of the LMDB to make its index") from None
    except OSError as error:
        raise StorageError(f"{file}: can't be written: {why(error, file.parent)}", hint_for(error)) from None


def load(folder: str, lmdb: LmdbFile | None = None, sampled: bool = True) -> Index | None:
    """The side file of the LMDB in `folder`, which may be open already; None if there is none. Not `sampled`: for those who compare all
    records.

    DataError if it is damaged, or was made for another LMDB, or another state of this one. The arrays can't be written to.
    """
    lmdb = lmdb or LmdbFile(folder)
    index = read(folder)
    if index is not None and is_stale(index, lmdb):
        raise DataError(
            f"{Path(folder) / SIDE_FILE}: belongs to another state of data.mdb: the LMDB was changed after its index was made",
            f"if the change was meant, {_MADE_AGAIN.format(folder=folder)}",
        )
    if index is None or not sampled:
        return index
    try:
        foreign = foreign_record(index, lmdb)
    except OSError as error:
        raise StorageError(
            f"{folder}: data.mdb can't be read: {error.strerror}", "check the disk or the file server"
        ) from None
    if foreign is not None:
        raise DataError(
            f"{Path(folder) / SIDE_FILE}: record `{printable(index.key(foreign))}` is not the one that it was made of: "
            "it belongs to another LMDB, or the record is damaged",
            f"copy both files again from where they were made together, or {_MADE_AGAIN.format(folder=folder)}",
        )
    return index


def is_stale(index: Index, lmdb: LmdbFile) -> bool:
    """Whether something was committed to the LMDB since, or it is quite another."""
    return (lmdb.size, lmdb.meta.transaction) != (index.facts.file_size, index.facts.transaction)


def foreign_record(index: Index, lmdb: LmdbFile) -> int | None:
    """The first, the middle or the last record, if its bytes in data.mdb are not those of its digest. OSError."""
    for i in sorted({0, len(index) // 2, len(index) - 1}) if len(index) else ():
        at, length = int(index.offsets[i]), int(index.lengths[i])
        whole = 0 <= at <= at + length <= index.facts.file_size
        if not whole or digest_of(os.pread(lmdb.fd, length, at)) != index.digests[i]:
            return i
    return None


def read(folder: str) -> Index | None:
    """As `load`, whatever has happened to data.mdb since."""
    file = Path(folder) / SIDE_FILE
    try:
        # Read, not mapped: a file that is copied over it while it is in use would end the process with a SIGBUS. Each worker
        # has its own so: 106 MB and 0.15 s for ILSVRC12's 1,281,167 records.
        with reading(file), suppress(FileNotFoundError):
            return _parse(file.read_bytes())
        return None
    except ValueError as error:
        raise DataError(f"{file}: is damaged: {error}", _MADE_AGAIN.format(folder=folder)) from None


def _parse(data: bytes) -> Index:
    """ValueError if it is not what `save` writes."""
    size = int.from_bytes(data[:8], "little")
    try:
        found = from_safetensors(data)
        header: Any = json_object(data[8 : 8 + size])
        digest, _, text = header["__metadata__"]["stagerun"].partition(" ")
        arrays = {name: found[name] for name in _ARRAYS}
    except (SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not that of such a file: {error}") from None
    said = json_object(text.encode())
    if said.get("version") != _VERSION:
        raise ValueError(f"its version is {said.get('version')}, this stagerun knows {_VERSION}")
    if (
        any((arrays[name].dtype, arrays[name].ndim) != (kind, 1) for name, kind in _ARRAYS.items())
        or _digest(text, arrays) != digest
    ):
        raise ValueError("its bytes are not those that were written")
    for numbers in arrays.values():
        numbers.flags.writeable = False
    facts = read_as(Facts, said)
    per_record = {len(array) for name, array in arrays.items() if name not in ("keys", "key_ends")}
    if per_record != {facts.records} or len(arrays["key_ends"]) != facts.records + 1:
        raise ValueError("its arrays are not of one length")
    return Index(facts=facts, **arrays)


def _digest(facts: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name in _ARRAYS:
        digest.update(arrays[name].data)
    return digest.hexdigest()
