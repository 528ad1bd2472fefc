"""The script of `stagerun sbatch`, word for word, and as bash takes it. On a real Slurm: tests/cluster/test_sbatch.py."""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
import tiny
from test_sbatch import GOLDEN as GOLDEN
from test_sbatch import PLAIN as PLAIN
from test_sbatch import SHARED as SHARED
from test_sbatch import sbatch as sbatch
from test_sbatch import schedule as schedule

from stagerun.tools.slurm.command import Batch, script


@pytest.mark.parametrize(("name", "batch"), [("plain", PLAIN), ("shared", SHARED)])
def test_script(name: str, batch: Batch) -> None:
    text = script(batch)
    assert text == (GOLDEN / f"{name}.sbatch").read_text(), "python tests/fast/test_sbatch.py writes them anew"
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert "@" not in text.replace("USR1@", "").replace('"$@"', "")


def test_what_is_quoted_reaches_the_ranks_as_it_was_typed() -> None:
    step = re.search(r"^srun .*?&$", script(SHARED), re.M | re.S)
    assert step
    words = subprocess.run(
        ["bash", "-c", "srun() { printf '%s\\n' \"$@\"; }; " + step[0].removesuffix("&")],
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert words[words.index("/home/me/venv/bin/stagerun") :] == [
        *SHARED.program, "run", "my solvers", "--set", "name=it's", "--threads", "3", "--grace", "30.5s"
    ]  # fmt: skip
    assert "--cpus-per-task=6" in words


_FAKES = {
    "srun": "[ $SRUN_CODE = 143 ] && { kill $PPID; /bin/sleep 0.3; }; exit $SRUN_CODE",
    "scontrol": """echo "$@" >>calls
[ $1.$STATE = requeue.KILLING ] && kill $$
[ $STATE = KILLING ] && STATE=RUNNING
[ $(grep -c . calls) -gt $BUSY ] || { echo busy >&2; exit 1; }
[ $1 = requeue ] || echo "JobState=$STATE Reason=${REASON:-None}" """,
    "sleep": "true",
}


@pytest.mark.parametrize(
    ("code", "busy", "state", "said"),
    [
        (75, 0, "RUNNING", "queued again: exit code 75"),
        (80, 0, "RUNNING", "queued again: exit code 80"),
        (137, 2, "RUNNING", "queued again: exit code 137"),  # Slurm's controller has much to do
        (75, 99, "RUNNING", "not queued again: Slurm does not answer"),
        (75, 0, "KILLING", "queued again: exit code 75"),  # what the job runs ends as soon as it is requeued
        (75, 0, "CANCELLED", ""),
        (130, 0, "RUNNING", ""),  # somebody's Ctrl-C
        (64, 0, "RUNNING", ""),
    ],
)
def test_what_becomes_of_an_end(code: int, busy: int, state: str, said: str, tmp_path: Path) -> None:
    found, text = end_of(tmp_path, tmp_path / "out", code, busy, state)
    assert found == code and (said in text if said else "queued" not in text), text
    queued = (tmp_path / "calls").exists() and "requeue" in (tmp_path / "calls").read_text()
    assert queued == said.startswith("queued")


def end_of(folder: Path, out: Path, code: int, busy: int = 0, state: str = "RUNNING") -> tuple[int, str]:
    """The script's exit code and what it says, where the ranks end with `code` and the first `busy` questions to Slurm fail."""
    for name, text in _FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    given = {
        "REASON": "TimeLimit" if code == 143 else "None",
        "SRUN_CODE": str(code),
        "BUSY": str(busy),
        "STATE": state,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n",
    }
    done = subprocess.run(
        ["bash", "-c", script(dataclasses.replace(PLAIN, out=str(out)))],
        cwd=folder, env={**given, "PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_the_time_limit(tmp_path: Path) -> None:
    """Slurm's SIGTERM finds the script at its `wait`; the ranks end after it."""
    code, said = end_of(tmp_path, tmp_path / "out", 143)
    assert code == 143 and "\nqueued again: time limit\n" in said and "not queued" not in said, said


def test_three_ends_without_progress_are_the_last_and_so_is_one_that_cannot_be_counted(tmp_path: Path) -> None:
    ends = [end_of(tmp_path, tmp_path / "out", 75) for _ in range(3)]
    assert [code for code, _ in ends] == [75, 75, 78] and "not queued again: 3 allocations in a row" in ends[2][1]
    assert (tmp_path / "calls").read_text().count("requeue") == 2
    (tmp_path / "out.slurm-7.idle").symlink_to("/dev/full")
    code, said = end_of(tmp_path, tmp_path / "out", 74)
    assert code == 74 and "not queued again: exit code 74" in said
    assert (tmp_path / "calls").read_text().count("requeue") == 2


def test_images_are_looked_at_where_they_are_here(schedule: Path) -> None:
    words = ["schedule", "--nodes", 2, "--time", "4h"]
    code, text, told = sbatch(*words)
    assert (
        code == 0 and text and f"warning: `{schedule.parent}/data/train_lmdb` and " in told and "ends with 65" in told
    )
    tiny.make_data(schedule.parent / "data")
    code, text, told = sbatch(*words)
    assert code == 0 and text and not told
    (schedule.parent / "data" / "train_lmdb" / "data.mdb").write_bytes(b"nothing" * 1000)
    code, text, told = sbatch(*words)
    assert code == 65 and not text and "train_lmdb" in told


def test_without_sbatch(schedule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(schedule))
    code, text, told = sbatch("schedule", "--nodes", 2, "--time", "4h", "--submit")
    assert (code, text) == (64, "") and "no sbatch can be run here" in told and "> FILE" in told
