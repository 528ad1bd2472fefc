"""`stagerun retry`: when a command that trains under a launcher is started again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import contract
import processes
import psutil
import pytest
import small
from facade import PeerError, ResumeRefused

from stagerun.store import Life
from stagerun.tools.retry import Restarts, judge, receiver


def life(code: int | None) -> Life:
    return Life(attempt=1, run="", code=code)


@pytest.mark.parametrize(
    "ended, found, code, why",
    [
        (1, life(0), 0, ""),  # torchrun
        (75, life(75), 75, ""),  # somebody stopped the ranks
        (137, life(75), None, "stopped, and saved"),  # mpirun did, since it had lost one
        (137, life(None), None, "was killed"),
        (1, life(69), None, "69: a worker, host or service is gone"),
        (74, life(74), None, "74: disk full"),
        (1, life(80), None, "80: the weights of a worker differ"),
        (1, life(79), 79, ""),
        (78, life(78), 78, ""),
        (0, None, 0, ""),  # nothing to do
        (64, None, 64, ""),
        (127, None, 64, ""),
        (255, None, None, "before the run had started"),
        (1, life(3), None, "the run ended with 3"),
    ],
)
def test_what_is_worth_another_start(ended, found, code, why):
    final, said = judge(ended, found)
    assert final == code and why in said


def test_how_often_it_is_started():
    def waits(restarts: Restarts, *further: bool) -> list[float]:
        return [restarts.next(one, "") or restarts.wait for one in further]

    usual = Restarts(None)
    assert waits(usual, False, False, True, False, False) == [2, 4, 1, 2, 4]
    with pytest.raises(ResumeRefused, match="3 starts in a row made no progress: it was killed"):
        usual.next(False, "it was killed")
    limited = Restarts(8)
    assert waits(limited, *[False] * 8) == [2, 4, 8, 16, 32, 60, 60, 60]
    with pytest.raises(PeerError, match="--max-restarts 8 is used up"):
        limited.next(True, "it was killed")


def test_a_signal_between_two_starts(base, tmp_path):
    words = ["retry", "--", "sh", "-c", "exit 69", "stagerun", "run", base / "schedule", "--out", tmp_path / "out"]
    run = processes.Run([str(word) for word in words]).start()
    assert run.process.stdout and any("restart 2 in 4" in line for line in run.process.stdout)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(60)[0] == 75


@pytest.mark.parametrize(
    "command, said",
    [
        (["stagerun", "run", "--help"], "asks `stagerun run` for its help"),
        (["./train.sh"], "in a script, put `stagerun retry --` before the launcher"),
    ],
)
def test_a_command_without_a_run_is_refused(command, said, tmp_path):
    done = contract.stagerun(["retry", "--", *command], tmp_path)
    assert done.exit_code == 64 and said in done.stderr


@pytest.mark.parametrize(
    "script, name, number",
    [
        ("./mpirun 60 | cat", "mpirun", signal.SIGUSR1),
        ("bash -c './torchrun -f x stagerun run x; true'; true", "torchrun", signal.SIGTERM),
        ("./mpirun.sh; true", "mpirun", signal.SIGUSR1),  # a script that starts the one with its name
    ],
)
def test_who_in_a_script_is_asked_to_stop(script, name, number, tmp_path):
    shutil.copy(str(shutil.which("sleep")), tmp_path / "mpirun")
    (tmp_path / "torchrun").symlink_to(str(shutil.which("tail")))
    (tmp_path / "x").touch()
    (tmp_path / "mpirun.sh").write_text("#!/bin/bash\n./mpirun 60\ntrue\n")
    (tmp_path / "mpirun.sh").chmod(0o755)
    process = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while (found := receiver(process.pid))[0] == process.pid and time.monotonic() < until:
            time.sleep(0.02)
        assert (psutil.Process(found[0]).name(), found[1]) == (name, number)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# Passes a signal on as another one, as launchers do.
LAUNCHER = """
import signal, subprocess, sys
run = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: run.send_signal(signal.SIGUSR1))
sys.exit(1 if run.wait() else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_has_the_run_saved(number, base, tmp_path):
    """And no process is left where retry is killed."""
    out, link = tmp_path / "out", tmp_path / "stagerun"
    link.write_text(f'#!/bin/sh\nexec {sys.executable} -m stagerun "$@"\n')
    link.chmod(0o755)
    words = ["retry", "--", sys.executable, "-c", LAUNCHER, link, "run", base / "schedule", "--out", out]
    words = [str(word) for word in (*words, "--nproc", 1, "--threads", 1, *small.ENDLESS)]
    run = processes.Run(words, {"PYTHONPATH": str(Path(__file__).parents[2])}).start()
    small.wait_for(out / "snapshots" / "init-00000006-a0001", run)
    os.kill(run.process.pid, number)
    code, said = run.wait(120)
    assert run.gone(within=60), run.pids()
    if number != signal.SIGKILL:
        assert code == 75 and "the command is asked to stop" in said, said
        assert json.loads((out / "lives" / "a0001.json").read_text())["code"] == 75
