"""Snapshots behind training: what is handed to the store, what is counted, what is said when the disk is slow, what is refused."""

import threading
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine_help import SOLVER, ConvNet, dataset, updates
from facade import (
    MOMENTUM,
    WEIGHTS,
    Diverged,
    Keeper,
    Lineage,
    Note,
    Precision,
    Progress,
    SnapshotFailed,
    SnapshotRef,
    Snapshotter,
    SnapshotWritten,
    StorageError,
    TrainState,
    momentum,
    weights,
)
from safetensors.torch import save

from stagerun.comm import SoloComm

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


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_not_written(poison):
    keeper, state, snapshotter = made()
    with torch.no_grad():
        state.model.conv2.weight[0, 0, 0, 1] = poison
    with pytest.raises(Diverged, match="`s`"):
        snapshotter.start(1, PROGRESS)
    assert snapshotter.wait() == [] and keeper.written == []


def test_a_bug_in_retention_is_a_warning_and_the_snapshot_counts():
    keeper, _, snapshotter = made()

    def bug(ref: SnapshotRef, spared: object) -> None:
        raise ValueError("a bug")

    keeper.retain = bug
    snapshotter.start(1, PROGRESS)
    written, note = snapshotter.wait()
    assert isinstance(written, SnapshotWritten) and written.cpu_seconds > 0
    assert isinstance(note, Note) and note.warning and "ValueError: a bug" in note.text
    assert snapshotter.require(1).iter == 1


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
