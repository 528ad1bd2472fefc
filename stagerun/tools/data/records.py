"""LMDBs of records: written, verified (`stagerun data verify`) and described (`stagerun data info`); and progress over many records."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from stagerun.base.errors import DataError, ExitCode
from stagerun.base.text import columns, count, size
from stagerun.command.ending import show, tell
from stagerun.command.options import command, flag, option
from stagerun.command.shared import Folder
from stagerun.data import index as side_file
from stagerun.data import jpeg
from stagerun.data.importing.engine import RECORDS_PER_COMMIT, in_order
from stagerun.data.importing.partial import Partial, open_lmdb
from stagerun.data.index import ROW, UNUSABLE, Look, Rows, index_of, look, parse
from stagerun.data.records import LmdbSource, Records, Room
from stagerun.data.write import commit, writing
from stagerun.logs.console import Terminal
from stagerun.system.image_sets import SIDE_FILE
from stagerun.tools.data.files import Text

DataThreads = Annotated[
    int | None, option("--threads N", "Threads.  [default: one per processor of this process]", least=1)
]
Watch = Callable[[int, int], None]  # (done, total)

_LINE_EVERY_S = 10.0


def threads_here(threads: int | None) -> int:
    return threads or len(os.sched_getaffinity(0))


class Shown:
    """Progress on stderr, as a context manager: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, what: str) -> None:
        console = Terminal(stderr=True)
        self._what, self._next = what, time.monotonic() + _LINE_EVERY_S
        columns = escape(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> "Shown":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if self._bar.disable and time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            tell(f"{self._what}: {done} of {total}")


class ListRecords(Records):
    """Records in memory, with the keys that `write_lmdb` gives."""

    def __init__(self, values: Sequence[bytes], name: str = "memory") -> None:
        self.name, self.index, self._values = name, None, values

    def __len__(self) -> int:
        return len(self._values)

    def key(self, i: int) -> bytes:
        return b"%08d" % i

    def read(self, i: int, room: Room) -> memoryview:
        return memoryview(self._values[i])


def write_lmdb(out: str, values: Iterable[bytes]) -> int:
    """Write the values as records `00000000`, `00000001`, ... of a new LMDB, which gets its name when it is complete; return their number."""
    pairs, records = ((b"%08d" % i, value) for i, value in enumerate(values)), 0
    with writing(out):
        if os.path.lexists(out):
            raise DataError(f"{out}: exists already", "remove it, or give another folder")
        with Partial(Path(out)) as partial:
            partial.begin({}, restart=True)
            with open_lmdb(partial.lmdb) as env:
                while chunk := list(islice(pairs, RECORDS_PER_COMMIT)):
                    commit(env, chunk)
                    records += len(chunk)
            partial.finish()
    return records


def class_names(path: str) -> tuple[str, ...]:
    """Return the lines of a text file: a name for each label, the first one for label 0."""
    names = tuple(line for _, line in Text(path))
    if not names:
        raise DataError(f"{path}: no names in it", "give a text file, one name per line")
    return names


def classes_of(records: Records) -> tuple[str, ...]:
    """Return the names by label that the side file gives, or ()."""
    return records.index.facts.classes if records.index is not None else ()


def schedule_line(path: str, records: int) -> str:
    """Return the text for `data` in schedule.prototxt."""
    name = str(Path(path).resolve()).replace("\\", "\\\\").replace('"', '\\"')
    return f'source: "{name}"  images: {records}'


# -- verify


def build(
    path: str,
    progress: Watch = lambda done, total: None,
    *,
    threads: int = 1,
    pixels: bool = True,
    classes: tuple[str, ...] = (),
) -> side_file.Index:
    """Return the side file's content for the LMDB in folder `path`. Without `pixels` no image is decoded, and the mean is unknown. DataError
    if a record can't be used."""
    source = LmdbSource(path, side_file=False)
    rows, mistakes = inspect(source, progress, threads, pixels)
    if mistakes:
        key, mistake = mistakes[0]
        message = f"{path}: record `{key}`: {mistake}; in all {count(len(mistakes), 'mistake')}"
        raise DataError(message, f"`stagerun data verify --index --max-bad N {path}` makes a side file all the same")
    return index_of(source, rows, classes)


def inspect(
    source: LmdbSource, progress: Watch, threads: int, pixels: bool, index: side_file.Index | None = None
) -> tuple[Rows, list[tuple[str, str]]]:
    """Read all records; return a row for each, and (key, mistake) of the records that can't be used or differ from an index."""

    def row(i: int) -> tuple[bytes, str]:
        label, digest = -1, 0
        try:
            record = source.get(i)[1]
            digest = side_file.digest_of(record)
            if index is not None and digest != int(index.digests[i]):
                raise DataError("its bytes don't match its digest")
            datum = parse(record)
            label = datum.label
            image = look(datum, pixels)
            if index is not None and not index.heights[i]:
                raise DataError("the side file says that it can't be used; --decode says why")
            return image.row(label, digest), ""
        except DataError as error:
            return Look(UNUSABLE, 0, 0).row(label, digest), error.message

    rows, mistakes = bytearray(), list[tuple[str, str]]()
    for i, (made, mistake) in enumerate(in_order(row, 0, len(source), threads)):
        rows += made
        mistakes += [(side_file.printable(source.key(i)), mistake)] if mistake else []
        progress(i + 1, len(source))
    return np.frombuffer(rows, ROW), mistakes


@command()
def verify(
    folder: Folder,
    decode: bool = flag("--decode", "Decode every image, too."),
    index: bool = flag("--index", "Make the side file, also if it belongs to another state of the LMDB. Decodes."),
    classes: str | None = option("--classes FILE", "With --index: the names of the classes, one per line, by label."),
    max_bad: int = option("--max-bad N", "Allow N records that can't be used.", least=0, default=0),
    threads: DataThreads = None,
) -> None:
    """Reads the LMDB in folder DIR and names every record that is damaged; exit code 65 if any is.

    Every digest, label and size is compared with the side file. Without a side file the records are only parsed.

    With --index it makes DIR/stagerun-index.safetensors, which an LMDB of Caffe's lacks: place, length, digest, label and image size of each
    record, the names of the classes, mean and deviation of all pixels and a fingerprint. With it a run starts sooner. Damaged records prevent
    it unless --max-bad allows them; it then marks them.
    """
    source, current, old = LmdbSource(folder, side_file=False), None, None
    names = class_names(classes) if classes is not None else ()
    try:
        old = current = side_file.load(folder, source.lmdb, sampled=False)
    except DataError:
        if not index:
            raise
        with suppress(DataError):  # the names of classes are nowhere else
            old = side_file.read(folder)
    with Shown("verify") as shown:
        rows, mistakes = inspect(source, shown.progress, threads_here(threads), decode or index, current)
    failed = len(mistakes) > max_bad or len(mistakes) == len(source)
    if index and not failed:
        made = index_of(source, rows, names or (old.facts.classes if old is not None else ()))
        if old is not None and old.facts.fingerprint == made.facts.fingerprint:
            made = replace(made, facts=replace(made.facts, prepared_from=old.facts.prepared_from))
        side_file.save(made, folder)
    done = [name for name, is_done in (("digests", current is not None), ("decoded", decode or index)) if is_done]
    verdict = count(len(mistakes), "mistake") if mistakes else "all correct"
    lines = [f"record `{key}`: {mistake}" for key, mistake in mistakes]
    lines.append(f"{folder}: {', '.join([count(len(source), 'record'), *done])}: {verdict}")
    if index:
        state = f"not made; to allow mistakes add --max-bad {len(mistakes)}" if failed else "made"
        lines.append(f"{folder}/{SIDE_FILE}: {state}")
    elif current is None:
        lines.append(f"note: no digests to compare; `stagerun data verify --index {folder}` makes the side file")
    show("\n".join(lines))
    if failed:
        sys.exit(ExitCode.DATA)


@command()
def info(folder: Folder, classes: bool = flag("--classes", "Every class with its number of images.")) -> None:
    """Shows what is in the LMDB in folder DIR, and how it can be decoded on this machine.

    Most of it is from the side file, which `stagerun data verify --index` makes.
    """
    source, index, table = LmdbSource(folder, side_file=False), None, list[tuple[str, str, str]]()
    try:
        index = side_file.load(folder, source.lmdb)
        state = "up to date" if index is not None else f"none; `stagerun data verify --index {folder}` makes it"
    except DataError as error:
        state = f"{error.message}; {error.hint}"
    sizes = f"{size(int(source.table.lengths.sum()))}; data.mdb {size(source.lmdb.size)}"
    rows = [("records", f"{len(source)}, {sizes}"), ("side file", state)]
    if index is not None:
        labels, images = np.unique(index.labels[index.labels >= 0], return_counts=True)
        counts = dict.fromkeys(range(len(index.facts.classes) if len(labels) else 0), 0)
        counts |= dict(zip(labels.tolist(), images.tolist(), strict=True))
        names = dict(enumerate(index.facts.classes))
        table = [(f"  {label}", str(n), names.get(label, "")) for label, n in sorted(counts.items())]
        sides = [each[index.heights > 0] for each in (index.heights, index.widths)]
        ranges = [f"{side.min()} to {side.max()}" for side in sides]
        rows += [
            ("images", ", ".join(f"{n} {kind}" for kind, n in index.facts.kinds)),
            ("sizes", f"{ranges[0]} high, {ranges[1]} wide"),
            (
                "classes",
                f"{len(counts)}, {min(counts.values(), default=0)} to {max(counts.values(), default=0)} images each",
            ),
            ("prepared", "yes" if index.facts.restart_interval else "no"),
            ("mean B, G, R", _per_channel(index.facts.mean_bgr)),
            ("deviation", _per_channel(index.facts.deviation_bgr)),
            ("fingerprint", index.facts.fingerprint),
        ]
    decoders = [(f"  {tier.name}", "yes" if tier.available else "no", tier.reason) for tier in jpeg.tiers()]
    text = [*columns(rows), "", "decoders here, fastest first:", *columns(decoders)]
    if classes:
        text += ["", *columns([("  class", "images", "name"), *table])]
    show("\n".join([*text, "", "in schedule.prototxt, under `data`:", f"  {schedule_line(folder, len(source))}"]))


def _per_channel(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) or "unknown"
