"""Bad input through the command: one clear message, the right exit code, nothing lost."""

import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import processes
import pytest
import small
import tiny

from stagerun.data.write import write_lmdb
from stagerun.language.proto import caffe_pb2


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


# -- found in the first second, without torch


@pytest.mark.parametrize(
    "arguments, code, texts",
    [
        (["--set", 'data.train.source="/no/such/lmdb"'], 65, ["/no/such/lmdb"]),
        (["--set", "data.train.images=601"], 65, ["holds 600 records", "images: 601", "write `images: 600`"]),
        (["--set", "model.num_classes=5"], 65, ["num_classes is 5: labels go from 0 to 4", "change `num_classes`"]),
        (["--set", "model.channels=3"], 65, ["1 channel, the network takes 3", "set `channels: 1`"]),
        (["--nproc", "5"], 64, ["schedule.prototxt:10:", "use at most 4 workers", "too many for stages `"]),
        (["--nproc", "0"], 64, ["--nproc must be 1 or more, and is 0"]),
        (["--resume"], 64, ["No such option '--resume': the same command goes on"]),
        (["--thread", "1"], 64, ["--thread"]),
        (["--set", "ini.base_lr=1"], 64, ["did you mean `init`?"]),
        (["--redo", "cyc"], 64, ["no stage is named `cyc`", "did you mean `cyc1`?"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_first_second(base: Path, tmp_path: Path, arguments: list[str], code: int, texts: list[str]) -> None:
    done = small.stagerun("run", base / "schedule", "--out", tmp_path / "out", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    for text in texts:
        assert text in done.stderr, done.stderr
    assert not list(tmp_path.glob("out/snapshots/*"))


@pytest.mark.parametrize("command", ["check", "plan", "run"])
def test_no_such_folder(command: str, tmp_path: Path) -> None:
    told(small.stagerun(command, tmp_path / "nothing", cwd=tmp_path), 64, "nothing")


def test_an_output_folder_below_a_file(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = small.run(base / "schedule", tmp_path / "file" / "out")
    told(done, 74, "Not a directory", "choose another folder with --out")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_output_folder_of_somebody_else(base: Path, tmp_path: Path) -> None:
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


def test_a_truncated_jpeg(base: Path, tmp_path: Path) -> None:
    ok, jpeg = cv2.imencode(".jpg", np.arange(784, dtype=np.uint8).reshape(28, 28))
    assert ok
    datum = caffe_pb2.Datum(encoded=True, data=jpeg.tobytes()[:-40], label=1).SerializeToString()
    records(tmp_path, 30, 17, datum)
    schedule = small.make_schedule(tmp_path / "schedule", tmp_path)
    done = small.run(schedule, tmp_path / "out", "--set", "data.train.images=30")
    told(done, 65, "train_lmdb: record `00000017`: the image is cut off", "make the LMDB again")


# -- met by the workers


def test_a_label_out_of_range_met_in_training_is_reported_once_by_two_workers(base: Path, tmp_path: Path) -> None:
    datum = caffe_pb2.Datum(channels=1, height=28, width=28, data=bytes(784), label=10).SerializeToString()
    records(tmp_path, tiny.TRAIN_IMAGES, 8, datum)  # preflight looks at 0, 19, 39, ...
    schedule = small.make_schedule(
        tmp_path / "schedule", tmp_path, init='base_lr: 1e-3 lr_policy: "fixed" max_iter: 200'
    )
    done = small.run(schedule, tmp_path / "out", nproc=2)
    told(done, 65, "train_lmdb: record `00000008`: the label is 10, but num_classes is 10")
    assert len(done.stderr.splitlines()) == 2, done.stderr


def test_a_pattern_that_fits_nothing(base: Path, tmp_path: Path) -> None:
    extra = small.STAGES["init"] + ' param { name: "layer9.*" lr_mult: 0 }'
    schedule = small.make_schedule(tmp_path / "schedule", base / "data", init=extra)
    done = small.run(schedule, tmp_path / "out", nproc=2)
    told(done, 64, "`layer9.*`", "schedule/init.prototxt:1:")
    assert not list((tmp_path / "out" / "snapshots").glob("*"))


def test_a_loss_that_is_not_finite(base: Path, tmp_path: Path) -> None:
    wild = 'base_lr: 1e6 lr_policy: "fixed" max_iter: 9'
    schedule = small.make_schedule(tmp_path / "schedule", base / "data", cyc1=wild)
    out = tmp_path / "out"
    done = small.run(schedule, out)
    assert done.returncode == 79, done.stdout + done.stderr
    assert "stage `cyc1`" in done.stderr and "lower base_lr" in done.stderr
    kept = processes.ends(out)["init"]
    mended = small.run(base / "schedule", out, "--redo", "cyc1")
    assert mended.returncode == 0, mended.stderr
    assert processes.ends(out)["init"] == kept
