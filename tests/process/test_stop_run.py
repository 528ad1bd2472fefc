"""Signals at the moments of a run at which nothing is trained yet, or all is: from the first instruction of each process on."""

import os
import signal
import time
from pathlib import Path

import processes
import pytest
import small
from processes import events, until
from reliability.sigterm import answers

NOTHING_STARTED = "stopped before anything was started; run the same command again"
FOLDER_PREFIX = "stagerun-run-"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the launcher and its workers meet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def ended(run: processes.Run, temporary: Path) -> str:
    """What was said by one that was stopped in time."""
    code, text = run.wait()
    assert code == 75, text
    assert "Traceback" not in text and "bug" not in text
    assert run.gone()
    assert not list(temporary.glob(f"{FOLDER_PREFIX}*"))
    return text


@pytest.mark.parametrize("nproc", [1, 2])
def test_from_the_first_instruction_on(base, tmp_path, temporary, nproc):
    run = small.start(base / "schedule", tmp_path / "out", nproc=nproc)
    until(run, lambda: answers(run.process.pid))
    os.kill(run.process.pid, signal.SIGTERM)
    assert ended(run, temporary).strip() == "SIGTERM: nothing was started; run the same command again"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "least, number",
    [
        (1, signal.SIGUSR1),  # the launcher imports torch
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),  # a worker does, the other may not even have started
        (3, signal.SIGINT),
    ],
)
def test_while_launcher_and_workers_start(base, tmp_path, temporary, least, number):
    run = small.start(base / "schedule", tmp_path / "out", nproc=2)
    until(run, lambda: bool(list(temporary.glob(f"{FOLDER_PREFIX}*"))) and len(run.pids()) >= least)
    os.kill(run.process.pid, number)
    os.kill(run.process.pid, signal.SIGTERM)  # schedulers send several
    assert ended(run, temporary).rstrip().endswith(NOTHING_STARTED)
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_an_iteration_that_has_just_started_is_broken_off(base, tmp_path, temporary):
    """It would take half an hour."""
    words = ("--set", "init.batch_size=400000", "--set", "init.max_iter=6", "--grace", "10m")
    run = small.start(base / "schedule", tmp_path / "out", *words)
    until(run, lambda: events(tmp_path / "out", "StageStarted"))
    os.kill(run.process.pid, signal.SIGTERM)
    text = ended(run, temporary)
    assert text.count("SIGTERM: stopping ") == text.count(", to save by ") == 1
    assert "stopped in init after iteration 0 " in text
    assert not events(tmp_path / "out", "Iterated") and events(tmp_path / "out", "Stopped")
    assert not list((tmp_path / "out" / "snapshots").glob("init-*")), "there is nothing to save"


@pytest.mark.slow
def test_hangup_does_not_stop_a_run_under_nohup(base, tmp_path, temporary):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = small.start(base / "schedule", tmp_path / "out", nproc=2)
    finally:
        signal.signal(signal.SIGHUP, before)
    for least in (1, 3):
        until(run, lambda n=least: bool(list(temporary.glob(f"{FOLDER_PREFIX}*"))) and len(run.pids()) >= n)
        for pid in run.pids():
            os.kill(pid, signal.SIGHUP)
    code, text = run.wait()
    assert code == 0, text


@pytest.mark.parametrize("command, number", [("plan", signal.SIGINT), ("rehearse", signal.SIGTERM)])
def test_other_commands_are_interrupted(base, tmp_path, command, number):
    code, text = 0, ""
    for _ in range(30):
        run = processes.Run([command, str(base / "schedule"), "--out", str(tmp_path / "out")]).start()
        while run.process.poll() is None and not answers(run.process.pid):
            time.sleep(0.002)
        run.process.send_signal(number)
        code, text = run.wait()
        if code:  # `plan` may have been faster than this process was on a busy machine
            break
    assert code == 130 and text.strip().endswith("interrupted"), text
