"""Copies of LMDBs on a node's fast disk: made once, checked by digest, used again by later jobs.

    SCRATCH/stagerun-UID/               mode 0700: another user's data must not pass for ours
        NAME/                           a complete copy
            data.mdb, stagerun-index.safetensors
            stagerun-copy.json          its source, and the sha256 of each 64 MiB of data.mdb
            suspect                     present after a failed read: compare every block before using the copy again
        NAME.partial/                   an unfinished copy; `blocks` lists the blocks that are written and checked
        NAME.lock                       held (flock) by the process that makes or checks the copy

NAME identifies one state of one LMDB (`look`): a changed source gets another name. The kernel releases a lock when its process ends,
so a killed job blocks no other, and the next job continues the copy. Nothing is removed to make room.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stagerun.base.errors import DataError, PermissionDenied, StorageError
from stagerun.base.text import size
from stagerun.data.write import CopyStopped, Stop, held, writing
from stagerun.system.files import private_folder, sync_folder, write_whole
from stagerun.system.image_sets import COPY, SIDE_FILE, scratch_home
from stagerun.system.lmdb_file import BY_SCHEDULE, LmdbFile, reading
from stagerun.system.typed import json_object, read_as

BLOCK = 1 << 26
DATA, JOURNAL, SUSPECT = "data.mdb", "blocks", "suspect"
PARTIAL = ".partial"
Report = Callable[[int], None]  # of bytes that were copied
# Appended to the hints for errors of the scratch disk.
OR_ELSE = "; or give another `scratch`, on a disk of the node itself"

_PIECE = 1 << 22
# Blocks copied at once: a file server gives one reader only part of its bandwidth.
_STREAMS = 4
_LINE = re.compile(r"^([0-9]{1,9}) ([0-9a-f]{64})$", re.MULTILINE)  # of the journal


@dataclass(frozen=True, slots=True)
class Original:
    """A state of an LMDB to copy. `path` is the user's, `size` that of data.mdb, `name` the name of its copies."""

    path: str
    real: str
    size: int
    name: str


def look(path: str) -> Original:
    """Return the present state of the LMDB in folder `path`. DataError if it is not whole, PermissionDenied.

    The name is a digest of the real path, size, time of change, and the bytes at both ends of data.mdb.
    """
    lmdb = LmdbFile(path, BY_SCHEDULE)
    with reading(lmdb.file):
        real = str(lmdb.file.resolve())
        digest = hashlib.sha256(f"{real}\0{lmdb.size}\0{lmdb.changed}\0".encode(errors="surrogateescape"))
        digest.update(lmdb.ends())
    return Original(path, str(Path(real).parent), lmdb.size, digest.hexdigest())


def home_of(scratch: str) -> Path:
    """Return the folder of this user's copies. StorageError without a folder `scratch`, PermissionDenied if it isn't ours."""
    if not os.path.isdir(scratch):
        raise StorageError(f"{scratch}: no such folder", "make it on every node, or give another `scratch`")
    return private_folder(scratch_home(scratch), "copies", "give another `scratch`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The source of a copy, the size of data.mdb, and the sha256 of each BLOCK bytes."""

    source: str
    size: int
    blocks: tuple[str, ...] = ()


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest; None if it is missing or damaged. OSError."""
    try:
        manifest = read_as(Manifest, json_object((folder / COPY).read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return manifest if len(manifest.blocks) == -(-manifest.size // BLOCK) else None


def free_bytes(home: Path) -> int:
    """Return the bytes that this user may still write to the disk. OSError."""
    return shutil.disk_usage(home).free


def _written(home: Path, name: str) -> int:
    """Return the bytes of a copy or import that are on the disk."""
    total = 0
    for file in (f"{name}/{DATA}", f"{name}{PARTIAL}/{DATA}", f"{name}{PARTIAL}/lmdb/{DATA}"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            total += (home / file).lstat().st_blocks * 512
    return total


def require_room(home: Path, sizes: Mapping[str, int], reserve: float) -> None:
    """Raise StorageError unless copies of these sizes, by name, fit on the disk and leave `reserve` gigabytes free. OSError."""
    needed = sum(max(0, size - _written(home, name)) for name, size in sizes.items())
    free, kept = free_bytes(home), round(reserve * 10**9)
    if needed and needed + kept > free:
        raise StorageError(
            f"{home}: no room for the images: {size(needed)} needed, {size(free)} free; {size(kept)} stay free (scratch_reserve)",
            "remove copies of other images there, give another `scratch`, or leave it out to read the data from its source",
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of all requested copies. `waiting`: another process makes them."""

    done: int
    total: int
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """A complete copy; `path` is its LMDB's folder. `bytes` were copied now, in `seconds`. `digest` combines all blocks' digests."""

    path: str
    original: Original
    digest: str
    bytes: int
    seconds: float

    def suspect(self) -> None:
        """Have every block compared before the next use, if the disk can still note that."""
        with contextlib.suppress(OSError):
            Path(self.path, SUSPECT).touch(0o600)


def stage(
    originals: Sequence[Original],
    scratch: str,
    reserve: float,
    *,
    stop: Stop = lambda: False,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> list[Copy]:
    """Return a complete copy of each LMDB below folder `scratch`; `reserve` gigabytes stay free on that disk.

    Any number of processes, threads and jobs may call it at once: one copies, the others wait. Several threads call `stop` and `watch`.

    CopyStopped after `stop`; DataError, PermissionDenied if an LMDB can't be read or has changed; StorageError without room or
    for a failing disk.
    """
    with writing(scratch, OR_ELSE), contextlib.ExitStack() as locks:
        home = home_of(scratch)
        wanted = {original.name: original for original in originals}
        total = sum(original.size for original in wanted.values())
        for name in sorted(wanted):  # all in the same order, so that no two jobs wait for each other
            locks.enter_context(held(home / f"{name}.lock", stop, lambda: watch(Progress(0, total, waiting=True))))
        todo = [original for original in wanted.values() if not _usable(home, original)]
        require_room(home, {original.name: original.size for original in todo}, reserve)
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
        copies = {name: _opened(home / name, one, *copied.get(name, (0, 0.0))) for name, one in wanted.items()}
        return [copies[original.name] for original in originals]


def _opened(folder: Path, original: Original, count: int, seconds: float) -> Copy:
    _mirror_side_file(folder, original)
    manifest = read_manifest(folder)
    digest = hashlib.sha256(" ".join(manifest.blocks if manifest else ()).encode()).hexdigest()
    return Copy(str(folder), original, digest, count, seconds)


def _usable(home: Path, original: Original) -> bool:
    """Return whether the copy looks complete without reading it. Make an incomplete one a partial copy; remove one without a manifest."""
    folder, partial = home / original.name, home / f"{original.name}{PARTIAL}"
    if not os.path.lexists(folder):
        return False
    manifest = read_manifest(folder)
    if manifest is None or manifest.size != original.size:
        shutil.rmtree(folder)  # a job that still reads its file keeps it
        return False
    data = folder / DATA
    if data.is_file() and data.lstat().st_size == original.size and not (folder / SUSPECT).exists():
        return True
    # Each block is compared, and copied again if it is wrong: readers of this copy see the same bytes before and after.
    (folder / JOURNAL).write_text("".join(f"{n} {digest}\n" for n, digest in enumerate(manifest.blocks)))
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    return False


def _make(home: Path, original: Original, report: Report, stop: Stop) -> int:
    """Return the number of bytes copied."""
    partial, folder = home / f"{original.name}{PARTIAL}", home / original.name
    try:
        _require_same(original)
        partial.mkdir(mode=0o700, exist_ok=True)
        copying = _Copying(original, partial, report, stop)
        manifest = Manifest(source=original.real, size=original.size, blocks=copying.run())
        _require_same(original)
        (partial / SUSPECT).unlink(missing_ok=True)
        write_whole(partial / COPY, json.dumps(asdict(manifest), indent=1).encode(), aside=partial / f"{COPY}.new")
        # The journal last: a kill before the rename leaves all that the next job needs, one after it only a useless file.
        partial.rename(folder)
        sync_folder(home)
        (folder / JOURNAL).unlink()
        return sum(copying.copied)
    except BaseException as error:
        # After a stop, or without the source, the copied blocks stay; a full or failing disk keeps nothing.
        if isinstance(error, SourceChanged) or not isinstance(error, CopyStopped | DataError | PermissionDenied):
            shutil.rmtree(partial, ignore_errors=True)
        raise


class SourceChanged(DataError):
    def __init__(self, original: Original) -> None:
        super().__init__(
            f"{original.path}: the LMDB was changed while it was copied",
            "wait until it is complete, then run the same command again",
        )


def _require_same(original: Original) -> None:
    if look(original.path) != original:
        raise SourceChanged(original)


class _Copying:
    """A copy made by several threads."""

    def __init__(self, original: Original, folder: Path, report: Report, stop: Stop) -> None:
        self._original, self._folder, self._report, self._stop = original, folder, report, stop
        self._file = Path(original.path, DATA)
        self._errors: list[BaseException] = []
        self.copied: list[int] = []  # bytes of each block

    def run(self) -> tuple[str, ...]:
        """Bring data.mdb to the bytes of the original; return the digests of all blocks, which are on disk then.

        CopyStopped, with a journal; StagerunError about the source; OSError of the scratch disk, StorageError if it
        returns other bytes than were written.
        """
        count = -(-self._original.size // BLOCK)
        todo, digests = iter(range(count)), dict[int, str]()
        # Blocks that an interrupted copy has written: each is read back before it counts.
        journal = self._folder / JOURNAL
        text = journal.read_text(encoding="ascii", errors="replace") if journal.exists() else ""
        earlier = {int(number): digest for number, digest in _LINE.findall(text)}

        def work() -> None:
            room = memoryview(bytearray(_PIECE))
            try:
                for number in todo:
                    digests[number] = self._block(number, earlier.get(number, ""), room)
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
            except RuntimeError as error:  # a limit on threads: the running ones must end before the files are closed
                self._errors.append(error)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._errors:
            raise self._errors[0]
        return tuple(digests[n] for n in range(count))

    def _block(self, number: int, earlier: str, room: memoryview) -> str:
        """Return the digest of a block that is on disk then; `earlier` is the digest of one that may be there."""
        begin = number * BLOCK
        end = min(begin + BLOCK, self._original.size)
        if earlier and self._read_back(begin, end, room) == earlier:
            self._report(end - begin)
            return earlier
        for _ in range(2):
            digest = self._transfer(begin, end, room)
            # Block by block, so that at the end, or at a stop, no backlog is left to wait for.
            os.fdatasync(self._target)
            if self._read_back(begin, end, room) == digest:
                self.copied.append(end - begin)
                os.write(self._journal, f"\n{number} {digest}\n".encode())  # a kill may have cut the previous line
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
            while piece:  # a full disk first writes part of it, then fails
                piece = piece[os.pwrite(self._target, piece, at - len(piece)) :]
        # The source is not read again; the memory is better used for the copy.
        os.posix_fadvise(self._source, begin, end - begin, os.POSIX_FADV_DONTNEED)
        return digest.hexdigest()

    def _read_back(self, at: int, end: int, room: memoryview) -> str:
        """Return the digest of the block as the disk has it, '' if it can't be read. The kernel is asked to drop its cached pages first,
        which it does for clean, unmapped ones; the drive's cache can't be told apart."""
        digest = hashlib.sha256()
        os.posix_fadvise(self._target, at, end - at, os.POSIX_FADV_DONTNEED)
        while at < end:
            try:
                piece = self._piece(self._target, at, end, room)
            except OSError:  # rewriting may repair a bad block
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
    """Give the copy the source's side file, or none; it may be made after the copy was."""
    file, copy = Path(original.path, SIDE_FILE), folder / SIDE_FILE
    with reading(file):
        if not file.exists():
            copy.unlink(missing_ok=True)
            return
        data = file.read_bytes()
    if not copy.exists() or copy.read_bytes() != data:
        # Renamed over the old one, which its readers keep.
        write_whole(copy, data, aside=folder / f"{SIDE_FILE}.new")
