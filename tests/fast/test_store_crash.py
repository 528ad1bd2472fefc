"""Whether an output folder is one host's alone; and a crash, or an error, at every call of the disk."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path

import disks
import pytest
from disks import Folder, Hook, HookedDisk, Killed, ModelDisk, failing, killed
from facade import PermissionDenied, SnapshotRef, StorageError

from stagerun import store
from stagerun.store import Disk, Inventory, LocalDisk, local_kind

MOUNTS = [
    *(("/", "ext4"), ("/home", "nfs4"), ("/home/a/scratch", "xfs"), ("/lustre", "lustre"), ("/with space", "tmpfs")),
    *(("/mnt/ssh", "fuse.sshfs"), ("/twice", "ext4"), ("/twice", "beegfs")),
]


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/out", "ext4"),
        ("/home/a/out", ""),
        ("/home/a/scratch/out", "xfs"),
        ("/home/a/scratchy", ""),
        ("/lustre/out/not/yet", ""),
        ("/with space/out", "tmpfs"),
        ("/mnt/ssh/out", ""),
        ("/twice/out", ""),
    ],
)
def test_the_kind_of_file_system(path, kind):
    assert local_kind(Path(path), MOUNTS) == kind


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("/lustre/out")
    assert local_kind(tmp_path, MOUNTS) == "ext4" and local_kind(tmp_path / "link", MOUNTS) == ""
    assert local_kind(Path("/dev/shm")) in ("tmpfs", "")


# -- Whatever fails or stops at whatever call, the store has the snapshots from before or one more, and goes on

OUT = Path("/runs/out")
ROOT = OUT / "snapshots"
FILES = {"model.safetensors": b"w" * 1000, "optim.safetensors": b"m" * 1500, "state.json": b"{}", "empty": b""}
CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)


def commit(disk: Disk, out: Path, iter: int, attempt: int = 1) -> SnapshotRef:
    files = {name: data + (str(iter).encode() if data else b"") for name, data in FILES.items()}
    return disks.commit(disk, out, "cyc1", iter, attempt, files)


def fresh_model(honest: bool = True) -> ModelDisk:
    """With two snapshots, of iterations 100 and 200, that no power cut can take."""
    disk = ModelDisk()
    store.prepare(disk, OUT)
    commit(disk, OUT, 100)
    commit(disk, OUT, 200)
    disk.honest = honest
    return disk


def iters(inventory: Inventory) -> list[int]:
    return [ref.iter for ref in inventory.snapshots]


def all_read(disk: Disk, out: Path) -> Inventory:
    """The inventory, after every snapshot of it was read and none was damaged."""
    inventory = store.inventory(disk, out)
    assert inventory.damaged == ()
    for ref in inventory.snapshots:
        files = store.read(disk, out, ref)
        assert files["model.safetensors"] == FILES["model.safetensors"] + str(ref.iter).encode()
    return inventory


def goes_on(disk: Disk, out: Path) -> None:
    """What the next run does works: sweep, a higher attempt, a commit."""
    assert store.sweep(disk, out) == ()
    assert [n for n in disk.names(out / "snapshots") if n.startswith((".tmp-", ".trash-"))] == []
    before = iters(store.inventory(disk, out))
    commit(disk, out, 300, attempt=max(store.attempts_seen(disk, out)) + 1)
    assert iters(all_read(disk, out)) == [*before, 300]


Operation = Callable[[HookedDisk, Path], object]
OPERATIONS: list[tuple[Operation, list[int]]] = [
    (lambda disk, out: commit(disk, out, 300), [100, 200, 300]),
    (lambda disk, out: store.discard(disk, out, store.inventory(disk.disk, out).snapshots[0].name), [200]),
    (lambda disk, out: store.set_aside(disk, out, "cyc1-00000100-a0001"), [200]),
]
operations = pytest.mark.parametrize(("operate", "afterwards"), OPERATIONS, ids=["commit", "drop", "set_aside"])


def cases(
    operate: Operation, hook: Callable[[int], Hook], make: Callable[[], ModelDisk] = fresh_model
) -> Iterator[tuple[ModelDisk, BaseException | None]]:
    """(disk, what was raised) with the hook for call 1, 2, ... until there is no such call. At least 3 calls."""
    for at in count(1):
        disk = make()
        hooked = HookedDisk(disk, hook(at))
        raised: BaseException | None = None
        try:
            operate(hooked, OUT)
        except (Exception, Killed) as error:
            raised = error
        yield disk, raised
        if len(hooked.calls) < at:
            assert raised is None and at > 3
            return


@operations
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_an_error_at_every_call(operate, afterwards, code):
    kind = PermissionDenied if code == errno.EACCES else StorageError
    for disk, raised in cases(operate, lambda at: failing(at, code)):
        assert raised is None or type(raised) is kind
        assert raised is None or (raised.hint and ("cyc1" in str(raised) or "snapshots" in str(raised)))
        found = iters(all_read(disk, OUT))
        assert found in ([100, 200], afterwards)
        if 300 in afterwards:
            assert not [n for n in disk.names(ROOT) if n.startswith(".tmp-")]
        goes_on(disk, OUT)


@operations
def test_a_rename_that_was_done_but_reports_an_error_counts(operate, afterwards):
    """NFS, when the answer to the first request is lost."""

    def after(call: int, name: str) -> None:
        if name == "rename":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    disk = fresh_model()
    operate(HookedDisk(disk, after=after), OUT)
    assert iters(all_read(disk, OUT)) == afterwards
    goes_on(disk, OUT)


def test_a_single_fault_of_reading_gives_up_no_snapshot():
    for look in (store.inventory, all_read, lambda disk, out: store.verify(disk, out, "cyc1-00000200-a0001")):
        for at in count(1):
            hooked = HookedDisk(fresh_model(), failing(at, errno.EIO))
            with contextlib.suppress(StorageError):  # of the folder's own names
                found = look(hooked, OUT)
                assert found is None or (iters(found), found.damaged) == ([100, 200], ())
            if len(hooked.calls) < at:
                break


def power_cuts(disk: ModelDisk) -> Iterator[ModelDisk]:
    """States after a power cut now: how many changes of OUT/snapshots, of every other folder, and what of the files."""
    root = disk.folder(ROOT)
    others = [node for node in [disk.root, *root.names.values(), *root.synced.values()] if isinstance(node, Folder)]
    most = max(len(folder.pending) for folder in others)
    for of_root in range(len(root.pending) + 1):
        for of_others in range(most + 1):
            for data in ("kept", "lost", "half", "zeros"):
                kept = lambda f, a=of_root, b=of_others: a if f is root else b  # noqa: E731
                yield disk.after_power_cut(kept, data)


@operations
def test_a_power_cut_at_every_call(operate, afterwards):
    """Where all changes are kept, only the process was killed."""
    states = 0
    for disk, raised in cases(operate, killed):
        for found in power_cuts(disk):
            states += 1
            left = iters(all_read(found, OUT))
            assert left in ([100, 200], afterwards)
            if raised is None:
                assert left == afterwards
            goes_on(found, OUT)
    assert states > (500 if 300 in afterwards else 15)


def test_the_model_of_a_power_cut_shows_a_missing_sync():
    """The test above would fail if nothing were synced."""
    disk = fresh_model(honest=False)
    commit(disk, OUT, 300)
    found = [store.inventory(state, OUT) for state in power_cuts(disk)]
    assert any(iters(one) == [100, 200] for one in found) and any(one.damaged for one in found)


RESULT = OUT / "results" / "r.json"


def with_a_small_file() -> ModelDisk:
    disk = ModelDisk()
    store.prepare(disk, OUT)
    store.write_atomic(disk, RESULT, b"old")
    return disk


def replace_it(disk: Disk, out: Path) -> None:
    store.prepare(disk, out)
    store.write_atomic(disk, RESULT, b"new")


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_a_small_file_is_the_old_or_the_new_and_every_error_is_told(code):
    for disk, raised in cases(replace_it, lambda at: failing(at, code), with_a_small_file):
        assert raised is None or (isinstance(raised, StorageError | PermissionDenied) and raised.hint)
        assert disk.read(RESULT, 9) in ((b"old", b"new") if raised else (b"new",))
        store.write_atomic(disk, RESULT, b"later")
        assert disk.read(RESULT, 9) == b"later"


def test_a_small_file_is_the_old_or_the_new_after_a_power_cut_at_every_call():
    for disk, _ in cases(replace_it, killed, with_a_small_file):
        for data, kept in product(("kept", "lost", "half", "zeros"), range(4)):
            found = disk.after_power_cut(lambda f, kept=kept: kept, data)
            assert found.read(RESULT, 9) in (b"old", b"new")
            store.write_atomic(found, RESULT, b"later")
            assert found.read(RESULT, 9) == b"later"


def test_two_writers_of_one_file_are_not_in_each_others_way(tmp_path):
    """One of them was taken over, and is woken amid it: that must not end the other."""
    path = tmp_path / "results" / "r.json"

    def before(call: int, name: str) -> None:
        if name not in ("mkdir", "sync_folder"):
            store.write_atomic(LocalDisk(), path, b"theirs")

    store.write_atomic(HookedDisk(LocalDisk(), before), path, b"ours")
    assert path.read_bytes() == b"ours" and os.listdir(path.parent) == ["r.json"]
