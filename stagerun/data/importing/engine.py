"""Records in, an LMDB with its side file out: in order, in parallel, and going on where it was killed.

Every record is a function of its position alone, and commits lie after fixed numbers of records and bytes. So the LMDB has
the same records at the same places, and the same side file, for any number of threads and however often it was interrupted.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import cv2
import lmdb

from stagerun.base.errors import DataError
from stagerun.base.text import count, first
from stagerun.data.importing import report
from stagerun.data.importing.partial import Note, Partial, Seen, entry
from stagerun.data.index import digest_of, save
from stagerun.data.indexing import in_order
from stagerun.data.lmdb_offsets import offsets_of
from stagerun.data.rows import LEFT_OUT, Look, Rows, Statistics, index_of
from stagerun.data.write import writing
from stagerun.system.imports import REPORT
from stagerun.system.lmdb_file import check_file

RECORDS_PER_COMMIT = 1000
BYTES_PER_COMMIT = 1 << 26
_FIRST_MAP_SIZE = 1 << 26
# So many images that can't be used, above those allowed, and the source is taken for a wrong one.
_HOPELESS = 1000
_SHOWN = 20


class Unusable(DataError):
    """More images than allowed can't be used, or all of them."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a position gives: a record, or None if it is left out, which a bad note explains."""

    key: bytes
    record: bytes | None
    label: int = 0
    look: Look | None = None
    notes: tuple[Note, ...] = ()


class Work(Protocol):
    """What is to be made. `make` is called by many threads at once, and may be called again for the same position."""

    title: str  # one line for the report
    # JSON values that decide every record: where they are the same, an unfinished import goes on.
    identity: Mapping[str, Any]
    classes: tuple[str, ...]
    ignored: tuple[str, ...]  # files of the source that were no images by their names, for the report
    statistics: Statistics | None  # the mean pixel where it is known before; None: from the sums of every `look`
    prepared_from: str  # `Facts.prepared_from`

    def __len__(self) -> int: ...

    def make(self, position: int) -> Made:
        """Keys rise with the position. An error that is raised ends the import; it can go on later."""


@dataclass(frozen=True, slots=True)
class Job:
    """How it is done; none of it decides what comes out, but `max_bad` whether it does."""

    threads: int
    max_bad: int = 0
    restart: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None  # positions
    stop: Callable[[], bool] = lambda: False
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`complete` is False where `stop` ended it; `records` are then those on disk, and `position` where it goes on."""

    complete: bool
    records: int
    position: int
    total: int
    counts: tuple[tuple[str, int], ...] = ()  # of notes by what they say, most first
    bad: int = 0
    kinds: tuple[tuple[str, int], ...] = ()
    started_at: int = 0  # position where this process began
    already: bool = False  # nothing was to be done


def run(work: Work, out: str, job: Job) -> Result:
    """Makes the LMDB in folder `out`, or goes on with it.

    DataError if `out` exists, if there is nothing to write, or for more bad images than allowed; FolderInUseError;
    ResumeRefused if what is unfinished is another work; StorageError, PermissionDenied. What was
    made stays in OUT.partial.
    """
    target = Path(out)
    if not target.name or target.name == "..":
        raise DataError(f"{out}: exists already", "give the name of a new folder")
    cv2.setNumThreads(1)  # one image, one thread: the images are what is parallel
    with writing(out):
        if target.is_symlink() and not target.exists():
            raise DataError(f"{out}: is a link that leads nowhere", "remove it, or give the name of a new folder")
        if target.exists() and not Partial(target).folder.exists():
            return _existing(work, target, job)
        return _run(work, target, job)


def _run(work: Work, target: Path, job: Job) -> Result:
    with Partial(target) as partial:
        if target.exists():
            # What a crash between the last rename and the removal left has no LMDB in it.
            if not partial.lmdb.exists():
                partial.remove()
            return _existing(work, target, job)
        partial.begin(work.identity, job.restart, _make_empty)
        with closing(_open_seen(partial)) as seen:
            started_at, records = _resume(partial, seen)
            _, notes = seen.read()
            if started_at:
                job.tell(f"goes on behind {count(records, 'record')} in {partial.folder}")
            if not _walk(work, partial, seen, started_at, sum(note.bad for note in notes), job):
                position, records = _resume(partial, seen)
                return Result(
                    complete=False, records=records, position=position, total=len(work), started_at=started_at
                )
            result = _finish(work, partial, seen, job.max_bad, started_at)
        partial.finish()
        return result


def _existing(work: Work, out: Path, job: Job) -> Result:
    left_out = report.left_out_of(out, work.identity)
    if left_out is None or job.restart:
        raise DataError(f"{out}: exists already", "remove it, or give another folder")
    if left_out > job.max_bad:
        raise DataError(
            f"{out}: is complete, but {left_out} of {count(len(work), 'image')} can't be used; more than {job.max_bad} are "
            "not allowed",
            f"{out / REPORT} lists them; to take it as it is add --max-bad {left_out}; or repair the source and remove {out}",
        )
    records = check_file(str(out))
    return Result(complete=True, records=records, position=len(work), total=len(work), bad=left_out, already=True)


def _open(folder: Path) -> lmdb.Environment:
    # No one else knows the folder, and one process at a time has OUT.partial's lock: none of LMDB's own is needed.
    return lmdb.open(str(folder), map_size=_FIRST_MAP_SIZE, lock=False)


def _make_empty(folder: Path) -> None:
    with _open(folder) as env:
        env.sync(True)


def _records_in(folder: Path) -> int:
    try:
        return check_file(str(folder))  # before it is mapped
    except DataError as error:
        raise DataError(error.message, "something changed it; add --restart to begin anew") from None


def _open_seen(partial: Partial) -> Seen:
    _records_in(partial.seen)
    return Seen(partial.seen)


def _resume(partial: Partial, seen: Seen) -> tuple[int, int]:
    """(first position to do, records in the LMDB); what is seen of later positions is cut off."""
    records = _records_in(partial.lmdb)
    rows, _ = seen.read()
    stored = rows["stored"].cumsum(dtype="int64")
    if records and (not len(stored) or stored[-1] < records):
        raise DataError(
            f"{partial.folder}: its records are {records}, and {partial.seen.name} doesn't know them all",
            "something changed its files; add --restart to begin anew",
        )
    # The shortest stretch with so many records. What was left out right behind it is looked at again.
    position = int(stored.searchsorted(records)) + 1 if records else 0
    seen.cut(position)
    return position, records


def _walk(work: Work, partial: Partial, seen: Seen, position: int, bad: int, job: Job) -> bool:
    """Does the rest; False where it was stopped before the end."""
    total = len(work)
    with (
        _open(partial.lmdb) as env,
        ThreadPoolExecutor(1, thread_name_prefix="writer") as writer,
        closing(in_order(lambda at: _with_entry(work.make(at)), position, total, job.threads)) as made,
    ):
        # One chunk is committed while the next one is made.
        chunk, commit = _Chunk(position), writer.submit(lambda: None)
        job.progress(position, total)
        for at in range(position, total):
            if job.stop():
                # What isn't committed is made again: a commit at another place would put the records at other places.
                commit.result()
                return False
            item, its_entry = next(made)
            chunk.add(item, its_entry)
            bad += sum(note.bad for note in item.notes)
            if bad > job.max_bad + _HOPELESS:
                commit.result()
                raise Unusable(
                    f"{bad} of {count(at + 1, 'image')} can't be used; {job.max_bad} at most are allowed (--max-bad)",
                    "is this the right source?",
                )
            if chunk.is_full():
                commit.result()
                commit = writer.submit(_commit, env, seen, chunk)
                chunk = _Chunk(at + 1)
            job.progress(at + 1, total)
        commit.result()
        _commit(env, seen, chunk)
    return True


def _with_entry(made: Made) -> tuple[Made, bytes]:
    row = LEFT_OUT
    if made.record is not None and made.look is not None:
        row = made.look.row(made.label, digest_of(made.record))
    return made, entry(row, made.notes)


@dataclass(slots=True)
class _Chunk:
    """What one commit holds, from position `first`."""

    first: int
    records: list[tuple[bytes, bytes]] = field(default_factory=list)
    size: int = 0
    entries: list[bytes] = field(default_factory=list)

    def add(self, made: Made, its_entry: bytes) -> None:
        self.entries.append(its_entry)
        if made.record is not None:
            self.records.append((made.key, made.record))
            self.size += len(made.record)

    def is_full(self) -> bool:
        # By what is stored alone: those left out at the end of a commit may be counted before it or after it.
        return len(self.records) >= RECORDS_PER_COMMIT or self.size >= BYTES_PER_COMMIT

    def most_bytes(self, page: int) -> int:
        """No less than what they take in the file: overflow pages, and pages of the tree for each."""
        values = sum(-(-(len(value) + 16) // page) * page for _, value in self.records)
        return values + 2 * page * len(self.records) + (1 << 22)


def _commit(env: lmdb.Environment, seen: Seen, chunk: _Chunk) -> None:
    seen.write(chunk.first, chunk.entries)
    if not chunk.records:
        return
    _make_room(env, chunk)
    with env.begin(write=True) as txn:
        for key, record in chunk.records:
            txn.put(key, record, append=True)


def _make_room(env: lmdb.Environment, chunk: _Chunk) -> None:
    """Doubles the map until the chunk fits. The size is a function of what the file and the chunk hold."""
    found = env.info()
    page = int(env.stat()["psize"])
    size = max(_FIRST_MAP_SIZE, int(found["map_size"]))
    while size < (int(found["last_pgno"]) + 1) * page + chunk.most_bytes(page):
        size = 1 << size.bit_length()
    if size > found["map_size"]:
        env.set_mapsize(size)


def _finish(work: Work, partial: Partial, seen: Seen, max_bad: int, started_at: int) -> Result:
    """Side file and report beside the records; DataError if too much, or all, was left out."""
    rows, notes = seen.read()
    kept: Rows = rows[rows["stored"] == 1]
    counts = Counter(note.what for note in notes)
    bad = [note for note in notes if note.bad]
    if len(bad) > max_bad:
        partial.write(REPORT, report.text_of(work, len(kept), notes, {}))
        raise Unusable(
            f"{len(bad)} of {count(len(work), 'image')} can't be used{f'; {max_bad} at most are allowed' if max_bad else ''}:\n  "
            + "\n  ".join(first([report.line_of(note) for note in bad], _SHOWN)),
            f"all of them are listed in {partial.folder / REPORT}; to go without them add --max-bad {len(bad)}, "
            "which goes on from here; or repair the source and add --restart",
        )
    if not len(kept):
        raise DataError(f"{partial.out}: there is nothing to write into it", "check where the images come from")
    offsets = offsets_of(str(partial.lmdb))
    if len(offsets) != len(kept):
        raise DataError(
            f"{partial.folder}: holds {len(offsets)} records, {partial.seen.name} says {len(kept)}",
            "something changed its files; add --restart to begin anew",
        )
    partial.only_records()  # an earlier end may have been interrupted
    index = index_of(offsets, kept, work.classes, work.statistics, work.prepared_from)
    save(index, str(partial.lmdb))
    partial.write(f"{partial.lmdb.name}/{REPORT}", report.text_of(work, len(kept), notes, dict(index.facts.kinds)))
    return Result(
        complete=True,
        records=len(kept),
        position=len(work),
        total=len(work),
        counts=tuple(counts.most_common()),
        bad=len(bad),
        kinds=index.facts.kinds,
        started_at=started_at,
    )
