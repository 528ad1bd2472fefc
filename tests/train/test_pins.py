"""Snapshots behind training: what is written, counted, refused; and pins, retention, and a full disk."""

import json
import os
import threading
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import audited
import pytest
import stored_help
import torch
from click.testing import Result
from disks import HookedDisk
from engine_help import SOLVER, ConvNet, dataset, updates
from facade import (
    MOMENTUM,
    WEIGHTS,
    Diverged,
    Keeper,
    Lineage,
    Precision,
    Progress,
    SnapshotFailed,
    SnapshotRef,
    Snapshotter,
    SnapshotWritten,
    StorageError,
    TrainState,
    make_state,
    momentum,
    weights,
)
from safetensors.torch import save

from stagerun import store
from stagerun.comm import SoloComm
from stagerun.language import load
from stagerun.store import LocalDisk

FP32 = replace(SOLVER, precision=Precision.FP32)
PROGRESS = Progress(0, 0.0, [])


@dataclass
class FakeKeeper:
    """A disk that takes as long as `open` is not set."""

    open: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    written: list[tuple[int, dict[str, bytes]]] = field(default_factory=list)
    retained: list[int] = field(default_factory=list)

    def commit(self, lineage: Any, iter: int, files: dict[str, memoryview], *_: Any) -> SnapshotRef:
        self.began.set()
        assert self.open.wait(60)
        self.written.append((iter, {name: bytes(file) for name, file in files.items()}))
        return cast(SnapshotRef, SimpleNamespace(iter=iter, name="s", bytes=1, stage="s"))

    def retain(self, ref: SnapshotRef, spared: object) -> None:
        self.retained.append(ref.iter)


def made(open: bool = True) -> tuple[FakeKeeper, TrainState, Snapshotter]:
    state = updates(ConvNet(), FP32, [dataset(8)], SoloComm())[0]
    keeper = FakeKeeper()
    if open:
        keeper.open.set()
    stage = cast(Any, SimpleNamespace(name="s"))
    return keeper, state, Snapshotter(cast(Keeper, keeper), Lineage(stage, "", {}), state)


def files_of(state: TrainState) -> dict[str, bytes]:
    def whole(tensors: dict[str, torch.Tensor]) -> bytes:
        return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()})

    return {WEIGHTS: whole(weights(state)), MOMENTUM: whole(momentum(state))}


def test_what_is_written_are_safetensors_files_of_the_state_when_it_was_due():
    keeper, state, snapshotter = made(open=False)
    expected = files_of(state)
    snapshotter.start(1, PROGRESS)
    with torch.no_grad():  # training goes on
        for tensor in [*weights(state).values(), *momentum(state).values()]:
            tensor.add_(1)
    keeper.open.set()
    (event,) = snapshotter.wait()
    assert keeper.written == [(1, expected)] and keeper.retained == [1]
    assert isinstance(event, SnapshotWritten) and event.iter == 1
    assert event.cpu_seconds > 0 and event.blocked_seconds > 0


def test_one_that_is_due_while_another_is_written_waits_and_none_is_left_out():
    """Other stages start from them, and a rollback goes back to them: which there are must not hang on the disk."""
    keeper, state, snapshotter = made(open=False)
    first = files_of(state)
    snapshotter.start(1, PROGRESS)
    assert keeper.began.wait(60) and snapshotter.finished() == []
    with torch.no_grad():
        state.model.fc.bias.add_(1)
    second = files_of(state)
    threading.Timer(0.05, keeper.open.set).start()
    events = snapshotter.start(2, PROGRESS)
    assert [e.iter for e in events if isinstance(e, SnapshotWritten)] == [1]
    snapshotter.wait()
    assert keeper.written == [(1, first), (2, second)]


def test_what_became_of_the_one_before_is_told_where_the_next_is_not_begun():
    keeper, state, snapshotter = made()
    snapshotter.start(1, PROGRESS)
    with torch.no_grad():
        state.model.fc.bias.fill_(float("nan"))
    with pytest.raises(Diverged):
        snapshotter.start(2, PROGRESS)
    assert [type(event) for event in snapshotter.wait()] == [SnapshotWritten]

    def full(*_: Any) -> SnapshotRef:
        raise StorageError("the disk is gone")

    keeper, _, snapshotter = made()
    keeper.commit = full
    told = []
    with pytest.raises(StorageError, match="3 snapshots in a row"):
        for iter in count(1):
            told += snapshotter.start(iter, PROGRESS)
    assert [event.iter for event in told + snapshotter.wait() if isinstance(event, SnapshotFailed)] == [1, 2, 3]


# -- `stagerun status --pin, --unpin`, retention that leaves pins alone, and the emergency on a full disk

DISK = LocalDisk()
SCHEDULE = """name: "pins"
model { name: "resnet_small" num_classes: 10 channels: 1 }
data { train { source: "/nowhere" images: 100 } }
solver { base_lr: 0.1 lr_policy: "fixed" max_iter: 9 batch_size: 4 device_batch_size: 2 }
stage { name: "main" solver: "main.prototxt" }
stage { name: "cut" from: "main@4" solver: "main.prototxt" }
stage { name: "last" from: "main" solver: "main.prototxt" }
"""


@pytest.fixture
def schedule(tmp_path):
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "schedule.prototxt").write_text(SCHEDULE)
    (tmp_path / "dir" / "main.prototxt").write_text("")
    return load(str(tmp_path / "dir"))


@pytest.fixture
def keeper(schedule, tmp_path):
    """With the disk of this machine, and the folder in tmp_path/out; it holds no lock."""
    made = Keeper(schedule, tmp_path / "out")
    store.prepare(made.disk, made.out)
    return made


def commit(keeper: Keeper, iter: int, stage: str = "main", parent: str = "") -> SnapshotRef:
    files = {"model.safetensors": f"{stage} {iter}".encode() * 20}
    return keeper.commit(Lineage(keeper.schedule.stage(stage), parent, {}), iter, files, Progress(0, 0.0, []))


def names(keeper: Keeper) -> list[str]:
    return [f"{ref.stage}-{ref.iter}" for ref in keeper.inventory().snapshots]


def snapshots(*words: object) -> Result:
    return stored_help.stagerun("status", "--snapshots", *words)


# ---- retention


def test_a_pinned_snapshot_stays_whatever_is_trained(keeper):
    pinned = commit(keeper, 1)
    assert store.pin(keeper.disk, keeper.out, pinned.name)
    for iter in (2, 3, 5, 6, 7):
        keeper.retain(commit(keeper, iter))
    assert names(keeper) == ["main-1", "main-5", "main-6", "main-7"]
    store.unpin(keeper.disk, keeper.out, pinned.name)
    keeper.retain(commit(keeper, 8))
    assert names(keeper) == ["main-6", "main-7", "main-8"]


def test_one_that_was_harmed_meanwhile_takes_no_place_among_those_kept(keeper):
    for iter in (1, 2, 3):
        newest = commit(keeper, iter)
        keeper.retain(newest)
    (keeper.out / "snapshots" / newest.name / "model.safetensors").write_bytes(b"cut")
    keeper.retain(commit(keeper, 5))
    assert names(keeper) == ["main-1", "main-2", "main-5"]


def test_what_an_older_definition_left_stays_until_the_stage_is_finished(keeper):
    """As long as it is there, a plan can tell that later stages were trained from something else."""
    for iter in (1, 2):
        commit(keeper, iter)
    keeper.schedule = load(str(keeper.out.parent / "dir"), ("main.base_lr=0.5",))
    last = keeper.schedule.stage("main").solver.max_iter
    keeper.attempt, keeper.serial = 2, 0
    for iter in range(3, last):
        keeper.retain(commit(keeper, iter))
    assert names(keeper)[:2] == ["main-1", "main-2"]
    keeper.retain(commit(keeper, last))
    assert not {"main-1", "main-2"} & {*names(keeper)}


# ---- a pin and a drop at the same moment


def test_a_pin_that_comes_while_the_snapshot_is_deleted_gives_it_back(keeper):
    old = commit(keeper, 1)

    class Racing(LocalDisk):
        def rename(self, source: Path, target: Path) -> None:
            os.close(os.open(pins / old.name, os.O_CREAT, 0o666))
            super().rename(source, target)

    pins = keeper.out / "pins"
    pins.mkdir()
    assert not store.discard(Racing(), keeper.out, old.name)
    assert names(keeper) == ["main-1"]


def test_a_pin_that_comes_too_late_is_taken_off_and_said(keeper):
    old = commit(keeper, 1)
    commit(keeper, 2)
    pin = str(keeper.out / "pins" / old.name)

    with audited.once("open", lambda path, *_: str(path) == pin, lambda: store.discard(DISK, keeper.out, old.name)):
        done = snapshots(keeper.out, "--pin", old.name)
    assert done.exit_code == 64 and "the run has just deleted snapshot" in done.stderr
    assert store.pins(DISK, keeper.out) == frozenset()


def test_a_run_killed_between_the_deletion_and_the_pin_loses_nothing(keeper):
    """It was renamed, and the process killed before it saw the pin. A half deleted one is not given back."""
    whole, half = commit(keeper, 1), commit(keeper, 2)
    root = keeper.out / "snapshots"
    (keeper.out / "pins").mkdir()
    for ref in (whole, half):
        os.rename(root / ref.name, root / f".trash-{ref.name}-00ff00ff")
        (keeper.out / "pins" / ref.name).touch()
    (root / f".trash-{half.name}-00ff00ff" / "model.safetensors").unlink()
    assert store.sweep(DISK, keeper.out) == ()
    assert os.listdir(root) == [whole.name] and names(keeper) == ["main-1"]


def test_pinning_works_beside_a_run_and_twice(keeper):
    old = commit(keeper, 1)
    with store.Lock(keeper.out):
        for _ in range(2):
            done = snapshots(keeper.out, "--pin", old.name)
            assert done.exit_code == 0 and f"{old.name} is pinned" in done.stderr
    (found,) = json.loads(snapshots(keeper.out, "--json").stdout)["snapshots"]
    assert found["needed"] == ["pinned", "main resumes"]
    assert "did you mean" in snapshots(keeper.out, "--pin", "main-00000001-a0002").stderr
    assert f"{old.name} is no longer pinned" in snapshots(keeper.out, "--unpin", old.name).stderr
    assert "pinned" not in snapshots(keeper.out).stdout


# ---- a disk that forgets


def test_a_snapshot_that_reads_back_wrong_is_no_snapshot(keeper):
    """A disk that forgets a bit, and says nothing: it is set aside, and all older ones stay."""
    stage = keeper.schedule.stage("main")
    state = make_state(stored_help.network(keeper.schedule.model, 1), stage.solver, torch.device("cpu"))
    shots = Snapshotter(keeper, Lineage(stage, "", {}), state, False)
    for iter in (1, 2, 3):
        shots.start(iter, Progress(0, 0.0, []))
    shots.wait()

    def after(call: int, name: str) -> None:
        if name == "rename":
            for file in keeper.out.glob("snapshots/main-00000005-*/model.safetensors"):
                file.write_bytes(file.read_bytes()[:-1] + b"!")

    keeper.disk = HookedDisk(LocalDisk(), after=after)
    shots.start(5, Progress(0, 0.0, []))
    written, failed = shots.wait()
    assert isinstance(written, SnapshotWritten) and isinstance(failed, SnapshotFailed)
    assert "reads back wrong: model.safetensors is not as it was written" in failed.message
    with pytest.raises(StorageError, match="reads back wrong"):
        shots.require(5)
    assert names(keeper) == ["main-1", "main-2", "main-3"]
    assert [*store.aside(keeper.disk, keeper.out)] == [".bad-main-00000005-a0001"]
