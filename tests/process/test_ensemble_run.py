"""Ensembles in `stagerun run`: their numbers against a computation by hand, when they are evaluated again, stops and damage."""

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import small
import tiny
import torch
from facade import EnsembleTested, LmdbSource, Note, StageStarted, Stopped, load_network, open_snapshot, training_loader
from test_run_trees import command, go, of
from torch import Tensor, nn

from stagerun.language import load
from stagerun.models import BatchNorm2d

# So that all stages look at the same pictures: `collapse` trains on images that are not cut.
SEEN = "solver {\n  test_transform_param { crop_size: 28 mean_value: 73 scale: 0.0111 }"
SOUP = 'ensemble { name: "soup" members: ["early", "collapse"] rule: WEIGHT_AVERAGE batch_norm_iter: 5 }\n'
ENSEMBLES = f"""
ensemble {{ name: "both" members: ["early", "collapse"] }}
ensemble {{ name: "three" members: ["cyc1", "collapse", "early"] rule: MEAN_LOGIT }}
{SOUP}"""
NAMES = ["both", "three", "soup"]
ENDS = {"cyc1": 5, "collapse": 3, "early": 3}


def make_schedule(folder: Path, data: Path, ensembles: str = ENSEMBLES) -> Path:
    # The members of "three" compute each in its own precision.
    small.make_schedule(folder, data, cyc1=small.STAGES["cyc1"] + " precision: FP64")
    file = folder / "schedule.prototxt"
    file.write_text(file.read_text().replace("solver {", SEEN, 1) + ensembles)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """data/, schedule/, its output out/, and what was printed in out.txt."""
    base = tmp_path_factory.mktemp("ensembles")
    tiny.make_data(base / "data")
    make_schedule(base / "schedule", base / "data")
    done = small.run(base / "schedule", base / "out", "--log", "tensorboard", code=0)
    (base / "out.txt").write_text(done.stdout)
    return base


@pytest.fixture
def out(base, tmp_path):
    return Path(shutil.copytree(base / "out", tmp_path / "out"))


def result(out: Path, name: str) -> dict[str, Any]:
    found = json.loads((out / "results" / "ensembles" / f"{name}.json").read_text())
    assert isinstance(found, dict)
    return found


def digits(out: Path, name: str) -> tuple[float, ...]:
    found = result(out, name)
    return found["images"], found["top1"], found["top5"], found["loss"]


# ---- the numbers


def network(out: Path, stage: str) -> nn.Module:
    (folder,) = out.glob(f"snapshots/{stage}-*{ENDS[stage]:08d}-a*")
    return load_network(open_snapshot(folder), torch.device("cpu"), ema=False)


def logits(model: nn.Module) -> Tensor:
    """float64, in passes of as many images as the schedule's, each network in its own precision."""
    stored = np.load(tiny.STORED)["images"][tiny.TRAIN_IMAGES :][: tiny.VAL_IMAGES]
    images = torch.from_numpy(stored.reshape(-1, 1, 28, 28)).to(next(model.parameters()).dtype)
    with torch.no_grad():
        parts = [model(((x - 73) * 0.0111).to(memory_format=torch.channels_last)) for x in images.split(50)]
    return torch.cat(parts).double()


def by_hand(probability: Tensor) -> tuple[float, ...]:
    stored = np.load(tiny.STORED)["labels"][tiny.TRAIN_IMAGES :][: tiny.VAL_IMAGES]
    labels = torch.from_numpy(stored.astype(np.int64))[:, None]
    order = probability.argsort(1, descending=True)
    top1, top5 = (order[:, :n].eq(labels).any(1).double().mean() for n in (1, 5))
    return tiny.VAL_IMAGES, float(top1), float(top5), float(-probability.gather(1, labels).log().mean())


def test_means_by_hand(base):
    cyc1, collapse, early = (logits(network(base / "out", stage)) for stage in ENDS)
    assert digits(base / "out", "both") == pytest.approx(
        by_hand((collapse.softmax(1) + early.softmax(1)) / 2), rel=1e-12
    )
    assert digits(base / "out", "three") == pytest.approx(
        by_hand(((cyc1 + collapse + early) / 3).softmax(1)), rel=1e-12
    )


def test_weight_average_by_hand(base):
    """The mean of weights, and of each BatchNorm layer's input over the 20 first device batches of `early`, the first that is
    written."""
    one, two = network(base / "out", "early"), network(base / "out", "collapse")
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def look(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        values = inputs[0].double().transpose(0, 1).flatten(1)
        seen.setdefault(layer, []).append((values.mean(1), values.var(1)))

    hooks = [layer.register_forward_hook(look) for layer in one.modules() if isinstance(layer, BatchNorm2d)]
    schedule = load(base / "schedule")
    loader = training_loader(LmdbSource(str(base / "data" / "train_lmdb")), schedule, schedule.stage("early"))
    with torch.no_grad():
        for mine, other in zip(one.parameters(), two.parameters(), strict=True):
            mine.copy_((mine.double() + other.double()) / 2)
        one.train()
        for position in range(0, 5 * 16, 4):
            images = torch.from_numpy(loader.batch(position, 4).images.copy()).permute(0, 3, 1, 2).float()
            one(((images - 73) * 0.0111).to(memory_format=torch.channels_last))
    for hook in hooks:
        hook.remove()
    for layer, moments in seen.items():
        assert len(moments) == 20
        layer.running_mean.copy_(torch.stack([mean for mean, _ in moments]).mean(0))
        layer.running_var.copy_(torch.stack([var for _, var in moments]).mean(0))
    assert len(seen) == len(hooks) > 0
    assert digits(base / "out", "soup") == pytest.approx(by_hand(logits(one.eval()).softmax(1)), rel=1e-5)


def test_a_probability_that_no_number_holds_has_a_loss_all_the_same(base, out):
    """exp(-2000) is 0, and its logarithm would be no number."""
    tested = of(go(base / "schedule", out, "solver.test_transform_param.scale=1000"), EnsembleTested)
    assert [one.name for one in tested] == NAMES and all(1000 < one.loss < 1e9 for one in tested)


def test_a_network_without_batch_norm_needs_no_statistics(base, tmp_path):
    schedule = make_schedule(tmp_path / "schedule", base / "data", SOUP)
    file = schedule / "schedule.prototxt"
    text = re.sub("model .*", 'model { name: "squeezenet1_1" num_classes: 10 channels: 1 }', file.read_text())
    file.write_text(text.replace("param { kind: NORM decay_mult: 0 }", ""))
    events = go(schedule, tmp_path / "out", "cyc1.max_iter=1", "collapse.max_iter=1", "early.max_iter=1")
    (tested,) = of(events, EnsembleTested)
    assert tested.rule == "WEIGHT_AVERAGE" and tested.images == tiny.VAL_IMAGES


# ---- where it is shown


def test_the_run_says_each_and_shows_them_under_its_table(base, out):
    lines = (base / "out.txt").read_text().splitlines()
    said = next(line for line in lines if line.startswith("ensemble both: MEAN_PROBABILITY of 2 stages, top-1 "))
    assert "on 100 images in" in said
    assert any(re.match("both      MEAN_PROBABILITY  early, collapse .*waiting for", line) for line in lines)
    table = lines[-4:]
    assert table[0].split()[:3] == ["ensemble", "members", "rule"] and "against the best" in table[0]
    assert [line.split()[0] for line in table[1:]] == NAMES
    assert f"{100 * result(out, 'soup')['top1']:.2f} %" in table[3]
    written = [file for part in ("snapshots", "results") for file in (out / part).rglob("*.json")]
    before = [file.stat().st_mtime_ns for file in written]
    again = small.run(base / "schedule", out)
    assert again.returncode == 0 and again.stdout.startswith("nothing to do: every stage is done")
    assert again.stdout.splitlines()[-4:] == table and [file.stat().st_mtime_ns for file in written] == before


def test_plan_and_report_know_them(base):
    out = base / "out"
    planned = json.loads(command("plan", base / "schedule", "--out", out, "--json"))["ensembles"]
    assert [(e["state"], e["batch_norm_iter"]) for e in planned] == [("done", None), ("done", None), ("done", 5)]
    rows = list(csv.DictReader(io.StringIO(command("report", out, "--by", "seed", "--format", "csv"))))
    assert [(row["stage"], row["top1_mean"]) for row in rows[-3:]] == [
        (f"ensemble {name}", repr(result(out, name)["top1"])) for name in NAMES
    ]
    found = [json.loads(file.read_text()) for file in out.glob("results/*.json")]
    alone, three = {one["stage"]: one["top1"] for one in found}, result(out, "three")
    members = [alone[stage] for stage in ENDS]
    assert three["best_top1"] == max(members) == alone[three["best"]], "the gain is over those of the table"
    assert three["mean_top1"] == pytest.approx(sum(members) / 3)


# ---- when it is evaluated


def test_two_workers_give_the_digits_of_one(base, out):
    shutil.rmtree(out / "results" / "ensembles")
    done = small.run(base / "schedule", out, nproc=2, code=0)
    assert "stage 1/4" not in done.stdout
    of_its_life = dict.fromkeys(("seconds", "attempt", "serial"))
    for name in NAMES:
        assert {**result(out, name), **of_its_life} == {**result(base / "out", name), **of_its_life}


def test_a_torn_result_is_made_anew(base, out):
    path = out / "results" / "ensembles" / "both.json"
    path.write_bytes(path.read_bytes()[:40])
    path.with_name(".tmp-both.json-00ff00ff").write_bytes(b"{")
    assert [event.name for event in of(go(base / "schedule", out), EnsembleTested)] == ["both"]
    assert digits(out, "both") == digits(base / "out", "both")


@pytest.mark.parametrize("name", ["both", "soup"])
def test_told_to_stop_it_leaves_nothing_and_is_evaluated_anew(base, out, name):
    path = out / "results" / "ensembles" / f"{name}.json"
    path.unlink()
    (stopped,) = of(go(base / "schedule", out, stop=lambda seen: True), Stopped)
    assert (stopped.stage, stopped.iter) == ("early", 3)
    assert stopped.reason == f"asked to stop; ensemble `{name}` is left out" and not path.exists()
    go(base / "schedule", out)
    assert digits(out, name) == digits(base / "out", name)


def test_a_damaged_member_is_set_aside_and_trained_again_first(base, out):
    (out / "results" / "ensembles" / "both.json").unlink()
    path = out / "snapshots" / "early-00000003-a0001" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    events = go(base / "schedule", out)
    said = "snapshot early-00000003-a0001 is damaged and was set"
    assert any(note.text.startswith(said) for note in of(events, Note))
    assert [event.stage for event in of(events, StageStarted)] == ["early"]
    assert [digits(out, name) for name in NAMES] == [digits(base / "out", name) for name in NAMES]
    assert processes.ends(out) == processes.ends(base / "out")


def states(schedule: Path, out: Path) -> list[tuple[str, str]]:
    """Of each ensemble, and why; the stages must all be done."""
    planned = json.loads(command("plan", schedule, "--out", out, "--json"))
    assert {stage["state"] for stage in planned["stages"]} == {"done"}
    return [(ensemble["state"], ensemble["why"]) for ensemble in planned["ensembles"]]


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [('"cyc1", "collapse", "early"', '"cyc1", "early"', "other members"), ("rule: MEAN_LOGIT", "", "another rule")],
)
def test_a_changed_ensemble_is_evaluated_again_and_makes_no_stage_stale(base, tmp_path, before, after, why):
    schedule = make_schedule(tmp_path / "s", base / "data", ENSEMBLES.replace(before, after))
    (both, three, soup) = states(schedule, base / "out")
    assert both[0] == soup[0] == "done" and three[0] == "ready" and three[1].startswith(f"evaluated with {why}")


def test_other_images_at_the_same_path_are_another_evaluation(base, tmp_path):
    shutil.copytree(base / "data", tmp_path / "data")
    schedule = make_schedule(tmp_path / "s", tmp_path / "data")
    assert [state for state, _ in states(schedule, base / "out")] == ["done"] * 3
    tiny.make_data(tmp_path / "other", first=300)
    shutil.rmtree(tmp_path / "data" / "val_lmdb")
    (tmp_path / "other" / "val_lmdb").rename(tmp_path / "data" / "val_lmdb")
    assert [state for state, _ in states(schedule, base / "out")] == ["ready"] * 3
