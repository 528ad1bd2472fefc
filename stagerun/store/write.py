"""Writing a snapshot so that it is there whole or not at all.

What a killed process, a full disk or a power cut leaves, by where it stops:

- Up to the rename everything happens under a fresh `.tmp-` name, which `inventory` ignores and `sweep` deletes. Nothing
  that was there before is opened, renamed or deleted.
- The rename comes after every file and the folder's own names were synced. So whoever sees the final name, be it after
  a power cut, sees whole files; a file system that reorders the rename before those syncs would break its own word.
- Between the rename and the sync of the parent the snapshot is complete, but its name may not outlast a power cut:
  then the folder has its `.tmp-` name again, or none. `commit` has not returned yet, so no one has counted on it, and
  nothing older has been dropped in its favour.
- A failed sync is not tried again: after one the kernel may have dropped the data and call the next sync a success.
  The files are given up, and the next snapshot is written to new ones.

Should the manifest's own sync be lost all the same, or any byte change later, sizes and digests show it.
"""

import contextlib
import errno
import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from stagerun.base.errors import PermissionDenied, StagerunError, StorageError
from stagerun.base.snapshots import SnapshotRef
from stagerun.store.disk import Disk, delete, make_folder, rename, was_renamed
from stagerun.store.errors import Damaged, not_as_written, reporting, storage_failure
from stagerun.store.layout import MANIFEST, snapshot_name, snapshots_folder, temp_name
from stagerun.store.manifest import FileEntry, Manifest, Metadata, check_names, encode, manifest_of
from stagerun.store.read import inspect
from stagerun.system.files import untrusted_links

Blob = bytes | bytearray | memoryview

PROBE = b"x" * 4096  # a block, so that a full disk shows
CHUNK = 1 << 20  # bytes hashed and written at a time: they are still in the cache when they are copied


def prepare(disk: Disk, out: Path) -> None:
    """Makes `out`, with what is above it, and `out`/snapshots; writes, syncs and deletes a file there.

    For rank 0; needs no lock, and disturbs no run that holds it. StorageError; PermissionDenied, also for a link in `out` that another user
    made: what a run writes would land where it says. A link of this user's own is followed.
    """
    root = snapshots_folder(out)
    with reporting("look at the output folder", out):
        links = untrusted_links(out) if out.is_dir() else []
    if links:
        raise PermissionDenied(
            f"{links[0]} is a link that another user made: what is written there would land elsewhere",
            "remove it, and see what else is there that you did not make; or give another --out",
        )
    with reporting("make the output folder", out):
        make_folder(disk, root)
    with reporting("write", root):
        probe = root / temp_name("probe")
        try:
            with contextlib.closing(disk.create(probe)) as file:
                file.write(memoryview(PROBE))
                file.sync()
        finally:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(probe)
        disk.sync_folder(root)


def lost_with(out: Path, kind: str, host: str) -> str:
    """For the user. `host`: where the folder is, '' for the first host of a job to come."""
    where, whose = (host, host) if host else ("its first host", "that host")
    return (
        f"{out} lies on a file system ({kind}) of {where} alone: if {whose} is lost, the run can't go on, neither there nor elsewhere; "
        "--out on one that all hosts share lets it"
    )


def commit(
    disk: Disk,
    out: Path,
    metadata: Metadata,
    *,
    files: Mapping[str, Blob],
    content: Collection[str],
    require_held: Callable[[], None] = lambda: None,
) -> SnapshotRef:
    """Writes a snapshot; when it returns, the snapshot is complete, on the disk, and was looked at again.

    `files` are contiguous bytes by name (letters, digits, `.`, `_`, `-`); `content` names those that make up the id. For rank 0,
    holding the lock; it may run in a thread of its own, one at a time. StorageError or PermissionDenied if it can't be written, and
    what `require_held` raises (FolderInUseError): what was there before is unharmed, and what was started is deleted where that is
    possible. A snapshot is never overwritten: StorageError if one of that name is there, whatever state it is in.
    """
    check_names(files, content)
    name, root = snapshot_name(*metadata.place), snapshots_folder(out)
    _require_new(disk, root, name)
    temp = root / temp_name(name)
    blobs = {file: memoryview(blob).cast("B") for file, blob in files.items()}
    writing = f"write snapshot {name}"
    try:
        disk.mkdir(temp)
        entries = {}
        for file, blob in blobs.items():
            writing = f"write {file} of snapshot {name}"
            entries[file] = _write(disk, temp / file, blob)
        manifest = manifest_of(metadata, entries, content)
        writing = f"write {MANIFEST} of snapshot {name}"
        _write(disk, temp / MANIFEST, memoryview(encode(manifest)))
        disk.sync_folder(temp)
        require_held()
        writing = f"give snapshot {name} its name"
        _publish(disk, temp, root / name, encode(manifest))
        disk.sync_folder(root)
    except StagerunError:  # of `require_held`, or the name is taken; what was started is named by no one but us
        _discard(disk, temp)
        raise
    except OSError as error:
        _discard(disk, temp)
        needed = sum(blob.nbytes for blob in blobs.values())
        # Looked up when the cleaning up is done: before, what was written has taken all there was.
        raise storage_failure(error, writing, root, needed, _free(disk, root)) from error
    return _look_again(disk, out, manifest)


def write_atomic(disk: Disk, path: Path, data: Blob) -> None:
    """Writes a small file, over an old one if there is one; readers see the old bytes or the new. Makes its folder.

    For rank 0, holding the lock. StorageError, PermissionDenied; then the old file is as it was.
    """
    with reporting(f"write {path.name}", path.parent):
        make_folder(disk, path.parent)
        replace_file(disk, path, data)
        disk.sync_folder(path.parent)


def replace_file(disk: Disk, path: Path, data: Blob, sync: bool = True) -> None:
    """Writes a small file, over an old one if there is one; readers see the old bytes or the new. OSError; then the old file is as
    it was. Another process that does the same at the same time is not in the way: the last one's bytes stay. `sync`: after a power
    cut, too, it is the old or the new, once the folder was synced."""
    temp = path.with_name(temp_name(path.name))
    try:
        _write(disk, temp, memoryview(data).cast("B"), sync)
        rename(disk, temp, path)
    except OSError:
        _discard(disk, temp)
        raise


_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def make_file(disk: Disk, path: Path, data: Blob) -> None:
    """Writes a small new file, synced, that is whole from the moment it has its name. FileExistsError if there is anything of that
    name, OSError; on NFS either may come though the file was made. On a file system that gives no file a second name a process
    that is killed in here may leave a part of it."""
    temp, blob = path.with_name(temp_name(path.name)), memoryview(data).cast("B")
    try:
        _write(disk, temp, blob)
        try:
            disk.link(temp, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write_new(disk, path, blob)
    except OSError:
        _discard(disk, temp)
        raise
    _discard(disk, temp)


def _write_new(disk: Disk, path: Path, blob: memoryview) -> None:
    try:
        _write(disk, path, blob)
    except FileExistsError:
        raise
    except OSError:
        _discard(disk, path)
        raise


def _require_new(disk: Disk, root: Path, name: str) -> None:
    with reporting("list the snapshots", root):
        names = disk.names(root)
    if name in names:
        raise StorageError(
            f"snapshot {name} is in {root} already, and a snapshot is never overwritten",
            "move it away; a new run numbers its attempts from what it finds",
        )


def _write(disk: Disk, path: Path, blob: memoryview, sync: bool = True) -> FileEntry:
    """Writes and syncs a new file; its size and digest."""
    digest = hashlib.sha256()
    with contextlib.closing(disk.create(path)) as file:
        for start in range(0, blob.nbytes, CHUNK):
            chunk = blob[start : start + CHUNK]
            digest.update(chunk)
            file.write(chunk)
        if sync:
            file.sync()
    return FileEntry(blob.nbytes, digest.hexdigest())


_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


def _publish(disk: Disk, temp: Path, target: Path, manifest: bytes) -> None:
    """Gives a snapshot its name. An error of the rename counts for nothing if the directory of that name holds the very
    manifest that was written, and the one it was written to is gone (`disk.rename`). StorageError if another run's has
    taken the name meanwhile."""
    try:
        disk.rename(temp, target)
    except OSError as error:
        found: bytes | None = None
        with contextlib.suppress(OSError):
            if target.name in disk.names(target.parent):
                found = b""
                found = disk.read(target / MANIFEST, len(manifest))
        if found == manifest and was_renamed(disk, temp, target):
            return
        # A manifest that can't be read says nothing, unless there being one is what the rename failed for.
        if found is None or (not found and error.errno not in _TAKEN):
            raise error from None
        raise _of_another_run(target.name, target.parent) from error


def _of_another_run(name: str, root: Path) -> StorageError:
    return StorageError(
        f"snapshot {name} in {root} was written by another run at the same time",
        "see that only one run uses the folder: its file system doesn't keep locks",
    )


def _look_again(disk: Disk, out: Path, written: Manifest) -> SnapshotRef:
    """The ref of a snapshot whose manifest and sizes read back as they were written; StorageError otherwise."""
    ref = written.ref()
    try:
        found = inspect(disk, out, ref.name)
    except Damaged as error:
        raise not_as_written(error) from error
    if found.ref() != ref:
        raise _of_another_run(ref.name, snapshots_folder(out))
    return ref


def _free(disk: Disk, root: Path) -> int | None:
    try:
        return disk.free(root)
    except OSError:
        return None  # the error being reported is the one that counts


def _discard(disk: Disk, temp: Path) -> None:
    """Deletes what was started, as far as the disk lets it; `sweep` deletes the rest."""
    with contextlib.suppress(OSError):
        delete(disk, temp)
