"""The side file of an LMDB: what is known about each record, so that nobody has to walk the LMDB to find it out.

    LMDB/data.mdb                       the records, Caffe's own format
    LMDB/stagerun-index.safetensors     this file: arrays with one row per record in key order, and facts as JSON

It is data alone: arrays in safetensors' format, which can be mapped into memory and shared by all workers of a node, and JSON.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIDE_FILE = "stagerun-index.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is true of an LMDB as a whole."""

    records: int
    file_size: int  # of data.mdb in bytes, and its newest transaction: another value means that it was changed since
    transaction: int
    fingerprint: str  # sha256 over keys and digests in key order, in hex: the same for every LMDB of the same records
    classes: tuple[str, ...] = ()  # names by label; () where nobody knows them
    mean_bgr: tuple[float, ...] = ()  # mean of all pixels per channel (B, G, R; or one of grey images); () where unknown
    kinds: tuple[tuple[str, int], ...] = ()  # ("baseline JPEG", 1281145), ("PNG", 1) ...: how the images are stored, most first
    restart_interval: int = 0  # 4 where `prepare` made all JPEGs, 0 else


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Index:
    """One row per record, in key order."""

    facts: Facts
    offsets: NDArray[np.int64]  # of the Datum's first byte in data.mdb
    lengths: NDArray[np.int64]  # of the Datum, bytes
    labels: NDArray[np.int32]
    heights: NDArray[np.int32]  # of the image, pixels, as stored (EXIF rotation not applied)
    widths: NDArray[np.int32]
    digests: NDArray[np.uint64]  # blake2b of 8 bytes, little-endian, over the Datum
    keys: NDArray[np.uint8]  # all keys, one after the other
    key_ends: NDArray[np.int64]  # [records + 1]; key i is keys[key_ends[i] : key_ends[i + 1]]

    def key(self, i: int) -> bytes:
        return self.keys[self.key_ends[i] : self.key_ends[i + 1]].tobytes()
