"""What snapshots there are, and their bytes, verified. Changes nothing (but `set_aside`), needs no lock.

A folder is a snapshot when its manifest, whose last line is its own digest, is as it was written and all files have the
sizes it states: that is cheap, and enough to plan with. The bytes are verified when they are read, the very bytes that
are handed out, so that nothing can change in between.
"""

import hashlib
from collections.abc import Collection, Mapping, MutableMapping
from functools import partial
from pathlib import Path

from stagerun.base.errors import PermissionDenied
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.store.disk import Disk, names_in, rename, twice
from stagerun.store.errors import Damaged, TooLarge, only_one, reading, reporting
from stagerun.store.layout import MANIFEST, Place, parse_folder, parse_name, snapshots_folder
from stagerun.store.manifest import MAX_BYTES, FileEntry, Manifest, parse

OTHER = 16_000_000  # bytes of a file that the caller says nothing about


def inventory(
    disk: Disk, out: Path, looking: bool = False, seen: MutableMapping[str, SnapshotRef] | None = None
) -> Inventory:
    """The snapshots of an output folder, empty if it isn't there yet. Other names than those of snapshots are ignored.

    `seen`: the snapshots that the caller, who holds the lock, has seen whole before, by name: of them the names alone are looked for. It is
    brought up to date. ResumeRefused if one is of a newer format. StorageError, PermissionDenied if the folder, or a manifest, can't be
    read: a snapshot that may be good is not passed over, except by who is only `looking`, and names those without permission.
    """
    seen = {} if seen is None else seen
    found: dict[str, SnapshotRef] = {}
    damaged: list[str] = []
    forbidden: list[str] = []
    for name in sorted(filter(parse_name, _names(disk, out))):
        try:
            found[name] = seen.get(name) or inspect(disk, out, name).ref()
        except Damaged:
            damaged.append(name)
        except PermissionDenied:
            if not looking:
                raise
            forbidden.append(name)
    seen.clear()
    seen.update(found)
    if damaged:  # a run that holds the lock may have deleted it while we looked
        damaged = sorted({*damaged}.intersection(_names(disk, out)))
    # In one process life by the order in which they were written: after a rollback iterations come a second time. Snapshots of
    # versions that did not count them have 0.
    refs = sorted(found.values(), key=lambda ref: (ref.attempt, ref.serial, ref.iter, ref.stage))
    return Inventory(tuple(refs), tuple(damaged), tuple(forbidden))


def answers_now(disk: Disk, out: Path, found: Inventory, stages: Collection[str]) -> bool:
    """Return whether a snapshot that counts as damaged, of a stage among `stages`, can be read now: the disk was away for a moment. StorageError
    if the disk still fails at it: such a stage must not be trained from its start while its snapshots may be good."""
    answered = False
    for name in found.damaged:
        if (place := parse_name(name)) is not None and place.stage in stages:
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
        data = twice(partial(disk.read, folder / MANIFEST, MAX_BYTES))
    manifest = parse(data, name)
    for file, entry in manifest.files.items():
        with reading(name, file, folder):
            size = twice(partial(disk.size, folder / file))
        if size != entry.size:
            raise Damaged(name, f"{file} has {size} bytes, not {entry.size}")
    return manifest


def read(disk: Disk, out: Path, ref: SnapshotRef, most: Mapping[str, int] | None = None) -> dict[str, bytes]:
    """The files of a snapshot, byte for byte as they were written. Reads each once.

    `most`: bytes that files may have by what they are for; any other file may have OTHER, and one that may have none is left out.
    Nothing is read of a snapshot in which one is larger: TooLarge. Damaged if the files are not as they were written; StorageError
    or PermissionDenied if they can't be read.
    """
    return read_folder(disk, snapshots_folder(out) / ref.name, most, ref.id)[1]


def read_folder(
    disk: Disk, folder: Path, most: Mapping[str, int] | None = None, id: str = ""
) -> tuple[SnapshotRef, dict[str, bytes]]:
    """The snapshot in a folder, wherever it lies, under its own name, and its files. Raises as `read` does; Damaged, too, if it has another `id`
    than was asked for."""
    manifest = inspect_folder(disk, folder)
    if id not in ("", manifest.id):
        raise Damaged(folder.name, f"it has id {manifest.id}, not {id}")
    limits = {file: entry.size if most is None else most.get(file, OTHER) for file, entry in manifest.files.items()}
    wanted = {file: entry for file, entry in manifest.files.items() if most is None or limits[file] > 0}
    for file, entry in wanted.items():
        if entry.size > limits[file]:
            raise TooLarge(folder.name, f"{file} has {entry.size} bytes, and needs at most {limits[file]}")
    return manifest.ref(), {file: _verified(disk, folder, file, entry) for file, entry in wanted.items()}


def read_file(disk: Disk, folder: Path, file: str, most: int | None = None) -> tuple[SnapshotRef, bytes]:
    """The snapshot in a folder, wherever it lies, under its own name, and one file of it, as it was written. `most` bytes that may have. Raises as
    `read` does; Damaged, too, if the snapshot doesn't have the file."""
    manifest = inspect_folder(disk, folder)
    entry = manifest.files.get(file)
    if entry is None:
        raise Damaged(folder.name, f"it has no {file}")
    if most is not None and entry.size > most:
        raise Damaged(folder.name, f"{file} has {entry.size} bytes, and needs at most {most}")
    return manifest.ref(), _verified(disk, folder, file, entry)


def _verified(disk: Disk, folder: Path, file: str, entry: FileEntry) -> bytes:
    with reading(folder.name, file, folder):
        data = twice(partial(disk.read, folder / file, entry.size))
    _require_same(folder.name, file, entry, (len(data), hashlib.sha256(data).hexdigest()))
    return data


def _require_same(name: str, file: str, entry: FileEntry, found: tuple[int, str]) -> None:
    if found != (entry.size, entry.sha256):
        raise Damaged(name, f"{file} is not as it was written")


def verify(disk: Disk, out: Path, name: str) -> None:
    """Reads every byte of a snapshot from the disk, in little memory. Raises as `read` does."""
    folder = snapshots_folder(out) / name
    for file, entry in inspect(disk, out, name).files.items():
        with reading(name, file, folder):
            found = twice(partial(disk.digest, folder / file, entry.size))
        _require_same(name, file, entry, found)


def is_harmed(disk: Disk, out: Path, name: str) -> bool:
    """Return whether a snapshot reads back otherwise than it was written. StorageError, PermissionDenied."""
    try:
        verify(disk, out, name)
    except Damaged:
        return True
    return False


def set_aside(disk: Disk, out: Path, name: str) -> str:
    """Renames a damaged snapshot to `.bad-NAME`, for a person to look at; its new name.

    For rank 0, holding the lock. StorageError, PermissionDenied.
    """
    root = snapshots_folder(out)
    with reporting(f"set damaged snapshot {name} aside", root):
        taken, aside, count = disk.names(root), f".bad-{name}", 1
        while aside in taken:
            count += 1
            aside = f".bad-{name}-{count}"
        rename(disk, root / name, root / aside)
        disk.sync_folder(root)
    return aside


def aside(disk: Disk, out: Path) -> dict[str, Place]:
    """The damaged snapshots that were set aside: their present names, and the places that they say."""
    return {name: place for name, (state, place) in _folders(disk, out).items() if state == "bad"}


def attempts_seen(disk: Disk, out: Path) -> tuple[int, ...]:
    """The attempts of all snapshots that left a trace, damaged and unfinished ones too: a new one must be above them."""
    return tuple(sorted({place.attempt for _, place in _folders(disk, out).values()}))


def _folders(disk: Disk, out: Path) -> dict[str, tuple[str, Place]]:
    parsed = {name: parse_folder(name) for name in sorted(_names(disk, out))}
    return {name: found for name, found in parsed.items() if found is not None}


def _names(disk: Disk, out: Path) -> list[str]:
    with reporting("list the snapshots", snapshots_folder(out)):
        return names_in(disk, snapshots_folder(out))
