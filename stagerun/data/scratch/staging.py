"""Having copies: those that are there are used, the others made, whoever comes first doing it for all.

The bytes of a copy come block by block, several at once, and each block is read back from the disk and compared before it counts.
"""

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import DataError, PermissionDenied, StorageError
from stagerun.data.scratch import layout
from stagerun.data.scratch.layout import (
    DATA,
    JOURNAL,
    OR_ELSE,
    PARTIAL,
    SUSPECT,
    CopyStopped,
    Found,
    Original,
    Use,
    file_size,
    held,
    home_of,
    look,
    read_manifest,
    remove,
    take_room,
    taken,
    unused_now,
    write_manifest,
)
from stagerun.data.write import writing
from stagerun.system.files import sync_folder, write_whole
from stagerun.system.image_sets import SIDE_FILE
from stagerun.system.lmdb_file import reading

GIGABYTE = 10**9
_PIECE = 1 << 22
# Blocks on their way at once: a file server gives one reader a part of what it has.
_STREAMS = 4
_LINE = re.compile(r"^([0-9]{1,9}) ([0-9a-f]{64})$", re.MULTILINE)  # of the journal


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of all copies that were asked for at once. `waiting`: another process makes them."""

    done: int
    total: int
    waiting: bool = False


class Copy:
    """A copy in use by this process, until `close`; `path` is the folder of an LMDB.

    `bytes` were copied for it in `seconds`, of its `size`. `digest` is of the digests of all its blocks.
    """

    def __init__(self, folder: Path, original: Original, copied: int = 0, seconds: float = 0.0) -> None:
        """Call it while holding the copy's lock. OSError."""
        self.path, self.original = str(folder), original
        manifest = read_manifest(folder)
        self.digest = hashlib.sha256(" ".join(manifest.blocks if manifest else ()).encode()).hexdigest()
        self.bytes, self.seconds = copied, seconds
        self._use = Use(folder)

    def suspect(self) -> None:
        """Have every block compared before anyone uses it again, as far as the disk lets us say so: it can't be read."""
        with contextlib.suppress(OSError):
            Path(self.path, SUSPECT).touch(0o600)

    def close(self) -> None:
        self._use.close()


def stage(
    originals: Sequence[Original],
    scratch: str,
    reserve: float,
    *,
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[Progress], None] = lambda progress: None,
    removed: Callable[[Found], None] = lambda found: None,
) -> list[Copy]:
    """A complete copy of each LMDB below folder `scratch`, in order; `reserve` gigabytes stay free on that disk.

    Any number of processes, threads and jobs may call it at once: one copies, the others wait. `stop` and `watch` are
    called while it goes on, from several threads; `removed` gets each copy that was removed to make room.

    CopyStopped if `stop` said so; DataError, PermissionDenied if an LMDB can't be read or has changed; StorageError if there is
    no room or the disk fails.
    """
    with writing(scratch, OR_ELSE), contextlib.ExitStack() as locks:
        home = home_of(scratch)
        wanted = {original.name: original for original in originals}
        total = sum(original.size for original in wanted.values())

        def waiting() -> None:
            there = sum(taken(home / n) + taken(home / f"{n}{PARTIAL}") for n in wanted)
            watch(Progress(min(there, total), total, waiting=True))

        for name in sorted(wanted):  # all in the same order, so that no two jobs wait for each other
            locks.enter_context(held(home / f"{name}.lock", stop, waiting))
        todo = [original for original in wanted.values() if not _usable(home, original)]
        if todo:
            take_room(home, todo, round(reserve * GIGABYTE), stop, removed)
        done, needed, lock = 0, sum(original.size for original in todo), threading.Lock()

        def report(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                watch(Progress(done, needed))

        copied: dict[str, tuple[int, float]] = {}
        for original in todo:
            began = time.monotonic()
            count = _make(home, original, report, stop)
            copied[original.name] = count, time.monotonic() - began
        for original in wanted.values():
            _mirror_side_file(home / original.name, original)
        return [Copy(home / one.name, one, *copied.get(one.name, (0, 0.0))) for one in originals]


def _usable(home: Path, original: Original) -> bool:
    """Whether the copy is complete as far as can be seen without reading it. One that isn't becomes a partial one; what says nothing of
    use is removed. Call it while holding the copy's lock. StorageError if that is in use."""
    folder, partial = home / original.name, home / f"{original.name}{PARTIAL}"
    if not os.path.lexists(folder):
        return False
    manifest = read_manifest(folder)
    if manifest is None or not manifest.blocks or manifest.size != original.size:
        with unused_now(folder) as unused:
            if not unused:  # by a job that began before its manifest was damaged
                raise StorageError(
                    f"{folder}: is no longer a complete copy, and is in use",
                    "wait until the jobs that read it have ended, or use another scratch folder",
                )
            remove(folder)
        return False
    if file_size(folder) == original.size and not (folder / SUSPECT).exists():
        return True
    # Each block is compared, and copied again where it is wrong: who reads the copy meanwhile has the same bytes before and after.
    (folder / JOURNAL).write_text("".join(f"{n} {digest}\n" for n, digest in enumerate(manifest.blocks)))
    if partial.exists():
        remove(partial)
    folder.rename(partial)
    return False


def _make(home: Path, original: Original, report: Callable[[int], None], stop: Callable[[], bool]) -> int:
    """Bytes that were copied."""
    partial, folder = home / f"{original.name}{PARTIAL}", home / original.name
    try:
        _require_same(original)
        copying = _Copying(original, partial, report, stop)
        blocks = copying.run()
        _require_same(original)
        (partial / SUSPECT).unlink(missing_ok=True)
        write_manifest(partial, layout.Manifest(source=original.real, size=original.size, blocks=blocks))
        # The journal last: a kill before the rename leaves all that is needed to go on, one after it a file without a use.
        partial.rename(folder)
        sync_folder(home)
        (folder / JOURNAL).unlink()
        return sum(copying.copied)
    except BaseException as error:
        # A stop, or a source that is gone, keeps what is there; a full or failing disk keeps nothing.
        if isinstance(error, SourceChanged) or not isinstance(error, CopyStopped | DataError | PermissionDenied):
            with contextlib.suppress(OSError):
                remove(partial)
        raise


class SourceChanged(DataError):
    def __init__(self, original: Original) -> None:
        super().__init__(
            f"{original.path}: the LMDB was changed while it was copied",
            "wait until it is complete, then run the same command again",
        )


def _require_same(original: Original) -> None:
    """SourceChanged if the LMDB is not the one that was looked at."""
    if look(original.path) != original:
        raise SourceChanged(original)


class _Copying:
    """One copy in the making, by several threads."""

    def __init__(
        self, original: Original, folder: Path, report: Callable[[int], None], stop: Callable[[], bool]
    ) -> None:
        self._original, self._folder, self._report, self._stop = original, folder, report, stop
        self._file = Path(original.path, DATA)
        self._errors: list[BaseException] = []
        self.copied: list[int] = []  # bytes of each block

    def run(self) -> tuple[str, ...]:
        """Brings the copy's data.mdb to the bytes of the original; the digests of all blocks, which are on the disk then.

        CopyStopped, with the journal saying what is there; StagerunError about the source; OSError of the scratch disk, StorageError
        if it gives back something else than was written.
        """
        count = -(-self._original.size // layout.BLOCK)
        todo, digests = iter(range(count)), dict[int, str]()
        # Blocks that an interrupted copy has written: each is read back before it counts.
        journal = self._folder / JOURNAL
        text = journal.read_text(encoding="ascii", errors="replace") if journal.exists() else ""
        known = {int(number): digest for number, digest in _LINE.findall(text)}

        def work() -> None:
            room = memoryview(bytearray(_PIECE))
            try:
                for number in todo:
                    digests[number] = self._block(number, known.get(number, ""), room)
            except BaseException as error:  # whatever it is, it belongs to the caller
                self._errors.append(error)

        with contextlib.ExitStack() as files:
            with reading(self._file):
                self._source = _open(files, self._file, os.O_RDONLY)
            self._target = _open(files, self._folder / DATA, os.O_RDWR | os.O_CREAT)
            self._journal = _open(files, journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.ftruncate(self._target, self._original.size)
            # Daemons: a file server that hangs must not keep a process from ending.
            threads = [threading.Thread(target=work, name="copy", daemon=True) for _ in range(min(_STREAMS, count))]
            try:
                for thread in threads:
                    thread.start()
            except RuntimeError as error:  # of a limit on threads: those that run must end before the files are closed
                self._errors.append(error)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._errors:
            raise self._errors[0]
        return tuple(digests[n] for n in range(count))

    def _block(self, number: int, known: str, room: memoryview) -> str:
        """The digest of a block that is on the disk then; `known`: of one that may be there already."""
        begin = number * layout.BLOCK
        end = min(begin + layout.BLOCK, self._original.size)
        if known and self._read_back(begin, end, room) == known:
            self._report(end - begin)
            return known
        for _ in range(2):
            digest = self._transfer(begin, end, room)
            # Each for itself, so that at the end, or at a stop, no backlog is left to wait for.
            os.fdatasync(self._target)
            if self._read_back(begin, end, room) == digest:
                self.copied.append(end - begin)
                os.write(self._journal, f"\n{number} {digest}\n".encode())  # a kill may have cut the line before
                return digest
            self._report(begin - end)
        raise StorageError(
            f"{self._folder / DATA}: the disk gives back other bytes than were written to it",
            "the disk is failing: leave this node out, or give another `scratch`",
        )

    def _piece(self, fd: int, at: int, end: int, room: memoryview) -> memoryview:
        if self._errors or self._stop():
            raise CopyStopped
        piece = room[: end - at]
        return piece[: os.preadv(fd, (piece,), at)]

    def _transfer(self, begin: int, end: int, room: memoryview) -> str:
        digest, at = hashlib.sha256(), begin
        while at < end:
            with reading(self._file):
                piece = self._piece(self._source, at, end, room)
            if not piece:
                raise SourceChanged(self._original)
            digest.update(piece)
            at += len(piece)
            self._report(len(piece))
            while piece:  # a full disk first writes less than it was given, then fails
                piece = piece[os.pwrite(self._target, piece, at - len(piece)) :]
        # The source is not read again; the memory is better used for the copy.
        os.posix_fadvise(self._source, begin, end - begin, os.POSIX_FADV_DONTNEED)
        return digest.hexdigest()

    def _read_back(self, at: int, end: int, room: memoryview) -> str:
        """The digest of the block as the disk has it, '' where it can't be read: the kernel is asked to forget its own copy first, which it
        does for what is written and not mapped. What the drive itself still has in memory can't be distinguished."""
        digest = hashlib.sha256()
        os.posix_fadvise(self._target, at, end - at, os.POSIX_FADV_DONTNEED)
        while at < end:
            try:
                piece = self._piece(self._target, at, end, room)
            except OSError:  # a bad block may be well again when it is written anew
                return ""
            if not piece:
                return ""
            digest.update(piece)
            at += len(piece)
        return digest.hexdigest()


def _open(files: contextlib.ExitStack, path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    files.callback(os.close, fd)
    return fd


def _mirror_side_file(folder: Path, original: Original) -> None:
    """The copy has the side file that the source has, or none; it may be made, or made again, after the copy was."""
    file, copy = Path(original.path, SIDE_FILE), folder / SIDE_FILE
    with reading(file):
        if not file.exists():
            copy.unlink(missing_ok=True)
            return
        state = file.stat()
        if copy.exists() and (state.st_size, state.st_mtime_ns) == (copy.stat().st_size, copy.stat().st_mtime_ns):
            return
        data = file.read_bytes()
    # Renamed over the old one, which those who read it keep. It has a digest of its own, compared when it is loaded.
    write_whole(copy, data, aside=folder / f"{SIDE_FILE}.new")
    os.utime(copy, ns=(state.st_mtime_ns, state.st_mtime_ns))
