"""Making an LMDB with its side file: in order, in parallel, and resumable after a kill.

Every record is a function of its position alone, and commits come after fixed numbers of records and bytes. So the LMDB has
the same records at the same offsets, and the same side file, for any number of threads and interruptions.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import cv2
import lmdb

from stagerun.base.errors import DataError
from stagerun.base.text import count, first
from stagerun.data.importing.partial import Note, Partial, Seen, left_out_of, line_of, open_lmdb, records_in, text_of
from stagerun.data.index import LEFT_OUT, Look, Statistics, digest_of, index_of, save
from stagerun.data.records import LmdbSource
from stagerun.data.write import commit, writing
from stagerun.system.image_sets import REPORT
from stagerun.system.lmdb_file import check_file

T = TypeVar("T")

# Items per thread that may be in progress or ready: this bounds the memory.
_AHEAD = 12

RECORDS_PER_COMMIT = 1000
BYTES_PER_COMMIT = 1 << 26
# With so many unusable images above those allowed, the source is taken for a wrong one.
_HOPELESS = 1000
_SHOWN = 20


class Unusable(DataError):
    """More images than allowed can't be used."""


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a position: a record, or None if it is left out, which a bad note explains."""

    key: bytes
    record: bytes | None
    label: int = 0
    look: Look | None = None
    notes: tuple[Note, ...] = ()


class Work(Protocol):
    """An import. Many threads call `make` at once, perhaps again for the same position."""

    title: str  # one line for the report
    # JSON values that decide every record: if they are the same, an unfinished import is resumed.
    identity: Mapping[str, Any]
    classes: tuple[str, ...]
    ignored: tuple[str, ...]  # files of the source that were no images by their names, for the report
    statistics: Statistics | None  # None: from the sums of every `look`
    prepared_from: str  # `Facts.prepared_from`

    def __len__(self) -> int: ...

    def make(self, position: int) -> Made:
        """Make a record; keys rise with the position. An error ends the import, which may be resumed."""


@dataclass(frozen=True, slots=True)
class Job:
    """Options that change no record; `max_bad` may refuse the result."""

    threads: int
    max_bad: int = 0
    restart: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None  # positions
    stop: Callable[[], bool] = lambda: False
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Result:
    """`complete` is False after `stop`; `records` are then on disk, and the import resumes at `position`."""

    complete: bool
    _: KW_ONLY
    records: int
    position: int
    total: int
    counts: tuple[tuple[str, int], ...] = ()  # of notes by their `what`, most first
    bad: int = 0
    kinds: tuple[tuple[str, int], ...] = ()
    started_at: int = 0  # position where this process began
    already: bool = False  # it was complete before


def run(work: Work, out: str, job: Job) -> Result:
    """Make the LMDB in folder `out`, or resume it.

    DataError if `out` exists, without records, or for more bad images than allowed; FolderInUseError; ResumeRefused if OUT.partial
    is another import; StorageError, PermissionDenied. The finished part stays in OUT.partial.
    """
    target = Path(out)
    if not target.name or target.name == "..":
        raise DataError(f"{out}: exists already", "give the name of a new folder")
    cv2.setNumThreads(1)  # one thread per image: the images are made in parallel
    with writing(out):
        if target.is_symlink() and not target.exists():
            raise DataError(f"{out}: is a link that leads nowhere", "remove it, or give the name of a new folder")
        if not target.exists() or Partial(target).folder.exists():
            with Partial(target) as partial:
                if not target.exists():
                    return _run(work, partial, job)
                # A crash between the last rename and the removal leaves a folder without an LMDB.
                if not partial.lmdb.exists():
                    partial.remove()
        left_out, total = left_out_of(target, work.identity), len(work)
        if left_out is None or left_out > job.max_bad or job.restart:
            raise DataError(f"{out}: exists already", "remove it, or give another folder")
        return Result(True, records=check_file(out), position=total, total=total, bad=left_out, already=True)


def _run(work: Work, partial: Partial, job: Job) -> Result:
    partial.begin(work.identity, job.restart)
    with closing(Seen(partial.seen)) as seen:
        begun, records = _done(partial, seen)
        if begun:
            job.tell(f"resumes behind {count(records, 'record')} in {partial.folder}")
        if not _walk(work, partial, seen, begun, job):
            position, records = _done(partial, seen)
            return Result(False, records=records, position=position, total=len(work), started_at=begun)
        result = _finish(work, partial, seen, job.max_bad, begun)
    partial.finish()
    return result


def _done(partial: Partial, seen: Seen) -> tuple[int, int]:
    """Return (next position, records in the LMDB): its commits alone decide."""
    records = records_in(partial.lmdb)
    stored = seen.read()[0]["stored"].cumsum(dtype="int64")
    if records and (not len(stored) or stored[-1] < records):
        raise DataError(
            f"{partial.folder}: it has {records} records, more than {partial.seen.name}",
            "something changed its files; add --restart to begin again",
        )
    # The shortest stretch with so many records. Images left out right behind it are tried again.
    return int(stored.searchsorted(records)) + 1 if records else 0, records


def _walk(work: Work, partial: Partial, seen: Seen, begun: int, job: Job) -> bool:
    """Make the remaining records; False if it was stopped."""
    total = len(work)

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
        chunk: list[tuple[Made, bytes]] = []
        records = size = bad = (
            0  # stored ones of the chunk: images left out at its end may be counted before it or after it
        )
        committing = writer.submit(lambda: None)
        job.progress(begun, total)
        for at in range(begun, total):
            if job.stop():
                # Uncommitted records are made again: a commit here would change the offsets of the next ones.
                committing.result()
                return False
            item, row = next(made)
            chunk.append((item, row))
            if item.record is not None:
                records, size = records + 1, size + len(item.record)
            bad += sum(note.bad for note in item.notes)
            if bad > job.max_bad + _HOPELESS:
                committing.result()
                text = f"{bad} of {count(at + 1, 'image')} can't be used; {job.max_bad} at most are allowed (--max-bad)"
                raise Unusable(text, "is this the right source?")
            if records >= RECORDS_PER_COMMIT or size >= BYTES_PER_COMMIT:
                committing.result()
                committing = writer.submit(_commit, env, seen, at + 1, chunk)
                chunk, records, size = [], 0, 0
            job.progress(at + 1, total)
        committing.result()
        _commit(env, seen, total, chunk)
    return True


def in_order(make: Callable[[int], T], first: int, last: int, threads: int) -> Generator[T, None, None]:
    """Yield make(first), ..., make(last - 1), or raise in place of a result.

    At most 12 results a thread are in progress or waiting. Closing it waits for the ones in progress. Threads are enough: decoding,
    encoding, hashing and reading all release Python's lock.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="images")
    waiting: deque[Future[T]] = deque()
    try:
        for i in range(first, last):
            waiting.append(pool.submit(make, i))
            if len(waiting) >= threads * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _commit(env: lmdb.Environment, seen: Seen, end: int, chunk: Sequence[tuple[Made, bytes]]) -> None:
    """Commit the results of the positions before `end`, with their rows."""
    seen.write(end - len(chunk), [(row, made.notes) for made, row in chunk])
    if records := [(made.key, made.record) for made, _ in chunk if made.record is not None]:
        commit(env, records)  # an empty commit would add a transaction


def _finish(work: Work, partial: Partial, seen: Seen, max_bad: int, begun: int) -> Result:
    """Write side file and report; DataError if too much, or all, was left out."""
    rows, notes = seen.read()
    kept = rows[rows["stored"] == 1]
    bad = [note for note in notes if note.bad]
    if len(bad) > max_bad:
        partial.write(REPORT, text_of(work, len(kept), notes, {}))
        raise Unusable(
            f"{len(bad)} of {count(len(work), 'image')} can't be used{f'; {max_bad} at most are allowed' if max_bad else ''}:\n  "
            + "\n  ".join(first([line_of(note) for note in bad], _SHOWN)),
            f"all of them are listed in {partial.folder / REPORT}; to leave them out add --max-bad {len(bad)}, "
            "which resumes here; or repair the source and add --restart",
        )
    if not len(kept):
        raise DataError(f"{partial.out}: there is nothing to write into it", "check the source")
    source = LmdbSource(str(partial.lmdb), side_file=False)
    if len(source) != len(kept):
        text = f"{partial.folder}: holds {len(source)} records, {partial.seen.name} says {len(kept)}"
        raise DataError(text, "something changed its files; add --restart to begin again")
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
