"""`stagerun data import --prepare`: JPEGs arranged anew so that a part can be decoded alone, of images or of an LMDB.

Key, label and all else of a Datum stay; raw pixels, PNGs and CMYK JPEGs are stored as they are, and so is a JPEG that can't be
arranged anew, which is noted.

A JPEG isn't decoded and encoded again: it keeps its coefficients, and only the Huffman coding is redone, in one scan from top to bottom
with tables made for the picture, and a restart marker after about every fourth MCU, so that a part can be cut out (`jpeg.slices`). What
comes out is an ordinary baseline JPEG, whose pixels are compared.

Of the metadata only what decides the pixels is kept: the JFIF or Adobe marker, from which decoders know the colour space. EXIF (an
orientation is not applied, as in Caffe), colour profiles, thumbnails and comments are left out; they would be read and skipped
at every picture.
"""

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from stagerun.base.errors import DataError, UsageError
from stagerun.data.importing.engine import Made, Work
from stagerun.data.importing.partial import Note
from stagerun.data.index import digest_of, printable
from stagerun.data.jpeg.choice import WARNING, Library, picture, turbojpeg
from stagerun.data.jpeg.header import SAMPLINGS, Header, Reach, is_complete, read_header
from stagerun.data.jpeg.slices import SimpleDecoder, find_edges, grid
from stagerun.data.records import LmdbSource
from stagerun.data.rows import Statistics, look, parse
from stagerun.language.proto import caffe_pb2
from stagerun.system.image_sets import set_of

VERSION = 1  # of the arrangement


class LmdbRecords:
    """`Work` of the engine: the records of an LMDB as they are."""

    ignored: tuple[str, ...] = ()

    def __init__(self, path: str) -> None:
        self._source = LmdbSource(path)
        self.title = f"stagerun data import: {path}"
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
        self.identity: Mapping[str, Any] = {"source": _signature(self._source)}

    def __len__(self) -> int:
        return len(self._source)

    def make(self, position: int) -> Made:
        key, record = self._source.get(position)
        index = self._source.index
        try:
            # What has changed on the disk since must not get a fresh digest that says it is right.
            if index is not None and digest_of(record) != int(index.digests[position]):
                raise DataError("its bytes are not those that its digest was made of")
            fields = parse(record)
            return Made(key, record, fields.one_label, look(fields, self.statistics is None))
        except DataError as error:
            raise DataError(
                f"{self._source.name}: record `{printable(key)}`: {error.message}",
                f"`stagerun data verify --decode {self._source.name}` finds all such records",
            ) from None


class Prepared:
    """Another `Work`, with its JPEGs arranged anew. UsageError where what that takes isn't installed."""

    def __init__(self, work: Work) -> None:
        if reason := can_prepare():
            raise UsageError(f"this machine can't prepare JPEGs: {reason}")
        self._work = work
        self.title, self.classes, self.ignored = work.title, work.classes, work.ignored
        self.statistics, self.prepared_from = work.statistics, work.prepared_from
        self.identity: Mapping[str, Any] = {**work.identity, "prepared": VERSION}

    def __len__(self) -> int:
        return len(self._work)

    def make(self, position: int) -> Made:
        made = self._work.make(position)
        if made.record is None or made.look is None or "JPEG" not in made.look.kind or "CMYK" in made.look.kind:
            return made
        datum = caffe_pb2.Datum.FromString(made.record)
        try:
            datum.data = prepare(datum.data)
        except DataError as error:
            # A loader takes it as it is, so it stays: a progressive one without its last scans, for example.
            return replace(made, notes=(*made.notes, Note(printable(made.key), "copied as it is", error.message)))
        record = datum.SerializeToString()
        stored = look(parse(record), False)
        return replace(made, record=record, look=replace(made.look, kind=stored.kind, interval=stored.interval))


def _signature(source: LmdbSource) -> str:
    """Which records: any change to an LMDB is a new transaction."""
    lmdb, places = source.lmdb, source.table
    digest = hashlib.sha256(f"{lmdb.size} {lmdb.meta.transaction}".encode())
    for array in (places.offsets, places.lengths, places.key_ends, places.keys):
        digest.update(array.data)
    return digest.hexdigest()


# MCUs from one restart marker to the next. Fewer: more bytes (2 have 1 % more than 4); more: more is decoded beside a
# part.
_INTERVAL = 4


def can_prepare() -> str:
    """'', or why `prepare` can't be called on this machine and what to do about it."""
    try:
        prepare(picture())
    except (UsageError, DataError) as error:
        return ": ".join(filter(None, (error.message, error.hint)))
    return ""


def prepare(data: bytes) -> bytes:
    """A baseline JPEG of the same pixels, whose parts can be cut out.

    `data` itself comes back where nothing is gained: a file that is prepared already, one of a single segment, CMYK,
    arithmetic coding, an unusual sampling.

    UsageError if this machine can't; DataError, without a place, if the file is damaged, or if the pixels would not be
    those of `data` (a progressive file without its last scans, which libjpeg smooths).
    """
    header = read_header(data)
    if not is_complete(data):  # the result would be, and no one would see any more that rows are missing
        raise DataError(
            "the image is cut off: JPEG data ends before its end marker",
            "replace it by a complete file, or leave it out",
        )
    interval = _interval(header)
    if not interval or (header.reach is Reach.PART and header.restart_interval == interval):
        return data
    library = turbojpeg()
    prepared = _transform(library, data, interval)
    _verify(data, header, prepared, interval, library)
    return prepared


def _interval(header: Header) -> int:
    """MCUs between markers, the divisor of a row's that is nearest 4; 0 for what can't be cut whatever the interval."""
    if header.reach is Reach.ODD or not (header.components == 1 or header.sampling in SAMPLINGS):
        return 0
    across, down = (8 * f for f in header.sampling[0]) if header.components > 1 else (8, 8)
    columns = -(-header.width // across)
    interval = min((n for n in range(1, columns + 1) if columns % n == 0), key=lambda n: (abs(n - _INTERVAL), n))
    return interval if columns > interval or header.height > down else 0


TRANSFORM = 2
OPTIMIZE, RESTART_BLOCKS = 11, 18
COPY_NONE = 64


class Region(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_int), ("width", ctypes.c_int), ("height", ctypes.c_int)]


class Transform(ctypes.Structure):
    _fields_ = [
        ("region", Region),
        ("operation", ctypes.c_int),
        ("options", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("filter", ctypes.c_void_p),
    ]


_int, _pointer, _size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_results, _sizes, _transforms = ctypes.POINTER(_pointer), ctypes.POINTER(_size), ctypes.POINTER(Transform)
# name -> (result, arguments)
_FUNCTIONS = {
    "tj3Init": (_pointer, (_int,)),
    "tj3Destroy": (None, (_pointer,)),
    "tj3Free": (None, (_pointer,)),
    "tj3Set": (_int, (_pointer, _int, _int)),
    "tj3GetErrorCode": (_int, (_pointer,)),
    "tj3GetErrorStr": (ctypes.c_char_p, (_pointer,)),
    "tj3Transform": (_int, (_pointer, _pointer, _size, _int, _results, _sizes, _transforms)),
}


def _transform(library: Library, data: bytes, interval: int) -> bytes:
    calls = library.calls
    for name, (result_type, arguments) in _FUNCTIONS.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result_type, arguments
    handle = calls.tj3Init(TRANSFORM)
    if not handle:
        raise MemoryError(f"{library.path} gives no transformer")
    result, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = np.frombuffer(data, np.uint8)
    try:
        calls.tj3Set(handle, RESTART_BLOCKS, interval)
        calls.tj3Set(handle, OPTIMIZE, 1)
        same = Transform(options=COPY_NONE)
        failed = calls.tj3Transform(
            handle, source.ctypes.data, source.size, 1, ctypes.byref(result), ctypes.byref(size), ctypes.byref(same)
        )
        if (failed and calls.tj3GetErrorCode(handle) != WARNING) or not result:
            reason = calls.tj3GetErrorStr(handle).decode("utf-8", "replace")
            raise DataError(f"the image can't be prepared: {reason}", "leave it as it is, or encode it again")
        return ctypes.string_at(result, size.value)
    finally:
        if result:
            calls.tj3Free(result)
        calls.tj3Destroy(handle)


def _verify(data: bytes, header: Header, prepared: bytes, interval: int, library: Library) -> None:
    """DataError unless the result has the pixels of `data` and restart markers where they should be."""
    made = read_header(prepared)
    cells = grid(made)
    count = cells.rows * cells.columns if cells else 0
    whole = np.frombuffer(prepared, np.uint8)
    if made.restart_interval != interval or find_edges(whole, made.scan_at, count, count) is None:
        raise DataError(
            f"the image can't be prepared: {library.path} writes no restart markers",
            "install a newer libjpeg-turbo: 3.0 and later do",
        )
    channels = 1 if header.components == 1 else 3
    before = SimpleDecoder().decode(data, header, channels)
    after = SimpleDecoder().decode(prepared, made, channels)
    if not np.array_equal(before, after):
        raise DataError("the image can't be prepared: its pixels would change", "leave it as it is, or encode it again")
