"""Snapshots on disk: write, verify, list, retain. Moves named byte blobs; knows no tensor and no plan. Stdlib only. Beside them what else is
in an output folder: its lock and its lives, pins, and the events that a run has written (`events`).

    OUT/lock                                      held while a run lasts
    OUT/lives/aNNNN.json                          the newest process lives: who holds the folder where locks don't reach
    OUT/snapshots/STAGE-ITER-aATTEMPT/            one complete snapshot, never overwritten
        model.safetensors, state.json, ...        whatever the caller names
        MANIFEST.json                             written last: sizes, digests, and its own digest
    OUT/pins/STAGE-ITER-aATTEMPT                  a snapshot that nothing deletes
    OUT/snapshots/.tmp-*  .bad-*  .trash-*        being written; damaged, set aside; being deleted

`inventory`, `holder`, `last_word`, `last_lives`, `aside`, `pins`, `read`, `verify`, `read_file` and `read_folder` change
nothing and need no lock; `pin` and `unpin` need none either. All the rest is for rank 0, while it holds `Lock` and `Lease`, one
call at a time. Every OSError becomes a StorageError or PermissionDenied.
"""

from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.store.disk import Disk, LocalDisk
from stagerun.store.errors import Damaged, TooLarge, not_as_written, only_one, reporting
from stagerun.store.layout import Place, parse_name, snapshot_name
from stagerun.store.lease import SILENT_S, Lease, last_word, require_free
from stagerun.store.lives import Life, last_lives
from stagerun.store.lock import Holder, Lock, holder
from stagerun.store.manifest import Metadata
from stagerun.store.read import (
    answers_now,
    aside,
    attempts_seen,
    inspect,
    inspect_folder,
    inventory,
    is_harmed,
    read,
    read_file,
    read_folder,
    set_aside,
    verify,
)  # fmt: skip
from stagerun.store.retain import discard, pin, pins, superfluous, sweep, unpin
from stagerun.store.write import Blob, commit, lost_with, prepare, write_atomic
from stagerun.system.files import local_kind

__all__ = [
    "SILENT_S", "Blob", "Damaged", "Disk", "Holder", "Inventory", "Lease", "Life", "LocalDisk", "Lock", "Metadata",
    "Place", "SnapshotRef", "TooLarge", "answers_now", "aside", "attempts_seen", "commit", "discard", "holder",
    "inspect", "inspect_folder", "inventory", "is_harmed", "last_lives", "last_word", "local_kind", "lost_with",
    "not_as_written", "only_one", "parse_name", "pin", "pins", "prepare", "read", "read_file", "read_folder",
    "reporting", "require_free", "set_aside", "snapshot_name", "superfluous", "sweep", "unpin", "verify",
    "write_atomic",
]  # fmt: skip
