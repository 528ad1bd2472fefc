"""How a command ends where nobody reads its output: the exit code still tells."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import small
import tiny

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def unread(*words: object, cwd: Path) -> int:
    """The exit code of a command whose stdout and stderr go to a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        return subprocess.run(
            [sys.executable, "-m", "stagerun", *map(str, words)],
            stdout=pipe, stderr=pipe, env=ENVIRONMENT, cwd=cwd, timeout=120,
        ).returncode  # fmt: skip


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ending")
    tiny.make_data(base / "data")
    return small.make_schedule(base / "schedule", base / "data", cyc1='base_lr: 1e6 lr_policy: "fixed" max_iter: 9')


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_error_keeps_its_exit_code(schedule: Path, tmp_path: Path, nproc: int) -> None:
    words = ("run", schedule, "--out", tmp_path / "out", "--nproc", nproc, "--threads", 1)
    assert unread(*words, cwd=tmp_path) == 79
    log = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert '"event": "Failed", "code": 79, "text": "in stage `cyc1` ' in log[-1]
    assert not list(tmp_path.glob("stagerun-bug-*"))


def test_a_mistake_and_a_listing_that_nobody_wants_to_its_end(schedule: Path, tmp_path: Path) -> None:
    assert unread("check", "/nowhere", cwd=tmp_path) == 64
    assert unread("plan", schedule, cwd=tmp_path) == 0


def test_a_full_disk_behind_stdout(schedule: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stagerun", "plan", str(schedule)],
            stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=60,
        )  # fmt: skip
    assert done.returncode == 74 and done.stderr == "standard output can't be written: No space left on device\n"
    assert not list(tmp_path.glob("stagerun-bug-*"))


def test_a_second_interrupt_whose_reader_is_gone() -> None:
    program = (
        "import os, signal\n"
        "from stagerun.launch import StopRequest\n"
        "StopRequest().install()\n"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 2)\n"
        "signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, timeout=60)
    assert done.returncode == 130 == 128 + signal.SIGINT
