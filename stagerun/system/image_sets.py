"""Which images an LMDB holds, as far as a few reads say, however large it is: by its side file, else by a sample. Without numpy: `plan` asks."""

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagerun.base.errors import StagerunError
from stagerun.system.image_folder import class_folders, is_class_folder
from stagerun.system.lmdb_file import BY_SCHEDULE, LmdbFile, reading

if TYPE_CHECKING:
    from stagerun.base.recipe import Schedule, Source, Stage

# What is known of the LMDB beforehand: `data.index` reads and writes it.
SIDE_FILE = "stagerun-index.safetensors"
_LARGEST_HEADER = 1 << 26

_SAMPLES = 32
_LARGEST_VALUE = 1 << 20  # bytes of a record that are looked at


# -- What the side file says. One that can't be read, or is of another state of the LMDB, is as good as none here: whoever opens the LMDB to
# read it reports what is wrong.

_Arrays = list["array[int]"]
_NOTHING: tuple[Mapping[str, Any], _Arrays] = {}, []


def known(folder: str, *names: str, most: int | None = None) -> tuple[Mapping[str, Any], _Arrays]:
    """`data.index.Facts` as the JSON in the side file's header, which is before its arrays (106 MB for ILSVRC12); and the first `most`
    numbers, or all, of the arrays of int32 with these names. Empty where they aren't known."""
    with suppress(StagerunError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        lmdb, file = LmdbFile(folder), Path(folder) / SIDE_FILE
        if not file.is_file():  # to open a FIFO would wait for a writer
            return _NOTHING
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, _LARGEST_HEADER)))
            facts = json.loads(header["__metadata__"]["stagerun"].partition(" ")[2])
            state = facts["file_size"], facts["transaction"]
            if state != (lmdb.size, lmdb.meta.transaction) or not isinstance(facts["fingerprint"], str):
                return _NOTHING
            arrays: _Arrays = []
            for name in names:
                first, end = header[name]["data_offsets"]
                stream.seek(8 + length + first)
                arrays.append(array("i", stream.read(end - first if most is None else min(end - first, 4 * most))))
        return facts, arrays
    return _NOTHING


def class_names(folder: str) -> tuple[str, ...]:
    """The classes that the side file, or class folders, name, by label; () where they aren't known, or the LMDB is missing."""
    if is_class_folder(folder):
        with suppress(StagerunError):
            return class_folders(folder)
    names = known(folder)[0].get("classes")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def class_sizes(folder: str, classes: int, ignored: int | None = None) -> tuple[int, ...]:
    """How many records have the labels 0 .. classes-1, as the side file says; () where that is not known, or there are other labels. Those of
    the `ignored` label are of no class."""
    facts, labels = known(folder, "labels")
    counted: Counter[int | None] = Counter(*labels)
    counted.pop(-1, None)  # records without one
    counted.pop(ignored, None)
    usable = facts and all(label is not None and 0 <= label < classes for label in counted)
    return tuple(counted[label] for label in range(classes)) if usable else ()


# -- Which images it holds, as a short text that is compared between process lives.


def with_sets(schedule: "Schedule", ignored: Callable[["Stage"], int | None]) -> "Schedule":
    """The schedule with what `set_of` says of its LMDBs, as far as they are on this machine (`recipe.Schedule.sets`, and `class_sizes`
    where a stage's sampling depends on them). `ignored`: the label that counts for nothing when a stage is trained."""
    found = {source.path: _set_of_source(schedule, source) for source in schedule.sources}
    sampled = [stage for stage in schedule.stages if stage.solver.sampling.value != "UNIFORM"]
    asked = {s.name: (s.data.train.path, s.model.num_classes, ignored(s)) for s in sampled}
    sizes = {one: _class_sizes(schedule, *one) for one in asked.values()}
    return replace(
        schedule,
        sets={path: text for path, text in found.items() if text},
        class_sizes={name: sizes[one] for name, one in asked.items()},
    )


def _set_of_source(schedule: "Schedule", source: "Source") -> str:
    """`set_of` its LMDB. Of class folders also `folder`, over the names and sizes of their images: that is known before they are imported,
    and afterwards `index`, over every byte, decides."""
    made, text = schedule.imports.get(source.path), set_of(schedule.lmdb(source))
    if made is None:
        return text
    return f"{text or f'{made.images} records'}, folder {made.files[:16]}"


def _class_sizes(schedule: "Schedule", path: str, classes: int, ignored: int | None) -> tuple[int, ...]:
    made = schedule.imports.get(path)
    if made is None:
        return class_sizes(path, classes, ignored)
    counts = tuple(0 if label == ignored else size for label, size in enumerate(made.counts))
    return counts + (0,) * (classes - len(counts)) if not any(counts[classes:]) else ()


def set_of(folder: str) -> str:
    """`60000 records, sample 0123456789abcdef, index 0123456789abcdef`: the images in the LMDB in `folder`; '' where they can't be read,
    which is reported when they are opened. To be compared by `snapshots.same_set`.

    `index` is the fingerprint in the side file, over every key and record; without a side file it is missing. `sample` covers the
    number of records and 32 of them, key and value, at even distances in the tree of pages: it needs no walk over all of that, but it is
    that of the same records in another tree only if that was filled in the same order. Of a prepared copy it is what it was prepared
    from: the pixels are the same.
    """
    with suppress(StagerunError, OSError):
        lmdb, (facts, _) = LmdbFile(folder), known(folder)
        if re.fullmatch(r"\d+ records(, (sample|index) \w+)+", source := str(facts.get("prepared_from"))):
            return source
        records = lmdb.meta.entries
        digest = hashlib.sha256(b"%d" % records)
        for n in range(_SAMPLES):
            record = lmdb.record_at(n / (_SAMPLES - 1))
            said = b"%d %d " % (len(record.key), record.length) + record.key + lmdb.value(record, _LARGEST_VALUE)
            digest.update(hashlib.sha256(said).digest())
        index = f", index {str(facts['fingerprint'])[:16]}" if facts else ""
        return f"{records} records, sample {digest.hexdigest()[:16]}{index}"
    return ""


def first_value(folder: str) -> bytes:
    """The value of the first record, 1 MB of it at most. Errors as of `LmdbFile.records`."""
    lmdb = LmdbFile(folder)
    with reading(lmdb.file):
        return lmdb.value(lmdb.record_at(0), _LARGEST_VALUE)


# -- Enough to see that two hosts have different ones.


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """`size` of data.mdb, bytes. `fingerprint` is that of the side file, '' without one, or where that is of another state of the LMDB.
    `ends`: a digest of data.mdb's first and last MB, in hex. Copies of one file are alike in all; LMDBs made separately of the same
    records in `records` and `fingerprint` alone."""

    records: int
    size: int
    fingerprint: str
    ends: str


def glance(folder: str) -> Glance:
    """Errors as in `check_file`."""
    lmdb = LmdbFile(folder, BY_SCHEDULE)
    with reading(lmdb.file):
        ends = hashlib.blake2b(lmdb.ends(), digest_size=16).hexdigest()
    fingerprint = str(known(folder)[0].get("fingerprint", ""))
    return Glance(records=lmdb.meta.entries, size=lmdb.size, fingerprint=fingerprint, ends=ends)
