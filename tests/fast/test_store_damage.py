"""Nothing that was changed, cut off, swapped or put in the place of something else is read as a snapshot."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import disks
import pytest
from facade import ExitCode, PermissionDenied, SnapshotRef, StorageError

from stagerun import store
from stagerun.store import Damaged, LocalDisk

DISK = LocalDisk()
FILES = {
    "model.safetensors": random.Random(1).randbytes(9000),
    "optim.safetensors": random.Random(2).randbytes(5000),
    "state.json": b'{"position": 3}',
    "recipe.prototxt": b'name: "r"\n',
}
NAMES = [*FILES, "MANIFEST.json"]


ABOUT = {
    "parent": "0" * 64,
    "identity": {"solver.base_lr": "1.6", "model.name": "resnet50"},
    "environment": {"torch": "2.13.0"},
}


def commit(out: Path, iter: int, attempt: int = 1, disk: store.Disk = DISK, **other: bytes) -> SnapshotRef:
    return disks.commit(disk, out, "cyc1", iter, attempt, {**FILES, **other}, **ABOUT)


@pytest.fixture
def out(tmp_path):
    """With one snapshot, of iteration 100."""
    store.prepare(DISK, tmp_path / "out")
    commit(tmp_path / "out", 100)
    return tmp_path / "out"


def the_one(out: Path) -> SnapshotRef:
    (ref,) = store.inventory(DISK, out).snapshots
    return ref


def assert_detected(out: Path, ref: SnapshotRef) -> None:
    inventory = store.inventory(DISK, out)
    if inventory.damaged:
        assert inventory == store.Inventory((), (ref.name,))
        return
    for read in (
        lambda: store.read(DISK, out, ref),
        lambda: store.read_folder(DISK, out / "snapshots" / ref.name),
        lambda: [store.read_file(DISK, out / "snapshots" / ref.name, file)[1] for file in FILES],
    ):
        with pytest.raises(Damaged) as caught:
            read()
        assert caught.value.name == ref.name and caught.value.exit_code == ExitCode.RESUME_REFUSED


def test_what_is_committed_is_read_wherever_it_lies(out, tmp_path):
    ref = the_one(out)
    assert ref.name == "cyc1-00000100-a0001" and (ref.stage, ref.iter, ref.attempt) == ("cyc1", 100, 1)
    assert {name: getattr(ref, name) for name in ABOUT} == ABOUT and ref.bytes == sum(map(len, FILES.values()))
    assert store.read(DISK, out, ref) == FILES
    moved = shutil.copytree(out / "snapshots" / ref.name, tmp_path / "elsewhere" / ref.name)
    assert store.read_folder(DISK, moved) == (ref, FILES)
    with pytest.raises(Damaged, match=r"has no ema\.safetensors"):
        store.read_file(DISK, out / "snapshots" / ref.name, "ema.safetensors")[1]


def test_the_id_is_of_content_and_place_alone(out):
    first = the_one(out)
    assert commit(out, 100, attempt=2, **{"state.json": b"later"}).id == first.id
    assert commit(out, 101).id != first.id
    assert commit(out, 100, attempt=3, **{"optim.safetensors": b"other"}).id != first.id


def test_snapshots_of_today_stay_readable(tmp_path):
    """Format 1, byte for byte. A change here makes the snapshots of users unreadable: make it a new format."""
    store.prepare(DISK, tmp_path)
    about = {"parent": "p", "identity": {"a": "é"}, "environment": {"torch": "2"}}
    ref = disks.commit(DISK, tmp_path, "s", 7, 2, {"m": b"abc"}, **about)
    body = (
        '{\n "attempt": 2,\n "content": [\n  "m"\n ],\n "environment": {\n  "torch": "2"\n },\n "files": {\n  "m": {\n'
        '   "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",\n   "size": 3\n  }\n },\n'
        ' "format": 1,\n "id": "ID",\n "identity": {\n  "a": "\\u00e9"\n },\n "iter": 7,\n "parent": "p",\n'
        ' "stage": "s"\n}\n'
    ).replace("ID", "a72af5d51de3d36eb8af7c40cf1209dd46ce6bbea9ae58912ce80dfe4c9a4caf")
    assert (tmp_path / "snapshots" / ref.name / "MANIFEST.json").read_bytes() == signed(body.encode())


class Showing(LocalDisk):
    """With other bytes in the place of a manifest's."""

    __slots__ = ("shown",)

    def read(self, path: Path, limit: int) -> bytes:
        return self.shown if path.name == "MANIFEST.json" else super().read(path, limit)


def test_every_flipped_bit_of_the_manifest_is_found(out):
    ref, disk = the_one(out), Showing()
    good = (out / "snapshots" / ref.name / "MANIFEST.json").read_bytes()
    flipped = (
        good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :] for bit in range(len(good) * 8)
    )
    for disk.shown in (*flipped, *(good[:length] for length in range(len(good))), good + b"\n"):
        assert store.inventory(disk, out) == store.Inventory((), (ref.name,))
    disk.shown = good
    assert store.inventory(disk, out) == store.Inventory((ref,))


def flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def zero(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))


def grow(data: bytearray, draw: random.Random) -> None:
    data += draw.randbytes(draw.randrange(1, 100))


@pytest.mark.parametrize("harm", [flip, cut, zero, grow])
@pytest.mark.parametrize("name", NAMES)
def test_every_change_of_a_file_is_found(out, name, harm):
    ref = the_one(out)
    path = out / "snapshots" / ref.name / name
    good = path.read_bytes()
    draw = random.Random(name + harm.__name__)
    for _ in range(60):
        bad = bytearray(good)
        harm(bad, draw)
        if bad != good:
            path.write_bytes(bad)
            assert_detected(out, ref)
    path.write_bytes(good)
    assert store.read(DISK, out, ref) == FILES


# By what it is: how to make it, beside the good one.
OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda path, good: None,
    "a file": lambda path, good: path.write_bytes(b""),
    "a terabyte": lambda path, good: (path.touch(), os.truncate(path, 1 << 40)),
    "a link": lambda path, good: path.symlink_to(good),
    "a folder": lambda path, good: path.mkdir(),
    "a pipe": lambda path, good: os.mkfifo(path),
}


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize("name", ["model.safetensors", "MANIFEST.json"])
def test_something_else_in_place_of_a_file(out, name, make):
    ref = the_one(out)
    path = out / "snapshots" / ref.name / name
    OTHERS[make](path, path.rename(out / "elsewhere"))
    assert store.inventory(DISK, out) == store.Inventory((), (ref.name,))
    with pytest.raises(Damaged):
        store.read(DISK, out, ref)
    assert store.set_aside(DISK, out, ref.name) == f".bad-{ref.name}"
    assert store.inventory(DISK, out) == store.Inventory()


@pytest.mark.parametrize("make", ["a file", "a link", "a folder", "a pipe"])
def test_something_else_in_place_of_a_snapshot(out, make):
    good = the_one(out)
    path = out / "snapshots" / "cyc1-00000200-a0001"
    OTHERS[make](path, path.with_name(good.name))
    assert store.inventory(DISK, out) == store.Inventory((good,), (path.name,))
    with pytest.raises(StorageError, match="never overwritten"):
        commit(out, 200)
    store.set_aside(DISK, out, path.name)
    assert commit(out, 200) in store.inventory(DISK, out).snapshots


def test_a_snapshot_swapped_for_another_is_not_read_in_its_place(out):
    ref = the_one(out)
    store.discard(DISK, out, ref.name)
    other = commit(out, 100, **{"model.safetensors": b"other weights"})
    with pytest.raises(Damaged, match="id"):
        store.read(DISK, out, ref)
    shutil.copytree(out / "snapshots" / other.name, out / "snapshots" / "cyc2-00000100-a0001")
    assert store.inventory(DISK, out) == store.Inventory((other,), ("cyc2-00000100-a0001",))


def test_what_is_no_snapshot_is_ignored(out):
    ref = the_one(out)
    for name in ("notes.txt", ".DS_Store", "best", f"{ref.name}.old", "cyc1-100-a1"):
        (out / "snapshots" / name).mkdir()
    (out / "snapshots" / ref.name / ".nfs0000001").write_bytes(b"x")
    assert store.inventory(DISK, out) == store.Inventory((ref,), ())
    assert store.inventory(DISK, out / "none") == store.Inventory()
    assert store.attempts_seen(DISK, out / "none") == () and not (out / "none").exists()


def test_a_snapshot_that_a_run_deletes_meanwhile_is_not_damaged(out):
    """`stagerun status` on the login node, while the job drops old snapshots."""
    ref = the_one(out)

    class Racing(LocalDisk):
        def read(self, path: Path, limit: int) -> bytes:
            store.discard(DISK, out, ref.name)
            return super().read(path, limit)

    assert store.inventory(Racing(), out) == store.Inventory()


def test_no_permission_is_not_damage(out):
    class Forbidding(LocalDisk):
        def read(self, path: Path, limit: int) -> bytes:
            raise PermissionError(13, "Permission denied")

    with pytest.raises(PermissionDenied, match="cyc1-00000100-a0001"):
        store.inventory(Forbidding(), out)


# ---- manifests that are in themselves whole


def signed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


NOT_SHOWN = ("\ud800", "\x1b[31mX", "\x07", "a\nb", "\x9b2J")  # by no terminal
ENTRY = {"size": 1, "sha256": "0" * 64}
ENTRIES = {
    **dict.fromkeys(("../model", "/etc/passwd", "..", "MANIFEST.json", "a\n"), ENTRY),
    "negative": ENTRY | {"size": -1},
    "half": ENTRY | {"size": 1.0},
    "short": ENTRY | {"sha256": "0"},
}


@pytest.mark.parametrize(
    "change",
    [
        *({"files": {name: entry}} for name, entry in ENTRIES.items()),
        *({"files": value} for value in ([], None, dict.fromkeys(map(str, range(65)), ENTRY))),
        {"files": {}, "content": []},
        *({"content": value} for value in (["none.safetensors"], "model.safetensors", [1])),
        *({"iter": value} for value in (101, True, "100", 10**400)),
        *({"format": value} for value in (0, "1", True, None)),
        *({"stage": value} for value in ("cyc2", "../x", "", "a/b", "..", *NOT_SHOWN)),
        *({where: {"x": text}} for where in ("identity", "environment") for text in NOT_SHOWN),
        *({"parent": value} for value in (None, *NOT_SHOWN)),
        {"attempt": 2}, {"id": "0" * 64}, {"identity": {"a": 1}}, {"environment": []}, {"identity": {"x": "x" * 1_000_000}},
        # What is no object, and what readers of JSON read differently.
        b"", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"a":', b"1" * 10_000, b'{"format": NaN}',
        b'{"format": 1, "format": 1}', b'{"format": Infinity}', b'{"serial": %d}' % (1 << 63),
    ],
    ids=lambda change: ascii(change)[:60],
)  # fmt: skip
def test_a_manifest_that_no_version_writes_is_damage(out, change):
    path = out / "snapshots" / "cyc1-00000100-a0001" / "MANIFEST.json"
    body = json.loads(path.read_bytes()[:-65])
    for name, value in {} if isinstance(change, bytes) else change.items():
        body[name] = body[name] | value if isinstance(value, dict) and value else value
    path.write_bytes(signed(change if isinstance(change, bytes) else json.dumps(body).encode()))
    assert store.inventory(DISK, out) == store.Inventory((), (path.parent.name,))


# ---- a commit looks at what it wrote


def test_another_run_without_a_lock_is_noticed(tmp_path):
    class Racing(LocalDisk):
        def rename(self, source: Path, target: Path) -> None:
            commit(tmp_path, 100, **{"model.safetensors": b"theirs"})
            super().rename(source, target)

    store.prepare(DISK, tmp_path)
    with pytest.raises(StorageError, match="another run"):
        commit(tmp_path, 100, disk=Racing())
    assert store.read(DISK, tmp_path, the_one(tmp_path))["model.safetensors"] == b"theirs"
