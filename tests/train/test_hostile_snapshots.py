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
from typing import Any

import audited
import made_up_runs
import pytest
import stored_help
import torch
from facade import WEIGHTS, Keeper, ResumeRefused, SnapshotRef, decode, most_bytes, restore
from reliability import forging, hostile
from reliability.flips import Half
from reliability.forging import Attack

from stagerun import store

DISK = store.LocalDisk()
MODEL = 'name: "resnet_small" num_classes: 10 channels: 1'


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """out/: one snapshot of a network that nobody trained; dir/: its schedule."""
    base = tmp_path_factory.mktemp("hostile")
    schedule = stored_help.make_schedule(base / "dir", MODEL, "")
    stored_help.make_snapshot(base / "out", schedule, iter=2)
    return base


@pytest.fixture
def snapshot(base: Path, tmp_path: Path) -> Path:
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


# ---- under the audit hook


@pytest.mark.slow
def test_every_kind_of_hostile_snapshot_in_every_way(tmp_path: Path) -> None:
    Half(tmp_path)
    found = hostile.load(tmp_path, 1, len(forging.ATTACKS))
    assert found["wrong"] == [] and found["events"] == []
    assert len(found["tried"]) == len(forging.ATTACKS)


# ---- sizes


def test_a_file_of_100_gb_is_refused_by_its_size(base: Path, snapshot: Path) -> None:
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
    ("num_classes: 10", "num_classes: -1", "`num_classes` must be 1 or more"),
    ("channels: 1", "channels: 10000000000000", "may need 23040.0 TB of memory"),
    ('name: "resnet_small"', 'name: "os.system"', "names a network that can't be made"),
]


@pytest.mark.parametrize("old, new, said", ENDLESS)
def test_a_recipe_of_an_endless_network_is_refused_before_it_is_built(
    snapshot: Path, old: str, new: str, said: str
) -> None:
    made = forged(snapshot)
    made.write("recipe.prototxt", made.read("recipe.prototxt").decode().replace(old, new).encode())
    made.finish()
    done = stored_help.stagerun("export", snapshot, "--safetensors", "--output", snapshot.parents[2] / "x")
    assert done.exit_code == 78 and said in done.stderr, done.stderr


def test_a_recipe_of_a_larger_network_than_the_weights_can_be_is_refused_unbuilt(snapshot: Path) -> None:
    """That of 638 million numbers would take 2.6 GB to be made."""
    made = forged(snapshot)
    text = made.read("recipe.prototxt").decode()
    made.write("recipe.prototxt", text.replace('name: "resnet_small"', 'name: "regnet_y_128gf"').encode())
    made.finish()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = stored_help.stagerun("export", snapshot, "--safetensors", "--output", snapshot.parents[2] / "x")
    # On a machine with little memory it is that which is said.
    assert done.exit_code == 78 and ("network `regnet_y_128gf`: its" in done.stderr or "of memory" in done.stderr)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


@pytest.mark.parametrize("change", [("test_batch_size: 5", "test_batch_size: 0"), ("batch_size: 4", "batch_size: -4")])
def test_a_recipe_with_numbers_that_check_refuses_is_refused(snapshot: Path, change: tuple[str, str]) -> None:
    made = forged(snapshot)
    made.write("recipe.prototxt", made.read("recipe.prototxt").decode().replace(*change).encode())
    made.finish()
    for words in (["eval", snapshot], ["diff", snapshot, snapshot]):
        done = stored_help.stagerun(*words)
        assert done.exit_code == 78 and "must be 1 or more" in done.stderr


def of_many_files(made: forging.Forged) -> None:
    made.body["files"] |= {f"f{i}": {"size": 0, "sha256": "0" * 64} for i in range(65)}


def saying(where: str, text: str) -> Attack:
    def change(made: forging.Forged) -> None:
        held = made.body[where]
        if isinstance(held, dict):
            held["x"] = text
        else:
            made.body[where] = text

    return change


def signed(text: bytes) -> Attack:
    return lambda made: made.sign(text)


NOT_SHOWN = ("\ud800", "\x1b[31mX", "\x07", "a\nb", "\x9b2J")  # by no terminal
DAMAGE: dict[str, Attack] = {
    "too long": saying("identity", "x" * 1_000_000),
    "65 more files": of_many_files,
    # What readers of JSON read differently.
    "twice": signed(b'{"format": 1, "format": 1}'),
    "infinity": signed(b'{"format": Infinity}'),
    "a large number": signed(b'{"serial": %d}' % (1 << 63)),
    **{f"{where} {text!a}": saying(where, text) for where in ("identity", "environment", "parent") for text in NOT_SHOWN},
    **{f"stage {text!a}": saying("stage", text) for text in ("../x", "", "a/b", "..", *NOT_SHOWN)},
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_manifest_that_no_version_writes_is_damage(base: Path, snapshot: Path, name: str) -> None:
    made = forged(snapshot)
    DAMAGE[name](made)
    if made.signed:
        made.finish()
    assert store.inventory(DISK, snapshot.parents[1]) == store.Inventory((), (snapshot.name,))
    done = stored_help.stagerun("status", "--snapshots", snapshot.parents[1])
    assert done.exit_code == 0, done.stderr
    assert used(keeper_of(base, snapshot)) is None


# ---- tensors and the state


def test_headers_are_bounded_and_numbers_of_another_kind_refused() -> None:
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
        {"plateau": {"drops": 0, "lowest": "x", "since": 0, "losses": []}},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_no_run_writes_is_passed_over(base: Path, snapshot: Path, fields: dict[str, Any]) -> None:
    made = forged(snapshot)
    made.state(**fields)
    made.finish()
    assert used(keeper_of(base, snapshot)) is None
    assert snapshot.with_name(f".bad-{snapshot.name}").exists()


def test_a_state_of_a_later_version_is_read(base: Path, snapshot: Path) -> None:
    made = forged(snapshot)
    made.state(mood="good")
    made.finish()
    ref = used(keeper_of(base, snapshot))
    assert ref is not None and ref.name == snapshot.name


# ---- foreign ones


def test_a_newer_format_is_refused_and_named(base: Path, snapshot: Path) -> None:
    made = forged(snapshot)
    made.body["format"] = 7
    made.finish()
    out = snapshot.parents[1]
    for words in (["run", base / "dir", "--out", out], ["eval", snapshot], ["status", out]):
        done = stored_help.stagerun(*words)
        assert done.exit_code == 78 and "has format 7, this version of stagerun reads up to 1" in done.stderr
    assert snapshot.exists(), "it is somebody's, and stays"


def test_weights_of_another_network_under_this_recipe_are_refused(base: Path, snapshot: Path) -> None:
    """Signed, of a fitting size, and not this network's."""
    made = forged(snapshot)
    header, body = forging.header_of(made.read(WEIGHTS))
    names = sorted(header.keys() - {"__metadata__"})
    header["another"] = header.pop(names[0])
    made.write(WEIGHTS, forging.tensors(header, body))
    made.finish()
    done = stored_help.stagerun("export", snapshot, "--safetensors", "--output", snapshot.parents[2] / "x")
    assert done.exit_code == 78 and "does not fit network `resnet_small`" in done.stderr


def test_a_copied_or_renamed_folder_is_passed_over(base: Path, snapshot: Path) -> None:
    copy = snapshot.with_name("only-00000001-a0001")
    shutil.copytree(snapshot, copy)
    done = stored_help.stagerun("status", "--snapshots", snapshot.parents[1])
    assert f"damaged: {copy.name}: MANIFEST.json is that of {snapshot.name}" in done.stdout
    ref = used(keeper_of(base, snapshot))
    assert ref is not None and ref.name == snapshot.name


def test_a_whole_number_of_the_identity_that_is_none(snapshot: Path) -> None:
    (ref,) = store.inventory(DISK, snapshot.parents[1]).snapshots
    assert ref.whole("solver.max_iter", 0) == 3 and ref.whole("nothing", 7) == 7
    for text in ("x", "-1", "9" * 5000, "٣", ""):
        wrong = SnapshotRef(name="n", stage="s", iter=1, attempt=1, id="", parent="", identity={"f": text})
        with pytest.raises(ResumeRefused, match="not a whole number"):
            wrong.whole("f", 0)


# ---- no clocks


def test_what_is_newest_is_told_by_attempt_and_serial_whatever_the_clock_says(tmp_path: Path) -> None:
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
def test_a_snapshot_without_permission_is_named_by_who_looks_and_stops_who_trains(
    base: Path, snapshot: Path, file: str
) -> None:
    """As root these tests could read anything."""
    out = snapshot.parents[1]
    newer = stored_help.make_snapshot(out, stored_help.load(base / "dir"), iter=3)
    made_up_runs.Story(out).begin(["only"])
    with audited.refused(newer / file, errno.EACCES):
        listed = stored_help.stagerun("status", "--snapshots", base / "dir", "--out", out)
        assert listed.exit_code == 0 and f"no permission: {newer.name}: can't read {file} of" in listed.output
        assert "1 complete snapshot," in listed.output
        verified = stored_help.stagerun("status", "--snapshots", out, "--verify")
        assert verified.exit_code == 77 and "1 snapshot may not be read\n  hint: ask the owner" in verified.output
        if file != "MANIFEST.json":  # that is enough to plan with
            return
        words = f"snapshot {newer.name} may not be read by this user, and is passed over here; `run` would refuse to"
        for command in (
            ["status", out],
            ["report", out],
            ["plan", base / "dir", "--out", out],
            ["status", out, "--json"],
        ):
            done = stored_help.stagerun(*command)
            assert done.exit_code == 0 and (words in done.output or f'"{newer.name}"' in done.output), done.output
        assert snapshot.name in stored_help.stagerun("status", out).output
        drop = ["status", "--snapshots", out, "--drop", snapshot.name]
        for command in (["run", base / "dir", "--out", out, "--nproc", 1], drop):
            done = stored_help.stagerun(*command)
            assert done.exit_code == 77 and f"can't read MANIFEST.json of snapshot {newer.name}" in done.output, (
                done.output
            )
