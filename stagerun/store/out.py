"""The output folder: made, and proven to be writable, before anything is trained."""

from contextlib import closing, suppress
from pathlib import Path

from stagerun.store.disk import Disk, make_folder
from stagerun.store.faults import reporting
from stagerun.store.layout import snapshots_folder, temp_name

PROBE = b"x" * 4096  # a block, so that a full disk shows


def prepare(disk: Disk, out: Path) -> None:
    """Makes `out`, with what is above it, and `out`/snapshots; writes, syncs and deletes a file there.

    For rank 0; needs no lock, and disturbs no run that holds it. StorageError, PermissionDenied.
    """
    root = snapshots_folder(out)
    with reporting("make the output folder", out):
        make_folder(disk, root)
    with reporting("write", root):
        probe = root / temp_name("probe")
        try:
            with closing(disk.create(probe)) as file:
                file.write(memoryview(PROBE))
                file.sync()
        finally:
            with suppress(FileNotFoundError):
                disk.unlink(probe)
        disk.sync_folder(root)
