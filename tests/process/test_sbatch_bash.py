"""`stagerun sbatch`: the script, word for word and as bash takes it. What is refused: tests/cases/words_of_sbatch.txt. On a real Slurm:
tests/cluster/test_sbatch.py."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import contract
import pytest
import small
import tiny

GOLDEN = Path(__file__).parents[1] / "golden" / "sbatch"
TYPED = {
    "plain": ["tiny", "--nodes", 2, "--workers-per-node", 2, "--time", "4h"],
    "shared": [
        "it's mine", "--nodes", 1, "--workers-per-node", 4, "--gpus-per-node", 4, "--cpus-per-worker", 6, "--partition", "gpu",
        "--account", "a 1", "--time", "48h", "--signal-before", "60s", "--set", "name=other", "--out", "100%", "--", "--threads", 3,
    ],
}  # fmt: skip


def work(folder: Path) -> Path:
    """A folder with two schedules."""
    for name in ("tiny", "it's mine"):
        tiny.make_schedule(folder / "my work" / name, folder / "data")
    return folder / "my work"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return work(tmp_path_factory.mktemp("sbatch"))


def script(folder: Path, *words: object) -> str:
    done = small.stagerun("sbatch", *words, cwd=folder, code=0)
    return done.stdout


def elsewhere(text: str, folder: Path) -> str:
    """The same of another user."""
    text = text.replace(str(folder), "/home/me/my work")
    return re.sub(r"^    \S.* run ", "    /home/me/venv/bin/stagerun run ", text, flags=re.M)


@pytest.fixture(scope="module")
def plain(folder):
    return script(folder, *TYPED["plain"])


def test_a_line_break_in_what_was_typed_hides_no_option(folder):
    """sbatch reads options down to the first line that is no comment."""
    lines = script(folder, *TYPED["plain"], "--set", "seed=2\n").splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(not line or line.startswith("#") for line in lines[: last + 1]), lines


@pytest.mark.parametrize("name", TYPED)
def test_script(folder, name):
    text = script(folder, *TYPED[name])
    golden = (GOLDEN / f"{name}.sbatch").read_text()
    assert elsewhere(text, folder) == golden, "python tests/process/test_sbatch_bash.py writes them anew"
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert "@" not in text.replace("USR1@", "").replace('"$@"', "")


def test_what_is_quoted_reaches_the_ranks_as_it_was_typed(folder):
    step = re.search(r"^srun .*?&$", script(folder, *TYPED["shared"]), re.M | re.S)
    assert step
    command = "srun() { printf '%s\\n' \"$@\"; }; " + step[0].removesuffix("&")
    words = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout.splitlines()
    assert words[words.index("run") :] == [
        "run", "it's mine", "--set", "name=other", "--out", "100%", "--threads", "3", "--grace", "53s"
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
        # Slurm's SIGTERM finds the script at its `wait`; the ranks end after it.
        (143, 0, "RUNNING", "\nqueued again: time limit\n"),
    ],
)
def test_what_becomes_of_an_end(plain, code, busy, state, said, tmp_path):
    found, text = end_of(plain, tmp_path, code, busy, state)
    assert found == code and (said in text if said else "queued" not in text), text
    queued = (tmp_path / "calls").exists() and "requeue" in (tmp_path / "calls").read_text()
    assert queued == said.strip().startswith("queued")


def end_of(text: str, folder: Path, code: int, busy: int = 0, state: str = "RUNNING") -> tuple[int, str]:
    """The script's exit code and what it says, where the ranks end with `code` and the first `busy` questions to Slurm fail."""
    for name, fake in _FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{fake}\n")
        (folder / name).chmod(0o755)
    given = {"SRUN_CODE": str(code), "BUSY": str(busy), "STATE": state, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"}
    given["REASON"] = "TimeLimit" if code == 143 else "None"
    done = subprocess.run(
        ["bash", "-c", re.sub("^out=.*$", f"out={folder}/out", text, flags=re.M)],
        cwd=folder, env={**given, "PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_three_ends_without_progress_are_the_last_and_so_is_one_that_cannot_be_counted(plain, tmp_path):
    ends = [end_of(plain, tmp_path, 75) for _ in range(3)]
    assert [code for code, _ in ends] == [75, 75, 78] and "not queued again: 3 allocations in a row" in ends[2][1]
    assert (tmp_path / "calls").read_text().count("requeue") == 2
    (tmp_path / "out.slurm-7.idle").symlink_to("/dev/full")
    code, said = end_of(plain, tmp_path, 74)
    assert code == 74 and "not queued again: exit code 74" in said
    assert (tmp_path / "calls").read_text().count("requeue") == 2


# -- the command


@pytest.fixture
def schedule(tmp_path):
    return tiny.make_schedule(tmp_path / "schedule", tmp_path / "data")


def sbatch(folder: Path, *words: object) -> tuple[int, str, str]:
    result = contract.stagerun(["sbatch", *words], folder)
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


def test_the_script_is_made_from_the_command(schedule):
    """The place of what is printed is made: sbatch takes a script whose output can't be opened, and the job fails without a word."""
    words = ["schedule", "--nodes", 2, "--time", "90m", "--out", "far/run@FRUITLESS@-@AGAIN@"]
    code, text, _ = sbatch(schedule.parent, *words, "--", "--retry", "--threads", "2")
    assert code == 0 and "@OUT@" not in text
    for line in ("nodes=2", "time=01:30:00", "signal=USR1@300", f"chdir={schedule.parent}"):
        assert f"#SBATCH --{line}\n" in text
    assert f"#SBATCH --output={schedule.parent}/far/run@FRUITLESS@-@AGAIN@.slurm-%j.out\n" in text
    assert "# Allocations of 1 h 30 min, the last 5 min 00 s for saving." in text
    assert re.search(r"stagerun run schedule .*--retry --threads 2 --grace 280s &$", text, re.M), text
    assert os.listdir(schedule.parent / "far") == []


@pytest.mark.parametrize("name", ["a\n#SBATCH --wrap=x", "a\rb", os.fsdecode(b"a\xff")])
def test_a_current_folder_whose_name_would_not_stay_in_its_line(schedule, name):
    (schedule.parent / name).mkdir()
    code, text, told = sbatch(schedule.parent / name, schedule, "--nodes", 2, "--time", "4h")
    assert (code, text) == (64, "") and "must be one line of printable text" in told, told


def test_images_are_looked_at_where_they_are_here(schedule):
    words = [schedule.parent, "schedule", "--nodes", 2, "--time", "4h"]
    code, text, told = sbatch(*words)
    assert code == 0 and text
    assert f"warning: `{schedule.parent}/data/train_lmdb`" in told and "ends with 65" in told
    tiny.make_data(schedule.parent / "data")
    code, text, told = sbatch(*words)
    assert code == 0 and text and not told
    (schedule.parent / "data" / "train_lmdb" / "data.mdb").write_bytes(b"nothing" * 1000)
    code, text, told = sbatch(*words)
    assert code == 65 and not text and "train_lmdb" in told


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        there = work(Path(made).resolve())
        for name, typed in TYPED.items():
            (GOLDEN / f"{name}.sbatch").write_text(elsewhere(script(there, *typed), there))
