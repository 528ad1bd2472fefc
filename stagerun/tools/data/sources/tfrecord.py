"""TFRecord shards of tf.train.Example with ImageNet's keys, as TensorFlow's converters write them; without TensorFlow.

    uint64 length | uint32 masked crc32c of the length | data | uint32 masked crc32c of the data      (little-endian)

(tensorflow/tensorflow: tensorflow/core/lib/io/record_writer.h). The lengths are gone through once, and their checksums
compared; the data's, when an image is read.

Keys: `image/encoded`, `image/class/label`, and if there are any `image/filename` and `image/class/synset`. Labels count
from 1 in ImageNet's converters, which write synsets (tensorflow/tpu: tools/datasets/imagenet_to_gcs.py), and from 0 in
TF-Slim's others, which don't (tensorflow/models: research/slim/datasets/dataset_utils.py).
"""

import glob
import os
import re
import struct
import threading
from dataclasses import dataclass, field

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.data.importing.items import LARGEST_FILE, Item, signature
from stagerun.language.proto import tfexample_pb2
from stagerun.tools.data.sources.archive import DAMAGED, LARGEST_LABEL, Archive, keep_open
from stagerun.tools.data.sources.format import Format, Sign, SourceOptions

_HEAD, _TAIL = 12, 4
_SHARD = re.compile(r"(?P<set>.*)-(?P<number>[0-9]{5})-of-(?P<of>[0-9]{5})(\..*)?")
_SPLITS = {"train": ("train",), "val": ("val", "validation", "valid"), "test": ("test",)}


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted by a constant, as TFRecords have it."""
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class TfRecords:
    kind = "tfrecord"
    ignored = ()
    classes = ()
    shards: tuple[Archive, ...]
    ends: NDArray[np.int64]  # how many records there are up to the end of each shard
    places: NDArray[np.int64]  # [n, 2]: offset of the data in its shard, bytes
    last: threading.local = field(default_factory=threading.local, repr=False)  # `record`: what this thread read last

    @property
    def signature(self) -> str:
        return signature(self.kind, *(shard.state for shard in self.shards), self.ends, self.places)

    def __len__(self) -> int:
        return len(self.places)

    def item(self, i: int) -> Item:
        features, place = self._features(i)
        label = _integer(features, "image/class/label", place)
        synset = _text(features, "image/class/synset", place)
        name = _text(features, "image/filename", place)
        if synset:
            label -= 1
        if not 0 <= label <= LARGEST_LABEL:
            raise DataError(f"{place}: `image/class/label` is {label + bool(synset)}", "ImageNet's count from 1")
        if not name:
            shard, number = self._where(i)
            name = f"{shard.name}/{number:06d}"
        elif synset and name.startswith(synset + "_"):
            name = f"{synset}/{name}"
        return Item(name, label)

    def read(self, i: int) -> bytes:
        features, place = self._features(i, checked=True)
        return _bytes(features, "image/encoded", place)

    def _where(self, i: int) -> tuple[Archive, int]:
        """The shard, and the number of the record in it."""
        shard = int(np.searchsorted(self.ends, i, side="right"))
        return self.shards[shard], i - (int(self.ends[shard - 1]) if shard else 0)

    def _features(self, i: int, checked: bool = False) -> tuple[dict[str, tfexample_pb2.Feature], str]:
        # A thread asks for the item and then for the image, which stand in the same record.
        last = getattr(self.last, "record", None)
        if last is None or last.number != i:
            last = self.last.record = self._record(i)
        if checked and masked_crc(last.content) != last.stated:
            raise DataError(f"{last.place}: its data have a wrong checksum", DAMAGED)
        return last.features, last.place

    def _record(self, i: int) -> "_Record":
        shard, number = self._where(i)
        at, size = (int(n) for n in self.places[i])
        place = f"{shard.path}: record {number} at byte {at}"
        data = shard.read(at, size + _TAIL, f"record {number}")
        content = data[:size]
        try:
            example = tfexample_pb2.Example.FromString(content)
        except DecodeError:
            if masked_crc(content) != int.from_bytes(data[size:], "little"):
                raise DataError(f"{place}: its data have a wrong checksum", DAMAGED) from None
            raise DataError(f"{place}: not a tf.train.Example", DAMAGED) from None
        return _Record(i, content, int.from_bytes(data[size:], "little"), dict(example.features.feature), place)


@dataclass(frozen=True, slots=True)
class _Record:
    number: int  # among all
    content: bytes
    stated: int  # its checksum in the file
    features: dict[str, tfexample_pb2.Feature]
    place: str


def _is_record(start: bytes) -> bool:
    """Whether a file's first 12 bytes are a record's."""
    return len(start) >= _HEAD and masked_crc(start[:8]) == int.from_bytes(start[8:12], "little")


def _is_shard(name: str) -> bool:
    return ".tfrecord" in name or bool(_SHARD.fullmatch(name))


def open_tfrecords(path: str, options: SourceOptions) -> TfRecords:
    """`path` is a shard, a folder of them, or a pattern (`DIR/train-*`). DataError if one is missing or damaged."""
    files = shards_of(path, options)
    keep_open(len(files))
    shards: list[Archive] = []
    places: list[tuple[int, int]] = []
    ends = []
    for file in files:
        shard = Archive(file)
        places.extend(_records(shard))
        ends.append(len(places))
        shards.append(shard)
    if not places:
        raise DataError(f"{path}: no records in it", "is the data set complete?")
    return TfRecords(tuple(shards), np.array(ends, np.int64), np.array(places, np.int64))


def shards_of(path: str, options: SourceOptions) -> list[str]:
    """A file is itself, a pattern what it matches, a folder the shards in it: of one split, where their names have one."""
    if os.path.isfile(path):
        options.refuse_split(f"{path} is one file")
        return [path]
    if os.path.isdir(path):
        names = [name for name in os.listdir(path) if _is_shard(name) and not name.startswith(".")]
        if any(_of_split(name, other) for name in names for other in _SPLITS):
            names = [name for name in names if _of_split(name, options.part)]
        else:
            options.refuse_split(f"no name of a shard in {path} has train, val or test in it")
        files = [os.path.join(path, name) for name in sorted(names)]
        lacking = f"no shards of the split `{options.part}` there"
    else:
        options.refuse_split(f"{path} is a pattern")
        files = sorted(file for file in glob.glob(path) if os.path.isfile(file))
        lacking = "no shards there"
    if not files:
        raise DataError(f"{path}: {lacking}", "their names are like train-00000-of-01024")
    _check_all_there(files)
    return files


def _of_split(name: str, split: str) -> bool:
    return bool(set(re.split(r"[-_.]", name.lower())) & set(_SPLITS[split]))


def _check_all_there(files: list[str]) -> None:
    """DataError if the names say how many shards there are, and they aren't."""
    found: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(os.path.basename(file)):
            found.setdefault((match["set"], int(match["of"])), set()).add(int(match["number"]))
    for (name, of), numbers in found.items():
        if missing := sorted(set(range(of)) - numbers):
            raise DataError(
                f"{os.path.dirname(files[0]) or '.'}: {len(missing)} of the {of} shards of {name} are missing, "
                f"the first is {name}-{missing[0]:05d}-of-{of:05d}",
                "get them, or give the files that are wanted one by one",
            )


def _records(shard: Archive) -> list[tuple[int, int]]:
    found = []
    at = 0
    while at < shard.size:
        head = shard.read(at, _HEAD, f"the record at byte {at}")
        if not _is_record(head):
            hint = "gzipped TFRecords are not read: unpack them" if at == 0 and head[:2] == b"\x1f\x8b" else DAMAGED
            raise DataError(f"{shard.path}: no record at byte {at}: its length has a wrong checksum", hint)
        (length,) = struct.unpack("<Q", head[:8])
        if length > LARGEST_FILE or at + _HEAD + length + _TAIL > shard.size:
            raise DataError(
                f"{shard.path}: the record at byte {at} has {length} bytes, but the file ends at {shard.size}", DAMAGED
            )
        found.append((at + _HEAD, length))
        at += _HEAD + length + _TAIL
    return found


def _feature(features: dict[str, tfexample_pb2.Feature], key: str, place: str) -> tfexample_pb2.Feature:
    if key not in features:
        held = ", ".join(sorted(features)[:10]) or "nothing"
        raise DataError(
            f"{place}: no `{key}`; it holds {held}", "records with the keys of ImageNet's converters are read"
        )
    return features[key]


def _bytes(features: dict[str, tfexample_pb2.Feature], key: str, place: str) -> bytes:
    values = _feature(features, key, place).bytes_list.value
    if len(values) != 1:
        raise DataError(f"{place}: `{key}` holds {len(values)} values of bytes, not one", "is it of another kind?")
    return values[0]


def _text(features: dict[str, tfexample_pb2.Feature], key: str, place: str) -> str:
    """'' where the record hasn't got it."""
    return _bytes(features, key, place).decode(errors="surrogateescape") if key in features else ""


def _integer(features: dict[str, tfexample_pb2.Feature], key: str, place: str) -> int:
    values = _feature(features, key, place).int64_list.value
    if len(values) != 1:
        raise DataError(f"{place}: `{key}` holds {len(values)} integers, not one", "images with one label are read")
    return int(values[0])


FORMAT = Format(
    name="tfrecord",
    about="shards of tf.train.Example with ImageNet's keys",
    open=open_tfrecords,
    reads=("split",),
    folder=Sign("TFRecord shards", lambda place: any(_is_shard(name) for name in place.names)),
    file=Sign("a TFRecord", lambda place: _is_record(place.start)),
    pattern=True,
)
