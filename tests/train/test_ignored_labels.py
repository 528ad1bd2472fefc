"""`ignore_label` of a net of Caffe's, from records to weights and scores, against a restatement in numpy; and what isn't ignored."""

import json
from collections.abc import Sequence
from pathlib import Path

import made_images
import numpy as np
import pytest
from caffe_layers import softmax_loss
from contract import stagerun
from facade import (
    DataError,
    ListRecords,
    LmdbSource,
    Transform,
    caffe_pb2,
    layers,
    pictures,
    preflight,
    training_loader,
)
from nan_help import lives
from safetensors.numpy import load_file
from stored_help import make_lmdb

from stagerun.language import load

# A linear net of Caffe's whose loss and Accuracy ignore a label that is no class, with a few images.
IGNORED, CLASSES, SIDE, IMAGES = 255, 3, 2, 10
LABELS = [0, 1, IGNORED, 2, IGNORED, IGNORED, IGNORED, 1, 0, 2]  # of the second three one counts, of the third none
BATCH, PASSES, UPDATES, RATE = 3, 2, 4, 0.25
NET = """
layer {{
  name: "data" type: "Data" top: "data" top: "label" transform_param {{ scale: 0.00390625 }}
  data_param {{ source: "images" batch_size: 3 backend: LMDB }}
}}
layer {{
  name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param {{ num_output: 3 }}
}}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" loss_param {{ {loss} }} }}
layer {{
  name: "top1" type: "Accuracy" top: "top1" bottom: "ip" bottom: "label" accuracy_param {{ {accuracy} }} include {{ phase: TEST }}
}}
"""
SCHEDULE = """
solver {{
  net: "net.prototxt" base_lr: 0.25 lr_policy: "fixed" momentum: 0 weight_decay: 0 batch_size: 6 max_iter: 4 snapshot: 4
  precision: FP64 {more}
}}
stage {{ name: "main" solver_param {{ test_interval: 4 }} }}
"""
IGNORE = f"ignore_label: {IGNORED}"


def written(
    folder: Path, loss: str = IGNORE, accuracy: str = IGNORE, more: str = "", labels: Sequence[int] = LABELS
) -> Path:
    folder.mkdir(exist_ok=True)
    pixels = np.random.default_rng(1).integers(0, 256, (IMAGES, SIDE, SIDE, 1), dtype=np.uint8)
    make_lmdb(folder / "images", pixels, labels)
    (folder / "net.prototxt").write_text(NET.format(loss=loss, accuracy=accuracy))
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(more=more))
    return folder


def pixels(folder: Path) -> np.ndarray:
    records = LmdbSource(str(folder / "images"))
    data = [caffe_pb2.Datum.FromString(bytes(records.get(i)[1])).data for i in range(IMAGES)]
    return np.stack([np.frombuffer(one, np.uint8) for one in data]) / 256


def trained(folder: Path, normalization: str) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias after the updates, in numpy: the mean of the device batches' gradients, each by its own normaliser."""
    loss = layers.SoftmaxWithLoss(ignore_label=IGNORED, normalization=normalization)
    x, labels = pixels(folder), np.array(LABELS)
    weight, bias = np.zeros((CLASSES, SIDE * SIDE)), np.zeros(CLASSES)
    for update in range(UPDATES):
        d_weight, d_bias = np.zeros_like(weight), np.zeros_like(bias)
        for one in range(PASSES):
            batch = [(update * PASSES * BATCH + one * BATCH + n) % IMAGES for n in range(BATCH)]
            _, d = softmax_loss(loss, x[batch] @ weight.T + bias, labels[batch])
            d_weight += d.T @ x[batch] / PASSES
            d_bias += d.sum(0) / PASSES
        weight, bias = weight - RATE * d_weight, bias - RATE * d_bias
    return weight, bias


def scores(folder: Path, weight: np.ndarray, bias: np.ndarray, normalization: str) -> tuple[float, float]:
    """(top-1, loss) over all images."""
    logits, labels = pixels(folder) @ weight.T + bias, np.array(LABELS)
    kept = labels != IGNORED
    logits = logits[kept]
    each = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), labels[kept]]
    return (logits.argmax(1) == labels[kept]).mean(), each.sum() / (kept.sum() if normalization == "VALID" else IMAGES)


@pytest.mark.parametrize(
    ("normalization", "workers"),
    [("VALID", 1), ("VALID", 2), ("FULL", 1), ("BATCH_SIZE", 1)],
)
def test_what_is_ignored_counts_for_nothing_in_weights_and_scores(normalization, workers, tmp_path):
    folder = written(tmp_path / "s", loss=f"{IGNORE} normalization: {normalization}")
    lives(folder, tmp_path / "out", workers, "determinism=ELASTIC")
    (snapshot,) = (tmp_path / "out" / "snapshots").glob("main-*")
    found, (weight, bias) = load_file(snapshot / "model.safetensors"), trained(folder, normalization)
    np.testing.assert_allclose(found["ip.weight"], weight, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found["ip.bias"], bias, rtol=0, atol=1e-13)

    (folder / "net.prototxt").unlink()  # the snapshot holds it
    done = stagerun(["eval", snapshot, "--json", "--per-class"], tmp_path)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["evaluations"]
    top1, loss = scores(folder, weight, bias, normalization)
    assert (row["images"], row["top1"]) == (len(LABELS) - LABELS.count(IGNORED), top1)
    assert row["loss"] == pytest.approx(loss, abs=1e-12)
    assert sum(one["images"] for one in row["classes"]) == row["images"]
    result = json.loads((tmp_path / "out" / "results" / f"{snapshot.name}.json").read_text())
    assert result["top1"] == top1 and result["test_loss"] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"loss": "ignore_label: 9"}, "the label is 255, but num_classes is 3"),
        ({"accuracy": ""}, "the label is 255, but num_classes is 3"),  # of an evaluation alone
        ({"more": "loss { type: SOFTMAX }"}, "the label is 255, but num_classes is 3"),
        ({"labels": [*LABELS[:-1], 254]}, "the label is 254, but num_classes is 3"),
        ({"labels": [-1, *LABELS[1:]]}, "the label is -1, below 0, or the Datum has several labels, or none"),
    ],
)
def test_any_other_label_is_a_mistake(texts, found, tmp_path):
    with pytest.raises(DataError, match=found):
        preflight(load(written(tmp_path / "s", **texts)))


def test_minus_one_may_be_ignored(tmp_path):
    labels = [-1 if label == IGNORED else label for label in LABELS]
    preflight(load(written(tmp_path / "s", "ignore_label: -1", "ignore_label: -1", labels=labels)))


def test_an_ignored_image_is_of_no_class_that_is_drawn(tmp_path):
    folder = written(tmp_path / "s", more="sampling: BALANCED")
    (folder / "schedule.prototxt").write_text("data { shuffle: true }" + (folder / "schedule.prototxt").read_text())
    assert stagerun(["data", "verify", "--index", "images"], folder).exit_code == 0
    schedule = load(folder)
    drawn = training_loader(LmdbSource(str(folder / "images")), schedule, schedule.stages[0]).batch(0, 300)
    assert sorted(set(drawn.labels.tolist())) == list(range(CLASSES))


def test_what_one_stage_ignores_another_refuses_in_memory_too():
    pixels = np.zeros((4, SIDE, SIDE), np.uint8)
    values = [
        caffe_pb2.Datum(channels=1, height=SIDE, width=SIDE, data=one.tobytes(), label=label).SerializeToString()
        for one, label in zip(pixels, [0, IGNORED, 2, -1], strict=True)
    ]
    records, memory = ListRecords(values, "images"), pictures.Decoded(4, SIDE, SIDE, 1)

    def label(i: int, **ignored: int) -> int:
        settings = {"channels": 1, "num_classes": CLASSES, "memory": memory, **ignored}
        return int(made_images.loader(records, Transform(), **settings).batch(i, 1).labels[0])

    assert label(1, ignored=IGNORED) == IGNORED and label(3, ignored=-1) == -1
    assert memory.has(1) and memory.has(3)
    assert label(1, ignored=IGNORED) == IGNORED
    with pytest.raises(DataError, match=f"^images: record `.*`: the label is {IGNORED}, but num_classes is 3"):
        label(1)
    with pytest.raises(DataError, match="the label is -1, below 0"):
        label(3)
