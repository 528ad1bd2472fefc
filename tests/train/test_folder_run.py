"""Runs whose `source` is a folder of class folders: the same bits as of the LMDB that `data import` makes of it."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import contract
import numpy as np
import pytest
import tiny
from facade import DataError, Event, Iterated, Note, ResumeRefused, RunFinished, StageFinished, Stopped
from PIL import Image
from test_run_trees import go, of

pytestmark = pytest.mark.long

SCHEDULE = """
name: "photos"
model { name: "resnet_small" num_classes: 10 channels: 1 batch_norm_param { moving_average_fraction: 0.8 } }
data { train { source: "train" } val { source: "val" } }
solver {
  batch_size: 16 device_batch_size: 8 base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 snapshot: 2
  transform_param { pad: 2 mirror: true crop_size: 28 }
}
stage { name: "one" solver_param { max_iter: 4 } }
stage { name: "two" solver_param { max_iter: 6 } }
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    stored = dict(np.load(tiny.STORED))
    for i in range(400):
        file = folder / ("train" if i < 300 else "val") / f"c{stored['labels'][i]}" / f"{i}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(stored["images"][i].reshape(28, 28)).save(file)
    (folder / "schedule.prototxt").write_text(SCHEDULE)
    return folder


def ids(out: Path) -> dict[str, bytes]:
    ends = {name: sorted((out / "snapshots").glob(f"{name}-*"))[-1] for name in ("one", "two")}
    return {name: (end / "model.safetensors").read_bytes() for name, end in ends.items()}


def planned(folder: Path, out: Path, *overrides: str) -> dict[str, Any]:
    words = [word for override in overrides for word in ("--set", override)]
    return json.loads(command(folder, "plan", folder, "--out", out, "--json", *words))


def command(folder: Path, *words: object) -> str:
    done = contract.stagerun(words, folder)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_same_bits_as_from_the_lmdb_also_where_import_and_training_were_stopped(photos, tmp_path):
    """The import commits after every 1000 images, and waits for a commit before the next one."""
    photos, stored = shutil.copytree(photos, tmp_path / "photos"), np.load(tiny.STORED)["images"]
    for i in range(400, 4200):
        image = stored[i % len(stored)]
        (photos / "train" / "c0" / f"{i}.pgm").write_bytes(b"P5 28 28 255\n" + image.tobytes())
    for kind in ("train", "val"):
        command(tmp_path, "data", "import", photos / kind, tmp_path / kind)
    lmdb = tuple(f'data.{kind}.source="{tmp_path / kind}"' for kind in ("train", "val"))
    go(photos, tmp_path / "lmdb", *lmdb)

    out = tmp_path / "out"

    def once_committed(seen: list[Event]) -> bool:
        """Wait for the first commit: the import may be over before `stop` is asked again."""
        deadline = time.monotonic() + 60
        while not any(file.stat().st_size > 8192 for file in out.glob("data/*.partial/positions/data.mdb")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return True

    first = go(photos, out, stop=once_committed)
    assert isinstance(first[-1], Stopped) and "while the images were imported" in first[-1].reason
    assert not (out / "snapshots").exists() or not list((out / "snapshots").iterdir())

    second = go(photos, out, stop=lambda seen: len(of(seen, Iterated)) > 1)
    notes = [event.text for event in second if isinstance(event, Note)]
    assert any("resumes behind" in text for text in notes) and any("imported" in text for text in notes)
    assert isinstance(second[-1], Stopped) and second[-1].stage == "one"

    third = go(photos, out)
    assert isinstance(third[-1], RunFinished) and third[-1].trained
    assert any(isinstance(e, Note) and "resume is BIT-EXACT" in e.text for e in third)
    assert ids(out) == ids(tmp_path / "lmdb")
    assert planned(photos, out)["iterations_left"] == planned(photos, out, *lmdb)["iterations_left"] == 0
    again = go(photos, out)
    assert isinstance(again[-1], RunFinished) and not again[-1].trained


def test_an_edit_that_only_the_import_shows_makes_stages_stale_in_the_same_command(photos, tmp_path):
    folder, out = shutil.copytree(photos, tmp_path / "p"), tmp_path / "out"
    go(folder, out, stop=lambda seen: len(of(seen, Iterated)) > 4)
    image = next((folder / "train" / "c0").iterdir())
    Image.fromarray(255 - np.array(Image.open(image))).save(image)
    os.utime(image, ns=(1, 1))
    assert [one["state"] for one in planned(folder, out)["stages"]] == ["done", "resume"], (
        "names and sizes are the same"
    )
    with pytest.raises(ResumeRefused, match="the training images have changed"):
        go(folder, out)
    shutil.rmtree(out / "snapshots")
    go(folder, out, stop=lambda seen: (out / "snapshots").exists())
    assert len(list((out / "data").iterdir())) == 2, "a run that opens its images leaves of each folder one state"


def test_eval_reads_what_the_run_imported_and_names_what_is_missing(photos, tmp_path):
    folder, out = shutil.copytree(photos, tmp_path / "p"), tmp_path / "out"
    ran = go(folder, out, "one.max_iter=1", "two.max_iter=1")
    (top1,) = (event.top1 for event in ran if isinstance(event, StageFinished) and event.stage == "two")
    snapshot = sorted((out / "snapshots").glob("two-*"))[-1]
    done = contract.stagerun(["eval", snapshot, "--json", "--threads", 1, "--per-class"], tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["evaluations"][0]["top1"] == top1
    alone = shutil.copytree(snapshot, tmp_path / "alone" / snapshot.name)
    os.utime(next((folder / "val" / "c0").iterdir()), ns=(1, 1))
    for path in (snapshot, alone):
        done = contract.stagerun(["eval", path], tmp_path)
        assert done.exit_code == 65 and "no such folder" in done.output and "data import" in done.output, done.output


def test_a_rehearsal_says_what_is_wrong_with_a_folder(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "p")
    (tmp_path / "p" / "train" / "empty").mkdir()
    for words in ([], ["--find-lr", "one"], ["--workers", "1,2"]):
        done = contract.stagerun(["rehearse", "p", *words, "--set", "data.train.images=300"], tmp_path)
        assert done.exit_code == 64 and "no images in the class folder empty" in done.output, done.output


def test_pictures_that_cant_be_used_stop_the_run_before_training(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    for file in sorted((folder / "train").rglob("*.bmp"))[:2]:
        file.write_bytes(b"")
    with pytest.raises(DataError, match="2 of 300 images can't be used") as caught:
        go(folder, tmp_path / "out")
    assert f"stagerun data import {folder / 'train'} LMDB --max-bad N" in caught.value.hint
