"""`stagerun sbatch`: the script, word for word and as bash takes it, and what is refused before there is one. On a real Slurm:
tests/cluster/test_sbatch.py."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import tiny
from click.testing import CliRunner

from stagerun.cli import main
from stagerun.tools.slurm.command import Batch, clock, script

GOLDEN = Path(__file__).parents[1] / "golden" / "sbatch"

PLAIN = Batch(
    name="resnet50_72ep",
    about=["resnet50_72ep on 64 nodes with 2 workers each: 5 stages, 22610 iterations to do.", "About 8 h."],
    command=["stagerun", "sbatch", "solvers/resnet50_72ep", "--nodes", "64", "--time", "4h"],
    folder="/home/me/work",
    out="/home/me/work/out/resnet50_72ep",
    program=["/home/me/venv/bin/stagerun"],
    arguments=["run", "solvers/resnet50_72ep"],
    nodes=64,
    workers_per_node=2,
    time=4 * 3600,
    signal_before=300,
)
SHARED = dataclasses.replace(
    PLAIN,
    name="two words",
    folder="/home/me/my work",
    out="/home/me/my work/100%",
    arguments=["run", "my solvers", "--set", "name=it's", "--threads", "3"],
    nodes=1,
    workers_per_node=4,
    time=2 * 86400 + 90,
    signal_before=60,
    grace=30.5,
    partition="gpu",
    account="a 1",
    gpus_per_node=4,
    cpus_per_worker=6,
)


def test_a_line_break_in_what_was_typed_hides_no_option() -> None:
    """sbatch reads options down to the first line that is no comment."""
    text = script(dataclasses.replace(PLAIN, command=["stagerun", "sbatch", "--set", "seed=2\n"], about=["a\nb"]))
    lines = text.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(not line or line.startswith("#") for line in lines[: last + 1]), text


def test_clock() -> None:
    assert [clock(s) for s in (60, 3599, 86399, 86400)] == ["00:01:00", "00:59:59", "23:59:59", "1-00:00:00"]


# -- the command


@pytest.fixture
def schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tiny.make_schedule(tmp_path / "schedule", tmp_path / "data")


def sbatch(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["sbatch", *map(str, words)])
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


def test_the_script_is_made_from_the_command(schedule: Path) -> None:
    code, text, _ = sbatch("schedule", "--nodes", 2, "--time", "90m", "--", "--retry", "--threads", "2")
    assert code == 0
    lines = text.splitlines()
    assert "#SBATCH --nodes=2" in lines and "#SBATCH --time=01:30:00" in lines and "#SBATCH --signal=USR1@300" in lines
    assert f"#SBATCH --chdir={schedule.parent}" in lines
    assert "# Allocations of 1 h 30 min, the last 5 min 00 s of which are for saving." in text
    assert re.search(r"stagerun run schedule --retry --threads 2 --grace 280s &$", text, re.M), text


def test_words_of_the_template_in_a_path_stay_as_they_are(schedule: Path) -> None:
    out = "run@FRUITLESS@-@AGAIN@"
    code, text, _ = sbatch("schedule", "--nodes", 2, "--time", "90m", "--", "--out", out)
    assert code == 0 and text.count(out) > 1 and "@OUT@" not in text


def test_all_that_run_would_refuse_is_told_now(schedule: Path) -> None:
    code, text, told = sbatch("schedule", "--nodes", 3, "--workers-per-node", 3, "--time", "4h")
    assert (code, text) == (64, "") and "9 workers are too many for stages" in told and "use at most 8 workers" in told
    (schedule / "cyc1.prototxt").write_text("base_lr: 0.06 lr_polcy: 'poly'\nmax_iter: x")
    code, text, told = sbatch("schedule", "--nodes", 2, "--time", "4h")
    assert code == 64 and not text and "did you mean `lr_policy`?" in told and "mistakes" in told


def test_numbers_that_do_not_go_together_are_told_all_at_once(schedule: Path) -> None:
    code, text, told = sbatch(
        "schedule", "--nodes", 2, "--time", "10m", "--signal-before", "6m", "--gpus-per-node", 2, "--workers-per-node", 3,
        "--", "--nproc", 2, "--grace", "6m",
    )  # fmt: skip
    assert code == 64 and not text and "4 mistakes" in told
    for part in (
        "--signal-before must be 5 min 00 s at most",
        "--grace must be 5 min 40 s at most",
        "--nproc must be left out",
    ):
        assert part in told, told


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--nodes", 0, "--time", "4h"], "--nodes must be 1 or more"),
        (["--nodes", 2, "--time", "30s"], "too short"),
        (["--nodes", 2], "Missing option '--time'"),
        (["--nodes", 2, "--time", "4h", "--", "--retyr"], "--retry"),
        (["--nodes", 2, "--time", "4h", "--", "--only", "cyc9"], "cyc9"),
        (["--nodes", 2, "--time", "4h", "--", "--threads", "0"], "--threads must be 1 or more"),
    ],
)
def test_mistakes(schedule: Path, words: list[object], part: str) -> None:
    code, text, told = sbatch("schedule", *words)
    assert (code, text) == (64, "") and part in told, told


@pytest.mark.parametrize("name", ["a\n#SBATCH --wrap=x", "a\rb", os.fsdecode(b"a\xff")])
def test_a_current_folder_whose_name_would_not_stay_in_its_line(
    schedule: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(name).mkdir()
    monkeypatch.chdir(name)
    code, text, told = sbatch(schedule.resolve(), "--nodes", 2, "--time", "4h")
    assert (code, text) == (64, "") and "the name of the current folder must be text of one line" in told, told


def test_the_place_of_what_is_printed_is_made(schedule: Path) -> None:
    """sbatch takes a script whose output can't be opened; the job then fails without a word."""
    code, text, _ = sbatch("schedule", "--nodes", 2, "--time", "4h", "--out", "far/off")
    assert code == 0 and f"#SBATCH --output={schedule.parent}/far/off.slurm-%j.out" in text
    assert Path("far").is_dir() and not Path("far/off").exists()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, batch in (("plain", PLAIN), ("shared", SHARED)):
        (GOLDEN / f"{name}.sbatch").write_text(script(batch))
