"""`run --replay OUT`: where records lie, what is refused before anything is trained, where a replay ends, and what it is compared with.

One worker, whose pushes come in their order: what is recorded here is no more than how many there were.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from facade import (
    Event,
    ExitCode,
    Iterated,
    Note,
    RunFinished,
    SnapshotDue,
    SnapshotWritten,
    StageFinished,
    Stopped,
    TrainState,
    UsageError,
)
from nan_help import lives, make_schedule

from stagerun.base.errors import RanksDiffer, ResumeRefused
from stagerun.cli import main
from stagerun.language import load
from stagerun.train.progress import ARRIVALS
from stagerun.wire.asynchronous import Asynchronous
from stagerun.wire.replay import Replay, record_of

pytestmark = pytest.mark.long

ASYNC = "sync_param { method: ASYNC replicas: 2 max_staleness: 2 } "
STAGES = {"first": "max_iter: 2", "main": ASYNC + "max_iter: 6 snapshot: 2", "after": "max_iter: 2"}


@pytest.fixture(autouse=True)
def nudged(monkeypatch):
    """After the iterations of `main` that are put into the list, at boundaries, a weight is another."""
    iters: list[int] = []

    def nudge(state: TrainState) -> None:
        if state.iter in iters:
            with torch.no_grad():
                state.model.state_dict()["fc.weight"].view(-1)[0] += 1

    def train(self: Asynchronous, *rest: Any) -> Iterator[Event]:
        for event in honest(self, *rest):
            if isinstance(event, SnapshotDue):
                nudge(self.state)
            yield event
        nudge(self.state)

    honest = Asynchronous.train
    monkeypatch.setattr(Asynchronous, "train", train)
    return iters


@pytest.fixture
def folder(tmp_path, few):
    return make_schedule(tmp_path / "s", few, shared="keep_snapshots: 100", **STAGES)


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def of(events: list[Event], kind: type) -> list[tuple[str, int]]:
    return [(event.stage, event.iter) for event in events if isinstance(event, kind)]


# -- the record in snapshots


def test_a_record_is_in_the_snapshots_of_its_stage_and_not_in_their_identity(tmp_path, folder):
    lives(folder, tmp_path / "out")
    found = {p.parent.name: record_of(p.read_bytes()).last for p in (tmp_path / "out").glob(f"snapshots/*/{ARRIVALS}")}
    assert found == {f"main-{i:08}-a0001": i for i in (2, 4, 6)}
    manifest = json.loads(
        (tmp_path / "out/snapshots/main-00000006-a0001/MANIFEST.json").read_text().rpartition("}")[0] + "}"
    )
    assert ARRIVALS in manifest["files"] and ARRIVALS not in manifest["content"]


# -- replays


def test_a_replay_says_that_it_has_the_same_bits(tmp_path, folder):
    lives(folder, tmp_path / "out")
    events = lives(folder, tmp_path / "new", replay=tmp_path / "out")
    same = f"replay: main-00000006-a0001 has the same bits as {tmp_path}/out/snapshots/main-00000006-a0001"
    assert notes(events).count(same) == 1
    assert [event.stage for event in events if isinstance(event, StageFinished)] == ["first", "main", "after"]
    assert of(events, SnapshotWritten)[-1] == ("after", 2)
    again = lives(folder, tmp_path / "new", replay=tmp_path / "out")
    assert notes(again) == [same] and isinstance(again[-1], RunFinished) and not again[-1].trained


def test_a_replay_with_other_bits_names_tensors(tmp_path, folder, nudged):
    lives(folder, tmp_path / "out")
    nudged.append(6)
    with pytest.raises(RanksDiffer) as caught:
        lives(folder, tmp_path / "new", replay=tmp_path / "out")
    assert caught.value.message == (
        f"replay: main-00000006-a0001 has other bits than {tmp_path}/out/snapshots/main-00000006-a0001 in `fc.weight`"
    )
    assert "the same kind of machine" in caught.value.hint
    nudged.clear()
    with pytest.raises(RanksDiffer):  # the same command is no way around it
        lives(folder, tmp_path / "new", replay=tmp_path / "out")


def test_the_replay_of_a_killed_run_ends_where_its_record_does(tmp_path, folder):
    lives(folder, tmp_path / "out", kill_after=7)  # in iteration 6 of `main`
    events = lives(folder, tmp_path / "new", replay=tmp_path / "out")
    assert of(events, Iterated)[-1] == ("main", 4)
    same, end = notes(events)[-2:]
    assert same == f"replay: main-00000004-a0001 has the same bits as {tmp_path}/out/snapshots/main-00000004-a0001"
    assert end.startswith("the record of `main` ends at iteration 4, and the replay with it")
    last = events[-1]
    assert isinstance(last, RunFinished) and last.not_chosen == ("main", "after")
    assert not any(isinstance(event, Stopped) for event in events) and "main" not in [
        event.stage for event in events if isinstance(event, StageFinished)
    ]
    # Once more, and when the run has come further.
    assert of(lives(folder, tmp_path / "new", replay=tmp_path / "out"), Iterated) == []
    lives(folder, tmp_path / "out")
    events = lives(folder, tmp_path / "new", replay=tmp_path / "out")
    assert of(events, Iterated) == [("main", 5), ("main", 6), ("after", 1), ("after", 2)]
    assert [text for text in notes(events) if "same bits" in text and "main-00000006" in text]


def test_a_replay_that_is_stopped_goes_on(tmp_path, folder):
    lives(folder, tmp_path / "out")
    stopped = lives(folder, tmp_path / "new", replay=tmp_path / "out", stop_after=5)
    assert isinstance(stopped[-1], Stopped)
    events = lives(folder, tmp_path / "new", replay=tmp_path / "out")
    assert of(events, Iterated)[0] == ("main", 3), "from the last boundary on"
    assert any("same bits" in text for text in notes(events))
    assert any("is BIT-EXACT" in text for text in notes(events))


def test_a_damaged_snapshot_is_refused_and_without_it_the_one_before_is_taken(tmp_path, folder):
    lives(folder, tmp_path / "out")
    for name in ("main-00000006-a0001/" + ARRIVALS, "main-00000004-a0001/model.safetensors"):
        path = tmp_path / "out" / "snapshots" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ResumeRefused, match=path.parent.name) as caught:
            Replay(tmp_path / "out", load(str(folder)), tmp_path / "new")
        assert caught.value.hint and "delete that snapshot" in caught.value.hint
        shutil.rmtree(path.parent)
    found = Replay(tmp_path / "out", load(str(folder)), tmp_path / "new").records
    assert {name: record_of(record.arrivals).last for name, record in found.items()} == {"main": 2}


# -- mistakes, in the first second


def refused(replayed: Path, folder: Path, out: Path, *changes: str) -> str:
    with pytest.raises(UsageError) as caught:
        Replay(replayed, load(str(folder), changes), out)
    assert caught.value.exit_code == ExitCode.RECIPE and caught.value.hint
    return caught.value.message


def test_mistakes(tmp_path, folder, few):
    lives(folder, tmp_path / "out")
    out, new = tmp_path / "out", tmp_path / "new"
    assert "is the replay's output folder, too" in refused(out, folder, tmp_path / "s" / ".." / "out")
    for nothing in (tmp_path / "none", few, folder):
        assert "no snapshot of `main` can be read" in refused(nothing, folder, new)
    plain = make_schedule(tmp_path / "plain", few, main="max_iter: 6")
    assert "no stage of nan has `method: ASYNC`" in refused(out, plain, new)
    changed = refused(out, folder, new, "first.base_lr=0.5")
    assert "is of another schedule:" in changed and "base_lr 0.05 -> 0.5 (--set:1)" in changed
    assert "sync_param.max_staleness 2 -> 3" in refused(out, folder, new, "main.sync_param.max_staleness=3")
    # What comes after, and what is only looked at, changes nothing.
    assert Replay(out, load(str(folder), ["after.base_lr=0.5", "main.display=7"]), new).records


def test_a_run_that_ended_before_the_first_snapshot_has_no_record(tmp_path, folder):
    lives(folder, tmp_path / "out", kill_after=3)
    assert "no snapshot of `main` can be read" in refused(tmp_path / "out", folder, tmp_path / "new")


def test_a_snapshot_without_a_record_is_none_of_this_version(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("stagerun.wire.asynchronous.ARRIVALS", "other.safetensors")
    lives(folder, tmp_path / "out")
    assert f"has no {ARRIVALS}" in refused(tmp_path / "out", folder, tmp_path / "new")


def test_the_command_finds_them_before_workers_start_and_has_a_folder_of_its_own(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = CliRunner().invoke(main, ["run", str(folder), "--nproc", "1", "--replay", "nowhere"])
    assert wrong.exit_code == ExitCode.RECIPE and "--replay nowhere: no snapshot of `main`" in wrong.output
    assert not (tmp_path / "out").exists()
    both = CliRunner().invoke(main, ["run", str(folder), "--nproc", "1", "--replay", "nowhere", "--redo", "main"])
    assert both.exit_code == ExitCode.RECIPE and "--replay with --redo" in both.output
