"""Records in, an LMDB with its side file out: in order, in parallel, and going on where it was killed.

Every record is a function of its position alone, and commits lie after fixed numbers of records and bytes. So the LMDB has
the same records at the same places, and the same side file, for any number of threads and however often it was interrupted.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import cv2
import lmdb

from stagerun.base.errors import DataError
from stagerun.base.text import count, first
from stagerun.data.importing.partial import Note, Partial, Seen, left_out_of, line_of, open_lmdb, records_in, text_of
from stagerun.data.index import digest_of, save
from stagerun.data.records import LmdbSource
from stagerun.data.rows import LEFT_OUT, Look, Statistics, index_of
from stagerun.data.write import commit, writing
from stagerun.system.imports import REPORT
from stagerun.system.lmdb_file import check_file

T = TypeVar("T")

# Items that one thread does in one go, so that handing over costs little, and goes ahead: memory is bounded by their product.
_AT_ONCE, _AHEAD = 4, 3

RECORDS_PER_COMMIT = 1000
BYTES_PER_COMMIT = 1 << 26
# So many images that can't be used, above those allowed, and the source is taken for a wrong one.
_HOPELESS = 1000
_SHOWN = 20


class Unusable(DataError):
    """More images than allowed can't be used."""


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


@dataclass(frozen=True, slots=True)
class Result:
    """`complete` is False where `stop` ended it; `records` are then those on disk, and `position` where it goes on."""

    complete: bool
    _: KW_ONLY
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
        if not target.exists() or Partial(target).folder.exists():
            with Partial(target) as partial:
                if not target.exists():
                    return _run(work, partial, job)
                # What a crash between the last rename and the removal left has no LMDB in it.
                if not partial.lmdb.exists():
                    partial.remove()
        return _existing(work, target, job)


def _existing(work: Work, out: Path, job: Job) -> Result:
    left_out = left_out_of(out, work.identity)
    if left_out is None or job.restart:
        raise DataError(f"{out}: exists already", "remove it, or give another folder")
    if left_out > job.max_bad:
        raise DataError(
            f"{out}: is complete, but {left_out} of {count(len(work), 'image')} can't be used; more than {job.max_bad} are "
            "not allowed",
            f"{out / REPORT} lists them; to take it as it is add --max-bad {left_out}; or repair the source and remove {out}",
        )
    total = len(work)
    return Result(True, records=check_file(str(out)), position=total, total=total, bad=left_out, already=True)


def _run(work: Work, partial: Partial, job: Job) -> Result:
    partial.begin(work.identity, job.restart)
    with closing(Seen(partial.seen)) as seen:
        begun, records = _done(partial, seen)
        if begun:
            job.tell(f"goes on behind {count(records, 'record')} in {partial.folder}")
        if not _walk(work, partial, seen, begun, job):
            position, records = _done(partial, seen)
            return Result(False, records=records, position=position, total=len(work), started_at=begun)
        result = _finish(work, partial, seen, job.max_bad, begun)
    partial.finish()
    return result


def _done(partial: Partial, seen: Seen) -> tuple[int, int]:
    """(first position to do, records in the LMDB): its commits alone say how far the import is."""
    records = records_in(partial.lmdb)
    stored = seen.read()[0]["stored"].cumsum(dtype="int64")
    if records and (not len(stored) or stored[-1] < records):
        raise DataError(
            f"{partial.folder}: its records are {records}, and {partial.seen.name} doesn't know them all",
            "something changed its files; add --restart to begin anew",
        )
    # The shortest stretch with so many records. What was left out right behind it is looked at again.
    return int(stored.searchsorted(records)) + 1 if records else 0, records


def _walk(work: Work, partial: Partial, seen: Seen, begun: int, job: Job) -> bool:
    """Does the rest; False where it was stopped before the end."""
    total, bad = len(work), sum(note.bad for note in seen.read(begun)[1])

    def with_row(at: int) -> tuple[Made, bytes]:
        made = work.make(at)
        if made.record is None or made.look is None:
            return made, LEFT_OUT
        return made, made.look.row(made.label, digest_of(made.record))

    with (
        open_lmdb(partial.lmdb) as env,
        ThreadPoolExecutor(1, thread_name_prefix="writer") as writer,
        closing(in_order(with_row, begun, total, job.threads)) as made,
    ):
        # One chunk is committed while the next one is made.
        chunk, committing = _Chunk(begun), writer.submit(lambda: None)
        job.progress(begun, total)
        for at in range(begun, total):
            if job.stop():
                # What isn't committed is made again: a commit at another place would put the records at other places.
                committing.result()
                return False
            item, row = next(made)
            chunk.add(item, row)
            bad += sum(note.bad for note in item.notes)
            if bad > job.max_bad + _HOPELESS:
                committing.result()
                raise Unusable(
                    f"{bad} of {count(at + 1, 'image')} can't be used; {job.max_bad} at most are allowed (--max-bad)",
                    "is this the right source?",
                )
            if chunk.is_full():
                committing.result()
                committing = writer.submit(_commit, env, seen, chunk)
                chunk = _Chunk(at + 1)
            job.progress(at + 1, total)
        committing.result()
        _commit(env, seen, chunk)
    return True


def in_order(make: Callable[[int], T], first: int, last: int, threads: int) -> Generator[T, None, None]:
    """make(first), ..., make(last - 1), whoever is done first. An exception comes where its result would have come.

    At most 12 results a thread are under way or waiting. Closing it waits for those in the making, no others are started. Threads
    are enough: decoding, encoding, hashing and reading all let go of Python's lock.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="images")
    waiting: deque[Future[list[T]]] = deque()

    def several(start: int) -> list[T]:
        return [make(i) for i in range(start, min(last, start + _AT_ONCE))]

    try:
        for start in range(first, last, _AT_ONCE):
            waiting.append(pool.submit(several, start))
            if len(waiting) >= threads * _AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True)
class _Chunk:
    """What one commit holds, from position `first`: of each what it gives, and its row."""

    first: int
    made: list[tuple[Made, bytes]] = field(default_factory=list)
    records: int = 0
    size: int = 0

    def add(self, made: Made, row: bytes) -> None:
        self.made.append((made, row))
        if made.record is not None:
            self.records += 1
            self.size += len(made.record)

    def is_full(self) -> bool:
        # By what is stored alone: those left out at the end of a commit may be counted before it or after it.
        return self.records >= RECORDS_PER_COMMIT or self.size >= BYTES_PER_COMMIT


def _commit(env: lmdb.Environment, seen: Seen, chunk: _Chunk) -> None:
    seen.write(chunk.first, [(row, made.notes) for made, row in chunk.made])
    if chunk.records:  # a commit without any would be one more transaction
        commit(env, [(made.key, made.record) for made, _ in chunk.made if made.record is not None])


def _finish(work: Work, partial: Partial, seen: Seen, max_bad: int, begun: int) -> Result:
    """Side file and report beside the records; DataError if too much, or all, was left out."""
    rows, notes = seen.read()
    kept = rows[rows["stored"] == 1]
    bad = [note for note in notes if note.bad]
    if len(bad) > max_bad:
        partial.write(REPORT, text_of(work, len(kept), notes, {}))
        raise Unusable(
            f"{len(bad)} of {count(len(work), 'image')} can't be used{f'; {max_bad} at most are allowed' if max_bad else ''}:\n  "
            + "\n  ".join(first([line_of(note) for note in bad], _SHOWN)),
            f"all of them are listed in {partial.folder / REPORT}; to go without them add --max-bad {len(bad)}, "
            "which goes on from here; or repair the source and add --restart",
        )
    if not len(kept):
        raise DataError(f"{partial.out}: there is nothing to write into it", "check where the images come from")
    source = LmdbSource(str(partial.lmdb), side_file=False)
    if len(source) != len(kept):
        raise DataError(
            f"{partial.folder}: holds {len(source)} records, {partial.seen.name} says {len(kept)}",
            "something changed its files; add --restart to begin anew",
        )
    partial.only_records()  # an earlier end may have been interrupted
    index = index_of(source, kept, work.classes, work.statistics, work.prepared_from)
    save(index, str(partial.lmdb))
    partial.write(f"{partial.lmdb.name}/{REPORT}", text_of(work, len(kept), notes, dict(index.facts.kinds)))
    return Result(
        True,
        records=len(kept),
        position=len(work),
        total=len(work),
        counts=tuple(Counter(note.what for note in notes).most_common()),
        bad=len(bad),
        kinds=index.facts.kinds,
        started_at=begun,
    )
