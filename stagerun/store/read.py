"""What snapshots there are, and their bytes, verified. Changes nothing (but `set_aside`), needs no lock.

A folder is a snapshot when its manifest, whose last line is its own digest, is as it was written and all files have the
sizes it states: that is cheap, and enough to plan with. The bytes are verified when they are read, the very bytes that
are handed out, so that nothing can change in between.
"""

import hashlib
from pathlib import Path

from stagerun.snapshots import Inventory, SnapshotRef
from stagerun.store.disk import Disk, rename_to_new
from stagerun.store.faults import Damaged, reading, reporting
from stagerun.store.layout import MANIFEST, Place, attempt_of, bad_name, parse_name, place_aside, snapshots_folder
from stagerun.store.manifest import MAX_BYTES, FileEntry, Manifest, parse


def inventory(disk: Disk, out: Path) -> Inventory:
    """The snapshots of an output folder, empty if it isn't there yet. Other names than those of snapshots are ignored.

    ResumeRefused if one is of a newer format. StorageError, PermissionDenied if the folder, or a manifest, can't be
    read: a snapshot that may be good is not passed over.
    """
    root = snapshots_folder(out)
    found: list[SnapshotRef] = []
    damaged: list[str] = []
    for name in sorted(_names(disk, root)):
        if parse_name(name) is None:
            continue
        try:
            found.append(inspect(disk, out, name).ref())
        except Damaged:
            damaged.append(name)
    if damaged:
        # A run that holds the lock may have deleted it while we looked.
        still_there = set(_names(disk, root))
        damaged = [name for name in damaged if name in still_there]
    found.sort(key=lambda ref: (ref.attempt, ref.iter, ref.stage))
    return Inventory(tuple(found), tuple(damaged))


def inspect(disk: Disk, out: Path, name: str) -> Manifest:
    """The manifest of a complete snapshot. Damaged, ResumeRefused, StorageError, PermissionDenied."""
    return _inspect(disk, snapshots_folder(out) / name)


def _inspect(disk: Disk, folder: Path) -> Manifest:
    name = folder.name
    with reading(name, MANIFEST, folder):
        data = disk.read(folder / MANIFEST, MAX_BYTES)
    manifest = parse(data, name)
    for file, entry in manifest.files.items():
        with reading(name, file, folder):
            size = disk.size(folder / file)
        if size != entry.size:
            raise Damaged(name, f"{file} has {size} bytes, not {entry.size}")
    return manifest


def read(disk: Disk, out: Path, ref: SnapshotRef) -> dict[str, bytes]:
    """The files of a snapshot, byte for byte as they were written. Reads each once.

    Damaged if they are not, StorageError or PermissionDenied if they can't be read.
    """
    manifest = inspect(disk, out, ref.name)
    if manifest.id != ref.id:
        raise Damaged(ref.name, f"it has id {manifest.id}, not {ref.id}")
    folder = snapshots_folder(out) / ref.name
    return {file: _verified(disk, folder, file, entry) for file, entry in manifest.files.items()}


def read_file(disk: Disk, out: Path, name: str, file: str) -> bytes:
    """One file of a snapshot, as it was written. Errors as of `read`; Damaged, too, if the snapshot has no such file."""
    entry = inspect(disk, out, name).files.get(file)
    if entry is None:
        raise Damaged(name, f"it has no {file}")
    return _verified(disk, snapshots_folder(out) / name, file, entry)


def read_folder(disk: Disk, folder: Path) -> tuple[SnapshotRef, dict[str, bytes]]:
    """The snapshot in a folder, wherever it lies, under its own name, and its files. Errors as of `read`."""
    manifest = _inspect(disk, folder)
    return manifest.ref(), {file: _verified(disk, folder, file, entry) for file, entry in manifest.files.items()}


def _verified(disk: Disk, folder: Path, file: str, entry: FileEntry) -> bytes:
    with reading(folder.name, file, folder):
        data = disk.read(folder / file, entry.size)
    if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise Damaged(folder.name, f"{file} is not as it was written")
    return data


def set_aside(disk: Disk, out: Path, name: str) -> str:
    """Renames a damaged snapshot to `.bad-NAME`, for somebody to look at; its new name.

    For rank 0, holding the lock. StorageError, PermissionDenied.
    """
    root = snapshots_folder(out)
    with reporting(f"set damaged snapshot {name} aside", root):
        taken = set(disk.names(root))
        count = 1
        while bad_name(name, count) in taken:
            count += 1
        rename_to_new(disk, root / name, root / bad_name(name, count))
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
