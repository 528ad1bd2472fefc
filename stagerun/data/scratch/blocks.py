"""The bytes of one copy: block by block, several at once, each read back from the disk and compared before it counts."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import DataError, PermissionDenied, StorageError
from stagerun.data.scratch.layout import BLOCK, JOURNAL, CopyStopped, Original, SourceChanged, blocks_in
from stagerun.system.lmdb_file import reading

_PIECE = 1 << 22
# Blocks on their way at once: a file server gives one reader a part of what it has.
_STREAMS = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of all copies that were asked for at once. `waiting`: another process makes them."""

    done: int
    total: int
    waiting: bool = False


class Tally:
    """Adds up what several threads do, and reports it, one report at a time."""

    def __init__(self, total: int, report: Callable[[Progress], None]) -> None:
        self.done, self.total, self.copied = 0, total, 0
        self._report, self._lock = report, threading.Lock()

    def add(self, count: int, copied: bool) -> None:
        with self._lock:
            self.done += count
            self.copied += count if copied else 0
            self._report(Progress(self.done, self.total))


def known_blocks(folder: Path) -> dict[int, str]:
    """Number -> sha256 of the blocks that an interrupted copy has written. OSError.

    A line cut off by a kill is passed over; whatever stands here, the block is read back and compared before it counts.
    """
    known = {}
    try:
        text = (folder / JOURNAL).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return {}
    for line in text.splitlines():
        number, _, digest = line.partition(" ")
        if number.isascii() and number.isdigit() and len(number) < 10 and len(digest) == 64:
            known[int(number)] = digest
    return known


class BlockCopy:
    """Brings `target` to the bytes of `original`. `known`: digests of blocks that may be there already."""

    def __init__(
        self, original: Original, target: Path, known: dict[int, str], tally: Tally, stop: Callable[[], bool]
    ) -> None:
        self.original, self.target, self.known, self.tally = original, target, known, tally
        self.digests: dict[int, str] = {}
        self.rewritten = 0  # blocks that were known and not there
        self._stop = stop
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._working = 0  # threads that may use the descriptors
        self._todo = iter(range(blocks_in(original.size)))

    def run(self) -> tuple[str, ...]:
        """The digests of all blocks, which are on the disk then. Once only.

        CopyStopped, with the journal saying what is there; StagerunError about the source; OSError of the scratch disk,
        StorageError if it gives back something else than was written.
        """
        file = Path(self.original.path) / "data.mdb"
        with contextlib.ExitStack() as stack:
            with reading(file):
                self._source = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, self._source)
            self._target = os.open(self.target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, self._target)
            self._journal = os.open(
                self.target.with_name(JOURNAL),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
            stack.callback(os.close, self._journal)
            if os.fstat(self._target).st_size != self.original.size:
                os.ftruncate(self._target, self.original.size)
            os.write(self._journal, b"\n")  # ends a line that a kill cut off
            self._all_streams()
            if self._error is not None:
                raise self._error
            os.fsync(self._target)
        return tuple(self.digests[n] for n in range(blocks_in(self.original.size)))

    def _all_streams(self) -> None:
        """Runs the threads; returns, or raises, only when none of them uses the descriptors any more: after these are closed
        it would write into whichever file got their numbers."""
        # Daemons: a file server that hangs must not keep a process from ending.
        threads = [
            threading.Thread(target=self._work, name="copy", daemon=True)
            for _ in range(min(_STREAMS, blocks_in(self.original.size)))
        ]
        try:
            for thread in threads:
                _start(thread)
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt too
            with self._idle:
                # Those at work stop at their next piece, and one that has yet to begin finds this and doesn't.
                self._error = self._error or error
                self._idle.wait_for(lambda: self._working == 0)
            raise

    def _work(self) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._working += 1
        try:
            room = memoryview(bytearray(_PIECE))
            while True:
                with self._lock:
                    number = next(self._todo, None)
                if number is None:
                    return
                digest = self._block(number, room)
                with self._lock:
                    self.digests[number] = digest
        except BaseException as error:  # whatever it is, it belongs to who called `run`
            with self._lock:
                self._error = self._error or error
        finally:
            with self._idle:
                self._working -= 1
                self._idle.notify_all()

    def _block(self, number: int, room: memoryview) -> str:
        known = self.known.get(number)
        if known is not None:
            if self._read_back(number, room) == known:
                self.tally.add(self._size(number), copied=False)
                return known
            with self._lock:
                self.rewritten += 1
        for _ in range(2):
            digest = self._copy(number, room)
            if self._written(number, digest, room):
                return digest
        raise StorageError(
            f"{self.target}: the disk gives back other bytes than were written to it",
            "the disk is failing: leave this node out, or give another `scratch`",
        )

    def _written(self, number: int, digest: str, room: memoryview) -> bool:
        os.fdatasync(self._target)  # each for itself, so that at the end, or at a stop, no backlog is left to wait for
        if self._read_back(number, room) == digest:
            os.write(self._journal, f"{number} {digest}\n".encode())
            return True
        self.tally.add(-self._size(number), copied=True)
        return False

    def _size(self, number: int) -> int:
        return min(BLOCK, self.original.size - number * BLOCK)

    def _copy(self, number: int, room: memoryview) -> str:
        digest = hashlib.sha256()
        at, end = number * BLOCK, number * BLOCK + self._size(number)
        while at < end:
            self._ask()
            piece = room[: min(_PIECE, end - at)]
            with reading(Path(self.original.path) / "data.mdb"):
                count = os.preadv(self._source, (piece,), at)
            if count == 0:
                raise SourceChanged(self.original)
            digest.update(piece[:count])
            written = 0
            while written < count:  # a full disk first writes less than it was given, then fails
                written += os.pwrite(self._target, piece[written:count], at + written)
            at += count
            self.tally.add(count, copied=True)
        # The source is not read again; the memory is better used for the copy.
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._source, number * BLOCK, self._size(number), os.POSIX_FADV_DONTNEED)
        return digest.hexdigest()

    def _read_back(self, number: int, room: memoryview) -> str:
        """The digest of the block as the disk has it: the kernel is asked to forget its own copy first, which it does for
        what is written and not mapped. What the drive itself still has in memory can't be distinguished."""
        digest = hashlib.sha256()
        at, end = number * BLOCK, number * BLOCK + self._size(number)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._target, at, end - at, os.POSIX_FADV_DONTNEED)
        while at < end:
            self._ask()
            piece = room[: min(_PIECE, end - at)]
            try:
                count = os.preadv(self._target, (piece,), at)
            except OSError:  # a bad block may be well again when it is written anew
                return ""
            if count == 0:
                return ""
            digest.update(piece[:count])
            at += count
        return digest.hexdigest()

    def _ask(self) -> None:
        if self._over():
            raise CopyStopped

    def _over(self) -> bool:
        """Whether it is to stop, or another thread has failed."""
        return self._error is not None or self._stop()


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise StorageError(
            f"the threads that copy can't be started: {error}",
            "this machine allows this user no more (`ulimit -u`): end some",
        ) from None


def worth_keeping(error: BaseException) -> bool:
    """Whether what is copied so far is of use to the next who tries: after a stop, or where only the source failed."""
    return isinstance(error, CopyStopped | DataError | PermissionDenied) and not isinstance(error, SourceChanged)
