"""Images with several labels: average precision, the file that has them, and a run with them."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from facade import (
    DataError,
    Iterated,
    LmdbSource,
    RecipeError,
    ResumeRefused,
    StageFinished,
    Tested,
    caffe_pb2,
    evaluate,
    write_lmdb,
)
from hypothesis import given
from hypothesis import strategies as st
from nan_help import lives
from test_distilled import make
from test_run_trees import command, go, ids, of

from stagerun.language import load

# -- average precision


def plainly(scores: np.ndarray, positive: np.ndarray) -> float:
    """The definition, threshold by threshold: of the images at or above it, how many are right, and how many of the right are there."""
    total, before, found = positive.sum(), 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        above = scores >= threshold
        precision, recall = positive[above].mean(), positive[above].sum() / total
        found += (recall - before) * precision
        before = recall
    return found


@given(st.integers(0, 10_000), st.integers(1, 30), st.sampled_from([2, 5, 1000]))
def test_average_precision_is_the_definition_with_ties(seed, images, values):
    rng = np.random.default_rng(seed)
    scores, positive = rng.integers(0, values, images) / 7 - 1, rng.integers(0, 2, images)
    found = evaluate.average_precision(torch.from_numpy(scores), torch.from_numpy(positive))
    if not positive.any():
        assert found is None
    else:
        np.testing.assert_allclose(found, plainly(scores, positive), rtol=1e-12)
    shuffled = rng.permutation(images)
    again = evaluate.average_precision(torch.from_numpy(scores[shuffled]), torch.from_numpy(positive[shuffled]))
    assert found == again


# -- runs

STAGE = 'base_lr: 0.05 lr_policy: "fixed" max_iter: 6 test_interval: 3 loss { type: BINARY }\n'
ONE = 'stage { name: "student" }\n'


def labels_of(i: int) -> list[int]:
    return sorted({i % 10, (i * 7) % 10})


def several(folder: Path, data: Path, stage: str = STAGE, head: str = "") -> Path:
    make(folder, data, head=head, stages=ONE, student=stage)
    for name, n in (("train", tiny.TRAIN_IMAGES), ("val", tiny.VAL_IMAGES)):
        lines = [f"{i:08d} {' '.join(map(str, labels_of(i)))}" for i in range(n)]
        (folder / f"{name}.txt").write_text("# key and classes\n" + "\n".join(lines) + "\n")
    file = folder / "schedule.prototxt"
    text = file.read_text()
    for name in ("train", "val"):
        text = text.replace(f"{name} {{ source:", f'{name} {{ labels: "{name}.txt" source:')
    file.write_text(text)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("several")
    tiny.make_data(base / "data")
    several(base / "schedule", base / "data", head="determinism: ELASTIC\n")
    return base


def test_a_run_learns_them_resumes_and_evaluates(base, tmp_path):
    events = go(base / "schedule", tmp_path / "out")
    (finished,) = of(events, StageFinished)
    aps = [ap for ap in finished.class_ap if ap is not None]
    assert len(finished.class_ap) == 10 and finished.mean_ap == pytest.approx(sum(aps) / len(aps))
    assert all(event.mean_ap is not None and 0 < event.mean_ap <= 1 for event in of(events, Tested))
    stopped = go(base / "schedule", tmp_path / "again", stop=lambda seen: len(of(seen, Iterated)) >= 4)
    assert not of(stopped, StageFinished)
    (same,) = of(go(base / "schedule", tmp_path / "again"), StageFinished)
    assert ids(tmp_path / "again")["student@6"] == ids(tmp_path / "out")["student@6"]
    assert (same.class_ap, same.test_loss) == (finished.class_ap, finished.test_loss)
    text = command("eval", base / "schedule", "--out", tmp_path / "out", "--per-class", "--threads", 1)
    assert f"mAP {100 * finished.mean_ap:.2f} %" in text and "class 9" in text


@pytest.mark.long
def test_two_and_three_workers_have_the_same_bits_and_the_same_precision(base, tmp_path):
    """Of labels in a file, and of labels in the records, of which each worker reads a part."""
    (alone,) = of(go(base / "schedule", tmp_path / "out"), StageFinished)
    made = in_records(tmp_path / "records", base / "data", lambda i: [float(n) for n in labels_of(i)])
    assert [source.labels_path for source in load(made, ()).sources] == [None, None]
    for workers, folder in ((1, made), (2, base / "schedule"), (3, made)):
        out = tmp_path / str(workers)
        (found,) = of(lives(folder, out, workers), StageFinished)
        assert ids(out) == ids(tmp_path / "out")
        assert (found.class_ap, found.mean_ap) == (alone.class_ap, alone.mean_ap)


def test_the_files_content_is_part_of_what_was_trained(base, tmp_path):
    folder, out = several(tmp_path / "s", base / "data"), tmp_path / "out"
    go(folder, out)
    (folder / "train.txt").rename(folder / "other.txt")
    text = (folder / "schedule.prototxt").read_text()
    (folder / "schedule.prototxt").write_text(text.replace('"train.txt"', '"other.txt"'))
    assert not of(go(folder, out), Iterated)
    (folder / "val.txt").write_text((folder / "val.txt").read_text() + "spare 1\n")
    again = go(folder, out)
    assert not of(again, Iterated) and of(again, StageFinished)
    (folder / "other.txt").write_text((folder / "other.txt").read_text() + "spare 1\n")
    with pytest.raises(ResumeRefused, match="labels_digest"):
        go(folder, out)


def test_early_stop_goes_by_the_mean_average_precision_and_so_do_the_labels_of_what_was_trained(base, tmp_path):
    stage = STAGE.replace("max_iter: 6", "max_iter: 30 early_stop { metric: MAP patience_iter: 3 min_delta: 100 }")
    folder, out = several(tmp_path / "s", base / "data", stage), tmp_path / "out"
    (finished,) = of(go(folder, out), StageFinished)
    assert finished.iterations == 6 and not of(go(folder, out), Iterated)
    (folder / "val.txt").write_text((folder / "val.txt").read_text() + "spare 1\n")
    with pytest.raises(ResumeRefused, match=r"data\.val\.labels_digest sha256:"):
        go(folder, out)


def test_mistakes_in_the_file_are_shown_with_their_lines(base, tmp_path):
    folder = several(tmp_path / "s", base / "data", STAGE.replace("loss { type: BINARY }", ""))
    (folder / "train.txt").write_text("00000000 1 x\n00000001 10\n00000000 2\n")
    (folder / "val.txt").unlink()
    with pytest.raises(RecipeError) as error:
        load(folder)
    said = error.value.render()
    for text in (
        "train.txt:1:12: `x` is not the number of a class",
        "train.txt:2:10: class 10 of `00000001`: the classes are 0 to 9",
        "train.txt:3:1: `00000000` is in line 1, too",
        "val.txt: no such file",
        "images have several `labels`, and loss `SOFTMAX` takes one",
    ):
        assert text in said, said


def test_a_record_that_the_file_does_not_name_is_told(base, tmp_path):
    folder = several(tmp_path / "s", base / "data")
    (folder / "train.txt").write_text("00000003 1\n")
    with pytest.raises(DataError, match=r"lacks 599 records .* `00000000`"):
        go(folder, tmp_path / "out")


# -- labels in the records


def in_records(folder: Path, data: Path, labels: Callable[[int], list[float]]) -> Path:
    """The same schedule, whose LMDBs have the labels in float_data."""
    made = several(folder, data, head="determinism: ELASTIC\n")
    for name in ("train", "val"):
        source = LmdbSource(str(data / f"{name}_lmdb"))
        values = []
        for i in range(len(source)):
            datum = caffe_pb2.Datum.FromString(source.get(i)[1])
            datum.ClearField("label")
            datum.float_data.extend(labels(i))
            values.append(datum.SerializeToString())
        write_lmdb(str(folder / f"{name}_lmdb"), values)
    text = (made / "schedule.prototxt").read_text()
    for name in ("train", "val"):
        text = text.replace(f"{data}/{name}_lmdb", str(folder / f"{name}_lmdb"))
        text = text.replace(f'labels: "{name}.txt"', 'labels: "float_data"')
    (made / "schedule.prototxt").write_text(text)
    return made


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (
            lambda i: [10.0] if i == 3 else [1.5] if i == 4 else [-1.0] if i > 99 else [1.0],
            "labels that are not 0 to 9",
        ),
        (lambda i: [math.nan] if i == 3 else [math.inf] if i == 4 else [1.0], "nan in float_data"),
        (lambda i: [], "no record has labels in its float_data"),
    ],
)
def test_floats_that_are_no_classes_are_named(base, tmp_path, labels, text):
    with pytest.raises(DataError, match=text) as caught:
        go(in_records(tmp_path / "records", base / "data", labels), tmp_path / "out")
    if "not 0" in text:
        assert "`00000003`: 10 in float_data" in caught.value.message and "`00000004`: 1.5" in caught.value.message
        assert caught.value.message.count("\n") == 21 and caught.value.message.endswith(" more")
