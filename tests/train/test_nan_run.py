"""Whole runs with `on_nan`: interrupted equals uninterrupted to the bit, wherever that was, for one worker and for two."""

import json
import shutil

import facade
import nan_help
import numpy as np
import pytest
import small
from caffe_lies import layer_bytes
from facade import (
    Event,
    Iterated,
    Note,
    NotFinite,
    RunFinished,
    SnapshotFailed,
    SnapshotWritten,
    StageFinished,
    Stopped,
)
from nan_help import lives, make_data, make_schedule, same, states_alive
from processes import ends
from test_run_trees import command, of

SKIP = "on_nan: SKIP snapshot: 4"
ROLLBACK = "on_nan: ROLLBACK snapshot: 4"
NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 8 dim: 1 dim: 12 dim: 12 } } }
layer { name: "norm" type: "BatchNorm" bottom: "data" top: "norm" }
layer { name: "ip" type: "InnerProduct" bottom: "norm" top: "ip" inner_product_param { num_output: 10 } }
"""
# Record 50 is met in iteration 6, and in the next epoch at image 114: with SKIP in iteration 14, and with the 24 images that the
# first rollback leaves out in iteration 11.
POISON = 50


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "lmdb", POISON)


def done(events: list[Event]) -> list[str]:
    """The iterations by number, those that failed with what was done."""
    return [f"{e.done} {e.iter}" if isinstance(e, NotFinite) else str(e.iter) for e in same(events)]


@pytest.mark.long
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("solver", "expected"),
    [
        pytest.param(SKIP, [*"123456", "SKIP 6", *"89", "10", "11", "12"], marks=pytest.mark.slow),
        (ROLLBACK, [*"123456", "ROLLBACK 6", *"56789", "10", "11", "ROLLBACK 11", "9", "10", "11", "12"]),
    ],
)
def test_killed_before_and_after_a_failure(tmp_path, data, solver, expected, workers):
    """After iteration 6, before which it fails; after the failure, with no snapshot that knows of it; after one that does."""
    folder, whole = make_schedule(tmp_path / "s", data, solver), tmp_path / "whole"
    before, alive = states_alive(), list[int]()

    def ask(event: Event) -> None:
        if isinstance(event, Iterated) and event.iter == 12:
            alive.append(states_alive() - before)

    events = lives(folder, whole, workers, ask=ask)
    assert alive == [workers], "none of what it went back from is held"
    assert done(events) == expected and isinstance(events[-1], RunFinished)
    assert all(f.keys == tuple(f"{i:08d}" for i in range(48, 56)) for f in of(events, NotFinite))
    for kill_after in (6, 8, 11):
        out = tmp_path / f"killed{kill_after}"
        first = lives(folder, out, workers, kill_after=kill_after)
        then = lives(folder, out, workers)
        assert done(first) == expected[:kill_after] and isinstance(then[-1], RunFinished)
        assert ends(out) == ends(whole)
        assert done(then)[-3:] == expected[-3:]


@pytest.mark.long
@pytest.mark.parametrize(("solver", "workers"), [pytest.param(SKIP, 2, marks=pytest.mark.slow), (ROLLBACK, 1)])
def test_stopped_after_each_iteration(tmp_path, data, solver, workers):
    """So there are snapshots everywhere, also on ways that were given up, and only one is kept beside the one to go back to."""
    folder = make_schedule(tmp_path / "s", data, solver, shared="keep_snapshots: 1")
    whole, out = tmp_path / "whole", tmp_path / "out"
    straight = lives(folder, whole, workers)
    told: list[Event] = []
    for _ in range(40):
        told += (life := lives(folder, out, workers, stop_after=1))
        if isinstance(life[-1], RunFinished):
            break
        assert isinstance(life[-1], Stopped)
        assert len(list((out / "snapshots").glob("main-*"))) <= 3
    assert ends(out) == ends(whole)
    assert {f.iter for f in of(told, NotFinite)} == {f.iter for f in of(straight, NotFinite)}
    (before,), (after,) = of(straight, StageFinished), of(told, StageFinished)
    assert (before.skips, before.rollbacks, before.loss) == (after.skips, after.rollbacks, after.loss)


def test_back_to_where_a_solverstate_began(tmp_path, data):
    """Rank 0 alone has looked into the file, and the other worker goes back to the same images."""
    more = 'on_nan: ROLLBACK net: "net.prototxt" solverstate: "x.solverstate"'
    folder = make_schedule(tmp_path / "s", data, more, main="max_iter: 11")
    (folder / "net.prototxt").write_text(NET)
    text = (folder / "schedule.prototxt").read_text()
    (folder / "schedule.prototxt").write_text("\n".join(one for one in text.splitlines() if "model {" not in one))
    ip, norm = [np.zeros((10, 144), np.float32), np.zeros(10, np.float32)], [np.zeros(1, np.float32)] * 3
    layers = [
        (layer_bytes("norm", "BatchNorm"), norm),
        (layer_bytes("ip", "InnerProduct"), ip),
    ]
    (folder / "x.caffemodel").write_bytes(facade.binary.net_bytes("n", layers))
    (folder / "x.solverstate").write_bytes(facade.binary.state_bytes(4, "x.caffemodel", [*norm, *ip]))
    both = {workers: lives(folder, tmp_path / f"out{workers}", workers) for workers in (1, 2)}
    assert done(both[2]) == done(both[1]) == [*map(str, range(5, 11)), "ROLLBACK 10", *map(str, range(5, 12))]
    one, two = ([e.loss for e in of(events, Iterated)] for events in both.values())
    assert two == pytest.approx(one, rel=1e-5)


def test_a_damaged_target_is_set_aside_and_the_one_before_it_taken(tmp_path, data):
    folder, out = make_schedule(tmp_path / "s", data, "on_nan: ROLLBACK snapshot: 2"), tmp_path / "out"

    def damage(event: Event) -> None:
        """As each comes to be on disk: a flipped bit in one, the other cut short."""
        if isinstance(event, SnapshotWritten) and event.name in ("main-00000004-a0001", "main-00000006-a0001"):
            path = out / "snapshots" / event.name / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[-9] ^= 1
            path.write_bytes(data if event.iter == 4 else data[:100])

    events = lives(folder, out, 1, ask=damage)
    first = of(events, NotFinite)[0]
    assert (first.iter, first.back_to, first.snapshot) == (6, 2, "main-00000002-a0001")
    said = "\n".join(event.text for event in of(events, Note))
    for text in (
        "4-a0001 is damaged and was set aside",
        "6-a0001 is damaged and was set aside",
        "EQUIVALENT, not BIT-E",
    ):
        assert text in said
    assert isinstance(events[-1], RunFinished) and not of(events, SnapshotFailed)


@pytest.mark.long
def test_the_stages_after_go_on_where_the_images_were_left_out(tmp_path, data):
    """Also one whose parent stopped before that, a piece of it, and one that begins the data anew."""
    stages = {"next": "max_iter: 2", "anew": "max_iter: 2 carry { data: RESTART }", "early": "max_iter: 2"}
    folder = make_schedule(tmp_path / "s", data, ROLLBACK, main="max_iter: 9", **stages)
    file = folder / "schedule.prototxt"
    file.write_text(file.read_text().replace('name: "early"', 'name: "early" from: "main@8"'))
    straight = lives(folder, tmp_path / "whole")
    # 24 of them: three iterations' worth.
    at = {(e.stage, e.iter): e.epoch * nan_help.IMAGES for e in of(straight, Iterated)}
    assert at["main", 9] == (9 + 3) * 8 and at["next", 1] == (9 + 3 + 1) * 8
    assert at["anew", 1] == 8 and at["early", 1] == (8 + 3 + 1) * 8
    out = tmp_path / "out"
    lives(folder, out, stop_after=13)  # one iteration into `next`, whose own snapshot knows how many were left out
    for iter in (8, 9):  # trained once more, from 4 on and over the failure
        shutil.rmtree(out / "snapshots" / f"main-{iter:08d}-a0001")
    assert isinstance(lives(folder, out)[-1], RunFinished)
    mine, there = ends(out), ends(tmp_path / "whole")
    assert [mine[name] for name in ("next", "anew", "early")] == [there[name] for name in ("next", "anew", "early")]


@pytest.mark.process
def test_the_command_says_what_failed_and_how_it_ends(tmp_path, data):
    folder, out = make_schedule(tmp_path / "s", data, "snapshot: 4"), tmp_path / "out"
    ended = small.run(folder, out)
    assert ended.returncode == 79, ended.stdout + ended.stderr
    assert "warning: main: BatchNorm's statistics are not finite" in ended.stdout
    assert "the run ends; its images: `00000048`, `00000049`, `00000050` and 5 more" in ended.stdout
    assert "in stage `main` BatchNorm's statistics are not finite" in ended.stderr and "at iteration 6" in ended.stderr
    (logged,) = [json.loads(s) for s in (out / "log.jsonl").read_text().splitlines() if '"NotFinite"' in s]
    assert logged["keys"] == [f"{i:08d}" for i in range(48, 56)] and logged["done"] == "STOP"
    assert sorted(p.name for p in (out / "snapshots").iterdir()) == ["main-00000004-a0001"], "that of before"
    again = small.run(folder, out, "--set", "main.on_nan=ROLLBACK")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "note: main: 2 rollbacks" in again.stdout
    status = command("status", folder, "--out", out)
    assert "back to 4 (main-00000004-a0001)" in status
    assert "rollbacks" in command("report", out)
