"""A run with all that is drawn about images: the same bits from the middle on, by other workers and threads."""

import shutil
from pathlib import Path

import numpy as np
import processes
import pytest
import small
import torch

from stagerun.comm import SoloComm
from stagerun.data.write import write_lmdb
from stagerun.language import load
from stagerun.language.proto import caffe_pb2
from stagerun.store import LocalDisk, inventory
from stagerun.system.world import World
from stagerun.train.keeper import Keeper
from stagerun.train.walk import run

SCHEDULE = """
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
    cutout_size: 5 lighting_std: 0.1 {colours}
  }}
}}
stage {{ name: "a" }}
stage {{ name: "b" }}
"""
COLOURS = """random_resized_crop_param { }
    rand_augment_param { num_ops: 2 }"""


def make(folder: Path) -> Path:
    rng = np.random.default_rng(1)

    def datum(i: int) -> bytes:
        size = (3, 20 + i % 3, 24)
        data = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        d = caffe_pb2.Datum(channels=3, height=size[1], width=size[2], data=data, label=i % 4)
        return d.SerializeToString()

    write_lmdb(str(folder / "data"), [datum(i) for i in range(40)])
    (folder / "schedule").mkdir()
    text = SCHEDULE.format(data=folder / "data", colours=COLOURS)
    (folder / "schedule" / "schedule.prototxt").write_text(text)
    for stage in "ab":
        (folder / "schedule" / f"{stage}.prototxt").write_text("\n")
    return folder / "schedule"


def train_here(schedule: Path, out: Path) -> None:
    """As `stagerun run` with one worker, in this process: importing torch takes longer than the training."""
    torch.set_num_threads(1)
    recipe = load(str(schedule))
    keeper = Keeper(recipe, out)
    keeper.open()
    try:
        for _ in run(recipe, str(out), SoloComm(), World(), torch.device("cpu"), keeper, lambda: False):
            pass
    finally:
        keeper.close()


@pytest.mark.slow
def test_a_resume_by_other_workers_and_threads_trains_the_same_bits(tmp_path: Path) -> None:
    """Without its last snapshots a run goes on from the one before, in the middle of stage `a`."""
    schedule, alone, out = make(tmp_path), tmp_path / "alone", tmp_path / "out"
    train_here(schedule, alone)
    shutil.copytree(alone, out)
    for snapshot in [*out.glob("snapshots/b-*"), *out.glob("snapshots/a-00000006-*")]:
        shutil.rmtree(snapshot)
    done = small.run(schedule, out, "--set", "data.loader_threads=3", nproc=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume is BIT-EXACT" in done.stdout
    made_by = [ref.environment["colour library"] for ref in inventory(LocalDisk(), out).snapshots]
    assert all("torchvision" in libraries and "pillow" in libraries for libraries in made_by)
    assert processes.ends(out) == processes.ends(alone)
