"""Runs with all that is drawn about images, and about which come: the same bits from the middle on, by other workers and threads."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import processes
import pytest
import small
from contract import stagerun
from facade import caffe_pb2, write_lmdb
from test_run_trees import go

from stagerun.store import LocalDisk, inventory

AUGMENTED = """
name: "augmented"
determinism: ELASTIC
model {{ name: "resnet_small" num_classes: 4 }}
data {{ train {{ source: "{data}" images: 40 }} val {{ source: "{data}" images: 40 }} }}
solver {{
  batch_size: 12 device_batch_size: 4 momentum: 0.9
  base_lr: 0.02 lr_policy: "fixed" max_iter: 6 snapshot: 3 test_batch_size: 20
  mixup_alpha: 0.4 cutmix_alpha: 1 label_smoothing: 0.1
  transform_param {{
    crop_size: 16 mirror: true channel_order: RGB mean_value: [124, 117, 104] std_value: [58, 57, 57]
    cutout_size: 5 {colours}
  }}
}}
stage {{ name: "a" }}
stage {{ name: "b" }}
"""
COLOURS = """random_resized_crop_param { }
    rand_augment_param { num_ops: 2 }"""


def augmented(folder: Path) -> Path:
    rng = np.random.default_rng(1)

    def datum(i: int) -> bytes:
        size = (3, 20 + i % 3, 24)
        data = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        d = caffe_pb2.Datum(channels=3, height=size[1], width=size[2], data=data, label=i % 4)
        return d.SerializeToString()

    write_lmdb(str(folder / "data"), [datum(i) for i in range(40)])
    (folder / "schedule").mkdir()
    text = AUGMENTED.format(data=folder / "data", colours=COLOURS)
    (folder / "schedule" / "schedule.prototxt").write_text(text)
    for stage in "ab":
        (folder / "schedule" / f"{stage}.prototxt").write_text("\n")
    return folder / "schedule"


SAMPLED = """
name: "sampled"
determinism: ELASTIC
model {{ name: "resnet_small" num_classes: 4 }}
data {{ train {{ source: "{data}" images: 40 }} val {{ source: "{data}" images: 40 }} }}
solver {{
  batch_size: 12 device_batch_size: 4 momentum: 0.9
  base_lr: 0.02 lr_policy: "fixed" max_iter: 6 snapshot: 3 test_batch_size: 20
  sampling: BALANCED class_weight: [1, 0.5, 2, 3]
  transform_param {{
    crop_size: 16 mirror: true python: "aug.py:augment"
    mean_value: 120 scale: 0.0166
  }}
}}
stage {{ name: "a" solver_param {{ }} }}
stage {{ name: "b" solver_param {{ sampling: UNIFORM }} }}
"""
AUGMENT = """import numpy as np

from turned import turn


def augment(image, rng):
    noise = rng.integers(-20, 21, image.shape)
    return turn(np.clip(image + noise, 0, 255).astype(np.uint8), rng.integers(4))
"""


def sampled(folder: Path) -> Path:
    """With balanced classes, class weights and a function of the user's."""
    rng = np.random.default_rng(1)

    def datum(i: int) -> bytes:
        data = rng.integers(0, 256, (3, 20 + i % 3, 24), dtype=np.uint8)
        record = caffe_pb2.Datum(channels=3, height=data.shape[1], width=24, data=data.tobytes())
        record.label = 0 if i < 25 else 1 if i < 35 else 2 if i < 39 else 3
        return record.SerializeToString()

    write_lmdb(str(folder / "data"), [datum(i) for i in range(40)])
    assert stagerun(["data", "index", "data"], folder).exit_code == 0
    (folder / "schedule").mkdir()
    text = SAMPLED.format(data=folder / "data")
    (folder / "schedule" / "schedule.prototxt").write_text(text)
    (folder / "schedule" / "aug.py").write_text(AUGMENT)
    (folder / "schedule" / "turned.py").write_text(
        "import numpy as np\n\n\ndef turn(image, times):\n    return np.rot90(image, times)\n"
    )
    return folder / "schedule"


@pytest.mark.slow
@pytest.mark.parametrize("make, workers, threads", [(augmented, 2, 3), (sampled, 2, 3), (sampled, 3, 1)])
def test_a_resume_by_other_workers_and_threads_trains_the_same_bits(
    tmp_path: Path, make: Callable[[Path], Path], workers: int, threads: int
) -> None:
    """Without its last snapshots a run goes on from the one before, in the middle of stage `a`."""
    schedule, alone, out = make(tmp_path), tmp_path / "alone", tmp_path / "out"
    go(schedule, alone)
    shutil.copytree(alone, out)
    for snapshot in [*out.glob("snapshots/b-*"), *out.glob("snapshots/a-00000006-*")]:
        shutil.rmtree(snapshot)
    done = small.run(schedule, out, "--set", f"data.loader_threads={threads}", nproc=workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume is BIT-EXACT" in done.stdout
    if make is augmented:
        made_by = [ref.environment["colour library"] for ref in inventory(LocalDisk(), out).snapshots]
        assert all("torchvision" in libraries and "pillow" in libraries for libraries in made_by)
    assert processes.ends(out) == processes.ends(alone)


@pytest.mark.slow
def test_a_mistake_in_the_function_ends_the_run_with_one_message(tmp_path: Path) -> None:
    schedule = sampled(tmp_path)
    (schedule / "aug.py").write_text("def augment(image, rng):\n    return imag\n")
    done = small.run(schedule, tmp_path / "out", nproc=2)
    assert done.returncode == 64, done.stdout + done.stderr
    assert done.stderr.count("NameError") == 1 and "aug.py:2: NameError: name 'imag' is not defined" in done.stderr
    assert not list((tmp_path / "out").glob("snapshots/*"))
