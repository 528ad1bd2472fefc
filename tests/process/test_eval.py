"""`stagerun eval`: the numbers of `run`, averages over views, and which snapshots are meant."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import stored_help
import tiny
import torch
from facade import load_network, open_snapshot

from stagerun import store
from stagerun.language import load

CROPPED = "transform_param { crop_size: 24 mean_value: 73 scale: 0.0111 }"
MODEL = 'name: "resnet_small" num_classes: 10 channels: 1'


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """data/, schedule/, and its output out/, with averaged weights of one stage."""
    base = tmp_path_factory.mktemp("eval")
    tiny.make_data(base / "data")
    averaged = small.STAGES["early"] + " ema_decay: 0.5"
    done = small.run(small.make_schedule(base / "schedule", base / "data", early=averaged), base / "out", code=0)
    assert "early 3: EMA test" in done.stdout and "EMA top-1" in done.stdout
    return base


def evaluated(*arguments: object) -> list[dict[str, Any]]:
    done = stored_help.stagerun("eval", *arguments, "--json", "--threads", 1)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["evaluations"]
    assert isinstance(found, list)
    return found


def refused(*arguments: object) -> tuple[int, str]:
    done = stored_help.stagerun("eval", *arguments)
    assert done.exit_code != 0 and done.stdout == "" and "hint:" in done.stderr
    return done.exit_code, done.stderr


# ---- the numbers of `run`


def test_every_stage_has_the_numbers_that_run_gave_it(base):
    out = base / "out"
    found = evaluated(base / "schedule", "--out", out)
    assert [f["stage"] for f in found] == list(small.STAGES)
    for row in found:
        result = json.loads((out / "results" / f"{row['snapshot']}.json").read_text())
        assert (row["top1"], row["top5"], row["loss"]) == (result["top1"], result["top5"], result["test_loss"])
        assert row["images"] == tiny.VAL_IMAGES
    (averaged,) = evaluated(base / "schedule", "--out", out, "--stage", "early", "--ema")
    assert (averaged["top1"], averaged["loss"]) == (result["ema_top1"], result["ema_test_loss"])
    assert averaged["loss"] != found[-1]["loss"]


def test_the_schedule_says_which_images_and_which_transform_now(base):
    arguments = [base / "schedule", "--out", base / "out", "--stage", "init"]
    train = base / "data" / "train_lmdb"
    moved = evaluated(*arguments, "--set", f"data.val.source={train}", "--set", f"data.val.images={tiny.TRAIN_IMAGES}")
    assert moved[0]["images"] == tiny.TRAIN_IMAGES and moved[0]["data"] == str(train)
    other = evaluated(*arguments, "--set", "init.test_transform_param={ crop_size: 24 mean_value: 73 scale: 0.0111 }")
    assert other[0]["loss"] != evaluated(*arguments)[0]["loss"]


def test_a_snapshot_needs_nothing_but_its_directory_and_images_and_the_batch_is_free(base, tmp_path):
    name, train = "cyc1-00000005-a0001", base / "data" / "train_lmdb"
    copy = shutil.copytree(base / "out" / "snapshots" / name, tmp_path / name)
    (tmp_path / "best").symlink_to(copy)
    (whole,) = evaluated(name, "--out", base / "out", "--data", train)
    (cut,) = evaluated(tmp_path / "best", "--data", train, "--device-batch", 7)
    assert whole["images"] == cut["images"] == tiny.TRAIN_IMAGES
    assert (whole["top1"], whole["top5"]) == (cut["top1"], cut["top5"])
    assert whole["loss"] == pytest.approx(cut["loss"], rel=1e-6)


def test_what_is_half_trained_is_left_out(base, tmp_path):
    schedule, out = tmp_path / "schedule", tmp_path / "out"
    stored_help.make_schedule(schedule, MODEL, CROPPED, base / "data" / "val_lmdb", tiny.VAL_IMAGES)
    with open(schedule / "schedule.prototxt", "a") as file:
        file.write('stage { name: "other" from: "" solver_param { } }')
    whole = load(schedule)
    stored_help.make_snapshot(out, whole)
    inside = stored_help.make_snapshot(out, whole, number=1, iter=2)
    for arguments in ([schedule, "--out", out], [out]):
        done = stored_help.stagerun("eval", *arguments)
        assert done.exit_code == 0 and done.stdout.startswith("only-00000003-a0001: ") and done.stdout.count("\n") == 1
        assert "note: stage `other` is half trained" in done.stderr and "and is left out" in done.stderr
    code, text = refused(out, "--stage", "other")
    assert code == 64 and "stage `other` is half trained" in text and "stagerun status" in text
    assert evaluated(inside)[0]["images"] == tiny.VAL_IMAGES


# ---- views


@pytest.fixture(scope="module")
def cropped(tmp_path_factory):
    """A snapshot, in precision FP64, whose evaluation crops 24 x 24 from images of 31 x 28."""
    base = tmp_path_factory.mktemp("views")
    images, labels = stored_help.pictures(23, 31, 28, 1, 10)
    data = stored_help.make_lmdb(base / "data", images, labels)
    schedule = stored_help.make_schedule(base / "schedule", MODEL, CROPPED + " precision: FP64", data, 23)
    return stored_help.make_snapshot(base / "out", schedule, seed=5, ema=6)


def expected(
    folder: Path, views: list[np.ndarray], labels: np.ndarray, ema: bool = False
) -> tuple[float, float, float]:
    """Top-1, top-5 and loss of the mean softmax over `views`, each uint8 [N, 24, 24, 1], in numpy."""
    net = load_network(open_snapshot(folder), torch.device("cpu"), ema)
    mean = np.zeros((len(labels), 10))
    for view in views:
        x = (torch.from_numpy(view.copy()).permute(0, 3, 1, 2).double() - 73) * 0.0111
        with torch.no_grad():
            logits = net(x).numpy()
        e = np.exp(logits - logits.max(axis=1, keepdims=True))
        mean += e / e.sum(axis=1, keepdims=True) / len(views)
    order = np.argsort(-mean, axis=1)[:, :5]
    right = order == labels[:, None]
    loss = -np.log(mean[np.arange(len(labels)), labels]).mean()
    return float(right[:, 0].mean()), float(right.any(axis=1).mean()), float(loss)


def corners(images: np.ndarray) -> list[np.ndarray]:
    top, bottom, left, right = slice(0, 24), slice(7, 31), slice(0, 24), slice(4, 28)
    centre = images[:, 3:27, 2:26]
    return [images[:, top, left], images[:, top, right], images[:, bottom, left], images[:, bottom, right], centre]


@pytest.mark.parametrize("views, ema", [("one", False), ("flip", True), ("10crop", False)])
def test_the_softmax_outputs_of_the_views_are_averaged(cropped, views, ema):
    images, labels = stored_help.pictures(23, 31, 28, 1, 10)
    parts = corners(images) if views == "10crop" else [images[:, 3:27, 2:26]]
    seen = parts if views == "one" else [v for part in parts for v in (part, part[:, :, ::-1])]
    (found,) = evaluated(cropped, "--views", views, *["--ema"] * ema)
    top1, top5, loss = expected(cropped, seen, labels, ema)
    assert (found["top1"], found["top5"]) == (pytest.approx(top1), pytest.approx(top5))
    assert found["loss"] == pytest.approx(loss, rel=1e-12)


def test_rectangles_are_those_of_the_recipe_with_any_device_batch(tmp_path):
    """Images are cropped as batches of test_batch_size (5) have it, however many go through the network at a time."""
    data, made = tmp_path / "data", []
    for n, (height, width) in enumerate([(30, 60), (60, 30), (40, 44), (33, 50), (52, 31), (30, 30)]):
        made += records(*stored_help.pictures(2 + n % 2, height, width, 1, 10))
    stored_help.write_lmdb(str(data), made)
    assert small.stagerun("data", "verify", "--index", data).returncode == 0
    solver = (
        f"{CROPPED} precision: FP64 test_transform_param {{ crop_size: 24 random_resize_param {{ min_size: 28 }} "
        "mean_value: 73 scale: 0.0111 rectangular: true }"
    )
    folder = tmp_path / "schedule"
    schedule = stored_help.make_schedule(folder, MODEL, solver, data, len(made))
    snapshot = stored_help.make_snapshot(tmp_path / "out", schedule, seed=5)
    (whole,) = evaluated(snapshot)
    assert whole["images"] == len(made) == 15
    for size in (1, 2, 3, 5):
        (cut,) = evaluated(snapshot, "--device-batch", size)
        assert (cut["images"], cut["top1"], cut["top5"]) == (15, whole["top1"], whole["top5"])
        assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    (other,) = evaluated(folder, "--out", tmp_path / "out", "--set", "only.test_batch_size=3")
    assert other["loss"] != pytest.approx(whole["loss"], rel=1e-6), "other rectangles: another result"
    code, text = refused(snapshot, "--device-batch", 6)
    assert code == 64 and "--device-batch 6: the evaluation is `rectangular`" in text and "at most 5" in text


def records(images: np.ndarray, labels: np.ndarray) -> list[bytes]:
    caffe_pb2 = stored_help.caffe_pb2
    return [
        caffe_pb2.Datum(
            channels=1, height=image.shape[0], width=image.shape[1], data=image.tobytes(), label=int(label)
        ).SerializeToString()
        for image, label in zip(images, labels, strict=True)
    ]


# ---- mistakes


def test_one_damaged_end_does_not_cost_the_numbers_of_the_others(base, tmp_path):
    out = shutil.copytree(base / "out", tmp_path / "out")
    path = out / "snapshots" / "cyc1-00000005-a0001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    others = ["init-00000006-a0001", "collapse-00000003-a0001", "early-00000003-a0001"]
    done = stored_help.stagerun("eval", base / "schedule", "--out", out, "--threads", 1, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 78 and [row["snapshot"] for row in found["evaluations"]] == others
    assert [row["snapshot"] for row in found["failed"]] == ["cyc1-00000005-a0001"]
    assert "is damaged" in found["failed"][0]["error"] and "is damaged" in done.stderr
    done = stored_help.stagerun("eval", out, "--data", tmp_path)
    assert done.exit_code == 65 and done.stdout == "" and done.stderr.count("with --data") == 1
    code, text = refused(path.parent)
    assert code == 78 and "snapshot cyc1-00000005-a0001 is damaged: model.safetensors is not as it was written" in text
    (path.parent / "MANIFEST.json").unlink()
    assert refused(path.parent)[0] == 78
    store.set_aside(store.LocalDisk(), out, "init-00000006-a0001")
    code, text = refused(out / "snapshots" / ".bad-init-00000006-a0001")
    assert code == 64 and "neither a schedule's folder" in text


def test_a_recipe_of_another_version_is_refused_with_its_line(tmp_path):
    schedule = stored_help.make_schedule(tmp_path / "schedule", MODEL, CROPPED)
    text = stored_help.canonical(schedule).replace("num_classes: 10", "num_classes: 10\n  novelty: 3")
    code, said = refused(stored_help.make_snapshot(tmp_path / "out", schedule, text=text))
    assert code == 78 and "the recipe in snapshot only-00000003-a0001 can't be read" in said
    assert "Model has no field `novelty`" in said and "stagerun 0.0.9" in said


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["{out}", "--stage", "cyk1"], 64, "did you mean `cyc1`?"),
        (["{schedule}", "--out", "{out}", "--stage", "nothing"], 64, "no stage or ensemble is named `nothing`"),
        (["{schedule}", "--out", "{base}/none"], 64, "no stage has ended in"),
        (["{snapshot}", "--stage", "cyc1"], 64, "--set and --stage belong to a schedule's folder"),
        (["cyc1-00000005-a0001"], 64, "no such folder"),
        (["cyc1-00000005-a0007", "--out", "{out}"], 64, "did you mean `cyc1-00000005-a0001`?"),
        (["cyc1-5", "--out", "{out}"], 64, "did you mean `cyc1`?"),
        (["cyc1-5", "--out", "{base}"], 64, "named `cyc1-5`"),
        (["{base}"], 64, "neither a schedule's folder"),
        (["{snapshot}", "--ema"], 64, "no averaged weights"),
        (["{snapshot}", "--data", "{base}"], 65, "with --data"),
        (["{snapshot}", "--device-batch", "0"], 64, "'--device-batch': 0 is not in the range x>=1"),
        (["{snapshot}", "--views", "3crop"], 64, ""),
    ],
)
def test_mistakes_are_told(base, arguments, code, message):
    snapshot = base / "out" / "snapshots" / "cyc1-00000005-a0001"
    names = {"base": base, "out": base / "out", "schedule": base / "schedule", "snapshot": snapshot}
    done = stored_help.stagerun("eval", *(a.format(**names) for a in arguments))
    assert done.exit_code == code and message in done.stderr and done.stdout == ""


def test_images_that_are_gone_or_others(base, tmp_path):
    images, labels = stored_help.pictures(6, 28, 28, 1, 10)
    data = stored_help.make_lmdb(tmp_path / "data", images, labels)
    with_five = stored_help.make_schedule(tmp_path / "a", MODEL, CROPPED, data, 5)
    code, text = refused(stored_help.make_snapshot(tmp_path / "five", with_five))
    assert code == 65 and "holds 6 records, but the recipe says images: 5" in text and f"--data {data}" in text
    shutil.rmtree(data)
    code, text = refused(tmp_path / "five" / "snapshots" / "only-00000003-a0001")
    assert code == 65 and "no such folder" in text and "--data" in text
    none = stored_help.make_snapshot(tmp_path / "none", stored_help.make_schedule(tmp_path / "b", MODEL, CROPPED))
    code, text = refused(none)
    assert code == 64 and "no validation images" in text and "--data" in text
    assert not math.isnan(evaluated(none, "--data", base / "data" / "val_lmdb")[0]["loss"])
