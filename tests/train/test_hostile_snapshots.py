"""Hostile and foreign snapshots: refused or passed over, in bounded memory, with a message, and nothing is executed.

`reliability.hostile` loads many more, in every way that stagerun has and under an audit hook; a few of these are tried here.
"""

import errno
import json
import os
import random
import resource
import shutil
import struct
from pathlib import Path

import audited
import made_up_runs
import pytest
import stored_help
import torch
from facade import WEIGHTS, Keeper, ResumeRefused, SnapshotRef, decode, most_bytes, restore
from reliability import forging, hostile
from reliability.flips import Half

from stagerun import store

DISK = store.LocalDisk()
MODEL = 'name: "resnet_small" num_classes: 10 channels: 1'


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """out/: one snapshot of a network that nobody trained; dir/: its schedule."""
    base = tmp_path_factory.mktemp("hostile")
    schedule = stored_help.make_schedule(base / "dir", MODEL, "")
    stored_help.make_snapshot(base / "out", schedule, iter=2)
    return base


@pytest.fixture
def snapshot(base, tmp_path):
    shutil.copytree(base / "out", tmp_path / "out")
    (tmp_path / "outside").mkdir()
    return tmp_path / "out" / "snapshots" / "only-00000002-a0001"


def keeper_of(base: Path, snapshot: Path) -> Keeper:
    return Keeper(stored_help.load(base / "dir"), snapshot.parents[1])


def used(keeper: Keeper) -> SnapshotRef | None:
    """What a run would go on from."""
    while True:
        planned = keeper.plan().next
        assert planned is not None
        if planned.start is None or keeper.read(planned.start, most_bytes(keeper.schedule.model)) is not None:
            return planned.start


def forged(snapshot: Path) -> forging.Forged:
    return forging.Forged(snapshot, snapshot.parents[2] / "outside", random.Random(1))


def exported(snapshot: Path, old: str = "", new: str = "") -> str:
    """Why it is refused, with a change in its recipe."""
    made = forged(snapshot)
    made.write("recipe.prototxt", made.read("recipe.prototxt").decode().replace(old, new, 1).encode())
    made.finish()
    done = stored_help.stagerun("export", snapshot, snapshot.parents[2] / "x.safetensors")
    assert done.exit_code == 78, done.stderr
    return done.stderr


# ---- under the audit hook


@pytest.mark.slow
def test_every_kind_of_hostile_snapshot_in_every_way(tmp_path):
    Half(tmp_path)
    found = hostile.load(tmp_path, 1, len(forging.ATTACKS))
    assert found["wrong"] == [] and found["events"] == []
    assert len(found["tried"]) == len(forging.ATTACKS)


# ---- sizes


def test_a_file_of_100_gb_is_refused_by_its_size(base, snapshot):
    """Signed, and of the size it states: of holes. It is set aside, and training begins anew."""
    made = forged(snapshot)
    with open(snapshot / WEIGHTS, "ab") as file:
        file.truncate(forging.BIG)
    made.body["files"][WEIGHTS]["size"] = forging.BIG
    made.finish()
    keeper, before = keeper_of(base, snapshot), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = stored_help.stagerun("eval", snapshot)
    assert done.exit_code == 78 and "has 100000000000 bytes, and needs at most" in done.stderr
    assert used(keeper) is None
    assert os.listdir(snapshot.parent) == [f".bad-{snapshot.name}"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


ENDLESS = [
    ("num_classes: 10", "num_classes: 10000000000000", "may need 41040.0 TB of memory"),
    ("num_classes: 10", "num_classes: -1", "`num_classes` must be at least 1"),
    ("channels: 1", "channels: 10000000000000", "must be 1 or 3"),
    ('name: "resnet_small"', 'name: "os.system"', "names a network that can't be made"),
    ("test_batch_size: 5", "test_batch_size: 0", "must be at least 1"),
    (" batch_size: 4", " batch_size: -4", "must be at least 1"),
]


@pytest.mark.parametrize("old, new, said", ENDLESS)
def test_a_recipe_of_an_endless_network_is_refused_before_it_is_built(snapshot, old, new, said):
    assert said in exported(snapshot, old, new)
    assert "must be" not in said or said in stored_help.stagerun("diff", snapshot, snapshot).stderr


def test_a_recipe_of_a_larger_network_than_the_weights_can_be_is_refused_unbuilt(snapshot):
    """That of 638 million numbers would take 2.6 GB to be made."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = exported(snapshot, 'name: "resnet_small"', 'name: "regnet_y_128gf"')
    # On a machine with little memory it is that which is said.
    assert "network `regnet_y_128gf`: its" in said or "of memory" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


# ---- tensors and the state


def test_headers_are_bounded_and_numbers_of_another_kind_refused():
    """`copy_` would take them, and round."""
    with pytest.raises(ValueError, match="header"):
        decode(struct.pack("<Q", 5_000_000) + b" " * 5_000_000)
    with pytest.raises(ValueError, match=r"`a` is torch\.int32 in the snapshot and torch\.float32 in the model"):
        restore({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)})
    live = {"a": torch.zeros(2)}
    restore(live, {"a": torch.ones(2, dtype=torch.float64)})
    assert live["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"position": -1}, {"position": True}, {"position": 1.5}, {"position": 10**30}, {"losses": ["x"]}, {"losses": None},
        {"train_seconds": "1"}, {"bad_records": [[1, 2]]}, {"bad_records": [[1, 2, 3]]}, {"plateau": {}}, {"plateau": []},
        {"plateau": {"drops": 0, "lowest": "x", "since": 0, "losses": []}}, {"mood": "good"},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_no_run_writes_is_passed_over(base, snapshot, fields):
    made = forged(snapshot)
    made.state(**fields)
    made.finish()
    later = "mood" in fields  # what a later version writes is read
    assert (used(keeper_of(base, snapshot)) is None) is not later
    assert snapshot.with_name(f".bad-{snapshot.name}").exists() is not later


# ---- foreign ones


def test_a_newer_format_is_refused_and_named(base, snapshot):
    made = forged(snapshot)
    made.body["format"] = 7
    made.finish()
    out = snapshot.parents[1]
    for words in (["run", base / "dir", "--out", out], ["eval", snapshot], ["status", out]):
        done = stored_help.stagerun(*words)
        assert done.exit_code == 78 and "has format 7, this version of stagerun reads up to 1" in done.stderr
        assert "--out" in done.stderr
    assert snapshot.exists(), "it is somebody's, and stays"


def test_weights_of_another_network_under_this_recipe_are_refused(base, snapshot):
    """Signed, of a fitting size, and not this network's."""
    made = forged(snapshot)
    header, body = forging.header_of(made.read(WEIGHTS))
    header["another"] = header.pop(min(header.keys() - {"__metadata__"}))
    made.write(WEIGHTS, forging.tensors(header, body))
    made.finish()
    assert "does not fit network `resnet_small`" in exported(snapshot)


def test_a_whole_number_of_the_identity_that_is_none(snapshot):
    (ref,) = store.inventory(DISK, snapshot.parents[1]).snapshots
    assert ref.whole("solver.max_iter", 0) == 3 and ref.whole("nothing", 7) == 7
    for text in ("x", "-1", "9" * 5000, "٣", ""):
        wrong = SnapshotRef(name="n", stage="s", iter=1, attempt=1, id="", parent="", identity={"f": text})
        with pytest.raises(ResumeRefused, match="not a whole number"):
            wrong.whole("f", 0)


# ---- no clocks


def test_what_is_newest_is_told_by_attempt_and_serial_whatever_the_clock_says(tmp_path):
    store.prepare(DISK, tmp_path)

    def commit(stage: str, attempt: int, serial: int, parent: str = "") -> SnapshotRef:
        place = store.Place(stage, 1, attempt)
        said = store.Metadata(place=place, parent=parent, identity={}, environment={}, serial=serial)
        return store.commit(DISK, tmp_path, said, files={"m": stage.encode()}, content=["m"])

    def newest() -> str:
        return str(json.loads(stored_help.stagerun("status", tmp_path, "--json").stdout)["snapshot"]["name"])

    first = commit("z", 1, 0)
    second = commit("y", 1, 0, first.id)  # of a version that did not count: it came of the first
    assert newest() == second.name
    third, fourth = commit("c", 2, 1), commit("b", 2, 2)
    for clock, ref in enumerate((fourth, third, second, first)):
        os.utime(tmp_path / "snapshots" / ref.name / "MANIFEST.json", (clock, clock))
    assert newest() == fourth.name
    assert [ref.stage for ref in store.inventory(DISK, tmp_path).snapshots] == ["y", "z", "c", "b"]


# ---- without permission


@pytest.mark.parametrize("file", ["MANIFEST.json", "state.json"])
def test_a_snapshot_without_permission_is_named_by_who_looks_and_stops_who_trains(base, snapshot, file):
    """As root these tests could read anything."""
    out = snapshot.parents[1]
    newer = stored_help.make_snapshot(out, stored_help.load(base / "dir"), iter=3)
    made_up_runs.Story(out).begin(["only"])
    with audited.refused(newer / file, errno.EACCES):
        listed = stored_help.stagerun("status", "--snapshots", base / "dir", "--out", out)
        assert listed.exit_code == 0 and f"unreadable: {newer.name}: can't read {file} of" in listed.output
        assert "1 complete snapshot," in listed.output
        verified = stored_help.stagerun("status", "--snapshots", out, "--verify")
        assert verified.exit_code == 77 and f"can't read {file} of" in verified.output
        if file != "MANIFEST.json":  # that is enough to plan with
            return
        words = f"snapshot {newer.name} can't be read by this user, and is ignored here; `run` would refuse it"
        for command in (["status", out], ["report", out], ["plan", base / "dir", "--out", out]):
            done = stored_help.stagerun(*command)
            assert done.exit_code == 0 and words in done.output, done.output
        assert newer.name in stored_help.stagerun("status", out, "--json").output
        assert snapshot.name in stored_help.stagerun("status", out).output
        done = stored_help.stagerun("run", base / "dir", "--out", out, "--nproc", 1)
        assert done.exit_code == 77 and f"can't read MANIFEST.json of snapshot {newer.name}" in done.output, done.output
