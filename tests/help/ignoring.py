"""A linear net of Caffe's whose loss and Accuracy ignore a label that is no class, with a few images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from facade import caffe_pb2, write_lmdb

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
    pixels = np.random.default_rng(1).integers(0, 256, (IMAGES, 1, SIDE, SIDE), dtype=np.uint8)
    datums = [
        caffe_pb2.Datum(channels=1, height=SIDE, width=SIDE, data=one.tobytes(), label=label)
        for one, label in zip(pixels, labels, strict=True)
    ]
    write_lmdb(str(folder / "images"), [one.SerializeToString() for one in datums])
    (folder / "net.prototxt").write_text(NET.format(loss=loss, accuracy=accuracy))
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(more=more))
    return folder
