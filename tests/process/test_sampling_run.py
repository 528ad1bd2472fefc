"""A run with balanced classes, class weights and a function of the user's: the same bits from the middle on, by other workers and threads."""

import shutil
from pathlib import Path

import numpy as np
import processes
import pytest
import small
from test_run_augmented import train_here

from stagerun.data.index import save
from stagerun.data.indexing import build
from stagerun.data.write import write_lmdb
from stagerun.language.proto import caffe_pb2

SCHEDULE = """
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
stage {{ name: "b" solver_param {{ sampling: FILE sampling_file: "own/weights.txt" }} }}
"""
AUGMENT = """import numpy as np

from turned import turn


def augment(image, rng):
    noise = rng.integers(-20, 21, image.shape)
    return turn(np.clip(image + noise, 0, 255).astype(np.uint8), rng.integers(4))
"""


def make(folder: Path) -> Path:
    rng = np.random.default_rng(1)

    def datum(i: int) -> bytes:
        data = rng.integers(0, 256, (3, 20 + i % 3, 24), dtype=np.uint8)
        record = caffe_pb2.Datum(channels=3, height=data.shape[1], width=24, data=data.tobytes())
        record.label = 0 if i < 25 else 1 if i < 35 else 2 if i < 39 else 3
        return record.SerializeToString()

    write_lmdb(str(folder / "data"), [datum(i) for i in range(40)])
    save(build(str(folder / "data")), str(folder / "data"))
    (folder / "schedule" / "own").mkdir(parents=True)
    text = SCHEDULE.format(data=folder / "data")
    (folder / "schedule" / "schedule.prototxt").write_text(text)
    (folder / "schedule" / "aug.py").write_text(AUGMENT)
    (folder / "schedule" / "turned.py").write_text(
        "import numpy as np\n\n\ndef turn(image, times):\n    return np.rot90(image, times)\n"
    )
    (folder / "schedule" / "own" / "weights.txt").write_text("0 1\n1 1\n2 3\n3 0.5\n")
    return folder / "schedule"


@pytest.mark.slow
def test_a_resume_by_other_workers_and_threads_trains_the_same_bits(tmp_path: Path) -> None:
    """Without its last snapshots a run goes on from the one before, in the middle of stage `a`."""
    schedule, alone = make(tmp_path), tmp_path / "alone"
    train_here(schedule, alone)
    for workers, threads in ((2, 3), (3, 1)):
        out = tmp_path / f"out{workers}"
        shutil.copytree(alone, out)
        for snapshot in [*out.glob("snapshots/b-*"), *out.glob("snapshots/a-00000006-*")]:
            shutil.rmtree(snapshot)
        done = small.run(schedule, out, "--set", f"data.loader_threads={threads}", nproc=workers)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resume is BIT-EXACT" in done.stdout
        assert processes.ends(out) == processes.ends(alone)


@pytest.mark.slow
def test_a_mistake_in_the_function_ends_the_run_with_one_message(tmp_path: Path) -> None:
    schedule = make(tmp_path)
    (schedule / "aug.py").write_text("def augment(image, rng):\n    return imag\n")
    done = small.run(schedule, tmp_path / "out", nproc=2)
    assert done.returncode == 64, done.stdout + done.stderr
    assert done.stderr.count("NameError") == 1 and "aug.py:2: NameError: name 'imag' is not defined" in done.stderr
    assert not list((tmp_path / "out").glob("snapshots/*"))
