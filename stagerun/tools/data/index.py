"""`stagerun data index`, `info` and `verify`: an LMDB looked at."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np

from stagerun.base.errors import DataError, ExitCode, StorageError, UsageError
from stagerun.base.text import columns, count, first, size
from stagerun.command.ending import show, tell
from stagerun.command.options import command, flag, option
from stagerun.command.shared import Folder, Json
from stagerun.data import jpeg
from stagerun.data.importing.engine import in_order
from stagerun.data.index import (
    Index,
    digest_of,
    foreign_record,
    is_stale,
    load,
    places_in,
    printable,
    read,
    save,
)
from stagerun.data.records import LmdbSource
from stagerun.data.rows import look, parse
from stagerun.system.image_sets import SIDE_FILE
from stagerun.system.lmdb_file import LmdbFile, reading
from stagerun.tools.data.indexing import build
from stagerun.tools.data.pictures import class_names
from stagerun.tools.data.progress import DataThreads, Shown, threads_here


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What stands below `fingerprint` is known from the side file alone."""

    path: str
    records: int
    file_size: int
    record_bytes: int
    decoders: tuple[jpeg.TierState, ...]
    index_state: str  # "up to date", or what is wrong with it
    fingerprint: str = ""
    classes: tuple[str, ...] = ()
    labels: tuple[tuple[int, int], ...] = ()  # (label, records of it), by label, every class that has a name too
    mean_bgr: tuple[float, ...] = ()
    deviation_bgr: tuple[float, ...] = ()
    smallest: Size | None = None  # by their number of pixels
    median: Size | None = None  # of widths, and of heights
    largest: Size | None = None
    kinds: tuple[tuple[str, int], ...] = ()
    prepared: bool = False


def describe(path: str) -> Description:
    """DataError if the LMDB in folder `path` can't be read."""
    lmdb = LmdbFile(path)
    places = places_in(lmdb)
    index, state = _index(lmdb)
    found = Description(
        path=path,
        records=len(places),
        file_size=lmdb.size,
        record_bytes=int(places.lengths.sum()),
        decoders=jpeg.tiers(),
        index_state=state,
    )
    if index is None:
        return found
    facts = index.facts
    heights, widths = (sides[index.heights > 0] for sides in (index.heights, index.widths))
    if len(heights):
        order = np.argsort(heights.astype(np.int64) * widths, kind="stable")
        first, last, middle = order[0], order[-1], (len(order) - 1) // 2
        found = replace(
            found,
            smallest=Size(int(widths[first]), int(heights[first])),
            median=Size(int(np.sort(widths)[middle]), int(np.sort(heights)[middle])),
            largest=Size(int(widths[last]), int(heights[last])),
        )
    labels, counts = np.unique(index.labels[index.labels >= 0], return_counts=True)
    named = range(len(facts.classes) if len(labels) else 0)  # records with several labels each have none here
    counted = dict.fromkeys(named, 0) | dict(zip(labels.tolist(), counts.tolist(), strict=True))
    return replace(
        found,
        fingerprint=facts.fingerprint,
        classes=facts.classes,
        labels=tuple(sorted(counted.items())),
        mean_bgr=facts.mean_bgr,
        deviation_bgr=facts.deviation_bgr,
        kinds=facts.kinds,
        prepared=facts.restart_interval > 0,
    )


def _index(lmdb: LmdbFile) -> tuple[Index | None, str]:
    """The side file if it can be used, and what there is to say about it."""
    path = lmdb.path
    try:
        index = read(path)
    except DataError as error:
        return None, error.message
    if index is None:
        return None, f"there is none; `stagerun data index {path}` makes it"
    again = f"`stagerun data index --force {path}` makes it again"
    if is_stale(index, lmdb):
        return None, f"of another state of the LMDB; {again}"
    with reading(path):
        foreign = foreign_record(index, lmdb)
    if foreign is not None:
        return None, f"of another LMDB, or record `{printable(index.key(foreign))}` is damaged; {again}"
    return index, "up to date"


def schedule_line(path: str, records: int) -> str:
    """What to write under `data` in schedule.prototxt."""
    name = str(Path(path).resolve()).replace("\\", "\\\\").replace('"', '\\"')
    return f'source: "{name}"  images: {records}'


@dataclass(frozen=True, slots=True)
class Verified:
    """`mistakes` is (key, what is wrong with it), in key order; the key is '' for what concerns the LMDB as a whole."""

    records: int
    size: int  # bytes of all records
    digests: bool  # whether there was a side file with them
    decoded: bool
    mistakes: tuple[tuple[str, str], ...]


def verify_lmdb(
    path: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    threads: int = 1,
    decode: bool = False,
) -> Verified:
    """Reads all records of the LMDB in folder `path`, and with `decode` decodes all images.

    DataError if it can't be read at all, or its side file is damaged or of another state of it.
    """
    source = LmdbSource(path, side_file=False)
    index, places, total = load(path, source.lmdb, sampled=False), source.table, len(source)
    known = index
    mistakes: list[tuple[str, str]] = []
    arrays = ("keys", "key_ends", "offsets", "lengths")
    if index is not None and not all(np.array_equal(getattr(index, a), getattr(places, a)) for a in arrays):
        mistakes, known = [("", "the side file has other keys or places than the records")], None

    def look_at(i: int) -> list[tuple[str, str]]:
        key = printable(source.key(i))
        try:
            _, record = source.get(i)
        except (DataError, StorageError) as error:
            return [(key, error.message)]
        text = _mistake(record, i, known, decode)
        return [(key, text)] if text else []

    for done, found in enumerate(in_order(look_at, 0, total, threads), start=1):
        mistakes += found
        progress(done, total)
    return Verified(total, int(places.lengths.sum()), index is not None, decode, tuple(mistakes))


def _mistake(record: bytes, i: int, index: Index | None, decode: bool) -> str:
    """What is wrong with a record; '' if nothing is."""
    if index is not None and digest_of(record) != int(index.digests[i]):
        return "its bytes are not those that its digest was made of"
    try:
        look(parse(record), decode)
    except DataError as error:
        return error.message
    if index is not None and not index.heights[i]:
        return "it can't be used, says the side file" + ("" if decode else "; --decode says why")
    return ""


# -- the commands

_SHOWN = 20
_ENDS = 3  # classes shown at each end of the histogram


@command()
def index(
    folder: Folder,
    classes: str | None = option("--classes FILE", "Names of the classes, one per line, by label."),
    ignore_label: int | None = option(
        "--ignore-label N", "With --classes: a label without a class, which a net of Caffe's ignores: 255, say."
    ),
    no_mean: bool = flag("--no-mean", "Decode no image; the mean pixel stays unknown."),
    force: bool = flag("--force", "Make it again if it is there."),
    max_bad: int = option(
        "--max-bad N",
        "Records that can't be used are listed; above so many no side file is made.",
        type=click.IntRange(0),
        default=0,
    ),
    threads: DataThreads = None,
) -> None:
    """Makes DIR/stagerun-index.safetensors: what is known about each record of the LMDB in folder DIR.

    That is place, length, digest, label and image size of each record, the names of the classes, the mean pixel and a
    fingerprint of the whole. With it a run starts sooner, and `stagerun data verify` finds every changed byte. Every record is
    read once, and every image decoded. `stagerun data import` makes it by itself.

    A record that can't be used is named, and exit code 65 says that there is one; with --max-bad the side file is made all the
    same, and knows it as unusable.
    """
    names = class_names(classes) if classes is not None else ()
    old = None
    if os.path.lexists(Path(folder) / SIDE_FILE):
        if not force:
            raise UsageError(f"{folder}/{SIDE_FILE} exists already", "add --force to make it again")
        old = _old(folder)
        names = names or (old.facts.classes if old is not None else ())
    with Shown("index", "records") as shown:
        built = build(
            folder, shown.progress, threads=threads_here(threads), pixels=not no_mean, classes=names, max_bad=max_bad
        )
    made = built.index
    if old is not None and old.facts.fingerprint == made.facts.fingerprint:
        made = replace(made, facts=replace(made.facts, prepared_from=old.facts.prepared_from))
    most = max((int(label) for label in set(made.labels.tolist()) - {ignore_label}), default=0)
    if names and most >= len(names):
        raise DataError(
            f"{folder}: there is a label {most}, but {count(len(names), 'class name')}",
            "give --classes a file with a line for each label, the first one for label 0; --ignore-label N is for one that a net ignores",
        )
    save(made, folder)
    show(f"{folder}/{SIDE_FILE}: {count(len(made), 'record')}{shown.rate(len(made))}")
    if built.unusable:
        show(f"{count(len(built.unusable), 'record')} can't be used:\n  " + "\n  ".join(first(built.unusable)))


def _old(folder: str) -> Index | None:
    """The side file that is to be replaced: the LMDB itself knows neither names of classes nor what it was prepared from."""
    try:
        return read(folder)
    except DataError:
        tell("note: the old side file is damaged; names of classes, if it had any, are lost")
        return None


@command()
def verify(
    folder: Folder,
    decode: bool = flag("--decode", "Decode every image, too."),
    threads: DataThreads = None,
    as_json: Json = False,
) -> None:
    """Reads the LMDB in folder DIR and names every record that is damaged; exit code 65 if there is one.

    Every digest, place, label and size is compared with the side file. Without a side file the records are only parsed.
    """
    with Shown("verify", "records") as shown:
        found = verify_lmdb(folder, shown.progress, threads=threads_here(threads), decode=decode)
    if as_json:
        mistakes = [{"key": key, "what": what} for key, what in found.mistakes]
        show(json.dumps({**asdict(found), "mistakes": mistakes}, indent=1))
    else:
        show(_verified(folder, found, shown))
    if found.mistakes:
        sys.exit(ExitCode.DATA)


def _verified(folder: str, found: Verified, shown: Shown) -> str:
    done = ["parsed"] + ["digests compared"] * found.digests + ["decoded"] * found.decoded
    lines = [f"record `{key}`: {what}" if key else what for key, what in found.mistakes]
    if len(lines) > _SHOWN:
        lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more; --json has them all"]
    records = f"{count(found.records, 'record')}, {size(found.size)}, {', '.join(done)}{shown.rate(found.records)}"
    verdict = count(len(found.mistakes), "mistake") if found.mistakes else "all is as it should be"
    lines.append(f"{folder}: {records}: {verdict}")
    if not found.digests:
        lines.append(
            f"note: there is no side file, so nothing to compare the bytes with: `stagerun data index {folder}`"
        )
    return "\n".join(lines)


@command()
def info(
    folder: Folder,
    classes: bool = flag("--classes", "Every class with its number of images."),
    as_json: Json = False,
) -> None:
    """Shows what is in the LMDB in folder DIR, and how it can be decoded on this machine.

    Most of it stands in the side file, which `stagerun data index` makes.
    """
    found = describe(folder)
    line = schedule_line(folder, found.records)
    if as_json:
        show(json.dumps({**asdict(found), "schedule": line}, indent=1))
        return
    rows = [
        ("records", f"{found.records}, {size(found.record_bytes)}; data.mdb {size(found.file_size)}"),
        ("side file", found.index_state),
    ]
    if found.fingerprint:
        rows += [
            ("images", ", ".join(f"{n} {kind}" for kind, n in found.kinds)),
            ("sizes", _sizes(found.smallest, found.median, found.largest)),
            ("prepared", "yes" if found.prepared else "no"),
            ("mean pixel", _per_channel(found.mean_bgr)),
            ("deviation", _per_channel(found.deviation_bgr)),
            ("fingerprint", found.fingerprint),
        ]
    lines = columns(rows)
    if found.labels:
        lines += ["", *_histogram(found, classes)]
    decoders = [(t.name, "yes" if t.available else "no", t.reason) for t in found.decoders]
    lines += ["", "decoders here, fastest first:", *(f"  {line}" for line in columns(decoders, 2))]
    show("\n".join([*lines, "", "in schedule.prototxt, under `data`:", f"  {line}"]))


def _per_channel(values: tuple[float, ...]) -> str:
    if not values:
        return "unknown"
    return ", ".join(f"{v:.3f}" for v in values) + (" (B, G, R)" if len(values) == 3 else " (grey)")


def _sizes(smallest: Size | None, median: Size | None, largest: Size | None) -> str:
    named = [("smallest", smallest), ("median", median), ("largest", largest)]
    words = [f"{name} {s.width} x {s.height}" for name, s in named if s is not None]
    return f"{', '.join(words)} (width x height)" if words else "unknown"


def _histogram(found: Description, all_classes: bool) -> list[str]:
    """All classes, or those with the most and the fewest images; and those without any."""

    def lines(pairs: Sequence[tuple[int, int]]) -> list[tuple[str, str, str]]:
        names = dict(enumerate(found.classes))
        return [(f"  {label}", str(n), names.get(label, "")) for label, n in pairs]

    if all_classes:
        return columns([("  class", "images", "name"), *lines(found.labels)])
    by_count = sorted((pair for pair in found.labels if pair[1]), key=lambda pair: (-pair[1], pair[0]))
    empty = [str(label) for label, n in found.labels if not n]
    names = "" if found.classes else f" without names (labels {found.labels[0][0]} to {found.labels[-1][0]})"
    each = f"from {by_count[-1][1]} to {by_count[0][1]} images each (--classes shows all)"
    text = [f"classes: {len(by_count)}{names}, {each}"]
    if len(by_count) > 2 * _ENDS:
        text += columns([*lines(by_count[:_ENDS]), ("  ...", "", ""), *lines(by_count[-_ENDS:])])
    else:
        text += columns(lines(by_count))
    return text + ([f"without images: {', '.join(first(empty))}"] if empty else [])
