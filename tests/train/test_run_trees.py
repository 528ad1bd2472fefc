"""Trees of stages in `stagerun run`: branches off the midst of a trunk, pieces trained again, --only and --until, kills, edits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import small
import tiny
import torch
from click.testing import CliRunner
from facade import (
    Context,
    Event,
    Iterated,
    Keeper,
    PieceStarted,
    Retraced,
    RunFinished,
    RunStarted,
    Selection,
    StageStarted,
    Stopped,
    Stopping,
    Tested,
    World,
    run,
    with_imports,
)

from stagerun import store
from stagerun.cli import main
from stagerun.comm import SoloComm
from stagerun.language import load

CPU = torch.device("cpu")
NO_DEADLINE = Stopping()
MAIN = 'stage { name: "main" }\n'
CUT = 'stage { name: "cut" from: "main@3" sweep { name: "a" } sweep { name: "b" solver { base_lr: 0.01 } } sweep { name: "c" solver { max_iter: 1 } } }\n'
LATE = 'stage { name: "late" from: "main@5" solver: "cut.prototxt" }\n'
END = 'stage { name: "end" from: "main" solver: "cut.prototxt" }\n'
TREE = MAIN + CUT + LATE + END
FILES = {
    "main": 'base_lr: 0.05 lr_policy: "fixed" max_iter: 8 test_interval: 4\n',
    "cut": 'base_lr: 0.02 lr_policy: "poly" power: 2 max_iter: 2\n',
}
ALONE = ("--nproc", 1, "--threads", 1)
NAMES = ["main", "cut_a", "cut_b", "cut_c", "late", "end"]


def make_schedule(folder: Path, data: Path, stages: str = TREE, **files: str) -> Path:
    """One snapshot of each stage's newest is kept, so that what is there besides is there for a reason."""
    small.make_schedule(folder, data)
    file = folder / "schedule.prototxt"
    text = file.read_text()
    file.write_text("keep_snapshots: 1\n" + text[: text.index("stage {")] + stages)
    for name, solver in {**FILES, **files}.items():
        (folder / f"{name}.prototxt").write_text(solver)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """data/, schedule/, and its output out/ with the logs."""
    base = tmp_path_factory.mktemp("trees")
    tiny.make_data(base / "data")
    make_schedule(base / "schedule", base / "data")
    command("run", base / "schedule", "--out", base / "out", *ALONE)
    return base


@pytest.fixture
def out(base, tmp_path):
    shutil.copytree(base / "out", tmp_path / "out")
    return tmp_path / "out"


def command(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def go(
    schedule: Path,
    out: Path,
    *overrides: str,
    stop: Callable[[list[Event]], bool] = lambda seen: False,
    at: Callable[[Event], object] = lambda event: None,
    stopping: Stopping = NO_DEADLINE,
    **choice: Any,
) -> list[Event]:
    """The events of `run` in this process. `stop` is asked with those so far; `at` is called with each as it comes."""
    torch.set_num_threads(1)
    loaded = with_imports(load(schedule, overrides), out)
    out.mkdir(exist_ok=True)
    keeper, seen = Keeper(loaded, out, Selection(**choice)), list[Event]()
    keeper.open()
    try:
        stopped = lambda: stop(seen)  # noqa: E731
        context = Context(loaded, str(out), SoloComm(), World(), CPU, keeper, stopped, stopping=stopping)
        for event in run(context):
            seen.append(event)
            at(event)
    finally:
        keeper.close()
    return seen


def of(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def names(out: Path, stage: str = "") -> list[str]:
    return sorted(p.name for p in (out / "snapshots").iterdir() if p.name.startswith(stage) and p.name[0] != ".")


def ids(out: Path) -> dict[str, str]:
    """By stage and iteration."""
    return {f"{ref.stage}@{ref.iter}": ref.id for ref in store.inventory(store.LocalDisk(), out).snapshots}


def mtimes(out: Path) -> dict[str, int]:
    return {p.parent.name: p.stat().st_mtime_ns for p in out.glob("snapshots/*/MANIFEST.json")}


def test_the_trunk_is_trained_once_and_its_branches_start_from_its_very_weights(base):
    lines = [json.loads(line) for line in (base / "out" / "log.jsonl").read_text().splitlines()]
    assert [[e["stage"], e["iter"], e["start"]] for e in lines if e["event"] == "StageStarted"] == [
        ["main", 0, "seed 1"],
        ["cut_a", 0, "main-00000003-a0001"],
        ["cut_b", 0, "main-00000003-a0001"],
        ["cut_c", 0, "main-00000003-a0001"],
        ["late", 0, "main-00000005-a0001"],
        ["end", 0, "main-00000008-a0001"],
    ]
    # Of every other iteration (`snapshot: 2`) none is left, of the branch points and the end all.
    assert names(base / "out", "main") == ["main-00000003-a0001", "main-00000005-a0001", "main-00000008-a0001"]
    found = {ref.name: ref for ref in store.inventory(store.LocalDisk(), base / "out").snapshots}
    assert found["cut_a-00000002-a0001"].parent == found["main-00000003-a0001"].id
    assert len({ids(base / "out")[f"cut_{n}@2"] for n in "ab"}) == 2


@pytest.mark.long
def test_a_branch_thought_of_later_trains_a_piece_of_the_trunk_to_the_same_bits(base, tmp_path):
    schedule, out = make_schedule(tmp_path / "s", base / "data", MAIN + END), tmp_path / "out"
    go(schedule, out)
    assert names(out, "main") == ["main-00000008-a0001"]
    before = mtimes(out)
    make_schedule(schedule, base / "data", MAIN + CUT + LATE + END)
    events = go(schedule, out)
    pieces = of(events, PieceStarted)
    assert [(p.stage, p.iter, p.until, p.children) for p in pieces] == [
        ("main", 0, 5, ("cut_a", "cut_b", "cut_c", "late"))
    ]
    assert [r.iter for r in of(events, Retraced)] == [1, 2, 3, 4, 5]
    assert {e.stage for e in of(events, Iterated)} == {"cut_a", "cut_b", "cut_c", "late"}
    assert not [e for e in of(events, Tested) if e.stage == "main"]
    # Told before the run, and right after the piece.
    assert of(events, RunStarted)[0].iterations_left == 5 + 2 + 2 + 1 + 2
    assert of(events, StageStarted)[0].iterations_left == 2 + 2 + 1 + 2
    assert ids(out) == ids(base / "out")
    assert before.items() <= mtimes(out).items(), "the trunk's end is left alone"
    assert names(out, "main") == ["main-00000003-a0002", "main-00000005-a0002", "main-00000008-a0001"]


def test_a_branch_snapshot_that_is_lost_comes_back_and_its_children_stay(base, out):
    shutil.rmtree(out / "snapshots" / "main-00000005-a0001")
    assert go(base / "schedule", out)[-1] == RunFinished(trained=False, seconds=pytest.approx(0, abs=60), not_chosen=())
    for name in names(out, "late"):
        shutil.rmtree(out / "snapshots" / name)
    events = go(base / "schedule", out)
    assert [(p.iter, p.until) for p in of(events, PieceStarted)] == [(3, 5)]
    assert ids(out) == ids(base / "out")
    # The step at 4, on the way, was of use until the piece was there.
    assert "main-00000005-a0003" in names(out) and "main-00000004-a0003" not in names(out)


def test_stopped_and_resumed_in_the_trunk_a_branch_and_a_piece(base, tmp_path):
    def at(stage: str, iter: int) -> Callable[[list[Event]], bool]:
        # Asked before the update is told: the stop comes after the next one.
        return lambda seen: any((e.stage, e.iter) == (stage, iter) for e in of(seen, Iterated) + of(seen, Retraced))

    schedule, out = base / "schedule", tmp_path / "out"
    stopped = [go(schedule, out, stop=at("main", 2))[-1], go(schedule, out, stop=at("main", 5))[-1]]
    shutil.rmtree(out / "snapshots" / "main-00000003-a0001")
    stopped += [go(schedule, out, stop=at("main", 1))[-1], go(schedule, out, stop=at("cut_b", 1))[-1]]
    assert [(e.stage, e.iter) for e in stopped if isinstance(e, Stopped)] == [
        ("main", 3), ("main", 6), ("main", 2), ("cut_b", 2),
    ]  # fmt: skip
    events = go(schedule, out)
    assert of(events, RunFinished)
    found, straight = processes.content(out), processes.content(base / "out")
    assert straight.items() <= found.items()
    # A step of a piece that was broken off in the life in which the trunk ended is like the trunk's own.
    assert found.keys() - straight.keys() <= {"main-00000002"}


@pytest.mark.long
def test_not_enabled_then_enabled(base, tmp_path):
    schedule, out = tmp_path / "s", tmp_path / "out"
    make_schedule(schedule, base / "data", MAIN + CUT.replace("from", "enabled: false from") + LATE)
    events = go(schedule, out)
    (started,) = of(events, RunStarted)
    assert (started.stages, started.iterations, started.iterations_left) == (("main", "late"), 10, 10)
    assert [(e.stage, e.number) for e in of(events, StageStarted)] == [("main", 1), ("late", 2)]
    assert of(events, RunFinished)[0].not_chosen == ()
    assert "main-00000003-a0001" in names(out), "what the stage will start from is kept for it"
    make_schedule(schedule, base / "data", MAIN + CUT + LATE)
    events = go(schedule, out)
    assert [e.stage for e in of(events, StageStarted)] == ["cut_a", "cut_b", "cut_c"] and not of(events, PieceStarted)
    assert {k: v for k, v in ids(base / "out").items() if k != "end@2"} == ids(out)
