"""`stagerun retry`: when a command that trains under a launcher is started anew."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import small
import tiny

from stagerun.cli.retrying import Ended, judge


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("retry")
    tiny.make_data(base / "data")
    small.make_schedule(base / "schedule", base / "data")
    return base


@pytest.mark.parametrize(
    "ended, code, why",
    [
        (Ended(True, 0, 1), 0, ""),  # torchrun
        (Ended(True, 75, 75), 75, ""),  # somebody stopped the ranks
        (Ended(True, 75, 137), None, "stopped, and saved"),  # mpirun did, since it had lost one
        (Ended(True, None, 137), None, "was killed"),
        (Ended(True, None, -9), None, "SIGKILL"),
        (Ended(True, 69, 1), None, "69: a worker, host or service is gone"),
        (Ended(True, 74, 74), None, "74: disk full"),
        (Ended(True, 79, 1), 79, ""),
        (Ended(True, 78, 78), 78, ""),
        (Ended(False, None, 64), 64, ""),
        (Ended(False, 75, 64), 64, ""),  # the life is an older one's
        (Ended(False, None, 127), 64, ""),
        (Ended(False, None, 255), None, "before the run had begun"),
    ],
)
def test_what_is_worth_another_start(ended: Ended, code: int | None, why: str) -> None:
    found, said = judge(ended)
    assert found == code and why in said


def retry(*words: object) -> subprocess.CompletedProcess[str]:
    return small.stagerun("retry", *words, timeout=400)


def test_mistakes_are_told_before_anything_is_started(base: Path, tmp_path: Path) -> None:
    run = ["stagerun", "run", base / "schedule", "--out", tmp_path / "out"]
    marker = tmp_path / "started"
    for words, said in (
        (["--", "touch", marker], "say what it runs: `stagerun retry --schedule DIR"),
        (["--", "touch", marker, *run, "--set", "init.base_lr=-1"], "`base_lr` must be at least 0"),
        (["--", "touch", marker, *run, "--nosuch"], "No such option"),
        (["--", "no-such-launcher", *run], "`no-such-launcher` can't be started"),
        (["--max-restarts", "-1", "--", "touch", marker, *run], "--max-restarts must be 0 or more"),
    ):
        done = retry(*words)
        assert done.returncode == 64 and said in done.stderr, done.stderr
    assert not marker.exists()


@pytest.mark.slow
def test_a_command_that_never_begins_is_given_up(base: Path, tmp_path: Path) -> None:
    script = tmp_path / "launcher"
    script.write_text(f"#!/bin/sh\necho . >> {tmp_path}/starts\nexit 255\n")
    script.chmod(0o755)
    done = retry("--", script, "stagerun", "run", base / "schedule", "--out", tmp_path / "out")
    assert done.returncode == 69 and "3 starts in a row ended before the run had begun" in done.stderr, done.stderr
    assert done.stderr.count("restart ") == 2 and (tmp_path / "starts").read_text().count(".") == 3


# Starts the run; once a snapshot is there it kills all, as a launcher that has lost a rank does, `deaths` times in all.
LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path
out, deaths, starts = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
starts.write_text((starts.read_text() if starts.exists() else "") + ".")
before = set(out.glob("snapshots/[!.]*"))
run = subprocess.Popen(sys.argv[4:])
signal.signal(signal.SIGTERM, lambda *_: run.send_signal(signal.SIGUSR1))
if len(starts.read_text()) <= deaths:
    while run.poll() is None and set(out.glob("snapshots/[!.]*-*-*")) <= before:
        time.sleep(0.01)
    run.kill()
    sys.exit(run.wait() and 137)
sys.exit(1 if run.wait() else 0)
"""


def launcher(base: Path, tmp_path: Path, deaths: int, *more: object) -> list[object]:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    out = tmp_path / "out"
    link = tmp_path / "stagerun"
    link.write_text(f'#!/bin/sh\nexec {sys.executable} -m stagerun "$@"\n')
    link.chmod(0o755)
    run = [link, "run", base / "schedule", "--out", out, "--nproc", 1, "--threads", 1, *more]
    return [sys.executable, script, out, deaths, tmp_path / "starts", *run]


@pytest.mark.slow
def test_killed_runs_go_on_to_the_same_bits(base: Path, tmp_path: Path) -> None:
    done = retry("--", *launcher(base, tmp_path, 2))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the run was killed (the command ended with exit code 137)") == 2, done.stderr
    assert small.run(base / "schedule", tmp_path / "alone").returncode == 0
    assert processes.ends(tmp_path / "out") == processes.ends(tmp_path / "alone")
    again = retry("--", *launcher(base, tmp_path, 0))
    assert again.returncode == 0 and "every stage is done" in again.stderr
    assert (tmp_path / "starts").read_text() == "..."


@pytest.mark.slow
def test_max_restarts(base: Path, tmp_path: Path) -> None:
    done = retry("--max-restarts", 1, "--", *launcher(base, tmp_path, 9))
    assert done.returncode == 69 and "--max-restarts 1 is used up" in done.stderr, done.stderr
    assert (tmp_path / "starts").read_text() == ".."


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_has_the_run_saved(number: signal.Signals, base: Path, tmp_path: Path) -> None:
    words = ["retry", "--", *(str(word) for word in launcher(base, tmp_path, 0, *small.ENDLESS))]
    run = processes.Run(words).start()
    small.wait_for(tmp_path / "out" / "snapshots" / "init-00000006-a0001", run)
    os.kill(run.process.pid, number)
    code, said = run.wait(120)
    assert code == 75, said
    assert "the command is told to stop" in said and run.gone()
    assert json.loads((tmp_path / "out" / "lives" / "a0001.json").read_text())["code"] == 75


@pytest.mark.slow
def test_no_process_is_left_when_it_is_killed(base: Path, tmp_path: Path) -> None:
    words = ["retry", "--", *(str(word) for word in launcher(base, tmp_path, 0, *small.ENDLESS))]
    run = processes.Run(words).start()
    small.wait_for(tmp_path / "out" / "snapshots" / "init-00000006-a0001", run)
    run.process.kill()
    began = time.monotonic()
    assert run.gone(within=60), run.pids()
    assert time.monotonic() - began < 60
