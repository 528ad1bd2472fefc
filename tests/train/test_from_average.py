"""Averages along a trunk: their weights against a computation by hand, a stage that starts from one, what it depends on, kills."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import nan_help
import numpy as np
import pytest
import torch
from facade import WEIGHTS, EnsembleTested, Iterated, PieceStarted, StageStarted, decode
from test_run_trees import ALONE, command, of

from stagerun import store
from stagerun.language import load
from stagerun.plan import State, make_plan

pytestmark = pytest.mark.long

SCHEDULE = """
name: "along" keep_snapshots: 1 {shared}
model {{ name: "resnet_small" num_classes: 10 channels: 1 }}
data {{ train {{ source: "{data}" images: 64 }} val {{ source: "{data}" images: 64 }} }}
solver {{
  batch_size: 8 device_batch_size: 2 momentum: 0.9 base_lr: 0.05 lr_policy: "fixed" display: 1 snapshot: 2 precision: FP64
  transform_param {{ crop_size: 12 scale: 0.01 mirror: true }}
}}
stage {{ name: "trunk" solver_param {{ max_iter: 8 }} }}
"""
ALONG = (
    'ensemble { name: "all" members: "trunk@3..7/2" rule: WEIGHT_AVERAGE shape: "one_minus_sqrt" batch_norm_iter: 3 }\n'
)
FINE = 'stage { name: "fine" from: "all" solver_param { base_lr: 0.02 max_iter: 5 } }\n'
TRUNK, FINES = 8, 5  # iterations


def made(folder: Path, data: Path, *blocks: str, shared: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    text = SCHEDULE.format(data=data, shared=shared) + "".join(blocks)
    (folder / "schedule.prototxt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory, few):
    """s/, and out/ of a run that nothing interrupted."""
    base = tmp_path_factory.mktemp("base")
    nan_help.lives(made(base / "s", few, ALONG, FINE), base / "out")
    return base


def weights(out: Path, stage: str, iter: int) -> dict[str, Any]:
    found = [ref for ref in store.inventory(store.LocalDisk(), out).of(stage) if ref.iter == iter]
    files = store.read(store.LocalDisk(), out, found[-1])
    return {name: tensor.numpy() for name, tensor in decode(files[WEIGHTS]).items()}


def states(folder: Path, out: Path, *options: str) -> dict[str, State]:
    plan = make_plan(load(str(folder), options), store.inventory(store.LocalDisk(), out))
    return {planned.stage.name: planned.state for planned in plan.stages}


def test_the_start_is_what_the_decay_comes_to(base, tmp_path):
    """In float64; with a rate of 0 weights stay what they started with. The decay reaches 0 at iteration 9, one step behind the last member."""
    nan_help.lives(base / "s", tmp_path / "out", 1, "fine.base_lr=0")
    three, five, seven = (weights(tmp_path / "out", "trunk", iter) for iter in (3, 5, 7))
    started = weights(tmp_path / "out", "fine", FINES)
    at = [1 - math.sqrt(gone / 6) for gone in (2, 4)]
    learned = [name for name in three if "running" not in name and "num_batches" not in name]
    for name in learned:
        expected = three[name] + at[0] * (five[name] - three[name]) + at[1] * (seven[name] - five[name])
        assert np.abs(started[name] - expected).max() < 1e-12, name
        assert not np.array_equal(expected, seven[name])
    assert len(learned) > 10
    counted = {int(value) for name, value in started.items() if "num_batches" in name}
    assert counted == {3 + FINES}, "statistics were taken over `batch_norm_iter` iterations"


def test_what_members_need_is_kept_and_it_goes_on_behind_the_last_with_no_momentum(base):
    found = store.inventory(store.LocalDisk(), base / "out")
    assert [ref.iter for ref in found.of("trunk")] == [3, 5, 7, 8], "keep_snapshots is 1"
    (fine,) = (planned for planned in make_plan(load(base / "s"), found).stages if planned.stage.name == "fine")
    assert (fine.stage.parent, fine.stage.parent_iter, fine.position) == ("trunk", 7, 7 * 8)
    assert fine.state is State.DONE and len(fine.end.identity["average.of"].split()) == 3


def test_killed_and_stopped_anywhere_it_ends_in_the_same_bits(few, tmp_path):
    """Killed before the stage's first snapshot, and after it; stopped in between."""
    folder = made(tmp_path / "s", few, ALONG, FINE, shared="determinism: ELASTIC")
    nan_help.lives(folder, tmp_path / "whole")
    whole = weights(tmp_path / "whole", "fine", FINES)
    for workers in (1, 2):
        out = tmp_path / f"{workers}"
        for iterations in (TRUNK, 1, 3):
            nan_help.lives(folder, out, workers, kill_after=iterations)
        nan_help.lives(folder, out, workers, stop_after=1)
        nan_help.lives(folder, out, workers)
        found = weights(out, "fine", FINES)
        assert all(np.array_equal(found[name], value) for name, value in whole.items())


EDITS = [("one_minus_sqrt", "linear"), (' shape: "one_minus_sqrt"', ""), ("batch_norm_iter: 3", "batch_norm_iter: 4")]


@pytest.mark.parametrize(
    "edit", [*EDITS, ("3..7/2", "5..7/2"), ("3..7/2", "3..7/4")], ids=lambda edit: edit[1] or "plain"
)
def test_another_average_makes_the_stage_stale_and_no_other(base, few, tmp_path, edit):
    folder = made(tmp_path / "s", few, ALONG.replace(*edit), FINE)
    assert states(folder, base / "out") == {"trunk": State.DONE, "fine": State.STALE}
    named = made(folder, few, ALONG.replace('"all"', '"mean"'), FINE.replace('"all"', '"mean"'))
    assert states(named, base / "out") == {"trunk": State.DONE, "fine": State.DONE}, "its name changes nothing"


def test_members_thought_of_later_are_trained_again_up_to_there(base, few, tmp_path):
    """In pieces of the trunk, before the stage that starts from them; with the bits that they would have had."""
    folder, out = tmp_path / "s", tmp_path / "out"
    nan_help.lives(made(folder, few), out)
    events = nan_help.lives(made(folder, few, ALONG, FINE), out)
    pieces, started = of(events, PieceStarted), of(events, StageStarted)
    assert [(piece.until, piece.children) for piece in pieces] and [stage.stage for stage in started] == ["fine"]
    assert events.index(pieces[-1]) < events.index(started[0])
    expected, found = (weights(place, "fine", FINES) for place in (base / "out", out))
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_a_damaged_member_is_set_aside_and_made_anew(base, few, tmp_path):
    folder, out = made(tmp_path / "s", few, ALONG), tmp_path / "out"
    nan_help.lives(folder, out)
    (snapshot,) = (out / "snapshots").glob("trunk-00000005-*")
    file = snapshot / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    events = nan_help.lives(made(folder, few, ALONG, FINE), out)
    assert of(events, PieceStarted) and of(events, Iterated)[-1].iter == FINES
    expected, found = (weights(place, "fine", FINES) for place in (base / "out", out))
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_the_averaged_network_is_evaluated_and_exported_by_the_ensembles_name(base, tmp_path):
    """A result that does not count replaces the network, too; nothing else stays beside it."""
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    (out / "results" / "ensembles" / "all.json").unlink()
    (tested,) = of(nan_help.lives(base / "s", out), EnsembleTested)
    assert len(list((out / "averages" / "all" / "snapshots").iterdir())) == 1
    (shown,) = json.loads(command("eval", "all", "--out", out, "--json"))["evaluations"]
    assert (shown["top1"], shown["ensemble"]) == (tested.top1, "all")
    assert command("eval", "all", "--out", out).startswith("all: top-1 ")
    file = tmp_path / "all.pth"
    command("export", "all", file, "--out", out)
    assert torch.load(file, weights_only=True)["fc.weight"].dtype is torch.float64


def test_an_average_that_a_stage_keeps_beside_its_weights_makes_nothing_below_it_stale(tmp_path, few):
    """What starts from it, or from an average of it and others, starts from its trained weights; another setting of it does."""
    ends = 'stage { name: "two" from: "trunk" solver_param { max_iter: 2 MORE } }\nensemble { name: "all" members: ["trunk", "two"] rule: WEIGHT_AVERAGE }\n'
    below = (
        FINE
        + 'stage { name: "plain" from: "two" solver_param { max_iter: 2 } }\nstage { name: "last" from: "plain" solver_param { max_iter: 2 } }\n'
    )
    out = tmp_path / "out"

    def schedule(more: str) -> Path:
        return made(tmp_path / "s", few, ends.replace("MORE", more), below)

    nan_help.lives(schedule(""), out)
    below_done = dict.fromkeys(("trunk", "fine", "plain", "last"), State.DONE)
    for more, change in (("ema_decay: 0.5", "none -> 0.5"), ("ema_decay: 0.5 ema_interval: 2", "1 -> 2")):
        assert states(schedule(more), out) == {**below_done, "two": State.STALE}
        planned = command("plan", tmp_path / "s", "--out", out, "--redo", "two")
        assert change in planned and "lost" not in planned
        said = command("run", tmp_path / "s", "--out", out, "--redo", "two", *ALONE)
        assert set(re.findall(r"^stage \d/5 (\w+):", said, re.M)) == {"two"}, said
        assert set(states(tmp_path / "s", out).values()) == {State.DONE}
    assert set(states(schedule(""), out).values()) == {State.DONE}, "what was trained first is there"
    changed = states(schedule("ema_decay: 0.5 momentum: 0.8"), out)
    assert {name for name, state in changed.items() if state is State.STALE} == {"two", "fine", "plain", "last"}
