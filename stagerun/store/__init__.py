"""Snapshots on disk: write, verify, list, retain. Moves named byte blobs; knows no tensor and no plan. Stdlib only.

    OUT/lock                                      held while a run lasts
    OUT/snapshots/STAGE-ITER-aATTEMPT/            one complete snapshot, never overwritten
        model.safetensors, state.json, ...        whatever the caller names
        MANIFEST.json                             written last: sizes, digests, and its own digest
    OUT/snapshots/.tmp-*  .bad-*  .trash-*        being written; damaged, set aside; being deleted

`inventory`, `holder`, `aside`, `read`, `read_file` and `read_folder` change nothing and need no lock; all the rest is for
rank 0, while it holds `Lock`, one call at a time. Every OSError becomes a StorageError or PermissionDenied.
"""

from stagerun.snapshots import Inventory, SnapshotRef
from stagerun.store.disk import Disk, File, LocalDisk
from stagerun.store.faults import Damaged
from stagerun.store.layout import Place, parse_name, snapshot_name
from stagerun.store.lock import Holder, Lock, holder
from stagerun.store.out import prepare
from stagerun.store.read import aside, attempts_seen, inventory, read, read_file, read_folder, set_aside
from stagerun.store.retain import drop, superfluous, sweep
from stagerun.store.write import Blob, commit, write_atomic

__all__ = [
    "Blob",
    "Damaged",
    "Disk",
    "File",
    "Holder",
    "Inventory",
    "LocalDisk",
    "Lock",
    "Place",
    "SnapshotRef",
    "aside",
    "attempts_seen",
    "commit",
    "drop",
    "holder",
    "inventory",
    "parse_name",
    "prepare",
    "read",
    "read_file",
    "read_folder",
    "set_aside",
    "snapshot_name",
    "superfluous",
    "sweep",
    "write_atomic",
]
