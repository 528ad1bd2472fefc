"""Stages that start from the best evaluation of another, or from its averaged weights: kills, numbers of workers, edits, and what is said."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import nan_help
import numpy as np
import pytest
import torch
from facade import AVERAGE, Iterated, PieceStarted, StageStarted, Tested, decode
from PIL import Image
from test_from_average import states, weights
from test_run_trees import ALONE, command, of

from stagerun import store
from stagerun.plan import State

pytestmark = pytest.mark.long

# Its rate rises a thousandfold at iteration 5, which unlearns what was learned.
SCHEDULE = """
name: "best" keep_snapshots: 1 {shared}
model {{ name: "resnet_small" num_classes: 10 channels: 1 }}
data {{ train {{ source: "{data}" images: 64 }} val {{ source: "{data}" images: 64 }} }}
solver {{
  batch_size: 8 device_batch_size: 2 momentum: 0.9 base_lr: 0.05 lr_policy: "fixed" display: 1 precision: FP64
  transform_param {{ crop_size: 12 scale: 0.01 mirror: true }}
}}
stage {{ name: "trunk" solver_param {{
  max_iter: 8 test_interval: 2 lr_policy: "multistep" gamma: 1000 stepvalue: 5 ema_decay: 0.5 {trunk}
}} }}
"""
BEST = 'stage { name: "fine" from: "trunk@best" solver_param { max_iter: 3 } }\n'


def made(folder: Path, data: Path, *blocks: str, shared: str = "", trunk: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(data=data, shared=shared, trunk=trunk) + "".join(blocks))
    return folder


MEAN = 'stage { name: "mean" from: "trunk@ema" solver_param { max_iter: 2 } }\n'
CHOSEN, TRUNK = 4, 8  # iterations


@pytest.fixture(scope="module")
def base(tmp_path_factory, few):
    """s/, and out/ of a run that nothing interrupted."""
    base = tmp_path_factory.mktemp("base")
    nan_help.lives(made(base / "s", few, BEST, MEAN), base / "out")
    return base


@pytest.fixture
def out(base, tmp_path):
    shutil.copytree(base / "out", tmp_path / "out")
    return tmp_path / "out"


def kept(out: Path, stage: str = "trunk") -> list[int]:
    return sorted(ref.iter for ref in store.inventory(store.LocalDisk(), out).of(stage))


def assert_same(out: Path, there: Path) -> None:
    for stage, iter in (("trunk", TRUNK), ("fine", 3), ("mean", 2)):
        mine, theirs = weights(out, stage, iter), weights(there, stage, iter)
        assert all(np.array_equal(mine[name], value) for name, value in theirs.items()), stage


def drop(out: Path, pattern: str) -> None:
    for snapshot in [*(out / "snapshots").glob(pattern)]:
        shutil.rmtree(snapshot)


def test_the_best_is_kept_and_started_from_and_the_plan_says_which(base, few, tmp_path):
    assert kept(base / "out") == [CHOSEN, TRUNK], "keep_snapshots is 1"
    before = command("plan", base / "s", "--out", tmp_path / "none")
    assert re.search(r"^fine +trunk@best", before, re.M) and "image 64 at most" in before
    assert "kept at the best, iteration not known yet, for fine" in before
    after = command("plan", base / "s", "--out", base / "out")
    assert re.search(r"^fine +trunk@4 ", after, re.M) and "data from image 32" in after
    assert "kept at the best, iteration 4, for fine" in after
    inventory = store.inventory(store.LocalDisk(), base / "out")
    (fine,) = inventory.of("fine")
    assert fine.parent == next(ref.id for ref in inventory.of("trunk") if ref.iter == CHOSEN)
    shown = command("status", base / "s", "--out", base / "out", "--snapshots")
    assert re.search(r"^trunk-00000004\S+ .*start of fine", shown, re.M)


@pytest.mark.parametrize("workers, determinism", [(1, "FIXED"), (2, "ELASTIC")])
def test_killed_and_stopped_anywhere_it_chooses_the_same(base, few, tmp_path, workers, determinism):
    folder = made(tmp_path / "s", few, BEST, MEAN, shared=f"determinism: {determinism}")
    nan_help.lives(folder, tmp_path / "whole")
    out = tmp_path / "out"
    for iterations in (3, 3, 2, 2):
        nan_help.lives(folder, out, workers, kill_after=iterations)
        nan_help.lives(folder, out, workers, stop_after=2)
    nan_help.lives(folder, out, workers)
    assert_same(out, tmp_path / "whole")
    assert set(kept(out)) >= {CHOSEN, TRUNK}


@pytest.mark.parametrize("at", [3, CHOSEN, TRUNK])
def test_stopped_anywhere_it_chooses_the_same(base, tmp_path, at):
    """Between evaluations; before the best one; after the last iteration, before the evaluation that may be the best."""
    out = tmp_path / "out"
    nan_help.lives(base / "s", out, stop_after=at)
    assert TRUNK not in kept(out)
    nan_help.lives(base / "s", out)
    assert_same(out, base / "out")


def test_what_is_lost_comes_back_and_nothing_else_is_trained(base, out):
    for pattern, trained in (("trunk-00000008*", {"trunk"}), ("trunk-00000004*", set())):
        drop(out, pattern)
        assert {e.stage for e in of(nan_help.lives(base / "s", out), Iterated)} == trained
        assert states(base / "s", out)["fine"] is State.DONE
    drop(out, "fine-*")
    events = nan_help.lives(base / "s", out)
    assert [piece.until for piece in of(events, PieceStarted)] == [CHOSEN]
    assert [started.stage for started in of(events, StageStarted)] == ["fine"]
    assert_same(out, base / "out")


def test_rates_are_swept_from_the_best(base, out):
    said = command("rehearse", base / "s", "--out", out, "--find-lr", "fine", "--iters", 15)
    assert re.search(r"^from trunk-00000004-", said, re.M)


@pytest.mark.parametrize(
    "edit, stale",
    [
        (("trunk@best", "trunk@4"), set()),  # the id decides
        (("trunk@best", "trunk@8"), {"fine"}),
        (("trunk@best", "trunk@ema"), {"fine"}),
        (("trunk@ema", "trunk"), {"mean"}),
        (("ema_decay: 0.5", "ema_decay: 0.6"), {"trunk", "fine", "mean"}),
        (("test_interval: 2", "test_interval: 4"), {"trunk", "fine", "mean"}),
        (("gamma: 1000", "gamma: 100"), {"trunk", "fine", "mean"}),
    ],
)
def test_an_edit_makes_stale_what_depends_on_it(base, few, tmp_path, edit, stale):
    folder = made(tmp_path / "s", few, BEST, MEAN)
    file = folder / "schedule.prototxt"
    file.write_text(file.read_text().replace(*edit))
    assert {name for name, state in states(folder, base / "out").items() if state is State.STALE} == stale


def test_a_trunk_that_recorded_no_best_is_stale_and_one_that_did_stays(base, few, tmp_path):
    alone, out = made(tmp_path / "s", few), tmp_path / "out"
    nan_help.lives(alone, out)
    assert not any(ref.best for ref in store.inventory(store.LocalDisk(), out).snapshots)
    said = command("run", made(alone, few, BEST), "--out", out, *ALONE, code=78)
    assert (
        "stage `trunk` is stale" in said
        and "best_evaluation (none) -> recorded" in said
        and '`from: "trunk@ITERATION"` keeps it' in said
    )
    assert states(made(alone, few, MEAN), base / "out") == {"trunk": State.DONE, "mean": State.DONE}


def test_averaged_weights_are_the_start(base, tmp_path):
    """With a rate of 0 they stay."""
    nan_help.lives(base / "s", tmp_path / "out", 1, "mean.base_lr=0")
    end = store.inventory(store.LocalDisk(), base / "out").of("trunk")[-1]
    average = decode(store.read(store.LocalDisk(), base / "out", end)[AVERAGE])
    started = weights(tmp_path / "out", "mean", 2)
    learned = [name for name in average if "running" not in name and "num_batches" not in name]
    assert learned and all(np.array_equal(started[name], average[name].numpy()) for name in learned)


def test_early_stop_hands_on_its_best(few, tmp_path):
    out, rule = tmp_path / "out", "early_stop { metric: LOSS patience_iter: 3 }"
    events = nan_help.lives(made(tmp_path / "s", few, BEST, trunk=rule), out)
    losses = {e.iter: e.loss for e in of(events, Tested) if e.stage == "trunk" and not e.ema}
    (end,) = (ref for ref in store.inventory(store.LocalDisk(), out).of("trunk") if ref.ended)
    assert end.best == min(losses, key=lambda iter: losses[iter]) < end.iter < TRUNK
    (start,) = (e.start for e in of(events, StageStarted) if e.stage == "fine")
    assert start.startswith(f"trunk-{end.best:08}-")


def test_it_goes_back_from_nan_to_an_evaluation_and_chooses_the_same_when_killed(tmp_path):
    data = nan_help.make_data(tmp_path / "data", 43)  # iteration 5 fails
    folder = made(tmp_path / "s", data, BEST)
    text = (folder / "schedule.prototxt").read_text().replace("scale: 0.01", "scale: 1e18")
    text = (
        text.replace("val {", "shuffle: false val {")
        .replace("ema_decay: 0.5", "")
        .replace("precision: FP64", "on_nan: ROLLBACK")
        .replace("gamma: 1000", "gamma: 1")
    )
    (folder / "schedule.prototxt").write_text(text)
    events = nan_help.lives(folder, tmp_path / "whole")
    assert [e.back_to for e in events if type(e).__name__ == "NotFinite"] == [4]
    for iterations in (5, 7, 2):
        nan_help.lives(folder, tmp_path / "out", kill_after=iterations)
    nan_help.lives(folder, tmp_path / "out")
    for stage, iter in (("trunk", TRUNK), ("fine", 3)):
        mine, theirs = (weights(tmp_path / there, stage, iter) for there in ("out", "whole"))
        assert all(np.array_equal(mine[name], value) for name, value in theirs.items())


def exported(out: Path, name: str, file: Path) -> dict[str, Any]:
    command("export", name, file, "--out", out, "--force")
    return torch.load(file, weights_only=True)


def test_the_words_in_eval_export_and_predict(base, out, few, tmp_path):
    def shown(*words: object) -> dict[str, Any]:
        (one,) = json.loads(command("eval", *words, "--out", out, "--json"))["evaluations"]
        return one

    best, ema = shown("trunk@best"), shown("trunk@ema")
    assert (best["iter"], best["ema"], ema["iter"], ema["ema"]) == (CHOSEN, False, TRUNK, True)
    assert shown(base / "s", "--stage", "trunk@best")["snapshot"] == best["snapshot"]
    assert shown(base / "s", "--stage", "trunk@ema")["top1"] == ema["top1"] == shown("trunk", "--ema")["top1"]
    file = tmp_path / "a.pth"
    assert np.array_equal(exported(out, "trunk@best", file)["fc.weight"], weights(out, "trunk", CHOSEN)["fc.weight"])
    average = decode(
        store.read(store.LocalDisk(), out, store.inventory(store.LocalDisk(), out).of("trunk")[-1])[AVERAGE]
    )
    assert torch.equal(exported(out, "trunk@ema", file)["fc.weight"], average["fc.weight"])
    picture = tmp_path / "a.png"
    Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save(picture)
    asked, every = {}, ("--top", 10, "--json")
    for name in ("trunk", "trunk@best", "trunk@ema"):
        asked[name] = command("predict", name, picture, "--out", out, *every)
        weights_of = exported(out, name, file)
        for folder, *words in ((base / "s", "--out", out), (out,)):
            assert command("predict", folder, picture, "--stage", name, *words, *every) == asked[name]
            command("export", folder, file, "--stage", name, "--force", *words)
            assert torch.equal(torch.load(file, weights_only=True)["fc.weight"], weights_of["fc.weight"])
    assert asked["trunk@best"] != asked["trunk"]  # whose average, of diverged weights, answers the same
    for words in (("fine@ema", picture, "--out", out), (out, picture, "--stage", "fine@ema")):
        assert "has no averaged weights" in command("predict", *words, code=64)
    assert "named `none@ema`" in command("predict", out, picture, "--stage", "none@ema", code=64)
    assert "no stage or ensemble is named `fin@best`" in command(
        "predict", base / "s", picture, "--out", out, "--stage", "fin@best", code=64
    )
    assert "no snapshot" in command("export", "none@best", file, "--out", out, "--force", code=64)
    assert "has no averaged weights" in command("export", "fine@ema", file, "--out", out, "--force", code=64)


def test_without_a_stage_that_starts_there_the_log_says_which_is_best(few, tmp_path):
    """Of equal ones the first."""
    folder, out, file = made(tmp_path / "s", few, trunk="snapshot: 2"), tmp_path / "out", tmp_path / "a.pth"
    text = (folder / "schedule.prototxt").read_text().replace("keep_snapshots: 1", "keep_snapshots: 9")
    (folder / "schedule.prototxt").write_text(text)
    command("run", folder, "--out", out, *ALONE)
    assert kept(out) == [2, 4, 6, 8]
    for lines, iter in ((None, CHOSEN), (r'\1"top1": 0.5', 2)):
        log = out / "log.jsonl"
        log.write_text(
            re.sub(r'("event": ?"Tested".*)"top1": ?[0-9.]+', lines, log.read_text()) if lines else log.read_text()
        )
        assert np.array_equal(exported(out, "trunk@best", file)["fc.weight"], weights(out, "trunk", iter)["fc.weight"])
