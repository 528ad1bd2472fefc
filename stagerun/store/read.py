"""Snapshots of an output folder: list, read, verify, pin, retain. Reading changes nothing and needs no lock.

A folder is a snapshot when its manifest, whose last line is its own digest, is as it was written and all files have the
sizes it states: that is cheap, and enough to plan with. The bytes are verified when they are read, the very bytes that
are handed out, so that nothing can change in between.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Container, Mapping, MutableMapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from stagerun.base.errors import PermissionDenied, ResumeRefused
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.store.disk import Disk, delete, make_folder, names_in, rename, twice
from stagerun.store.errors import Damaged, TooLarge, only_one, reading, reporting
from stagerun.store.layout import (
    MANIFEST,
    Place,
    choices_folder,
    is_leftover,
    parse_folder,
    parse_name,
    pins_folder,
    results_folder,
    snapshot_name,
    snapshots_folder,
    temp_name,
)
from stagerun.store.manifest import MAX_BYTES, FileEntry, Manifest, parse

OTHER = 16_000_000  # bytes of a file that the caller says nothing about


def inventory(
    disk: Disk, out: Path, looking: bool = False, seen: MutableMapping[str, SnapshotRef] | None = None
) -> Inventory:
    """Return the snapshots of an output folder, empty if it doesn't exist yet. Other names are ignored.

    `seen`: the snapshots that the caller, who holds the lock, has seen whole before, by name: only their names are looked up. Updated in
    place. ResumeRefused for a newer format. StorageError, PermissionDenied if the folder, or a manifest, can't be read: a snapshot that may
    be good is not skipped, unless the caller is only `looking`: then `forbidden` lists it."""
    seen = {} if seen is None else seen
    refs: dict[str, SnapshotRef] = {}
    damaged: list[str] = []
    forbidden: list[str] = []
    for name in sorted(filter(parse_name, _names(disk, out))):
        try:
            refs[name] = seen.get(name) or inspect(disk, out, name).ref()
        except Damaged:
            damaged.append(name)
        except PermissionDenied:
            if not looking:
                raise
            forbidden.append(name)
    seen.clear()
    seen.update(refs)
    if damaged:  # a run that holds the lock may have deleted it while we looked
        damaged = sorted({*damaged}.intersection(_names(disk, out)))
    # In one process life by the order in which they were written: after a rollback iterations come a second time. Snapshots of
    # versions that did not count them have 0.
    ordered = sorted(refs.values(), key=lambda ref: (ref.attempt, ref.serial, ref.iter, ref.stage))
    return Inventory(tuple(ordered), tuple(damaged), tuple(forbidden))


def answers_now(disk: Disk, out: Path, listed: Inventory, stages: Collection[str]) -> bool:
    """Return whether a snapshot of `stages` that was listed as damaged can be read now, after a brief failure of the disk. StorageError if
    the disk still fails: such a stage must not be trained from its start while its snapshots may be good."""
    answered = False
    for name in listed.damaged:
        if (place := parse_name(name)) is not None and place.stage in stages:
            try:
                inspect(disk, out, name)
                answered = True
            except Damaged as error:
                if error.disk_fails:
                    raise only_one(error) from error
    return answered


def inspect(disk: Disk, out: Path, name: str) -> Manifest:
    """Return the manifest of a complete snapshot. Damaged, ResumeRefused, StorageError, PermissionDenied."""
    return inspect_folder(disk, snapshots_folder(out) / name)


def inspect_folder(disk: Disk, folder: Path, name: str = "") -> Manifest:
    """Return the manifest of the snapshot in any folder; `name`: if the folder has another. Raises as `inspect` does."""
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
    """Return the files of a snapshot, byte for byte as they were written. Reads each once.

    `most`: limits in bytes by file name; OTHER for any other file, and a file with limit 0 is skipped. Nothing is read if a file is larger:
    TooLarge. Damaged if the files are not as they were written; StorageError or PermissionDenied if they can't be read."""
    return read_folder(disk, snapshots_folder(out) / ref.name, most, ref.id)[1]


def read_folder(
    disk: Disk, folder: Path, most: Mapping[str, int] | None = None, id: str = ""
) -> tuple[SnapshotRef, dict[str, bytes]]:
    """Return the snapshot in any folder that has its name, and its files. Raises as `read` does; Damaged, too, if its id isn't `id`."""
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
    """Return the snapshot in any folder that has its name, and a file as it was written, of at most `most` bytes. Raises as `read` does;
    Damaged, too, if the file is missing or larger."""
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


def _require_same(name: str, file: str, entry: FileEntry, actual: tuple[int, str]) -> None:
    if actual != (entry.size, entry.sha256):
        raise Damaged(name, f"{file} is not as it was written")


def verify(disk: Disk, out: Path, name: str) -> None:
    """Read every byte of a snapshot from the disk, in little memory. Raises as `read` does."""
    folder = snapshots_folder(out) / name
    for file, entry in inspect(disk, out, name).files.items():
        with reading(name, file, folder):
            actual = twice(partial(disk.digest, folder / file, entry.size))
        _require_same(name, file, entry, actual)


def is_harmed(disk: Disk, out: Path, name: str) -> bool:
    """Return whether a snapshot reads back otherwise than it was written. StorageError, PermissionDenied."""
    try:
        verify(disk, out, name)
    except Damaged:
        return True
    return False


def set_aside(disk: Disk, out: Path, name: str) -> str:
    """Rename a damaged snapshot to `.bad-NAME`, for a person to look at; return its new name. For rank 0, holding the lock. StorageError,
    PermissionDenied."""
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
    """Return the damaged snapshots that were set aside: their new names, and what these say."""
    return {name: place for name, (state, place) in _folders(disk, out).items() if state == "bad"}


def attempts_seen(disk: Disk, out: Path) -> tuple[int, ...]:
    """Return the attempts of all snapshots, damaged and unfinished ones too: a new attempt must be above them."""
    return tuple(sorted({place.attempt for _, place in _folders(disk, out).values()}))


def _folders(disk: Disk, out: Path) -> dict[str, tuple[str, Place]]:
    parsed = {name: parse_folder(name) for name in sorted(_names(disk, out))}
    return {name: folder for name, folder in parsed.items() if folder is not None}


def _names(disk: Disk, out: Path) -> list[str]:
    with reporting("list the snapshots", snapshots_folder(out)):
        return names_in(disk, snapshots_folder(out))


def superfluous(
    refs: Sequence[SnapshotRef], keep: int, pinned: Container[str], max_iter: int
) -> tuple[SnapshotRef, ...]:
    """Return the snapshots of a stage that may be dropped, in the order of `refs`, oldest first: all but the newest `keep` (1 or more), any
    at the stage's end, and any whose name is in `pinned`. Pure.

    A snapshot is dropped only if `refs` holds a newer one. So for nothing to be lost `refs` must be listed after the `commit` of that newer
    one returned, without snapshots that `read` or `verify` reported damaged; and a snapshot that stays must be verified before any goes."""
    return tuple(ref for ref in refs[:-keep] if not ref.ends(max_iter) and ref.name not in pinned)


def discard(disk: Disk, out: Path, name: str) -> bool:
    """Delete a directory of OUT/snapshots, be the snapshot whole, damaged or set aside, unless it is pinned. Return whether it did. For rank
    0, holding the lock. StorageError, PermissionDenied.

    It is renamed first, and the new name synced, so that a half deleted one is never taken for a damaged snapshot. What
    NFS holds on to for a reader is left for `sweep`.

    A pin may be made meanwhile, by a command that holds no lock. That makes the pin, then looks whether the snapshot exists; this
    takes the snapshot's name away, then looks for a pin. So one of the two sees the other: this sees the pin and gives the snapshot its
    name back, or the command sees that the snapshot is gone and says so. A kill between the two leaves the snapshot under its other
    name, and `sweep` gives it back."""
    root = snapshots_folder(out)
    if name in pins(disk, out):
        return False
    with reporting(f"delete snapshot {name}", root):
        trash = root / temp_name(name, "trash")
        rename(disk, root / name, trash)
        if name in pins(disk, out):
            rename(disk, trash, root / name)
            disk.sync_folder(root)
            return False
        disk.sync_folder(root)
        delete(disk, trash)
    return True


def sweep(disk: Disk, out: Path) -> tuple[str, ...]:
    """Delete what killed runs left half written or half deleted; return the names of files still open somewhere.

    For rank 0, just after it took the lock: then no process is writing. StorageError, PermissionDenied."""
    root = snapshots_folder(out)
    pinned = pins(disk, out)
    held = []
    with reporting("clear away what a killed run left", root):
        names = disk.names(root)
        for name in filter(is_leftover, sorted(names)):
            state, place = parse_folder(name) or ("", None)
            snapshot = snapshot_name(*place) if place is not None and state == "trash" else ""
            if snapshot in pinned and snapshot not in names:
                with suppress(Damaged, ResumeRefused):
                    inspect_folder(disk, root / name, snapshot)
                    rename(disk, root / name, root / snapshot)  # killed before it saw the pin, see `discard`
                    disk.sync_folder(root)
                    continue
            if not delete(disk, root / name):
                held.append(name)
    for folder in (out, results_folder(out), results_folder(out) / "ensembles"):
        with reporting("clear away what a killed run left", folder):
            held += [name for name in filter(is_leftover, names_in(disk, folder)) if not delete(disk, folder / name)]
    return tuple(held)


def pins(disk: Disk, out: Path) -> frozenset[str]:
    """Names of the snapshots that are pinned. StorageError, PermissionDenied."""
    root = pins_folder(out)
    with reporting("list the pins of snapshots", root):
        return frozenset(name for name in names_in(disk, root) if parse_name(name) is not None)


def pin(disk: Disk, out: Path, name: str) -> bool:
    """Pin a snapshot. Return False, and leave no pin, if it was deleted meanwhile. Needs no lock. StorageError, PermissionDenied.

    A pin is a file OUT/pins/NAME. It is made first, then the snapshot is looked up: `discard` argues how that meets a run that is deleting
    the snapshot. On NFS a host may see another's new file only after some seconds (its cache of names, `acdirmin`): a pin made on another
    host than the run's is sure only after that time."""
    path = pins_folder(out) / name
    with reporting(f"pin snapshot {name}", path.parent):
        make_folder(disk, path.parent)
        with suppress(FileExistsError), closing(disk.create(path)) as file:
            file.sync()
        disk.sync_folder(path.parent)
        if name in disk.names(snapshots_folder(out)):
            return True
    unpin(disk, out, name)
    return False


def unpin(disk: Disk, out: Path, name: str) -> bool:
    """Take off a pin; return whether it existed. Needs no lock. StorageError, PermissionDenied."""
    path = pins_folder(out) / name
    with reporting(f"unpin snapshot {name}", path.parent), suppress(FileNotFoundError):
        disk.unlink(path)
        disk.sync_folder(path.parent)
        return True
    return False


def borrow(source: Path, target: Path, names: Collection[str]) -> None:
    """Make `target` an output folder with these snapshots of `source`, and its results and choices, so that they are not made again.

    The files of snapshots are hard links, or copies where links fail: a run adds folders and deletes names, and never writes into a
    snapshot. For folders that only this user writes. StorageError, PermissionDenied."""
    with reporting("make a folder with snapshots of another", target):
        snapshots_folder(target).mkdir(parents=True, exist_ok=True)
        for folder in (results_folder, choices_folder):
            if folder(source).is_dir():
                shutil.copytree(folder(source), folder(target), dirs_exist_ok=True)
        for name in names:
            if not (made := snapshots_folder(target) / name).exists():
                shutil.copytree(snapshots_folder(source) / name, made, copy_function=_linked)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy(source, target)


def give_back(disk: Disk, source: Path, target: Path, stage: str) -> None:
    """Move a stage's snapshots, results and choices that `target` lacks from `source`, which no run holds any more. Each is whole under its
    name at any moment; a call after a crash does the rest. StorageError, PermissionDenied."""
    with reporting("take over what was trained", target):
        names = {
            name for name in disk.names(snapshots_folder(source)) if (ref := parse_name(name)) and ref.stage == stage
        }
        _move(disk, snapshots_folder(source), snapshots_folder(target), lambda path: path.name in names)
        for folder in (results_folder, choices_folder):
            if folder(source).is_dir():
                _move(disk, folder(source), folder(target), Path.is_file)


def _move(disk: Disk, source: Path, target: Path, wanted: Callable[[Path], bool]) -> None:
    make_folder(disk, target)
    for name in sorted(disk.names(source)):
        if wanted(source / name) and not (target / name).exists():
            disk.rename(source / name, target / name)
    disk.sync_folder(target)
