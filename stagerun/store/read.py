"""What snapshots there are, and their bytes, verified. Changes nothing (but `set_aside`), needs no lock.

A folder is a snapshot when its manifest, whose last line is its own digest, is as it was written and all files have the
sizes it states: that is cheap, and enough to plan with. The bytes are verified when they are read, the very bytes that
are handed out, so that nothing can change in between.
"""

import errno
import hashlib
from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from stagerun.base.errors import PermissionDenied
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.store.disk import Disk, rename
from stagerun.store.errors import Damaged, TooLarge, only_one, reading, reporting
from stagerun.store.layout import (
    MANIFEST,
    Place,
    attempt_of,
    bad_name,
    parse_name,
    place_aside,
    snapshots_folder,
)
from stagerun.store.manifest import MAX_BYTES, FileEntry, Manifest, parse

_T = TypeVar("_T")

OTHER = 16_000_000  # bytes of a file that the caller says nothing about


def inventory(
    disk: Disk, out: Path, looking: bool = False, seen: MutableMapping[str, SnapshotRef] | None = None
) -> Inventory:
    """The snapshots of an output folder, empty if it isn't there yet. Other names than those of snapshots are ignored.

    `seen`: the snapshots that the caller, who holds the lock, has seen whole before, by name: of them the names alone are looked for. It is
    brought up to date. ResumeRefused if one is of a newer format. StorageError, PermissionDenied if the folder, or a manifest, can't be
    read: a snapshot that may be good is not passed over, except by who is only `looking`, and names those without permission.
    """
    root = snapshots_folder(out)
    before = dict(seen or {})
    found: dict[str, SnapshotRef] = {}
    damaged: list[str] = []
    forbidden: list[str] = []
    for name in sorted(_names(disk, root)):
        if parse_name(name) is None:
            continue
        try:
            found[name] = before.get(name) or inspect(disk, out, name).ref()
        except Damaged:
            damaged.append(name)
        except PermissionDenied:
            if not looking:
                raise
            forbidden.append(name)
    if seen is not None:
        seen.clear()
        seen.update(found)
    if damaged:
        # A run that holds the lock may have deleted it while we looked.
        still_there = set(_names(disk, root))
        damaged = [name for name in damaged if name in still_there]
    # In one process life by the order in which they were written: after a rollback iterations come a second time. Snapshots of
    # versions that did not count them have 0.
    refs = sorted(found.values(), key=lambda ref: (ref.attempt, ref.serial, ref.iter, ref.stage))
    return Inventory(tuple(refs), tuple(damaged), tuple(forbidden))


def answers_now(disk: Disk, out: Path, found: Inventory, stages: Collection[str]) -> bool:
    """Return whether a snapshot that counts as damaged, of a stage among `stages`, can be read now: the disk was away for a moment. StorageError
    if the disk still fails at it: such a stage must not be trained from its start while its snapshots may be good."""
    answered = False
    for name in found.damaged:
        place = parse_name(name)
        if place is None or place.stage not in stages:
            continue
        try:
            inspect(disk, out, name)
            answered = True
        except Damaged as error:
            if error.disk_fails:
                raise only_one(error) from error
    return answered


def inspect(disk: Disk, out: Path, name: str) -> Manifest:
    """The manifest of a complete snapshot. Damaged, ResumeRefused, StorageError, PermissionDenied."""
    return inspect_folder(disk, snapshots_folder(out) / name)


def inspect_folder(disk: Disk, folder: Path, name: str = "") -> Manifest:
    """The manifest of the snapshot in a folder, wherever it lies; `name`: where it isn't the folder's own. Raises as `inspect` does."""
    name = name or folder.name
    with reading(name, MANIFEST, folder):
        data = _twice(partial(disk.read, folder / MANIFEST, MAX_BYTES))
    manifest = parse(data, name)
    for file, entry in manifest.files.items():
        with reading(name, file, folder):
            size = _twice(partial(disk.size, folder / file))
        if size != entry.size:
            raise Damaged(name, f"{file} has {size} bytes, not {entry.size}")
    return manifest


def read(disk: Disk, out: Path, ref: SnapshotRef, most: Mapping[str, int] | None = None) -> dict[str, bytes]:
    """The files of a snapshot, byte for byte as they were written. Reads each once.

    `most`: bytes that files may have by what they are for; any other file may have OTHER, and one that may have none is left out.
    Nothing is read of a snapshot in which one is larger: TooLarge. Damaged if the files are not as they were written; StorageError
    or PermissionDenied if they can't be read.
    """
    manifest = inspect(disk, out, ref.name)
    if manifest.id != ref.id:
        raise Damaged(ref.name, f"it has id {manifest.id}, not {ref.id}")
    return _files(disk, snapshots_folder(out) / ref.name, manifest, most)


def _files(disk: Disk, folder: Path, manifest: Manifest, most: Mapping[str, int] | None) -> dict[str, bytes]:
    wanted = {f: e for f, e in manifest.files.items() if most is None or most.get(f, OTHER) > 0}
    for file, entry in wanted.items():
        if most is not None and entry.size > (allowed := most.get(file, OTHER)):
            raise TooLarge(folder.name, f"{file} has {entry.size} bytes, and needs at most {allowed}")
    return {file: _verified(disk, folder, file, entry) for file, entry in wanted.items()}


def verify(disk: Disk, out: Path, name: str) -> None:
    """Reads every byte of a snapshot from the disk, in little memory. Raises as `read` does."""
    manifest = inspect(disk, out, name)
    folder = snapshots_folder(out) / name
    for file, entry in manifest.files.items():
        with reading(name, file, folder):
            found = _twice(partial(disk.digest, folder / file, entry.size))
        if found != (entry.size, entry.sha256):
            raise Damaged(name, f"{file} is not as it was written")


def is_harmed(disk: Disk, out: Path, name: str) -> bool:
    """Return whether a snapshot reads back otherwise than it was written. StorageError, PermissionDenied."""
    try:
        verify(disk, out, name)
    except Damaged:
        return True
    return False


def read_file(disk: Disk, out: Path, name: str, file: str, most: int | None = None) -> bytes:
    """One file of a snapshot, as it was written. Raises as `read` does; Damaged, too, if the snapshot doesn't have the file."""
    return read_file_of(disk, snapshots_folder(out) / name, file, most)[1]


def read_file_of(disk: Disk, folder: Path, file: str, most: int | None = None) -> tuple[SnapshotRef, bytes]:
    """The snapshot in a folder, wherever it lies, under its own name, and one file of it. `most` bytes that may have."""
    manifest = inspect_folder(disk, folder)
    entry = manifest.files.get(file)
    if entry is None:
        raise Damaged(folder.name, f"it has no {file}")
    if most is not None and entry.size > most:
        raise Damaged(folder.name, f"{file} has {entry.size} bytes, and needs at most {most}")
    return manifest.ref(), _verified(disk, folder, file, entry)


def read_folder(
    disk: Disk, folder: Path, most: Mapping[str, int] | None = None
) -> tuple[SnapshotRef, dict[str, bytes]]:
    """The snapshot in a folder, wherever it lies, under its own name, and its files. Raises as `read` does."""
    manifest = inspect_folder(disk, folder)
    return manifest.ref(), _files(disk, folder, manifest, most)


def _twice(look: Callable[[], _T]) -> _T:
    """Call the disk, and once more after EIO: a bad sector fails again, a server or a cable that failed once does not. Else a good snapshot
    would be given up."""
    try:
        return look()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return look()


def _verified(disk: Disk, folder: Path, file: str, entry: FileEntry) -> bytes:
    with reading(folder.name, file, folder):
        data = _twice(partial(disk.read, folder / file, entry.size))
    if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise Damaged(folder.name, f"{file} is not as it was written")
    return data


def set_aside(disk: Disk, out: Path, name: str) -> str:
    """Renames a damaged snapshot to `.bad-NAME`, for a person to look at; its new name.

    For rank 0, holding the lock. StorageError, PermissionDenied.
    """
    root = snapshots_folder(out)
    with reporting(f"set damaged snapshot {name} aside", root):
        taken = set(disk.names(root))
        count = 1
        while bad_name(name, count) in taken:
            count += 1
        rename(disk, root / name, root / bad_name(name, count))
        disk.sync_folder(root)
    return bad_name(name, count)


def aside(disk: Disk, out: Path) -> dict[str, Place]:
    """The damaged snapshots that were set aside: their present names, and the places that they say."""
    places = {name: place_aside(name) for name in sorted(_names(disk, snapshots_folder(out)))}
    return {name: place for name, place in places.items() if place is not None}


def attempts_seen(disk: Disk, out: Path) -> tuple[int, ...]:
    """The attempts of all snapshots that left a trace, damaged and unfinished ones too: a new one must be above them."""
    seen = {attempt_of(name) for name in _names(disk, snapshots_folder(out))}
    return tuple(sorted(attempt for attempt in seen if attempt is not None))


def _names(disk: Disk, root: Path) -> list[str]:
    with reporting("list the snapshots", root):
        try:
            return disk.names(root)
        except FileNotFoundError:
            return []
