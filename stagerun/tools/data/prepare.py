"""`stagerun data import --prepare`: a copy of an LMDB whose JPEGs decode faster, since a training's random crop is decoded without the rest.

Preparing neither decodes nor encodes a JPEG again: it keeps its coefficients. Only the Huffman coding is redone, in one scan from top to
bottom with tables made for the picture, and a restart marker after about every fourth MCU, so that a part can be cut out (`jpeg.slices`).
The result is an ordinary baseline JPEG, whose pixels are compared. Of the metadata it keeps what decides the pixels: the JFIF or Adobe
marker. EXIF (an orientation is not applied, as in Caffe), colour profiles, thumbnails and comments would be skipped at every reading.
"""

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from stagerun.base.errors import DataError, UsageError
from stagerun.data.importing.engine import Made
from stagerun.data.importing.partial import Note
from stagerun.data.index import Statistics, digest_of, look, parse, printable
from stagerun.data.jpeg import WARNING, picture, turbojpeg
from stagerun.data.jpeg.decoder import SimpleDecoder
from stagerun.data.jpeg.header import SAMPLINGS, Header, Reach, is_complete, read_header
from stagerun.data.records import LmdbSource
from stagerun.language.proto import caffe_pb2
from stagerun.system.image_sets import set_of
from stagerun.tools.data.records import classes_of


class PreparedRecords:
    """`Work` of the engine that copies the records of an LMDB and prepares their JPEGs. UsageError on a machine that can't."""

    ignored: tuple[str, ...] = ()
    statistics: Statistics | None = None

    def __init__(self, path: str) -> None:
        try:
            prepare(picture())
        except (UsageError, DataError) as error:
            raise UsageError(f"this machine can't prepare JPEGs: {error.message}", error.hint) from None
        self._source = source = LmdbSource(path)
        self.title, self.classes = f"stagerun data import: {path}", classes_of(source)
        self.prepared_from = set_of(path)
        # Any change to an LMDB is a new transaction.
        state = f"{source.lmdb.size} bytes, transaction {source.lmdb.meta.transaction}, {self.prepared_from}"
        self.identity: Mapping[str, Any] = {"source": state, "prepared": 1}  # the version of the rules

    def __len__(self) -> int:
        return len(self._source)

    def make(self, position: int) -> Made:
        key, record = self._source.get(position)
        index, notes = self._source.index, tuple[Note, ...]()
        try:
            # A fresh digest must not approve what changed on the disk.
            if index is not None and digest_of(record) != int(index.digests[position]):
                raise DataError("its bytes don't match its digest")
            fields = parse(record)
            made = look(fields, True)
        except DataError as error:
            message = f"{self._source.name}: record `{printable(key)}`: {error.message}"
            hint = f"`stagerun data verify --decode {self._source.name}` lists all such records"
            raise DataError(message, hint) from None
        if "JPEG" in made.kind and "CMYK" not in made.kind:
            datum = caffe_pb2.Datum.FromString(record)
            try:
                datum.data = prepare(datum.data)
            except DataError as error:  # a loader takes it: a progressive one without its last scans, for example
                notes = (Note(printable(key), "copied as it is", error.message),)
            record = datum.SerializeToString()
            stored = look(parse(record), False)
            made = replace(made, kind=stored.kind, interval=stored.interval)
        return Made(key, record, fields.label, made, notes)


# MCUs from one restart marker to the next. With 2 the bytes grow by 1 %; with more a part needs more of its surroundings.
_INTERVAL = 4


def prepare(data: bytes) -> bytes:
    """Return a baseline JPEG of the same pixels whose parts can be cut out; or `data`, if that gains nothing: it is prepared already, has one
    segment, CMYK, arithmetic coding or an unusual sampling.

    DataError, without a place, if the file is damaged or its pixels would change (a progressive file without its last scans, which libjpeg
    smooths).
    """
    header = read_header(data)
    if not is_complete(data):  # the result would be complete, and hide that rows are missing
        message = "the image is cut off: JPEG data ends before its end marker"
        raise DataError(message, "replace it by a complete file, or leave it out")
    interval = _interval(header)
    if not interval or (header.reach is Reach.PART and header.restart_interval == interval):
        return data
    prepared = _transcode(data, interval)
    made = read_header(prepared)
    if made.restart_interval != interval:
        message = f"the image can't be prepared: {turbojpeg().path} writes no restart markers"
        raise DataError(message, "install libjpeg-turbo 3.0 or later")
    channels = 1 if header.components == 1 else 3
    before = SimpleDecoder().decode(data, header, channels)
    after = SimpleDecoder().decode(prepared, made, channels)
    if not np.array_equal(before, after):
        raise DataError("the image can't be prepared: its pixels would change", "leave it as it is, or encode it again")
    return prepared


def _interval(header: Header) -> int:
    """Return the divisor of a row's MCUs that is nearest 4; 0 for a picture that can't be cut."""
    if header.reach is Reach.ODD or not (header.components == 1 or header.sampling in SAMPLINGS):
        return 0
    across, down = (8 * f for f in header.sampling[0]) if header.components > 1 else (8, 8)
    columns = -(-header.width // across)
    interval = min((n for n in range(1, columns + 1) if columns % n == 0), key=lambda n: (abs(n - _INTERVAL), n))
    return interval if columns > interval or header.height > down else 0


# libjpeg-turbo/libjpeg-turbo: `src/turbojpeg.h`
_TRANSFORM = 2
_OPTIMIZE, _RESTART_BLOCKS = 11, 18
_COPY_NONE = 64


def _transcode(data: bytes, interval: int) -> bytes:
    """Code the coefficients again, by TurboJPEG's lossless transform."""
    calls = turbojpeg().calls
    calls.tj3Init.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(calls.tj3Init(_TRANSFORM))
    result, size = ctypes.c_void_p(), ctypes.c_size_t()
    # tjtransform: the region, operation, options, data, filter
    transform = struct.pack("6i2P", 0, 0, 0, 0, 0, _COPY_NONE, 0, 0)
    try:
        calls.tj3Set(handle, _RESTART_BLOCKS, interval)
        calls.tj3Set(handle, _OPTIMIZE, 1)
        failed = calls.tj3Transform(
            handle, data, ctypes.c_size_t(len(data)), 1, ctypes.byref(result), ctypes.byref(size), transform
        )
        if (failed and calls.tj3GetErrorCode(handle) != WARNING) or not result:
            raise DataError("the image can't be prepared: libjpeg-turbo refuses it", "encode it again")
        return ctypes.string_at(result, size.value)
    finally:
        calls.tj3Free(result)
        calls.tj3Destroy(handle)
