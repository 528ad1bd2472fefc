"""`determinism: PORTABLE`: the bits of a fixed schedule are recorded here, and every processor that runs the suite compares with them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import photos
import pytest
import torch
from facade import UsageError

import stagerun

# Proofs of the state after each stage: chains of digests of weights and history. Another torch may compute other bits.
TORCH = "2.13.0"
PROVEN = {
    "sgd": "ebfad245ab51439a",
    "adam": "39f85e4e3ad3ab88",
    "lars": "c45e16f7e2cb68f7",
    "own": "a6beaac930902d53",
    "resnet18": "130f60c4869c3469",
    "photos": "4907187bfebc9bd1",
}
SCHEDULE = """
name: "portable"
determinism: PORTABLE
model {{ name: "resnet_small" num_classes: 10 channels: 1 }}
data {{
  train {{ source: "{data}/train_lmdb" images: 600 }}
  val {{ source: "{data}/val_lmdb" images: 100 }}
}}
solver {{
  batch_size: 16
  device_batch_size: 4
  momentum: 0.9
  weight_decay: 5e-4
  test_batch_size: 50
  snapshot: {every}
  audit_param {{ proof_iter: 4 }}
  transform_param {{ random_resized_crop_param {{}} mirror: true crop_size: 28 mean_value: 73 scale: 0.0111 }}
  test_transform_param {{ crop_size: 28 mean_value: 73 scale: 0.0111 }}
}}
stage {{ name: "sgd" solver_param {{ base_lr: 0.05 lr_policy: "cosine" max_iter: {length} }} }}
stage {{ name: "adam" solver_param {{ type: "Adam" base_lr: 0.001 lr_policy: "poly" power: 1 max_iter: {length} ema_decay: 0.9 }} }}
stage {{
  name: "lars"
  solver_param {{
    type: "LARS" base_lr: 0.1 lr_policy: "poly" power: 2 max_iter: {length} label_smoothing: 0.1 mixup_alpha: 0.2
  }}
}}
stage {{
  name: "own"
  from: ""
  solver_param {{
    model {{ name: "net.py:build" num_classes: 10 channels: 1 }}
    type: "AdamW" momentum2: 0.999 base_lr: 0.001 lr_policy: "fixed" max_iter: {length}
  }}
}}
stage {{
  name: "resnet18"
  from: ""
  solver_param {{
    model {{ name: "resnet18" num_classes: 10 channels: 1 }}
    base_lr: 0.02 lr_policy: "poly" power: 1 warmup_iter: 2 max_iter: {short}
  }}
}}
"""
PHOTOS = """
name: "photos"
determinism: PORTABLE
model { name: "resnet_small" num_classes: 3 }
data { train { source: "photos_lmdb" } val { source: "photos_lmdb" } }
solver {
  batch_size: 12 device_batch_size: 4 momentum: 0.9 test_batch_size: 24 audit_param { proof_iter: 2 }
  base_lr: 0.02 lr_policy: "fixed" max_iter: 8
  transform_param {
    random_resized_crop_param {} crop_size: 32 mirror: true mean_value: 128 std_value: 60
    rand_augment_param {} cutout_size: 8
  }
  test_transform_param { random_resize_param { min_size: 36 } crop_size: 32 mean_value: 128 std_value: 60 }
}
stage { name: "photos" solver_param {} }
"""
NETWORK = """
from torch import nn

def build(num_classes, channels):
    first = nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    last = nn.GELU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, num_classes)
    return nn.Sequential(*first, nn.Conv2d(8, 16, 3, padding=1), *last)
"""


def make(folder: Path, data: Path, length: int = 12, every: int = 5) -> Path:
    folder.mkdir()
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(data=data, length=length, short=length // 3, every=every))
    (folder / "net.py").write_text(NETWORK)
    return folder


def make_photos(folder: Path) -> Path:
    """Stripes as JPEGs, with RandAugment."""
    done = command("data", "import", photos.make_folder(folder / "photos"), folder / "photos_lmdb")
    assert done.returncode == 0, done.stderr
    (folder / "schedule.prototxt").write_text(PHOTOS)
    return folder


def python(emulated: str = "") -> list[str]:
    # qemu doesn't follow the link to a virtual environment's Python.
    return ["qemu-x86_64-static", "-cpu", emulated, os.path.realpath(sys.executable)] if emulated else [sys.executable]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(stagerun.__file__).parents[1]), *sys.path])}


def command(*words: object) -> subprocess.CompletedProcess[str]:
    """In a process that has not loaded torch."""
    called = [*python(), "-m", "stagerun", *map(str, words)]
    return subprocess.run(called, env=environment(), capture_output=True, text=True, timeout=600)


def proofs(out: Path) -> dict[tuple[str, int], str]:
    events = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return {(e["stage"], e["iter"]): e["state"] for e in events if e["event"] == "Proof"}


def ends(out: Path) -> dict[str, str]:
    return {stage: state for (stage, _), state in sorted(proofs(out).items())}


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("portable")
    schedule = make(folder / "schedule", data)
    done = command("run", schedule, "--out", folder / "one", "--nproc", 1)
    assert done.returncode == 0, done.stderr
    return schedule, folder / "one"


def test_the_recorded_bits(straight, tmp_path):
    if torch.__version__.partition("+")[0] != TORCH:
        pytest.skip(f"recorded with torch {TORCH}")
    schedule = make_photos(tmp_path / "schedule")
    done = command("run", schedule, "--out", tmp_path / "photos", "--nproc", 1)
    assert done.returncode == 0, done.stderr
    assert ends(straight[1]) | ends(tmp_path / "photos") == PROVEN


def test_two_workers_and_a_stop_change_nothing(straight, tmp_path):
    schedule, one = straight
    # LARS has no snapshot at 12 - 1: a piece of it is trained again, by one worker.
    stopped = command("run", schedule, "--out", tmp_path / "two", "--nproc", 2, "--until", "adam")
    assert stopped.returncode == 0, stopped.stderr
    done = command("run", schedule, "--out", tmp_path / "two", "--nproc", 1)
    assert done.returncode == 0 and proofs(tmp_path / "two") == proofs(one), done.stderr
    verified = command("verify", tmp_path / "two", "--trust-code", "--proofs", 1)
    assert verified.returncode == 0 and "\nBIT-EXACT" in verified.stdout, verified.stderr


def test_what_it_cannot_hold_is_refused_by_name(straight, tmp_path):
    schedule, one = straight
    done = command("check", schedule, "--set", "sgd.compile=true")
    assert done.returncode == 64 and "`compile` with `determinism: PORTABLE`" in done.stderr, done.stderr
    shutil.copytree(one, tmp_path / "out")
    shutil.rmtree(next((tmp_path / "out/snapshots").glob("own-00000012*")))
    done = command("run", schedule, "--out", tmp_path / "out", "--nproc", 1, "--threads", 2)
    assert done.returncode == 64 and "has one thread per worker" in done.stderr, done.stderr
    # This process has loaded torch.
    with pytest.raises(UsageError) as refused:
        list(stagerun.run(schedule, tmp_path / "library"))
    assert "torch is loaded already" in refused.value.message
    assert "MKL_CBWR=COMPATIBLE" in refused.value.hint


def life(emulated: str, schedule: Path, out: Path, workers: int, until: int | None) -> None:
    """Start workers by hand, since the launcher would start them on this processor; SIGKILL to all once `until` states are proven."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    words = ["-m", "stagerun", "run", str(schedule), "--out", str(out), "--timeout", "off", "--threads", "1"]
    started = []
    with (out.parent / f"{workers}.txt").open("ab") as printed:
        for rank in range(workers):
            place = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": workers}
            variables = environment() | meeting | {name: str(value) for name, value in place.items()}
            started.append(subprocess.Popen([*python(emulated), *words], env=variables, stdout=printed, stderr=printed))
    try:
        while any(one.poll() is None for one in started):
            if until is not None and (out / "log.jsonl").exists() and len(proofs(out)) >= until:
                break
            time.sleep(0.2)
    finally:
        for one in started:
            one.kill()
    ends = [-signal.SIGKILL if until is not None else 0] * workers
    assert [one.wait() for one in started] == ends, Path(printed.name).read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64-static") is None, reason="needs Debian's qemu-user-static")
@pytest.mark.parametrize("processor", ["Haswell", "Skylake-Client", "EPYC-v2", "EPYC-Rome"])
def test_an_emulated_processor_has_the_same_bits_for_any_workers_through_kills(data, processor, tmp_path):
    schedules = make(tmp_path / "schedule", data, length=60), make_photos(tmp_path / "photos")
    lives = [(1, 20), (2, 45), (3, 70), (1, 95), (2, None)], [(1, None)]
    for schedule, planned in zip(schedules, lives, strict=True):
        native, out = tmp_path / f"{schedule.name}-native", tmp_path / f"{schedule.name}-out"
        done = command("run", schedule, "--out", native, "--nproc", 1)
        assert done.returncode == 0, done.stderr
        for workers, until in planned:
            life(processor, schedule, out, workers, until)
        assert proofs(out) == proofs(native)
