"""The set of images in an LMDB of any size, by a few reads: of its side file, else of a sample; and the LMDBs that class folders are imported
to. Without numpy, for `plan`."""

import hashlib
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagerun.base.errors import StagerunError
from stagerun.base.recipe import Import
from stagerun.system.image_folder import Listed, class_folders, is_class_folder, seen, small
from stagerun.system.lmdb_file import BY_SCHEDULE, LmdbFile, reading

if TYPE_CHECKING:
    from stagerun.base.recipe import Schedule, Source, Stage

# Facts about the LMDB, which `data.index` reads and writes.
SIDE_FILE = "stagerun-index.safetensors"
_LARGEST_HEADER = 1 << 26

_SAMPLES = 32
_LARGEST_VALUE = 1 << 20  # bytes of a record that are looked at


# -- The side file. An unreadable or outdated one counts as missing here: opening the LMDB reports the error.

_Arrays = list["array[int]"]
_NOTHING: tuple[Mapping[str, Any], _Arrays] = {}, []


def known(folder: str, *names: str, most: int | None = None) -> tuple[Mapping[str, Any], _Arrays]:
    """Return `data.index.Facts` as JSON from the side file's header, without reading its arrays (106 MB for ILSVRC12); and the first `most`
    numbers, or all, of the arrays of int32 with these names. Empty if unknown."""
    with suppress(StagerunError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        lmdb, file = LmdbFile(folder), Path(folder) / SIDE_FILE
        if not file.is_file():  # opening a FIFO would block
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
    """Return the names of classes by label, of the side file or class folders; () if unknown, or without the LMDB."""
    if is_class_folder(folder):
        with suppress(StagerunError):
            return class_folders(folder)
    names = known(folder)[0].get("classes")
    return tuple(map(str, names)) if isinstance(names, list) else ()


# -- The set of images, as a short text that is compared between process lives.


def with_sets(schedule: "Schedule", ignored: Callable[["Stage"], int | None]) -> "Schedule":
    """Return the schedule with `set_of` its LMDBs on this machine (`recipe.Schedule.sets`), and the sizes of classes where a stage's sampling depends
    on them. `ignored`: the label that a stage's training ignores."""
    texts = {source.path: _set_of_source(schedule, source) for source in schedule.sources}
    sampled = [stage for stage in schedule.stages if stage.solver.sampling.value != "UNIFORM"]
    sampled_by = {s.name: (s.data.train.path, s.model.num_classes, ignored(s)) for s in sampled}
    sizes = {one: _class_sizes(schedule, *one) for one in sampled_by.values()}
    return replace(
        schedule,
        sets={path: text for path, text in texts.items() if text},
        class_sizes={name: sizes[one] for name, one in sampled_by.items()},
    )


def _set_of_source(schedule: "Schedule", source: "Source") -> str:
    """Return `set_of` a source's LMDB; for class folders with `folder`, over names and sizes of images, which exists before the import.
    Afterwards `index`, over every byte, decides."""
    made, text = schedule.imports.get(source.path), set_of(schedule.lmdb(source))
    if made is None:
        return text
    return f"{text or f'{made.images} records'}, folder {made.files[:16]}"


def _class_sizes(schedule: "Schedule", path: str, classes: int, ignored: int | None) -> tuple[int, ...]:
    """Return the number of records of each label 0 .. classes-1, by the import or the side file; () if unknown, or with other labels. Records
    of the `ignored` label don't count."""
    counted: Counter[int | None]
    if (made := schedule.imports.get(path)) is not None:
        counted = Counter(dict(enumerate(made.counts)))
    else:
        facts, labels = known(path, "labels")
        if not facts:
            return ()
        counted = Counter(*labels)
        del counted[-1]  # records without one
    del counted[ignored]
    sizes = tuple(counted[label] for label in range(classes))
    return sizes if sum(sizes) == counted.total() else ()


def set_of(folder: str) -> str:
    """Return `60000 records, sample 0123456789abcdef, index 0123456789abcdef` for the LMDB in `folder`, to be compared by `snapshots.same_set`;
    '' if unreadable, which opening it reports.

    `index` is the side file's fingerprint over every key and record, if any. `sample` covers the number of records and 32 of them, key and
    value, at even distances in the tree of pages, without a walk over all; the same records in another tree have the same sample only if it
    was filled in the same order. A prepared copy has the text of its original: the pixels are the same.
    """
    with suppress(StagerunError, OSError):
        lmdb, (facts, _) = LmdbFile(folder), known(folder)
        if re.fullmatch(r"\d+ records(, (sample|index) \w+)+", source := str(facts.get("prepared_from"))):
            return source
        records = lmdb.meta.entries
        digest = hashlib.sha256(b"%d" % records)
        for n in range(_SAMPLES):
            record = lmdb.record_at(n / (_SAMPLES - 1))
            described = b"%d %d " % (len(record.key), record.length) + record.key + lmdb.value(record, _LARGEST_VALUE)
            digest.update(hashlib.sha256(described).digest())
        index = f", index {str(facts['fingerprint'])[:16]}" if facts else ""
        return f"{records} records, sample {digest.hexdigest()[:16]}{index}"
    return ""


def first_value(folder: str) -> bytes:
    """Return the first record's value, at most 1 MB of it. Errors as in `LmdbFile.records`."""
    lmdb = LmdbFile(folder)
    with reading(lmdb.file):
        return lmdb.value(lmdb.record_at(0), _LARGEST_VALUE)


# -- Differences between two hosts.


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """`size`: bytes of data.mdb. `fingerprint`: of the side file, '' without a valid one. `ends`: a digest of data.mdb's first and last MB, in
    hex. Copies of one file agree in all; LMDBs made separately of the same records only in `records` and `fingerprint`."""

    records: int
    size: int
    fingerprint: str
    ends: str


def glance(folder: str) -> Glance:
    """Summarise an LMDB. Errors as in `check_file`."""
    lmdb = LmdbFile(folder, BY_SCHEDULE)
    with reading(lmdb.file):
        ends = hashlib.blake2b(lmdb.ends(), digest_size=16).hexdigest()
    fingerprint = str(known(folder)[0].get("fingerprint", ""))
    return Glance(records=lmdb.meta.entries, size=lmdb.size, fingerprint=fingerprint, ends=ends)


# -- LMDBs that class folders named by `source` are imported to: below `scratch`, or OUT/data, named by the folder and its state.
# `data.importing` makes them.

FOLDER = "data"  # in OUT
REPORT = "stagerun-import.txt"  # of an import, in its LMDB's folder
COPY = "stagerun-copy.json"  # in scratch: identifies a finished or unfinished copy for `data.scratch`


def scratch_home(scratch: str) -> Path:
    """Return this user's folder in a `scratch` folder."""
    return Path(scratch) / f"stagerun-{os.getuid()}"


def with_imports(schedule: "Schedule", out: str | os.PathLike[str]) -> "Schedule":
    """Return the schedule with an `Import` for each `source` of class folders on this machine, except for unusable ones, which
    `language.look_at_folders` reports. Existing ones stay."""
    imports: dict[str, Import] = {}
    for source in schedule.sources:
        if source.path not in schedule.imports and is_class_folder(source.path):
            with suppress(StagerunError):
                imports[source.path] = import_of(small(source.path), schedule.data.scratch, out)
    return replace(schedule, imports={**schedule.imports, **imports}) if imports else schedule


def import_of(images: Listed, scratch: str | None, out: str | os.PathLike[str]) -> Import:
    """Return the import of these images into `scratch` or, without it, into the output folder `out`."""
    state = seen(images)
    real = os.path.realpath(images.root)
    if scratch is not None:  # named like copies
        named = hashlib.sha256(f"import\0{real}\0{state.state}".encode(errors="surrogateescape")).hexdigest()
        lmdb = scratch_home(scratch) / named
    else:
        folder = hashlib.sha256(real.encode(errors="surrogateescape")).hexdigest()[:8]
        parent = Path(os.path.abspath(out)) / FOLDER
        parent = parent.resolve() if parent.is_symlink() else parent  # a stage of parallel training
        lmdb = parent / f"{os.path.basename(real)}-{folder}-{state.state[:16]}"
    return Import(
        lmdb=str(lmdb),
        in_scratch=scratch is not None,
        classes=images.classes,
        counts=images.counts,
        files=state.files,
        state=state.state,
        bytes=state.bytes,
    )


def is_there(made: Import) -> bool:
    """Return whether the import is complete: only then the folder gets its name."""
    return os.path.exists(os.path.join(made.lmdb, "data.mdb"))
