"""A schedule of five stages and 40 iterations on a few hundred real images, for tests that start processes."""

from pathlib import Path

import numpy as np
from facade import caffe_pb2, write_lmdb

STORED = Path(__file__).parents[1] / "golden" / "fashion_9664.npz"
TRAIN_IMAGES, VAL_IMAGES = 600, 100

SCHEDULE = """
name: "tiny"
model {{ name: "resnet_small" num_classes: 10 channels: 1 batch_norm_param {{ moving_average_fraction: 0.8 }} }}
data {{
  train {{ source: "{data}/train_lmdb" images: {train} }}
  val {{ source: "{data}/val_lmdb" images: {val} }}
}}
solver {{
  batch_size: 32
  device_batch_size: 4
  momentum: 0.9
  weight_decay: 5e-4
  param {{ kind: NORM decay_mult: 0 }}
  transform_param {{ pad: 2 mirror: true crop_size: 28 mean_value: 73 scale: 0.0111 }}
  snapshot: 3
  display: 5
  test_batch_size: 50
}}
stage {{ name: "init" }}
stage {{ name: "cyc1" }}
stage {{ name: "cyc2" }}
stage {{ name: "cyc3" }}
stage {{ name: "collapse" }}
"""
STAGES = {
    "init": 'base_lr: 0.1 lr_policy: "poly_cyc" power: 1 max_iter: 10 lr_iter: 20 warmup_iter: 3 warmup_start_lr: 0.01',
    "cyc1": 'base_lr: 0.06 lr_policy: "poly_cyc" power: 2 max_iter: 7 lr_iter: 14 test_interval: 4',
    "cyc2": 'base_lr: 0.05 lr_policy: "poly_cyc" power: 2 max_iter: 8 lr_iter: 14 warmup_iter: 2 warmup_start_lr: 0.02',
    "cyc3": 'base_lr: 0.04 lr_policy: "poly_cyc" power: 2 max_iter: 8 lr_iter: 14 carry { momentum: KEEP }',
    "collapse": """base_lr: 0.02 lr_policy: "poly" power: 2 max_iter: 7 weight_decay: 2e-3
transform_param { mirror: true mean_value: 73 scale: 0.0111 }""",
}


def make_data(folder: Path, first: int = 0) -> None:
    """folder/train_lmdb and folder/val_lmdb from the stored images, `first` and those after it."""
    stored = np.load(STORED)
    images, labels = stored["images"], stored["labels"]

    def datum(i: int) -> bytes:
        i = (first + i) % len(images)
        d = caffe_pb2.Datum(channels=1, height=28, width=28, data=images[i].tobytes(), label=int(labels[i]))
        return d.SerializeToString()

    write_lmdb(str(folder / "train_lmdb"), [datum(i) for i in range(TRAIN_IMAGES)])
    write_lmdb(str(folder / "val_lmdb"), [datum(i) for i in range(TRAIN_IMAGES, TRAIN_IMAGES + VAL_IMAGES)])


def make_schedule(folder: Path, data: Path) -> Path:
    """The solver files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = SCHEDULE.format(data=data, train=TRAIN_IMAGES, val=VAL_IMAGES)
    (folder / "schedule.prototxt").write_text(text)
    for name, solver in STAGES.items():
        (folder / f"{name}.prototxt").write_text(solver + "\n")
    return folder
