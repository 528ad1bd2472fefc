"""Which snapshots are not needed any more, and deleting them; and pins, which keep one until the pin is taken off.

A pin is a file OUT/pins/NAME. Setting one needs no lock, so that it works beside a run that is training: the file is made first, then it
is looked whether the snapshot is still there. How that meets a run that is deleting it just then is argued in `discard`. On NFS a host
may see another's new file only after some seconds (its cache of names, `acdirmin`): there a pin made on another host than the run's
is sure once it has been there for that long.
"""

from collections.abc import Container, Sequence
from contextlib import closing, suppress
from pathlib import Path

from stagerun.base.errors import ResumeRefused
from stagerun.base.snapshots import SnapshotRef
from stagerun.store.disk import Disk, delete, make_folder, names_in, rename
from stagerun.store.errors import Damaged, reporting
from stagerun.store.layout import (
    is_leftover,
    parse_folder,
    parse_name,
    pins_folder,
    results_folder,
    snapshot_name,
    snapshots_folder,
    temp_name,
)
from stagerun.store.read import inspect_folder


def superfluous(
    own: Sequence[SnapshotRef], keep: int, pinned: Container[str], max_iter: int
) -> tuple[SnapshotRef, ...]:
    """Return the snapshots of a stage that may be dropped, oldest first, as `own` is: not the newest `keep` (1 or more), not those at its end, and
    not those whose name is in `pinned`. Pure.

    A snapshot is in the answer only if `own` holds a newer one. So for nothing to be lost `own` must be listed after the `commit` of that
    newer one returned, and without those that `read` or `verify` found damaged; and one that stays must have been verified before any goes.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}")
    return tuple(ref for ref in own[:-keep] if not ref.ends(max_iter) and ref.name not in pinned)


def discard(disk: Disk, out: Path, name: str) -> bool:
    """Delete a directory of OUT/snapshots, be the snapshot whole, damaged or set aside, unless it is pinned. Return whether it did. For rank
    0, holding the lock. StorageError, PermissionDenied.

    It is renamed first, and the new name synced, so that a half deleted one is never taken for a damaged snapshot. What
    NFS holds on to for a reader is left for `sweep`.

    A pin may be made meanwhile, by a command that holds no lock. That makes the pin, then looks whether the snapshot is there;
    this takes the snapshot's name away, then looks for a pin. So one of the two sees the other: the pin is found here and the
    snapshot gets its name back, or the command finds the snapshot gone and says so. A kill between the two leaves the snapshot
    under its other name, and `sweep` gives it back.
    """
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
    """Deletes what killed runs left half written or half deleted; the names of what is still open somewhere.

    For rank 0, just after it took the lock: then no one is writing. StorageError, PermissionDenied.
    """
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
    # Of whole files: rehearsal.json and logs are in `out` itself.
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
    """Pins a snapshot that was there when the caller looked. False if it was deleted meanwhile: then no pin is left. Needs no lock.
    StorageError, PermissionDenied."""
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
    """Whether there was a pin to take off. Needs no lock. StorageError, PermissionDenied."""
    path = pins_folder(out) / name
    with reporting(f"unpin snapshot {name}", path.parent), suppress(FileNotFoundError):
        disk.unlink(path)
        disk.sync_folder(path.parent)
        return True
    return False
