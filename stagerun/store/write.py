"""Write a snapshot whole or not at all.

State after a killed process, a full disk or a power cut, by where it stops:

- Up to the rename everything happens under a fresh `.tmp-` name, which `inventory` ignores and `sweep` deletes. No older file
  is opened, renamed or deleted.
- The rename comes after every file and the names in the folder were synced. So a reader of the final name, even after a power
  cut, sees whole files; a file system that reorders the rename before those syncs would break its promise.
- Between the rename and the sync of the parent the snapshot is complete, but its name may not outlast a power cut:
  then the folder has its `.tmp-` name again, or none. `commit` has not returned yet, so nothing relies on it, and
  nothing older has been dropped in its favour.
- A failed sync is not tried again: after one the kernel may have dropped the data and call the next sync a success.
  The files are discarded, and the next snapshot is written to new ones.

Should the manifest's own sync be lost all the same, or any byte change later, sizes and digests show it.
"""

import errno
import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path

from stagerun.base.errors import PermissionDenied, StagerunError, StorageError
from stagerun.base.snapshots import SnapshotRef
from stagerun.store.disk import Disk, delete, make_folder, rename, was_renamed
from stagerun.store.errors import Damaged, not_as_written, reporting, storage_failure
from stagerun.store.layout import MANIFEST, snapshot_name, snapshots_folder, temp_name
from stagerun.store.manifest import FileEntry, Metadata, check_names, encode, manifest_of
from stagerun.store.read import inspect
from stagerun.system.files import untrusted_links

Blob = bytes | bytearray | memoryview

PROBE = b"x" * 4096  # a block, so that a full disk shows
CHUNK = 1 << 20  # bytes hashed and written at a time: they are still in the cache when they are copied


def prepare(disk: Disk, out: Path) -> None:
    """Make `out`/snapshots and the folders above; write, sync and delete a file in it.

    For rank 0; needs no lock, and disturbs no run that holds it. StorageError; PermissionDenied, also for a link in `out` that another user
    made: files would be written to its target. A link of this user is followed."""
    root = snapshots_folder(out)
    with reporting("look at the output folder", out):
        links = untrusted_links(out) if out.is_dir() else []
    if links:
        raise PermissionDenied(
            f"{links[0]} is a link that another user made: files would be written to its target",
            "remove it, and check the folder for other files that aren't yours; or choose another --out",
        )
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


def lost_with(out: Path, kind: str, host: str) -> str:
    """Return a warning. `host` holds the folder; '' for the first host of a future job."""
    return (
        f"{out} is on a file system ({kind}) that only {host or 'its first host'} has: if that host is lost, the run can't resume; "
        "choose an --out that all hosts share"
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
    """Write a snapshot; when it returns, the snapshot is complete, on the disk, and was looked at again.

    `files` are contiguous bytes by name (letters, digits, `.`, `_`, `-`); `content` names the files that make up the id. For rank 0,
    holding the lock; it may run in a background thread, one at a time. StorageError or PermissionDenied if it can't be written, and
    what `require_held` raises (FolderInUseError): older files are unharmed, and the new ones are deleted where possible. A snapshot is
    never overwritten: StorageError if one of that name exists, whatever state it is in."""
    check_names(files, content)
    name, root = snapshot_name(*metadata.place), snapshots_folder(out)
    with reporting("list the snapshots", root):
        names = disk.names(root)
    if name in names:
        raise StorageError(
            f"snapshot {name} is in {root} already, and a snapshot is never overwritten",
            "move it elsewhere; a new run numbers its attempts above the existing ones",
        )
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
    except StagerunError:  # of `require_held`, or the name is taken; only this process knows the temporary name
        abandon(disk, temp)
        raise
    except OSError as error:
        abandon(disk, temp)
        needed = sum(blob.nbytes for blob in blobs.values())
        free = None
        with suppress(OSError):  # the error being reported counts
            free = disk.free(root)  # after cleaning up: before, the new files filled the disk
        raise storage_failure(error, writing, root, needed, free) from error
    # Its manifest and sizes must read back as they were written.
    ref = manifest.ref()
    try:
        stored = inspect(disk, out, name).ref()
    except Damaged as error:
        raise not_as_written(error) from error
    if stored != ref:
        raise _of_another_run(name, root)
    return ref


def write_atomic(disk: Disk, path: Path, data: Blob) -> None:
    """Write or replace a small file; readers see the old bytes or the new. Makes its folder.

    For rank 0, holding the lock. StorageError, PermissionDenied; then the old file is as it was."""
    with reporting(f"write {path.name}", path.parent):
        make_folder(disk, path.parent)
        replace_file(disk, path, data)
        disk.sync_folder(path.parent)


def replace_file(disk: Disk, path: Path, data: Blob, sync: bool = True) -> None:
    """Write or replace a small file; readers see the old bytes or the new. OSError; then the old file is as it was. If two processes do
    this at once, the last one's bytes stay. `sync`: after a power cut, too, it is the old or the new, once the folder was synced."""
    temp = path.with_name(temp_name(path.name))
    try:
        _write(disk, temp, memoryview(data).cast("B"), sync)
        rename(disk, temp, path)
    except OSError:
        abandon(disk, temp)
        raise


_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def make_file(disk: Disk, path: Path, data: Blob) -> None:
    """Write a small new file, synced, that is whole from the moment it has its name. FileExistsError if the name is taken, OSError; on NFS
    either may come though the file was made. On a file system without hard links a process that is killed in here may leave a part of
    the file."""
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
        abandon(disk, temp)
        raise
    abandon(disk, temp)


def _write_new(disk: Disk, path: Path, blob: memoryview) -> None:
    try:
        _write(disk, path, blob)
    except FileExistsError:
        raise
    except OSError:
        abandon(disk, path)
        raise


def _write(disk: Disk, path: Path, blob: memoryview, sync: bool = True) -> FileEntry:
    """Write and sync a new file; return its size and digest."""
    digest = hashlib.sha256()
    with closing(disk.create(path)) as file:
        for start in range(0, blob.nbytes, CHUNK):
            chunk = blob[start : start + CHUNK]
            digest.update(chunk)
            file.write(chunk)
        if sync:
            file.sync()
    return FileEntry(blob.nbytes, digest.hexdigest())


_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


def _publish(disk: Disk, temp: Path, target: Path, manifest: bytes) -> None:
    """Give a snapshot its name. Ignore an error of the rename if the directory of that name holds the manifest that was just written,
    and the temporary one is gone (`disk.rename`). StorageError if another run's snapshot has taken the name meanwhile."""
    try:
        disk.rename(temp, target)
    except OSError as error:
        stored: bytes | None = None
        with suppress(OSError):
            if target.name in disk.names(target.parent):
                stored = b""
                stored = disk.read(target / MANIFEST, len(manifest))
        if stored == manifest and was_renamed(disk, temp, target):
            return
        # An unreadable manifest says nothing, unless the rename failed because the name is taken.
        if stored is None or (not stored and error.errno not in _TAKEN):
            raise error from None
        raise _of_another_run(target.name, target.parent) from error


def _of_another_run(name: str, root: Path) -> StorageError:
    return StorageError(
        f"snapshot {name} in {root} was written by another run at the same time",
        "make sure that only one run uses the folder: its file system doesn't keep locks",
    )


def abandon(disk: Disk, temp: Path) -> None:
    """Delete what was started, as far as the disk allows; `sweep` deletes the rest."""
    with suppress(OSError):
        delete(disk, temp)
