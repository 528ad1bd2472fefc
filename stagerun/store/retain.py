"""Which snapshots are not needed any more, and deleting them."""

from collections.abc import Container, Mapping
from pathlib import Path

from stagerun.snapshots import Inventory, SnapshotRef
from stagerun.store.disk import Disk, delete, rename_to_new
from stagerun.store.faults import reporting
from stagerun.store.layout import is_leftover, snapshots_folder, trash_name


def superfluous(
    inventory: Inventory, keep: int, pinned: Container[str], ends: Mapping[str, int]
) -> tuple[SnapshotRef, ...]:
    """What may be dropped, oldest first. Pure.

    Of each stage stay the newest `keep` (1 or more), those at its last iteration, `ends[stage]`, and those whose name is
    in `pinned`. A stage that `ends` doesn't know belongs to something else, and keeps all.

    A snapshot is in the answer only if the inventory holds a newer one of its stage. So for nothing to be lost the
    inventory must be taken after the `commit` of that newer one returned, and without those that `read` found damaged.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}")
    answer = []
    for ref in inventory.snapshots:
        if ref.stage not in ends or ref.iter == ends[ref.stage] or ref.name in pinned:
            continue
        if ref not in inventory.of(ref.stage)[-keep:]:
            answer.append(ref)
    return tuple(answer)


def drop(disk: Disk, out: Path, ref: SnapshotRef) -> None:
    """Deletes a snapshot. For rank 0, holding the lock. StorageError, PermissionDenied.

    It is renamed first, and the new name synced, so that a half deleted one is never taken for a damaged snapshot. What
    NFS holds on to for a reader is left for `sweep`.
    """
    root = snapshots_folder(out)
    with reporting(f"delete snapshot {ref.name}", root):
        trash = root / trash_name(ref.name)
        rename_to_new(disk, root / ref.name, trash)
        disk.sync_folder(root)
        delete(disk, trash)


def sweep(disk: Disk, out: Path) -> tuple[str, ...]:
    """Deletes what killed runs left half written or half deleted; the names of what is still held by somebody.

    For rank 0, just after it took the lock: then nobody is writing. StorageError, PermissionDenied.
    """
    root = snapshots_folder(out)
    with reporting("clear away what a killed run left", root):
        leftovers = [name for name in sorted(disk.names(root)) if is_leftover(name)]
        return tuple(name for name in leftovers if not delete(disk, root / name))
