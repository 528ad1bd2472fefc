"""A disk, or its server, that fails for a while: nothing good is given up for it, and nothing is trained anew beside what is there."""

import errno
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from facade import Determinism, Keeper, ResumeRefused, StorageError, environment_of, other_machines
from reliability.faults import FaultyDisk
from test_pins import commit, keeper, names, schedule

from stagerun import store
from stagerun.comm import SoloComm
from stagerun.language import load
from stagerun.plan import State

__all__ = ["keeper", "schedule"]  # fixtures

WEIGHTS = "model.safetensors"


@dataclass
class Failing(store.LocalDisk):
    """Gives EIO for files whose path ends so."""

    end: str = ""

    def _fail(self, path: Path) -> None:
        if self.end and str(path).endswith(self.end):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read(self, path: Path, limit: int) -> bytes:
        self._fail(path)
        return super().read(path, limit)

    def digest(self, path: Path, limit: int) -> tuple[int, str]:
        self._fail(path)
        return super().digest(path, limit)


def aside(keeper: Keeper) -> list[str]:
    return list(store.aside(keeper.disk, keeper.out))


def test_a_stage_does_not_begin_anew_while_its_snapshots_do_not_answer(keeper):
    ref = commit(keeper, 5)
    keeper.forget()
    keeper.disk = Failing("MANIFEST.json")
    with pytest.raises(StorageError, match=f"can't read snapshot {ref.name}, and no other of its stage") as caught:
        keeper.plan()
    assert "move the snapshot away" in caught.value.hint and aside(keeper) == []


def test_what_a_stage_left_that_the_schedule_has_no_more_stops_nothing(keeper):
    end = commit(keeper, 9)
    left = commit(keeper, 4, "last", end.id)
    keeper.forget()
    keeper.schedule = replace(keeper.schedule, stages=keeper.schedule.stages[:2])
    keeper.disk = Failing(f"{left.name}/MANIFEST.json")
    assert [s.state for s in keeper.plan().stages] == [State.DONE, State.FRESH]


def test_one_that_answers_the_next_time_is_gone_on_from(keeper):
    commit(keeper, 5)
    keeper.forget()
    # `names`, and the manifest twice.
    keeper.disk = FaultyDisk("EIO@2-3")
    main = keeper.plan().stages[0]
    assert main.state is State.RESUME and main.iter == 5


def test_a_bad_sector_stops_no_stage_that_has_another(keeper):
    commit(keeper, 3)
    newest = commit(keeper, 5)
    keeper.forget()
    keeper.disk = Failing(f"{newest.name}/MANIFEST.json")
    assert keeper.plan().stages[0].iter == 3


def test_what_can_not_be_read_is_set_aside_only_when_another_can(keeper):
    old, new = commit(keeper, 3), commit(keeper, 5)
    keeper.disk = Failing(WEIGHTS)
    with pytest.raises(StorageError, match="no other of its stage"):
        keeper.read(new)
    assert names(keeper) == ["main-3", "main-5"]
    keeper.disk = Failing(f"{new.name}/{WEIGHTS}")
    assert keeper.read(new) is None and aside(keeper) == [f".bad-{new.name}"]
    assert keeper.read(old) is not None


def test_retention_waits_for_a_disk_that_does_not_read_back(keeper):
    for iter in (1, 2, 3):
        keeper.retain(commit(keeper, iter))
    newest = commit(keeper, 5)
    keeper.disk = Failing(WEIGHTS)
    with pytest.raises(store.Damaged):  # the snapshotter then counts it as not written
        keeper.retain(newest)
    assert names(keeper) == ["main-1", "main-2", "main-3", "main-5"] and aside(keeper) == []


def test_what_is_further_stays_until_training_has_come_as_far(keeper):
    """A life that did not see them began at the seed."""
    for iter in (5, 6, 7):
        commit(keeper, iter)
    keeper.attempt, keeper.serial = 2, 0
    for iter in (1, 2, 3):
        keeper.retain(commit(keeper, iter))
    there = [(ref.iter, ref.attempt) for ref in keeper.inventory().snapshots]
    assert there == [(5, 1), (6, 1), (7, 1), (1, 2), (2, 2), (3, 2)]
    for iter in (5, 6, 7):
        keeper.retain(commit(keeper, iter))
    assert [(ref.iter, ref.attempt) for ref in keeper.inventory().snapshots] == [(5, 2), (6, 2), (7, 2)]


def test_one_of_another_network_is_refused_and_not_set_aside(keeper):
    folder = str(Path(keeper.out).parent / "dir")
    keeper.schedule = load(folder, ("model.num_classes=1000",))
    ref = commit(keeper, 5)
    keeper.schedule = load(folder)
    with pytest.raises(ResumeRefused, match=f"snapshot {ref.name} does not fit network `resnet_small`") as caught:
        keeper.read(ref, {WEIGHTS: 5})
    assert "--redo" in caught.value.hint and names(keeper) == ["main-5"]


class Mixed(SoloComm):
    """Four ranks: the last two are of another kind."""

    size = 4

    def gather_bytes(self, data: bytes) -> list[bytes]:
        other = json.dumps({**json.loads(data), "instruction set": "ZVECTOR", "processor flags": "zvector"}).encode()
        return [data, data, other, other]


def test_the_promise_is_of_all_ranks_machines(keeper):
    cpu = torch.device("cpu")
    assert other_machines(SoloComm(), cpu, Determinism.FIXED) == ""
    others = other_machines(Mixed(), cpu, Determinism.FIXED)
    stage = keeper.schedule.stages[0]
    own = environment_of(keeper.schedule, stage, cpu, 4, "")["processor flags"]
    missing = sorted(set(own.split()) - {"none"})
    flags = ", ".join([*(f"{name} missing" for name in missing), "zvector added"])
    assert others == f"ranks 2 3: instruction set ZVECTOR, processor flags {flags}"
    alike, mixed = (environment_of(keeper.schedule, stage, cpu, 4, text) for text in ("", others))
    assert "other ranks" not in alike and mixed["other ranks"] == others
