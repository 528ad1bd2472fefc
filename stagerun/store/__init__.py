"""Snapshots on disk: write, verify, list, retain. Moves named byte blobs; knows no tensor and no plan. Stdlib only. Also its lock,
lives and pins.

    OUT/lock                                      held while a run lasts
    OUT/lives/aNNNN.json                          the newest process lives: who holds the folder where locks don't reach
    OUT/snapshots/STAGE-ITER-aATTEMPT/            one complete snapshot, never overwritten
        model.safetensors, state.json, ...        whatever the caller names
        MANIFEST.json                             written last: sizes, digests, and its own digest
    OUT/pins/STAGE-ITER-aATTEMPT                  a snapshot that nothing deletes
    OUT/snapshots/.tmp-*  .bad-*  .trash-*        being written; damaged, set aside; being deleted

`inventory`, `holder`, `last_word`, `last_lives`, `aside`, `pins`, `read`, `verify`, `read_file` and `read_folder` change
nothing and need no lock, nor do `pin` and `unpin`. All the rest is for rank 0, while it holds `Lock` and `Lease`, one
call at a time. Every OSError becomes a StorageError or PermissionDenied.
"""

# ruff: noqa: F401 (its imports are its names)

from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.store.disk import Disk, LocalDisk
from stagerun.store.errors import Damaged, TooLarge, not_as_written, only_one, reporting
from stagerun.store.layout import Place, parse_name, snapshot_name
from stagerun.store.lease import Lease, last_word
from stagerun.store.lock import Holder, Life, Lock, holder, last_lives
from stagerun.store.manifest import Metadata
from stagerun.store.read import (
    answers_now,
    aside,
    attempts_seen,
    discard,
    inspect,
    inspect_folder,
    inventory,
    is_harmed,
    pin,
    pins,
    read,
    read_file,
    read_folder,
    set_aside,
    superfluous,
    sweep,
    unpin,
    verify,
)  # fmt: skip
from stagerun.store.write import Blob, commit, lost_with, prepare, write_atomic
from stagerun.system.files import local_kind
