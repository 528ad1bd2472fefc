"""Having copies: those that are there are used, the others made or mended, whoever comes first doing it for all."""

import contextlib
import enum
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import stagerun
from stagerun.base.errors import StorageError
from stagerun.data.scratch.blocks import BlockCopy, Progress, Tally, known_blocks, worth_keeping
from stagerun.data.scratch.layout import (
    DATA,
    JOURNAL,
    PARTIAL,
    SUSPECT,
    Found,
    Manifest,
    Original,
    SourceChanged,
    Use,
    file_size,
    held,
    home_of,
    is_of_another_version,
    look,
    read_manifest,
    remove,
    suspect,
    taken,
    unused_now,
    write_manifest,
    writing,
)
from stagerun.data.scratch.room import take_room
from stagerun.system.files import sync_folder, write_whole
from stagerun.system.lmdb_file import SIDE_FILE, reading

GIGABYTE = 10**9


class How(enum.Enum):
    """What was done to have a copy."""

    THERE = "was there"
    CHECKED = "was there, and every byte is right"
    MENDED = "was there and damaged: what was wrong is copied again"
    COPIED = "copied"


class Copy:
    """A copy in use by this process, until `close`; `path` is the folder of an LMDB.

    `bytes` were copied for it in `seconds`, of its `size`. `digest` is of the digests of all its blocks.
    """

    def __init__(self, folder: Path, original: Original, how: How, copied: int, seconds: float) -> None:
        """Call it while holding the copy's lock. OSError."""
        self.path, self.original, self.how = str(folder), original, how
        manifest = read_manifest(folder)
        self.digest = hashlib.sha256(" ".join(manifest.blocks if manifest else ()).encode()).hexdigest()
        self.bytes, self.seconds = copied, seconds
        self._use = Use(folder)

    def suspect(self) -> None:
        """It can't be read, or gives other bytes than it should."""
        suspect(Path(self.path))

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
    with writing(scratch), contextlib.ExitStack() as locks:
        home = home_of(scratch)
        wanted = {original.name: original for original in originals}
        total = sum(original.size for original in wanted.values())

        def waiting() -> None:
            there = sum(taken(home / n) + taken(home / f"{n}{PARTIAL}") for n in wanted)
            watch(Progress(min(there, total), total, waiting=True))

        for name in sorted(wanted):  # all in the same order, so that no two jobs wait for each other
            locks.enter_context(held(home / f"{name}.lock", stop, waiting))
        todo = [original for original in wanted.values() if not _usable(home, original)]
        tally = Tally(sum(original.size for original in todo), watch)
        if todo:
            take_room(home, todo, round(reserve * GIGABYTE), stop, removed)
        done = {original.name: _one(home, original, original in todo, tally, stop) for original in wanted.values()}
        with contextlib.ExitStack() as undone:
            copies = []
            for original in originals:
                copies.append(Copy(home / original.name, original, *done[original.name]))
                undone.callback(copies[-1].close)
            undone.pop_all()
        return copies


def _one(home: Path, original: Original, todo: bool, tally: Tally, stop: Callable[[], bool]) -> tuple[How, int, float]:
    """Has one copy made or mended, as far as that is needed: (how, bytes copied, seconds)."""
    started, before = time.monotonic(), tally.copied
    how = How.THERE
    if todo:
        make = _mend if (home / original.name).exists() else _make
        how = make(home, original, tally, stop)
    _mirror_side_file(home / original.name, original)
    return how, tally.copied - before, time.monotonic() - started


def _usable(home: Path, original: Original) -> bool:
    """Whether the copy is complete as far as can be seen without reading it. What says nothing of use is cleared away.

    Call it while holding the copy's lock. StorageError if it is in use, or not ours to judge.
    """
    folder = home / original.name
    if folder.is_symlink() or (home / f"{original.name}{PARTIAL}").is_symlink():
        raise StorageError(
            f"{folder}: is a link, which stagerun didn't make", "remove it, then run the same command again"
        )
    for made in (folder, home / f"{original.name}{PARTIAL}"):
        if is_of_another_version(made):
            raise StorageError(
                f"{made}: made by another version of stagerun",
                "remove it, or use another scratch folder",
            )
    manifest = read_manifest(folder)
    if manifest is None or not manifest.blocks or manifest.size != original.size:
        if folder.exists():
            _clear(folder)
        if folder.exists():
            raise StorageError(
                f"{folder}: holds something that isn't stagerun's", "remove it, then run the same command again"
            )
        return False
    return file_size(folder) == original.size and not (folder / SUSPECT).exists()


def _clear(folder: Path) -> None:
    """Removes a copy that can't be used. StorageError if a job reads it: its manifest was damaged, or found wrong, since."""
    with unused_now(folder) as unused:
        if not unused:
            raise StorageError(
                f"{folder}: is no longer a complete copy, and is in use",
                "wait until the jobs that read it have ended, or use another scratch folder",
            )
        remove(folder)


def _make(home: Path, original: Original, tally: Tally, stop: Callable[[], bool]) -> How:
    partial, started = home / f"{original.name}{PARTIAL}", time.monotonic()
    try:
        _same(original)
        copy = BlockCopy(original, partial / DATA, known_blocks(partial), tally, stop)
        blocks = copy.run()
        _same(original)
        manifest = Manifest(
            source=original.real,
            size=original.size,
            mtime_ns=original.mtime_ns,
            blocks=blocks,
            made=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            seconds=round(time.monotonic() - started, 3),
            stagerun=stagerun.__version__,
        )
        write_manifest(partial, manifest)
        # The journal last: a kill before the rename leaves all that is needed to go on, one after it a file without a use.
        partial.rename(home / original.name)
        sync_folder(home)
        (home / original.name / JOURNAL).unlink()
    except BaseException as error:
        # A full or failing disk keeps nothing; a stop, or a source that is gone, keeps what is there.
        if not worth_keeping(error):
            with contextlib.suppress(OSError):
                remove(partial)
        raise
    return How.COPIED


def _mend(home: Path, original: Original, tally: Tally, stop: Callable[[], bool]) -> How:
    """Reads a complete copy whole, and copies again, in place, what is not as it was: who reads it meanwhile has the same
    bytes before and after, but for the wrong ones."""
    folder = home / original.name
    manifest = read_manifest(folder)
    assert manifest is not None
    # Until it is done: an end half way leaves a copy that is looked at again.
    mark = folder / SUSPECT
    mark.touch(0o600)
    copy = BlockCopy(original, folder / DATA, dict(enumerate(manifest.blocks)), tally, stop)
    blocks = copy.run()
    _same(original)
    if blocks != manifest.blocks:
        # A block was wrong, and the source has others than it had, with the same size and time.
        write_manifest(folder, replace(manifest, blocks=()))
        raise SourceChanged(original)
    (folder / JOURNAL).unlink()
    sync_folder(folder)
    mark.unlink()
    return How.MENDED if copy.rewritten else How.CHECKED


def _same(original: Original) -> None:
    """DataError if the LMDB is not the one that was looked at."""
    if look(original.path) != original:
        raise SourceChanged(original)


def _mirror_side_file(folder: Path, original: Original) -> None:
    """The copy has the side file that the source has, or none; it may be made, or made again, after the copy was."""
    manifest = read_manifest(folder)
    assert manifest is not None
    file, copy = Path(original.path) / SIDE_FILE, folder / SIDE_FILE
    with reading(file):
        there = file.exists()
    if not there:
        if manifest.side is not None:
            copy.unlink(missing_ok=True)
            write_manifest(folder, replace(manifest, side=None))
        return
    with reading(file), file.open("rb") as stream:
        found = os.fstat(stream.fileno())
        side = (found.st_size, found.st_mtime_ns)
        if side == manifest.side and copy.exists():
            return
        data = stream.read()
    # Renamed over the old one, which those who have it mapped keep. It has a digest of its own, compared when it is loaded.
    write_whole(copy, data, aside=folder / f"{SIDE_FILE}.new")
    write_manifest(folder, replace(manifest, side=side))
