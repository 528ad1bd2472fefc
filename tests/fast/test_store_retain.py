"""Names, retention, and clearing away."""

import os
from pathlib import Path

import disks
from facade import SnapshotRef
from hypothesis import given
from hypothesis import strategies as st

from stagerun import store
from stagerun.store import LocalDisk

DISK = LocalDisk()


@given(st.one_of(st.text(max_size=40), st.from_regex(r"\A[a-z.]*-[0-9]{6,10}-a[0-9]{2,6}.?\Z")))
def test_only_names_it_gives_are_parsed(name):
    place = store.parse_name(name)
    assert place is None or store.snapshot_name(*place) == name


# ---- retention


def ref(stage: str, iter: int, attempt: int) -> SnapshotRef:
    name = store.snapshot_name(stage, iter, attempt)
    return SnapshotRef(name=name, stage=stage, iter=iter, attempt=attempt, id=name, parent="")


END = 5
refs = st.builds(ref, st.just("a"), st.integers(0, END), st.integers(1, 3))
stages = st.lists(refs, unique_by=lambda r: r.name).map(lambda found: sorted(found, key=lambda r: (r.attempt, r.iter)))


@given(stages, st.integers(1, 4), st.sets(refs.map(lambda r: r.name)))
def test_what_is_kept(own, keep, pinned):
    """A later attempt is newer than a later iteration: of a stage that is trained anew from the start the old snapshots go first."""
    drop = store.superfluous(own, keep, pinned, END)
    assert drop == tuple(r for r in own[:-keep] if r.name not in pinned and r.iter != END)


# ---- on disk


def commit(out: Path, stage: str, iter: int, attempt: int = 1) -> SnapshotRef:
    return disks.commit(DISK, out, stage, iter, attempt, {"m": str(iter).encode()})


def test_the_inventory_is_oldest_first(tmp_path):
    store.prepare(DISK, tmp_path)
    for stage, iter, attempt in [("b", 100, 1), ("a", 20, 2), ("a", 5, 1), ("a", 100, 1), ("a", 100_000_000, 1)]:
        commit(tmp_path, stage, iter, attempt)
    found = [(r.attempt, r.iter, r.stage) for r in store.inventory(DISK, tmp_path).snapshots]
    assert found == [(1, 5, "a"), (1, 100, "a"), (1, 100, "b"), (1, 100_000_000, "a"), (2, 20, "a")]


def test_what_nfs_holds_on_to_waits_for_the_next_sweep(tmp_path):
    """A reader on another host has a file open: unlink leaves `.nfsXXXX`, which can't be deleted yet."""
    store.prepare(DISK, tmp_path)
    old = commit(tmp_path, "a", 1)
    commit(tmp_path, "a", 2)

    class Busy(LocalDisk):
        def unlink(self, path: Path) -> None:
            if path.name == "m":
                raise OSError(16, "Device or resource busy")
            super().unlink(path)

    store.discard(Busy(), tmp_path, old.name)
    assert [r.iter for r in store.inventory(DISK, tmp_path).snapshots] == [2]
    (held,) = store.sweep(Busy(), tmp_path)
    assert held.startswith(".trash-a-00000001")
    assert store.sweep(DISK, tmp_path) == ()
    assert os.listdir(tmp_path / "snapshots") == ["a-00000002-a0001"]


def test_sweep_deletes_leftovers_and_nothing_else(tmp_path):
    store.prepare(DISK, tmp_path)
    root = tmp_path / "snapshots"
    kept = commit(tmp_path, "a", 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"x")
    gone = (".tmp-a-00000002-a0001-00ff00ff", ".trash-a-00000003-a0001-00ff00ff")
    for name in (*gone, ".bad-a-00000004-a0001", "mine", ".tmp-mine"):
        (root / name).mkdir()
        (root / name / "f").write_bytes(b"x")
    (root / ".tmp-probe-00ff00ff").write_bytes(b"x")
    (root / ".tmp-link-00ff00ff").symlink_to(elsewhere)
    results = tmp_path / "results" / "ensembles"
    results.mkdir(parents=True)
    for folder in (results, results.parent, tmp_path):
        for name in (".tmp-r.json-00ff00ff", "r.json"):
            (folder / name).write_bytes(b"{}")
    assert store.attempts_seen(DISK, tmp_path) == (1,)
    assert store.sweep(DISK, tmp_path) == ()
    assert sorted(os.listdir(root)) == [".bad-a-00000004-a0001", ".tmp-mine", kept.name, "mine"]
    assert os.listdir(results) == ["r.json"] and sorted(os.listdir(results.parent)) == ["ensembles", "r.json"]
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "r.json", "results", "snapshots"]
    assert (elsewhere / "precious").exists()


def test_a_folder_that_somebody_put_inside_is_not_deleted(tmp_path):
    store.prepare(DISK, tmp_path)
    old = commit(tmp_path, "a", 1)
    (tmp_path / "snapshots" / old.name / "notes").mkdir()
    (tmp_path / "snapshots" / old.name / "notes" / "f").write_bytes(b"x")
    store.discard(DISK, tmp_path, old.name)
    (held,) = store.sweep(DISK, tmp_path)
    assert os.listdir(tmp_path / "snapshots" / held) == ["notes"]


def test_attempts_are_seen_in_whatever_is_left_of_them(tmp_path):
    store.prepare(DISK, tmp_path)
    for attempt in (1, 2, 3):
        commit(tmp_path, "a", 1, attempt)
    root = tmp_path / "snapshots"
    os.rename(root / "a-00000001-a0002", root / ".tmp-a-00000001-a0007-0123abcd")
    store.set_aside(DISK, tmp_path, "a-00000001-a0003")
    (root / "a-00000001-a0003").mkdir()
    assert store.set_aside(DISK, tmp_path, "a-00000001-a0003") == ".bad-a-00000001-a0003-2"
    assert store.attempts_seen(DISK, tmp_path) == (1, 3, 7)
