"""`stagerun retry`: when a command that trains under a launcher is started anew."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import small
from facade import ResumeRefused, StorageError, UsageError

from stagerun.tools.retry import command as retrying
from stagerun.tools.retry.command import Ended, RetryOptions, judge, retry_command, to_be_told


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
        (Ended(True, 80, 1), None, "80: a worker held other weights than the others"),
        (Ended(True, 79, 1), 79, ""),
        (Ended(True, 78, 78), 78, ""),
        (Ended(False, None, 64), 64, ""),
        (Ended(False, 75, 64), 64, ""),  # the life is an older one's
        (Ended(False, None, 127), 64, ""),
        (Ended(False, None, 255), None, "before the run had started"),
        (Ended(False, None, -33), None, "signal 33"),
        (Ended(True, 3, 1), None, "the run ended with 3"),
    ],
)
def test_what_is_worth_another_start(ended, code, why):
    found, said = judge(ended)
    assert found == code and why in said


class Commanded:
    """Stands in for the real one. `asked_in`: the number of the wait in which a signal comes."""

    def __init__(self, asked_in: int = 0) -> None:
        self.asked: signal.Signals | None = None
        self.asked_in, self.waits = asked_in, list[float]()

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if len(self.waits) == self.asked_in:
            self.asked = signal.SIGTERM
        return self.asked is not None

    def stands_in(self, monkeypatch: pytest.MonkeyPatch, *parts: object) -> None:
        """And what starts the command and looks at the folder before, and after."""
        for name, part in zip(("Commanded", "_before", "_one", "_further"), (lambda: self, *parts), strict=True):
            monkeypatch.setattr(retrying, name, part)


FULL = StorageError("disk full")
SAVED, KILLED, NEVER, DONE = Ended(True, 75, 1), Ended(True, None, -9), Ended(False, None, 255), Ended(True, 0, 0)


@pytest.mark.parametrize(
    "starts, further, words, ends, waits",
    [
        # Saved, and no further: no one counts them but this.
        ([SAVED] * 9, [], [], ResumeRefused, [2, 4]),
        # It goes on to the last of `starts`.
        ([SAVED] * 9, [], ["--retry"], IndexError, [2, 4, 8, 16, 32, 60, 60, 60]),
        ([SAVED] * 4 + [DONE], [2], [], 0, [2, 4, 1, 2]),
        ([KILLED, NEVER, KILLED], [], [], ResumeRefused, [2, 4]),
        ([NEVER] * 3, [], ["--retry"], ResumeRefused, [2, 4]),
        # A disk that is full for a while, and for good.
        ([KILLED, FULL, FULL, DONE], [0], [], 0, [1, 2, 4]),
        ([KILLED, FULL, FULL, FULL], [0], [], StorageError, [1, 2, 4]),
        ([FULL], [], [], StorageError, []),
    ],
)
def test_how_often_it_is_started(
    starts, further, words, ends, waits,
    monkeypatch,
):  # fmt: skip
    """`further`: the starts, counted from 0, that came to a snapshot."""
    left, stop = list(enumerate(starts)), Commanded()

    def before(task: object) -> str:
        if isinstance(left[0][1], StorageError):
            raise left.pop(0)[1]
        return ""

    stop.stands_in(monkeypatch, before, lambda *_: left[0][1], lambda *_: left.pop(0)[0] in further)
    options = RetryOptions(("stagerun", "run", "x", *words), 9, None, None)
    if isinstance(ends, int):
        assert retry_command(options) == ends
    else:
        with pytest.raises(ends):
            retry_command(options)
    assert stop.waits[: len(waits)] == waits and (ends is IndexError or len(stop.waits) == len(waits))


def test_a_signal_between_two_starts(monkeypatch, capsys):
    stop, started = Commanded(asked_in=1), []
    stop.stands_in(monkeypatch, lambda task: "", lambda *_: started.append(1) or KILLED, lambda *_: True)
    options = RetryOptions(("stagerun", "run", "x"), None, None, None)
    assert retry_command(options) == 75 and "without saving" not in capsys.readouterr().err
    # While it looks at the folder.
    assert retry_command(options) == 75 and started == [1]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_a_command_that_asks_for_help_is_refused(option):
    with pytest.raises(UsageError, match="asks `stagerun run` for its help"):
        retry_command(RetryOptions(("stagerun", "run", option), None, None, None))


@pytest.mark.parametrize(
    "script, told",
    [
        ("./mpirun 60 | cat", ("mpirun", signal.SIGUSR1)),
        ("time ./mpirun 60; true", ("mpirun", signal.SIGUSR1)),
        ("bash -c './torchrun -f x stagerun run x; true'; true", ("torchrun", signal.SIGTERM)),
        ("./mpirun.sh; true", ("mpirun", signal.SIGUSR1)),  # a script that starts the one with its name
        ("sleep 60; true", None),
        ("cd .", None),
    ],
)
def test_who_in_a_script_is_asked_to_stop(script, told, tmp_path):
    sleep = shutil.which("sleep")
    (tmp_path / "mpirun").symlink_to(str(sleep))
    (tmp_path / "torchrun").symlink_to(str(shutil.which("tail")))
    (tmp_path / "x").touch()
    (tmp_path / "mpirun.sh").write_text("#!/bin/bash\n./mpirun 60\ntrue\n")
    (tmp_path / "mpirun.sh").chmod(0o755)
    process = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, start_new_session=True)
    try:
        until = time.monotonic() + (60 if told else 0.2)
        while (found := to_be_told(process.pid)) is None and time.monotonic() < until:
            time.sleep(0.02)
        assert (found and (found[0].name(), found[1])) == told
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
def test_killed_runs_go_on_to_the_same_bits(base, tmp_path):
    done = small.stagerun("retry", "--max-restarts", 1, "--", *launcher(base, tmp_path, 9))
    assert done.returncode == 69 and "--max-restarts 1 is used up" in done.stderr, done.stderr
    assert done.stderr.count("the run was killed (the command ended with exit code 137)") == 2, done.stderr
    assert (tmp_path / "starts").read_text() == ".."
    done = small.stagerun("retry", "--", *launcher(base, tmp_path, 0))
    assert done.returncode == 0, done.stderr
    assert small.run(base / "schedule", tmp_path / "alone").returncode == 0
    assert processes.ends(tmp_path / "out") == processes.ends(tmp_path / "alone")
    again = small.stagerun("retry", "--", *launcher(base, tmp_path, 0))
    assert again.returncode == 0 and "every stage is done" in again.stderr
    assert (tmp_path / "starts").read_text() == "..."


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, script", [(signal.SIGINT, ""), (signal.SIGUSR1, ""), (signal.SIGKILL, ""), (signal.SIGTERM, "train.sh")]
)
def test_a_signal_has_the_run_saved(number, script, base, tmp_path):
    """Also in a script, whose shell dies of a signal and hands none on; and no process is left where it is killed."""
    out, command = tmp_path / "out", launcher(base, tmp_path, 0, *small.ENDLESS)
    words = ["retry", "--", *command]
    if script:
        (tmp_path / script).write_text(f"#!/bin/bash\n{shlex.join(map(str, command[5:]))}\necho after $?\n")
        (tmp_path / script).chmod(0o755)
        words = ["retry", "--schedule", base / "schedule", "--out", out, "--", tmp_path / script]
    run = processes.Run([str(word) for word in words], {"PYTHONPATH": str(Path(__file__).parents[2])}).start()
    small.wait_for(out / "snapshots" / "init-00000006-a0001", run)
    os.kill(run.process.pid, number)
    code, said = run.wait(120)
    assert run.gone(within=60), run.pids()
    if number == signal.SIGKILL:
        return
    assert code == 75 and ("after 75" if script else "the command is asked to stop") in said, said
    assert json.loads((out / "lives" / "a0001.json").read_text())["code"] == 75
