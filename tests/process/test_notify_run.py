"""`run --notify`: one end for each command, whatever becomes of the workers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import small
import tiny

from stagerun.system.process import living
from stagerun.train import notifier


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("notify")
    tiny.make_data(base / "data")
    small.make_schedule(base / "schedule", base / "data")
    return base


def to(path: Path) -> tuple[str, str]:
    return "--notify", f"{sys.executable} -c \"import sys; open('{path}', 'a').write(sys.stdin.read())\""


def notices(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def started(base: Path, out: Path, nproc: int = 2) -> processes.Run:
    run = small.start(base / "schedule", out, *to(out.with_suffix(".jsonl")), *small.ENDLESS, nproc=nproc)
    small.wait_for(out / "snapshots" / "early-00000002-a0001", run)
    return run


@pytest.mark.parametrize("nproc", [1, 2])
def test_stages_and_the_end(base: Path, tmp_path: Path, nproc: int) -> None:
    told = tmp_path / "told"
    done = small.run(base / "schedule", tmp_path / "out", *to(told), "--notify", "false", nproc=nproc)
    assert done.returncode == 0, done.stderr
    found = notices(told)
    assert [one["event"] for one in found] == ["stage"] * 4 + ["finished"]
    assert [one["stage"] for one in found] == ["init", "cyc1", "collapse", "early", "early"]
    last = found[-1]
    result = json.loads(next((tmp_path / "out" / "results").glob("early-*.json")).read_text())
    assert (last["schedule"], last["exit_code"], last["iter"]) == ("tiny", 0, 3) and last["accuracy"] == result["top1"]
    assert last["out"] == str(tmp_path / "out") and abs(last["time"] - time.time()) < 300
    assert done.stderr.count("--notify false: ended with code 1") == 1
    told.unlink()
    assert small.run(base / "schedule", tmp_path / "out", *to(told), nproc=nproc).returncode == 0
    assert [one["event"] for one in notices(told)] == ["finished"]  # there was nothing to do


def test_a_worker_is_killed(base: Path, tmp_path: Path) -> None:
    run = started(base, tmp_path / "out")
    os.kill(run.ranks()[0], signal.SIGKILL)
    code, _ = run.wait()
    end = notices(tmp_path / "out.jsonl")[-1]
    assert [one["event"] for one in notices(tmp_path / "out.jsonl")].count("failed") == 1
    assert (end["event"], end["exit_code"], end["stage"]) == ("failed", code, "early") and code == 69


@pytest.mark.parametrize("nproc", [1, 2])
def test_ctrl_c(base: Path, tmp_path: Path, nproc: int) -> None:
    run = started(base, tmp_path / "out", nproc)
    run.process.send_signal(signal.SIGINT)
    assert run.wait()[0] == 75
    ends = [one for one in notices(tmp_path / "out.jsonl") if one["event"] != "stage"]
    assert [(one["event"], one["exit_code"]) for one in ends] == [("stopped", 75)]


def test_the_launcher_is_killed(base: Path, tmp_path: Path) -> None:
    run = started(base, tmp_path / "out")
    processes.kill(run, "launcher", random.Random(1))
    run.wait()
    assert run.gone()
    ends = [one for one in notices(tmp_path / "out.jsonl") if one["event"] != "stage"]
    assert len(ends) == 1 and ends[0]["event"] == "failed" and ends[0]["message"]


def test_a_mistake_in_the_files(base: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    done = small.run(base / "schedule", tmp_path / "out", *to(told), "--set", "init.base_lr=-1")
    (end,) = notices(told)
    assert (end["event"], end["exit_code"], done.returncode) == ("failed", 64, 64)
    assert "base_lr" in end["message"] and end["schedule"] is None and end["stage"] is None


@pytest.mark.parametrize("command", ["no-such-program-at-all", "echo 'open", ""])
def test_what_is_no_command_is_said_before_the_start(base: Path, tmp_path: Path, command: str) -> None:
    done = small.run(base / "schedule", tmp_path / "out", "--notify", command)
    assert done.returncode == 64 and f"--notify {command!r}" in done.stderr and "hint:" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "TIMEOUT_S", 1.0)
    began = time.monotonic()
    found = notifier.run_all(["sh -c 'sleep 61 & echo $! > %s; wait'" % (tmp_path / "pid"), "cat"], "{}\n")
    assert time.monotonic() < began + 20
    hung, fine = found.values()
    assert "took longer than 1 s" in hung and not fine
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 20  # SIGKILL is sent, not yet received: on busy processors that takes a while
    while living(pid) is not None:
        assert time.monotonic() < until, "what the command started runs on"
        time.sleep(0.02)


def test_what_a_command_prints_goes_to_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))  # as where the disk is full
    chatty = f"{sys.executable} -c \"import sys; print('x' * 10**7); print('the last word'); sys.exit(3)\""
    found = notifier.run_all([chatty, "cat"], json.dumps("y" * 10**6) + "\n")
    assert list(found.values()) == ["ended with code 3: the last word", ""]


@pytest.mark.parametrize("ranks", ["launcher", "mpirun"])
def test_an_end_at_once_is_one_end(base: Path, tmp_path: Path, ranks: str) -> None:
    """Within the first imports and plans a signal ends the process at once."""
    told = tmp_path / "told"
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    text = f"""
import os, signal, sys
from stagerun.system import signals
from stagerun.train.notify import Notified
from stagerun.train.options import RunOptions
signals.leave(75, "nothing was started")
commands = ({to(told)[1]!r},)
with Notified(RunOptions(folder={str(base / "schedule")!r}, out={str(tmp_path / "out")!r}, notify=commands)) as notified:
    job = notified.around(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    job(None, None, None)
"""
    done = subprocess.run([sys.executable, "-c", text], env=os.environ | (world if ranks == "mpirun" else {}))
    assert done.returncode == 75
    end = time.monotonic() + 30
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1)
    assert [(one["event"], one["exit_code"]) for one in notices(told)] == [("stopped", 75)]
