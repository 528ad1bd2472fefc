"""Room on the scratch disk: counted for all copies at once, before the first byte; made by removing what no one uses."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stagerun.base.errors import StorageError
from stagerun.base.text import size
from stagerun.data.importing.partial import LOCK, Partial
from stagerun.data.scratch.layout import (
    PARTIAL,
    Found,
    Manifest,
    Original,
    file_size,
    held,
    held_now,
    read_manifest,
    remove,
    survey,
    taken,
    unused_now,
    write_manifest,
)


def free_bytes(home: Path) -> int:
    """Bytes that this user may still write to the disk. OSError."""
    found = os.statvfs(home)
    return found.f_bavail * found.f_frsize


def take_room(
    home: Path,
    originals: Sequence[Original],
    reserve: int,
    stop: Callable[[], bool],
    removed: Callable[[Found], None],
) -> None:
    """Takes the room that copies of `originals` still need and leaves `reserve` bytes free; registers the copies.

    The caller holds the locks of these copies. Under one lock for all jobs, and with what others are about to write counted as
    written: two jobs at once don't both take the last room. Removes copies that no one uses, interrupted ones first, then the
    longest unused, if and only if that makes enough room, and calls `removed` for each; else StorageError. CopyStopped, OSError.
    """
    with held(home / "lock", stop):
        names = {original.name for original in originals}
        others = [one for one in survey(home) if one.folder.name.removesuffix(PARTIAL) not in names]
        needed = sum(missing(home, original) for original in originals)
        with contextlib.ExitStack() as locks:
            idle = [one for one in others if locks.enter_context(idle_now(one)) == ""]
            pending = sum(max(0, one.manifest.size - one.bytes) for one in others if one.partial and one not in idle)
            short = needed + pending + reserve - free_bytes(home)
            if needed and short > sum(one.bytes for one in idle):
                raise _no_room(home, needed, pending, reserve, [one for one in others if one not in idle])
            for one in sorted(idle, key=lambda one: not one.partial):
                if not needed or short <= 0:
                    break
                drop(one)
                removed(one)
                short = needed + pending + reserve - free_bytes(home)
        for original in originals:
            _register(home, original)


@contextlib.contextmanager
def idle_now(one: Found) -> Iterator[str]:
    """'' while the copy is locked against everyone, or why it can't be. OSError."""
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(held_now(one.lock)):
            why = "is being made" if one.partial else "is being checked"
        else:
            try:
                why = "" if stack.enter_context(unused_now(one.folder)) else "is in use"
            except FileNotFoundError:
                why = "is gone"
        yield why


def drop(one: Found) -> None:
    """Removes a copy, or an unfinished import, that is locked by `idle_now`. OSError."""
    if one.partial and (one.folder / LOCK).exists():
        with Partial(one.folder.with_name(one.folder.name.removesuffix(PARTIAL))) as partial:
            partial.remove()
    remove(one.folder)
    one.lock.unlink(missing_ok=True)


def missing(home: Path, original: Original) -> int:
    """Bytes that are still to be written."""
    if file_size(home / original.name) == original.size:
        return 0
    # A copy being made has its full size from the start, and takes what is written.
    return max(0, original.size - taken(home / original.name) - taken(home / f"{original.name}{PARTIAL}"))


def _register(home: Path, original: Original) -> None:
    """Makes the folder of the copy, where there is none, so that others count it."""
    if (home / original.name).exists():
        return
    folder = home / f"{original.name}{PARTIAL}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if read_manifest(folder) is None:
        write_manifest(folder, Manifest(source=original.real, size=original.size, mtime_ns=original.mtime_ns))


def _no_room(home: Path, needed: int, pending: int, reserve: int, kept: Sequence[Found]) -> StorageError:
    parts = [f"{size(needed)} needed, {size(free_bytes(home))} free", f"{size(reserve)} stay free (scratch_reserve)"]
    if pending:
        parts.append(f"{size(pending)} are promised to copies being made")
    used = sum(one.bytes for one in kept)
    if used:
        parts.append(f"{size(used)} are copies in use")
    return StorageError(
        f"{home}: no room for the images: {'; '.join(parts)}",
        "free some space there, give another `scratch`, or leave it out to read the data where it is",
    )
