"""`eval --per-class` and `predict`: what a network answers, image by image."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import stored_help
from facade import load_network, open_snapshot
from made_images import raw
from PIL import Image

from stagerun.language import load

MODEL = 'name: "resnet_small" num_classes: 10 channels: 1'
CROPPED = "transform_param { crop_size: 24 mean_value: 73 scale: 0.0111 }"
NAMES = [f"kind {n}" for n in range(10)]


def said(*arguments: object) -> dict:
    done = stored_help.stagerun(*arguments, "--json", "--threads", 1)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """classes/: 23 grey PNGs of 31 x 28 in class folders, and lmdb/, imported from them; a snapshot in out/snapshots."""
    base = tmp_path_factory.mktemp("predict")
    images, labels = stored_help.pictures(23, 31, 28, 1, 10)
    labels[:10] = np.arange(10)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = base / "classes" / NAMES[label] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), image)
    done = stored_help.stagerun("data", "import", base / "classes", base / "lmdb")
    assert done.exit_code == 0, done.output
    schedule = stored_help.make_schedule(base / "schedule", MODEL, CROPPED, base / "lmdb", 23)
    stored_help.make_snapshot(base / "out", schedule, seed=5)
    return base


@pytest.fixture
def snapshot(files):
    return next((files / "out" / "snapshots").glob("only-*"))


@pytest.mark.parametrize("views", ["one", "10crop"])
def test_files_get_the_answers_that_their_records_get(files, snapshot, views):
    (row,) = said("eval", snapshot, "--per-class", "--views", views)["evaluations"]
    counts = np.zeros((10, 10), int)
    found = said("predict", snapshot, files / "classes", "--views", views, "--device-batch", 4)
    for one in found["predictions"]:
        first = one["answers"][0]
        assert first["name"] == NAMES[first["label"]] and len(one["answers"]) == 5
        counts[NAMES.index(Path(one["image"]).parent.name), first["label"]] += 1
    assert len(found["predictions"]) == 23 and found["failed"] == []
    for label, kind in enumerate(row["classes"]):
        assert kind["name"] == NAMES[label] and kind["images"] == counts[label].sum()
        assert kind["answers"] == {str(n): counts[label, n] for n in np.flatnonzero(counts[label])}
        assert kind["top1"] == pytest.approx(counts[label, label] / counts[label].sum())
    assert row["top1"] == pytest.approx(counts.trace() / 23)


def test_probabilities_are_those_of_the_network(files, snapshot):
    import torch

    path = next((files / "classes").rglob("*.png"))
    image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    assert image is not None
    pixels = torch.from_numpy((image[3:27, 2:26].astype(np.float32) - 73) * np.float32(0.0111))
    with torch.no_grad():
        network = load_network(open_snapshot(snapshot), torch.device("cpu"), False)
        expected = network(pixels[None, None]).double().softmax(1)[0]
    (found,) = said("predict", snapshot, path, "--top", 10)["predictions"]
    assert sum(answer["probability"] for answer in found["answers"]) == pytest.approx(1)
    for answer in found["answers"]:
        assert answer["probability"] == pytest.approx(float(expected[answer["label"]]), abs=1e-6)


def test_answers_of_rectangles_go_by_their_record(tmp_path):
    """They are evaluated in the order of their shapes, in whatever order they lie."""
    shapes = [(30, 60), (60, 30), (40, 44), (33, 50), (60, 31), (31, 60), (36, 36)]
    rng = np.random.default_rng(1)
    images = [(rng.random((*shape, 1)) * rng.integers(20, 255)).astype(np.uint8) for shape in shapes]
    records = [raw(image, label) for label, image in enumerate(images)]
    test = "test_transform_param { crop_size: 24 random_resize_param { min_size: 28 } rectangular: true }"
    found = []
    for folder, order in ((tmp_path / "one", records), (tmp_path / "other", records[::-1])):
        folder.mkdir()
        stored_help.write_lmdb(str(folder / "data"), order)
        assert stored_help.stagerun("data", "verify", "--index", folder / "data").exit_code == 0
        schedule = stored_help.make_schedule(folder / "schedule", MODEL, f"{CROPPED} {test}", folder / "data", 7)
        (row,) = said("eval", stored_help.make_snapshot(folder / "out", schedule), "--per-class")["evaluations"]
        found.append([kind["answers"] for kind in row["classes"]][: len(shapes)])
    assert found[0] == found[1] and len({str(answers) for answers in found[0]}) > 1


def test_bad_pictures_are_named_and_the_others_answered(files, snapshot, tmp_path):
    good = next((files / "classes").rglob("*.png"))
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:-20])
    cv2.imwrite(str(tmp_path / "colour.png"), np.random.default_rng(1).integers(0, 255, (30, 30, 3), np.uint8))
    (tmp_path / "notes.txt").write_text("not a picture, and not named as one")
    done = stored_help.stagerun("predict", snapshot, tmp_path, good)
    assert done.exit_code == 65 and [line.split("  ")[0] for line in done.stdout.splitlines()] == [str(good)]
    assert "cut.png: " in done.stderr and "colour.png: the image has 3 channels, the network takes 1" in done.stderr
    assert "2 pictures can't be used" in done.stderr and "notes.txt" not in done.stderr


def test_what_is_missing_is_named(snapshot, tmp_path):
    (tmp_path / "empty").mkdir()
    done = stored_help.stagerun("predict", snapshot, tmp_path / "empty")
    assert done.exit_code == 65 and f"{tmp_path / 'empty'}: no images" in done.stderr and done.stdout == ""
    done = stored_help.stagerun("predict", snapshot, tmp_path / "x.jpg", tmp_path / "y.jpg")
    assert done.exit_code == 65 and done.stdout == ""
    assert all(f"{tmp_path / name}: " in done.stderr for name in ("x.jpg", "y.jpg"))


def test_names_of_classes_come_from_a_file(files, snapshot, tmp_path):
    (tmp_path / "names").write_text("\n".join(name.upper() for name in NAMES))
    path = next((files / "classes").rglob("*.png"))
    found = said("predict", snapshot, path, "--classes", tmp_path / "names")
    assert found["snapshots"] == [snapshot.name] and found["predictions"][0]["answers"][0]["name"].startswith("KIND")


def test_transparent_pictures_are_seen_on_the_background(snapshot, tmp_path):
    """As `data import` stores them."""
    Image.new("L", (28, 31), 200).save(tmp_path / "grey.png")
    Image.new("LA", (28, 31), (90, 0)).save(tmp_path / "clear.png")
    found = said("predict", snapshot, tmp_path / "grey.png", tmp_path / "clear.png", "--background", "#c8c8c8")
    one, other = (prediction["answers"] for prediction in found["predictions"])
    assert one == other and found["failed"] == []


@pytest.mark.parametrize("rule", ["MEAN_PROBABILITY", "MEAN_LOGIT"])
def test_a_stage_and_an_ensemble_are_asked_by_name(files, tmp_path, rule):
    out = tmp_path / "out"
    paths = stored_help.make_ensemble(out, tmp_path / "schedule", files / "lmdb", 23, rule, CROPPED)

    def shares(*words: object) -> np.ndarray:
        found = said("predict", *words, files / "classes", "--top", 10)["predictions"]
        answers = [sorted((a["label"], a["probability"]) for a in one["answers"]) for one in found]
        return np.array(answers)[:, :, 1]

    other, one = (shares(path) for path in paths)
    assert np.array_equal(shares("only", "--out", out), one) and not np.allclose(one, other)
    assert np.array_equal(shares(out, "--stage", "only"), one)
    mean = (one + other) / 2 if rule == "MEAN_PROBABILITY" else np.sqrt(one * other)
    both = shares("both", "--out", out)
    assert np.allclose(both, mean / mean.sum(1, keepdims=True), atol=1e-6)
    assert np.array_equal(shares(out, "--stage", "both"), both)
    half = load(tmp_path / "schedule")
    stored_help.make_snapshot(out, half, seed=9, iter=2)
    assert np.array_equal(shares("only", "--out", out), one)  # half of it is no other end


def test_which_stage_is_asked(files, tmp_path):
    out, picture = tmp_path / "out", next((files / "classes").rglob("*.png"))
    stored_help.make_ensemble(out, tmp_path / "schedule", files / "lmdb", 23, "MEAN_LOGIT", CROPPED)
    for words, text, hint in (
        ([out], "has 2 trained stages", "--stage: `only` or `other`"),
        ([tmp_path / "schedule", "--out", out, "--stage", "bot"], "no stage or ensemble is named `bot`", "`both`?"),
        ([tmp_path / "schedule", "--out", out, "--stage", "both"], "`both` is ready: ", "`stagerun run` evaluates it"),
        ([out, "--stage", "zzz"], "no evaluated ensemble, named `zzz`", f"`stagerun status {out} --snapshots`"),
        (["both"], "both is not a snapshot", "--stage STAGE"),
    ):
        done = stored_help.stagerun("predict", *words, picture)
        assert done.exit_code == 64 and text in done.stderr and hint in done.stderr
