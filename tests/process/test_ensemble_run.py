"""Ensembles in `stagerun run`: their numbers against a computation by hand, when they are evaluated again, stops and damage."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import small
import tiny
import torch
from click.testing import CliRunner
from facade import (
    EnsembleTested,
    LmdbSource,
    Note,
    Schedule,
    StageStarted,
    Stopped,
    load_network,
    open_snapshot,
    training_loader,
)
from test_run_trees import go, of
from torch import Tensor, nn

from stagerun.cli import main
from stagerun.language import load
from stagerun.models import BatchNorm2d

CPU = torch.device("cpu")
# So that all stages look at the same pictures: `collapse` trains on images that are not cut.
SEEN = "solver {\n  test_transform_param { crop_size: 28 mean_value: 73 scale: 0.0111 }"
ENSEMBLES = """
ensemble { name: "both" members: ["early", "collapse"] }
ensemble { name: "three" members: ["cyc1", "collapse", "early"] rule: MEAN_LOGIT }
ensemble { name: "soup" members: ["early", "collapse"] rule: WEIGHT_AVERAGE batch_norm_iter: 5 }
"""
NAMES = ("both", "three", "soup")
CYC1 = small.STAGES["cyc1"] + " precision: FP64"  # the members of "three" compute each in its own


def make_schedule(folder: Path, data: Path, ensembles: str = ENSEMBLES, **stages: str) -> Path:
    small.make_schedule(folder, data, **stages)
    file = folder / "schedule.prototxt"
    file.write_text(file.read_text().replace("solver {", SEEN, 1) + ensembles)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/, schedule/, its output out/, and what was printed in out.txt."""
    base = tmp_path_factory.mktemp("ensembles")
    tiny.make_data(base / "data")
    make_schedule(base / "schedule", base / "data", cyc1=CYC1)
    done = small.run(base / "schedule", base / "out", "--log", "tensorboard")
    assert done.returncode == 0, done.stdout + done.stderr
    (base / "out.txt").write_text(done.stdout)
    return base


@pytest.fixture
def out(base: Path, tmp_path: Path) -> Path:
    """A copy of what was trained and evaluated."""
    shutil.copytree(base / "out", tmp_path / "out")
    return tmp_path / "out"


def result(out: Path, name: str) -> dict[str, Any]:
    found = json.loads((out / "results" / "ensembles" / f"{name}.json").read_text())
    assert isinstance(found, dict)
    return found


def digits(out: Path, name: str) -> tuple[float, ...]:
    found = result(out, name)
    return found["images"], found["top1"], found["top5"], found["loss"]


def times(out: Path) -> dict[str, int]:
    """When each snapshot and each ensemble's result was written."""
    files = [*out.glob("snapshots/*/MANIFEST.json"), *out.glob("results/ensembles/*.json")]
    return {f.parent.name if f.name == "MANIFEST.json" else f.stem: f.stat().st_mtime_ns for f in files}


# ---- the numbers


def network(out: Path, stage: str) -> nn.Module:
    (folder,) = out.glob(f"snapshots/{stage}-*{small_ends(stage):08d}-a*")
    return load_network(open_snapshot(folder), CPU, ema=False)


def small_ends(stage: str) -> int:
    return {"cyc1": 5, "collapse": 3, "early": 3}[stage]


def validation() -> tuple[Tensor, Tensor]:
    stored = np.load(tiny.STORED)
    part = slice(tiny.TRAIN_IMAGES, tiny.TRAIN_IMAGES + tiny.VAL_IMAGES)
    images = torch.from_numpy(stored["images"][part].reshape(-1, 1, 28, 28))
    return images, torch.from_numpy(stored["labels"][part].astype(np.int64))


def logits(model: nn.Module) -> Tensor:
    """float64, in passes of as many images as the schedule's, each network in its own precision."""
    images = (validation()[0].to(next(model.parameters()).dtype) - 73) * 0.0111
    with torch.no_grad():
        parts = [model(x.to(memory_format=torch.channels_last)) for x in images.split(50)]
    return torch.cat(parts).double()


def by_hand(probability: Tensor) -> tuple[float, ...]:
    labels = validation()[1]
    order = probability.argsort(1, descending=True)
    top1, top5 = (order[:, :n].eq(labels[:, None]).any(1).double().mean() for n in (1, 5))
    loss = -probability.gather(1, labels[:, None]).log().mean()
    return tiny.VAL_IMAGES, float(top1), float(top5), float(loss)


def test_mean_probability_by_hand(base: Path) -> None:
    members = [logits(network(base / "out", stage)).softmax(1) for stage in ("collapse", "early")]
    assert digits(base / "out", "both") == pytest.approx(by_hand((members[0] + members[1]) / 2), rel=1e-12)


def test_mean_logit_by_hand(base: Path) -> None:
    members = [logits(network(base / "out", stage)) for stage in ("cyc1", "collapse", "early")]
    assert digits(base / "out", "three") == pytest.approx(by_hand((sum(members) / 3).softmax(1)), rel=1e-12)  # type: ignore[attr-defined]


def test_weight_average_by_hand(base: Path) -> None:
    """The mean of weights, and of each BatchNorm layer's input over the 20 first device batches of `early`, the first that is
    written."""
    one, two = network(base / "out", "early"), network(base / "out", "collapse")
    with torch.no_grad():
        for mine, other in zip(one.parameters(), two.parameters(), strict=True):
            mine.copy_((mine.double() + other.double()) / 2)
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def look(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        values = inputs[0].double().transpose(0, 1).flatten(1)
        seen.setdefault(layer, []).append((values.mean(1), values.var(1)))

    layers = [m for m in one.modules() if isinstance(m, BatchNorm2d)]
    hooks = [layer.register_forward_hook(look) for layer in layers]
    one.train()
    with torch.no_grad():
        for images in training_images(base, load(base / "schedule")):
            one(images)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        assert len(seen[layer]) == 20
        layer.running_mean.copy_(torch.stack([mean for mean, _ in seen[layer]]).mean(0))
        layer.running_var.copy_(torch.stack([var for _, var in seen[layer]]).mean(0))
    one.eval()
    assert digits(base / "out", "soup") == pytest.approx(by_hand(logits(one).softmax(1)), rel=1e-5)


def training_images(base: Path, schedule: Schedule) -> Iterator[Tensor]:
    stage = schedule.stage("early")
    loader = training_loader(LmdbSource(str(base / "data" / "train_lmdb")), schedule, stage)
    for position in range(0, 5 * 16, 4):
        images = torch.from_numpy(loader.batch(position, 4).images.copy()).permute(0, 3, 1, 2).float()
        yield ((images - 73) * 0.0111).to(memory_format=torch.channels_last)


def test_the_gain_is_over_the_members_as_the_table_has_them(base: Path) -> None:
    alone = {
        json.loads(f.read_text())["stage"]: json.loads(f.read_text())["top1"] for f in base.glob("out/results/*.json")
    }
    found = result(base / "out", "three")
    members = [alone[stage] for stage in ("cyc1", "collapse", "early")]
    assert found["best_top1"] == max(members) and alone[found["best"]] == max(members)
    assert found["mean_top1"] == pytest.approx(sum(members) / 3)


# ---- where it is shown


def test_the_run_says_each_and_shows_them_under_its_table(base: Path) -> None:
    lines = (base / "out.txt").read_text().splitlines()
    said = next(line for line in lines if line.startswith("ensemble both: MEAN_PROBABILITY of 2 stages, top-1 "))
    assert "on 100 images in" in said
    assert any(
        line.startswith("both      MEAN_PROBABILITY  early, collapse ") and "waiting for" in line for line in lines
    )
    table = lines[-4:]
    assert table[0].split()[:3] == ["ensemble", "members", "rule"] and "against the best" in table[0]
    assert [line.split()[0] for line in table[1:]] == list(NAMES)
    assert f"{100 * result(base / 'out', 'soup')['top1']:.2f} %" in table[3]


def test_status_plan_and_report_know_them(base: Path) -> None:
    def said(*words: object) -> str:
        done = CliRunner().invoke(main, [str(word) for word in words], prog_name="stagerun")
        assert done.exit_code == 0, done.output
        return done.stdout

    out, both = base / "out", result(base / "out", "both")
    for target in ((base / "schedule", "--out", out), (out,)):
        status = json.loads(said("status", *target, "--json"))["ensembles"]
        assert [e["name"] for e in status] == list(NAMES) and status[0]["top1"] == both["top1"]
        assert status[0]["gain"] == both["top1"] - both["best_top1"]
    assert "both      early, collapse        MEAN_PROBABILITY" in said("status", out)
    planned = json.loads(said("plan", base / "schedule", "--out", out, "--json"))["ensembles"]
    assert [(e["state"], e["batch_norm_iter"]) for e in planned] == [("done", None), ("done", None), ("done", 5)]
    rows = said("report", out, "--by", "ensemble", "--format", "csv").splitlines()
    assert len(rows) == 1 + 3 + 4 + 3
    assert rows[3].split(",")[:5] == ["out", "both", "", "MEAN_PROBABILITY", repr(both["top1"])]
    assert rows[1].split(",")[:3] == ["out", "both", "early"]
    text = said("report", out)
    assert "## Ensembles" in text and "Ensemble soup: top-1 " in text and " its best member" in text
    picture = base / "run.svg"
    said("report", out, "--plot", picture)
    assert ">ensembles</text>" in picture.read_text()


# ---- when it is evaluated


def test_a_second_run_does_nothing(base: Path, out: Path) -> None:
    before = times(out)
    done = small.run(base / "schedule", out)
    assert done.returncode == 0 and done.stdout.startswith("nothing to do: every stage is done")
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == list(NAMES)
    assert times(out) == before


def test_two_workers_give_the_digits_of_one(base: Path, out: Path) -> None:
    before = {name: result(out, name) for name in NAMES}
    shutil.rmtree(out / "results" / "ensembles")
    done = small.run(base / "schedule", out, nproc=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stage 1/4" not in done.stdout
    for name in NAMES:
        now = result(out, name)
        of_its_life = ("seconds", "attempt", "serial")
        assert {k: v for k, v in now.items() if k not in of_its_life} == {
            k: v for k, v in before[name].items() if k not in of_its_life
        }


def test_a_torn_result_is_made_go(base: Path, out: Path) -> None:
    path = out / "results" / "ensembles" / "both.json"
    expected = digits(out, "both")
    path.write_bytes(path.read_bytes()[:40])
    path.with_name(".tmp-both.json-00ff00ff").write_bytes(b"{")
    assert [event.name for event in of(go(base / "schedule", out), EnsembleTested)] == ["both"]
    assert digits(out, "both") == expected


@pytest.mark.parametrize("name", ["both", "soup"])
def test_told_to_stop_it_leaves_nothing_and_is_evaluated_anew(base: Path, out: Path, name: str) -> None:
    path = out / "results" / "ensembles" / f"{name}.json"
    expected = digits(out, name)
    path.unlink()
    (stopped,) = of(go(base / "schedule", out, stop=lambda seen: True), Stopped)
    assert (stopped.stage, stopped.iter) == ("early", 3)
    assert stopped.reason == f"asked to stop; ensemble `{name}` is left out" and not path.exists()
    go(base / "schedule", out)
    assert digits(out, name) == expected


def test_a_damaged_member_is_set_aside_and_trained_again_first(base: Path, out: Path) -> None:
    expected = {name: digits(out, name) for name in NAMES}
    (out / "results" / "ensembles" / "both.json").unlink()
    path = out / "snapshots" / "early-00000003-a0001" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    events = go(base / "schedule", out)
    assert any(
        note.text.startswith("snapshot early-00000003-a0001 is damaged and was set") for note in of(events, Note)
    )
    assert [event.stage for event in of(events, StageStarted)] == ["early"]
    assert {name: digits(out, name) for name in NAMES} == expected
    assert processes.ends(out) == processes.ends(base / "out")


def states(schedule: Path, out: Path) -> list[tuple[str, str]]:
    """Of each ensemble, and why; the stages must all be done."""
    done = CliRunner().invoke(main, ["plan", str(schedule), "--out", str(out), "--json"])
    planned = json.loads(done.stdout)
    assert {stage["state"] for stage in planned["stages"]} == {"done"}
    return [(ensemble["state"], ensemble["why"]) for ensemble in planned["ensembles"]]


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ('"three" members: ["cyc1", "collapse", "early"]', '"three" members: ["cyc1", "early"]', "other members"),
        ("rule: MEAN_LOGIT", "", "another rule"),
    ],
)
def test_a_changed_ensemble_is_evaluated_again_and_makes_no_stage_stale(
    base: Path, tmp_path: Path, before: str, after: str, why: str
) -> None:
    schedule = make_schedule(tmp_path / "s", base / "data", ENSEMBLES.replace(before, after), cyc1=CYC1)
    (both, three, soup) = states(schedule, base / "out")
    assert both[0] == soup[0] == "done" and three[0] == "ready" and three[1].startswith(f"evaluated with {why}")


def test_other_images_at_the_same_path_are_another_evaluation(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "data", tmp_path / "data")
    schedule = make_schedule(tmp_path / "s", tmp_path / "data", cyc1=CYC1)
    assert [state for state, _ in states(schedule, base / "out")] == ["done"] * 3
    tiny.make_data(tmp_path / "other", first=300)
    shutil.rmtree(tmp_path / "data" / "val_lmdb")
    (tmp_path / "other" / "val_lmdb").rename(tmp_path / "data" / "val_lmdb")
    assert [state for state, _ in states(schedule, base / "out")] == ["ready"] * 3


LOUD = """from torch import nn

class Loud(nn.Module):
    def __init__(self, num_classes, channels):
        super().__init__()
        self.fc = nn.Linear(784, num_classes)

    def forward(self, x):
        return 1e4 * self.fc(x.flatten(1))
"""


def test_a_probability_that_no_number_holds_has_a_loss_all_the_same(base: Path, tmp_path: Path) -> None:
    """exp(-2000) is 0, and its logarithm would be no number."""
    still = 'base_lr: 0 lr_policy: "fixed" max_iter: 1'
    schedule = make_schedule(
        tmp_path / "s", base / "data", ENSEMBLES.splitlines()[1], **dict.fromkeys(small.STAGES, still)
    )
    file = schedule / "schedule.prototxt"
    lines = [
        'model { name: "loud.py:Loud" num_classes: 10 channels: 1 }' if line.startswith("model {") else line
        for line in file.read_text().splitlines()
    ]
    file.write_text("\n".join(lines).replace("param { kind: NORM decay_mult: 0 }", ""))
    (schedule / "loud.py").write_text(LOUD)
    (tested,) = of(go(schedule, tmp_path / "out"), EnsembleTested)
    assert 1000 < tested.loss < 1e6


def test_a_network_without_batch_norm_needs_no_statistics(base: Path, tmp_path: Path) -> None:
    schedule = make_schedule(tmp_path / "schedule", base / "data", ENSEMBLES.splitlines()[-1])
    file = schedule / "schedule.prototxt"
    text = file.read_text()
    start = text.index("model {")
    text = text[:start] + 'model { name: "squeezenet1_1" num_classes: 10 channels: 1 }\n' + text[text.index("data {") :]
    file.write_text(text.replace("param { kind: NORM decay_mult: 0 }", ""))
    events = go(schedule, tmp_path / "out", "cyc1.max_iter=1", "collapse.max_iter=1", "early.max_iter=1")
    (tested,) = of(events, EnsembleTested)
    assert tested.rule == "WEIGHT_AVERAGE" and tested.images == tiny.VAL_IMAGES
