"""Bad input through the command: one clear message, the right exit code. More are in tests/cases/trained/first_second.txt."""

import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import small
import tiny
from facade import caffe_pb2, write_lmdb


def records(folder: Path, count: int, special: int, value: bytes) -> None:
    """folder/train_lmdb and val_lmdb of grey squares, `value` in place of record `special` of the first."""
    plain = caffe_pb2.Datum(channels=1, height=28, width=28, data=bytes(range(196)) * 4, label=3).SerializeToString()
    write_lmdb(str(folder / "train_lmdb"), [value if i == special else plain for i in range(count)])
    write_lmdb(str(folder / "val_lmdb"), [plain] * tiny.VAL_IMAGES)


def told(done: subprocess.CompletedProcess[str], code: int, *texts: str) -> None:
    """One message, at the end and on stderr only, that holds the texts."""
    assert done.returncode == code, done.stdout + done.stderr
    for text in texts:
        assert done.stderr.count(text) == 1, done.stderr
    assert "rank 1:" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_output_folder_of_somebody_else(base, tmp_path):
    program = (
        "import os, sys, stagerun.train.command; from stagerun.cli import main; from stagerun.language import load; "
        f"schedule = {str(base / 'schedule')!r}; sys.argv = ['stagerun', 'run', schedule, '--out', {str(tmp_path / 'o')!r}]; "
        # read while it is allowed: pytest's folders are root's alone
        "loaded = load(schedule, ()); stagerun.train.command.load = lambda *_: loaded; "
        "os.setgid(65534); os.setuid(65534); main()"
    )
    tmp_path.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    told(done, 77, "ask its owner for permission")


def test_a_truncated_jpeg(base, tmp_path):
    ok, jpeg = cv2.imencode(".jpg", np.arange(784, dtype=np.uint8).reshape(28, 28))
    assert ok
    datum = caffe_pb2.Datum(encoded=True, data=jpeg.tobytes()[:-40], label=1).SerializeToString()
    records(tmp_path, 30, 17, datum)
    schedule = small.make_schedule(tmp_path / "schedule", tmp_path)
    done = small.run(schedule, tmp_path / "out", "--set", "data.train.images=30")
    told(done, 65, "train_lmdb: record `00000017`: the image is cut off", "make the LMDB again")


def test_a_label_out_of_range_met_in_training_is_reported_once_by_two_workers(base, tmp_path):
    datum = caffe_pb2.Datum(channels=1, height=28, width=28, data=bytes(784), label=10).SerializeToString()
    records(tmp_path, tiny.TRAIN_IMAGES, 8, datum)  # preflight looks at 0, 19, 39, ...
    schedule = small.make_schedule(
        tmp_path / "schedule", tmp_path, init='base_lr: 1e-3 lr_policy: "fixed" max_iter: 200'
    )
    done = small.run(schedule, tmp_path / "out", nproc=2)
    told(done, 65, "train_lmdb: record `00000008`: the label is 10, but num_classes is 10")
    assert len(done.stderr.splitlines()) == 2, done.stderr
