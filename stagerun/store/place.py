"""The output folder: made, and proven to be writable, before anything is trained; and whether it lies on a file system that one
host has for itself, and what that means."""

import os
import re
from contextlib import closing, suppress
from pathlib import Path

from stagerun.store.disk import Disk, make_folder
from stagerun.store.faults import reporting
from stagerun.store.layout import snapshots_folder, temp_name

PROBE = b"x" * 4096  # a block, so that a full disk shows

# As the kernel names them. Of all others (nfs, lustre, gpfs, beegfs, ceph, fuse of any kind ...) nothing is claimed.
LOCAL = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"}
)
_MOUNTS = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")


def local_kind(path: Path, mounts: str | None = None) -> str:
    """The kind of file system that `path` is, or would be made, on, where it is a host's own; '' where it isn't, or can't be known.
    `mounts` as of `mounted`."""
    kind, _ = mounted(path, mounts)
    return kind if kind in LOCAL else ""


def mounted(path: Path, mounts: str | None = None) -> tuple[str, str]:
    """(kind, source) of the file system that `path` is, or would be made, on; ('', '') where that can't be known. `mounts`: as in
    proc_pid_mountinfo(5)."""
    if mounts is None:
        try:
            mounts = Path(_MOUNTS).read_text(errors="replace")
        except OSError:  # no Linux, or a box that hides it
            return "", ""
    real, best, found = os.path.realpath(path), "", ("", "")
    for line in mounts.splitlines():
        words, _, rest = line.partition(" - ")
        fields, kinds = words.split(), rest.split()
        if len(fields) < 5 or len(kinds) < 2:
            continue
        point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
        within = real == point or real.startswith(point.rstrip("/") + "/")
        if within and len(point) >= len(best):  # of two at one place the later one covers the other
            best, found = point, (kinds[0], kinds[1])
    return found


def lost_with(out: Path, kind: str, host: str) -> str:
    """For the user. `host`: where the folder is, '' for the first host of a job to come."""
    where, whose = (host, host) if host else ("its first host", "that host")
    return (
        f"{out} lies on a file system ({kind}) of {where} alone: if {whose} is lost, the run can't go on, neither there nor elsewhere; "
        "--out on one that all hosts share lets it"
    )


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
