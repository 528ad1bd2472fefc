"""One image of a source -> one Datum, by rule. Encoded images keep their bytes where `odd` keeps them; formats that hold pixels are stored
as pixels, as Caffe's own converters do."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagerun.base import order
from stagerun.base.errors import DataError, UsageError
from stagerun.data.datum import SEVERAL, Image, parse, raw_datum
from stagerun.data.importing import odd
from stagerun.data.importing.engine import Made
from stagerun.data.importing.items import Item, Pixels, Source
from stagerun.data.importing.partial import Note
from stagerun.data.jpeg import BadImage
from stagerun.data.rows import Statistics, look
from stagerun.language.proto import caffe_pb2

# What decides the records besides source and options: it changes with the rules here and in `odd`.
VERSION = 3
LONGEST_KEY = 511  # LMDB's limit, bytes
_MOST = 10**8  # keys have eight digits

# A Datum without label, its image decoded (None: as it will be), and names of oddities.
Stored: TypeAlias = tuple[caffe_pb2.Datum, Image | None, tuple[str, ...]]


class PlainImport:
    """`Work` of the engine, as a run has it. Position p is the image at place p of the order; what is left out keeps its number."""

    def __init__(self, source: Source, path: str) -> None:
        """DataError, UsageError."""
        if not len(source):
            raise DataError(f"{path}: there are no images in it", "check the path")
        if len(source) >= _MOST:
            raise UsageError(f"{path}: {len(source)} images; keys of eight digits number fewer than 100 million")
        self._source = source
        self._order: NDArray[np.int64] = order.EveryRecord(1, len(source), True).at(0, len(source))
        self.title = f"stagerun data import: {source.kind} {path}"
        self.classes, self.ignored = source.classes, source.ignored
        self.statistics: Statistics | None = None
        self.prepared_from = ""
        self.identity: Mapping[str, Any] = {
            "version": VERSION,
            "format": source.kind,
            "source": source.signature,
            "images": len(source),
            "shuffle": "seed 1",
            "pixels": "encoded",
            "size": "as it is",
            "quality": "as it is",
            "background": "white",
        }

    def __len__(self) -> int:
        return len(self._order)

    def make(self, position: int) -> Made:
        i = int(self._order[position])
        name = f"image {i} of the source"
        try:
            item = self._source.item(i)
            name = item.name
            key = b"%08d_" % position + name.encode(errors="surrogateescape")
            return self._make(key, item, self._source.read(i))
        except MemoryError:
            # No fault of the image: to leave it out would make the result depend on the machine.
            raise UsageError(f"{name}: not enough memory to decode it", "use fewer --threads") from None
        except DataError as error:
            reason = error.reason if isinstance(error, BadImage) else "can't be read"
            return Made(b"", None, notes=(Note(name, reason, error.message, bad=True),))

    def _make(self, key: bytes, item: Item, content: bytes | Pixels) -> Made:
        if len(key) > LONGEST_KEY:
            raise BadImage("name too long", f"its key would have {len(key)} bytes, LMDB's have at most {LONGEST_KEY}")
        if item.several is None and not 0 <= item.label < 2**31:
            raise BadImage("bad label", f"the label is {item.label}; labels count from 0")
        datum, decoded, oddities = self.stored(item.name, content)
        if item.several is None:
            datum.label = item.label
        else:
            datum.label = SEVERAL
            datum.float_data.extend(item.several)
        record = datum.SerializeToString()
        notes = tuple(Note(item.name, oddity) for oddity in oddities)
        return Made(key, record, item.label, look(parse(record), True, decoded), notes)

    def stored(self, name: str, content: bytes | Pixels) -> Stored:
        """BadImage."""
        if isinstance(content, Pixels):
            return raw_datum(content.array, 0), content.array, ()
        judged = odd.judge(content, name)
        return caffe_pb2.Datum(data=judged.data, encoded=True), judged.image, judged.oddities
