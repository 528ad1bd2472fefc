"""Pins: snapshots that nothing deletes until somebody takes the pin off. A pin is a file OUT/pins/NAME.

Setting one needs no lock, so that it works beside a run that is training: the file is made first, then it is looked whether the
snapshot is still there. How that meets a run that is deleting it just then is argued in `retain.discard`. On NFS a host may
see another's new file only after some seconds (its cache of names, `acdirmin`): there a pin made on another host than the run's
is sure once it has been there for that long.
"""

from contextlib import closing, suppress
from pathlib import Path

from stagerun.store.disk import Disk, make_folder
from stagerun.store.faults import reporting
from stagerun.store.layout import parse_name, pins_folder, snapshots_folder


def pins(disk: Disk, out: Path) -> frozenset[str]:
    """Names of the snapshots that are pinned. StorageError, PermissionDenied."""
    root = pins_folder(out)
    with reporting("list the pins of snapshots", root):
        try:
            names = disk.names(root)
        except FileNotFoundError:
            return frozenset()
    return frozenset(name for name in names if parse_name(name) is not None)


def pin(disk: Disk, out: Path, name: str) -> bool:
    """Pins a snapshot that was there when the caller looked. False if it was deleted meanwhile: then there is no pin.

    Needs no lock. StorageError, PermissionDenied.
    """
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
    with reporting(f"unpin snapshot {name}", path.parent):
        try:
            disk.unlink(path)
        except FileNotFoundError:
            return False
        disk.sync_folder(path.parent)
    return True
