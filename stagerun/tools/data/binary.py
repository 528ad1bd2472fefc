"""Files of records of other frameworks: MXNet's RecordIO, and TFRecord shards."""

import os
import re
import struct
from collections import Counter
from typing import Any

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from stagerun.base.errors import DataError
from stagerun.data.importing.images import LARGEST_FILE, Item, signature
from stagerun.language.proto import tfexample_pb2
from stagerun.system.host import open_files
from stagerun.tools.data.files import DAMAGED, LARGEST_LABEL, Archive, Images, Member, SourceOptions, Text, archived

# -- RecordIO of im2rec: FILE.rec, with the names of FILE.lst
#
#     uint32 magic | uint32 part << 29 | length | data, filled up to a multiple of 4 bytes              (little-endian)
#
# `part` is 0 for a whole record; a record that holds the magic number (at a multiple of 4) is cut there into a first (1), middle (2) and
# last (3) part without it (dmlc/dmlc-core: include/dmlc/recordio.h). The data are flag (uint32), label (float), id and id2 (uint64), then
# `flag` floats if the flag isn't 0, then the image's file (apache/mxnet: python/mxnet/recordio.py).

MAGIC = struct.pack("<I", 0xCED7230A)
_IMAGE = struct.Struct("<IfQQ")


def open_recordio(path: str, _: SourceOptions) -> Images:
    archive, at, members, labels = Archive(path), 0, list[Member](), list[int]()
    stem, names = path.removesuffix(".rec"), dict[str, str]()
    if os.path.isfile(f"{stem}.lst"):  # `id label ... path` lines with tabs
        names = {line.split("\t")[0]: line.split("\t")[-1] for _, line in Text(f"{stem}.lst")}
    while at < archive.size:
        size, data = _record_at(archive, at)
        if len(data) < _IMAGE.size:
            raise DataError(f"{path}: the record at byte {at} is too short for an image's", DAMAGED)
        flag, label, number, _id2 = _IMAGE.unpack_from(data)
        if flag or not (0 <= label <= LARGEST_LABEL and label == int(label)):  # NaN fails the first comparison
            message = f"{path}: the record at byte {at} has the label {label:g}, and {flag} more"
            raise DataError(message, "records with one label, 0, 1, 2, ..., are read")
        members.append(Member(names.get(str(number), f"{os.path.basename(stem)}/{number:08d}"), at, size))
        labels.append(int(label))
        at += size
    if not members:
        raise DataError(f"{path}: no records in it", DAMAGED)
    return archived(
        "recordio",
        archive,
        members,
        np.array(labels, np.int32),
        lambda i: _record_at(archive, members[i].at)[1][_IMAGE.size :],
    )


def _record_at(archive: Archive, start: int) -> tuple[int, bytes]:
    """Return the bytes that all parts of a record take, and its data. DataError if none begins at offset `start`."""
    at, parts, part = start, list[bytes](), 1
    while part in (1, 2):
        magic, word = struct.unpack("<4sI", archive.read(at, 8))
        part, length = word >> 29, word & 0x1FFFFFFF
        if magic != MAGIC or part not in ((2, 3) if parts else (0, 1)) or at - start > LARGEST_FILE:
            raise DataError(f"{archive.path}: no record at byte {at}, or not all parts of one", DAMAGED)
        parts.append(archive.read(at + 8, (length + 3) // 4 * 4)[:length])
        at += 8 + (length + 3) // 4 * 4
    return at - start, MAGIC.join(parts)


# -- TFRecord shards of tf.train.Example with ImageNet's keys, as TensorFlow's converters write them
#
#     uint64 length | uint32 masked crc32c of the length | data | uint32 masked crc32c of the data      (little-endian)
#
# (tensorflow/tensorflow: tensorflow/core/lib/io/record_writer.h). Keys: `image/encoded`, `image/class/label`, and optional
# `image/filename` and `image/class/synset`. Labels count from 1 in ImageNet's converters, which write synsets (tensorflow/tpu:
# tools/datasets/imagenet_to_gcs.py), and from 0 in TF-Slim's others, which don't (tensorflow/models:
# research/slim/datasets/dataset_utils.py).

_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\..*)?")


def _masked_crc(data: bytes) -> bytes:
    crc = int(google_crc32c.value(data))
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def is_tfrecord(start: bytes) -> bool:
    return len(start) >= 12 and _masked_crc(start[:8]) == start[8:12]


def is_shard(name: str) -> bool:
    return ".tfrecord" in name or _SHARD.fullmatch(name) is not None


def open_tfrecords(path: str, options: SourceOptions) -> Images:
    """`path` is a shard, or a folder of shards: all, or a split if their names contain one."""
    files = [path]
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if is_shard(name) and not name.startswith("."))
        of_split = [name for name in names if (options.split or "train") in name]
        names = of_split if of_split or options.split is not None else names
        present = Counter((m[1], int(m[3])) for m in map(_SHARD.fullmatch, names) if m)
        for (name, shards), number in present.items():
            if number < shards:
                raise DataError(f"{path}: {shards - number} of the {shards} shards of {name} are missing", "get them")
        files = [os.path.join(path, name) for name in names]
    open_files(len(files) + 256)  # and what else this process has open
    archives, records, ends = [Archive(file) for file in files], list[tuple[Archive, int, int, int]](), list[int]()
    for archive in archives:
        at, number = 0, 0
        while at < archive.size:
            head = archive.read(at, 12)
            length = int.from_bytes(head[:8], "little")
            if not is_tfrecord(head) or at + length + 16 > archive.size:
                message = f"{archive.path}: no record at byte {at}: its length is wrong, or the file ends before it"
                raise DataError(message, DAMAGED)
            records.append((archive, number, at + 12, length))
            at, number = at + length + 16, number + 1
        ends.append(len(records))
    if not records:
        raise DataError(f"{path}: no records of the split `{options.split or 'train'}`", "name another with --split")
    offsets = np.array([record[2:] for record in records])
    return Images(
        kind="tfrecord",
        length=len(records),
        signature=signature("tfrecord", *(archive.state for archive in archives), np.array(ends), offsets),
        item=lambda i: _Record(*records[i]).item(),
        read=lambda i: _Record(*records[i]).only("image/encoded", "bytes_list"),
    )


class _Record:
    """A tf.train.Example, read from an archive."""

    def __init__(self, archive: Archive, number: int, at: int, size: int) -> None:
        self._location, self._name = f"{archive.path}: record {number} at byte {at}", os.path.basename(archive.path)
        self._name += f"/{number:06d}"
        data = archive.read(at, size + 4)
        if _masked_crc(data[:size]) != data[size:]:
            raise DataError(f"{self._location}: its data have a wrong checksum", DAMAGED)
        try:
            self._features = tfexample_pb2.Example.FromString(data[:size]).features.feature
        except DecodeError:
            raise DataError(f"{self._location}: not a tf.train.Example", DAMAGED) from None

    def item(self) -> Item:
        label, names = self.only("image/class/label", "int64_list"), {"image/class/synset": "", "image/filename": ""}
        for key in names.keys() & set(self._features):
            names[key] = self.only(key, "bytes_list").decode(errors="surrogateescape")
        synset, name = names["image/class/synset"], names["image/filename"]
        if not 0 <= label - bool(synset) <= LARGEST_LABEL:
            raise DataError(f"{self._location}: `image/class/label` is {label}", "ImageNet's count from 1")
        if synset and name.startswith(synset + "_"):
            name = f"{synset}/{name}"
        return Item(name or self._name, label - bool(synset))

    def only(self, key: str, kind: str) -> Any:
        """Return the only value of a feature. `kind`: the field that holds it."""
        values: Any = getattr(self._features[key], kind).value if key in self._features else ()
        if len(values) != 1:
            message = f"{self._location}: {len(values)} values of `{key}` ({kind}), not one"
            raise DataError(message, "records with the keys of ImageNet's converters are read")
        return values[0]
