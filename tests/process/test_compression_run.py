"""`compress_param` in whole runs: stopped, killed, and with what AUTO chose."""

import json
import os
import signal
from pathlib import Path

import processes
import pytest
import small


@pytest.fixture(scope="module")
def schedule(base: Path) -> Path:
    return base / "schedule"


def compressing(how: str) -> tuple[str, ...]:
    return ("--set", f"solver.compress_param={{{how}}}")


def whole(schedule: Path, out: Path, *arguments: str, nproc: int) -> str:
    done = small.run(schedule, out, *arguments, nproc=nproc)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ended(schedule: Path, out: Path, *arguments: str, number: int, there: str) -> None:
    """Two workers, ended by a signal once `there` exists."""
    run = small.start(schedule, out, *arguments, *small.ENDLESS, nproc=2)
    small.wait_for(out / there, run)
    os.kill(run.process.pid, number)
    code, text = run.wait()
    assert code == (75 if number == signal.SIGTERM else -number), text
    assert run.gone(30)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_run_that_was_ended_goes_on_to_the_same_bits(schedule: Path, tmp_path: Path, number: int) -> None:
    """Other methods and other numbers of workers: tests/train/test_compressed.py."""
    how = compressing("method: TOP_K ratio: 0.1")
    whole(schedule, tmp_path / "straight", *how, nproc=2)
    ended(schedule, tmp_path / "ended", *how, number=number, there="snapshots/cyc1-00000002-a0001")
    text = whole(schedule, tmp_path / "ended", *how, *small.AGAIN, nproc=2)
    assert "resume is BIT-EXACT" in text or "resume" not in text
    assert processes.ends(tmp_path / "straight") == processes.ends(tmp_path / "ended")


@pytest.mark.parametrize(
    ("field", "rule", "said"),
    [
        (
            "compress_param",
            "method: TOP_K ratio: 0.1 param { name: 'head*' method: NONE }",
            "with name `head*` and kind ANY",
        ),
        ("param", "name: 'conv1.wieght' lr_mult: 0", "did you mean `conv1.weight`?"),
    ],
)
def test_a_pattern_that_fits_nothing_is_a_mistake_with_a_place(
    schedule: Path, tmp_path: Path, field: str, rule: str, said: str
) -> None:
    done = small.run(schedule, tmp_path / "out", "--set", f"solver.{field}={{{rule}}}")
    assert done.returncode == 64
    assert said in done.stderr and "fits no parameter of the model" in done.stderr and "--set" in done.stderr


def test_what_auto_chose_before_it_was_killed_is_kept(schedule: Path, tmp_path: Path) -> None:
    """Killed right after the choice, before any update: two workers then train by it, whatever the link is like by then."""
    how, out, chosen = compressing("method: AUTO ratio: 0.1 allow: TOP_K"), tmp_path / "out", {"*": "TOP_K"}
    ended(schedule, out, *how, number=signal.SIGKILL, there="choices/init.json")
    path = out / "choices" / "init.json"
    record = json.loads(path.read_text())
    assert record["workers"] == 2 and record["seconds"]
    first = not list((out / "snapshots").glob("init-*"))
    if first:
        path.write_text(json.dumps({**record, "choice": chosen}))
    text = whole(schedule, out, *how, *small.AGAIN, nproc=2)
    chosen = chosen if first else record["choice"]
    assert "as chosen before, in OUT/choices" in text or not first
    ends = list((out / "snapshots").glob("init-00000006-*"))
    assert [json.loads((end / "state.json").read_text())["choice"] for end in ends] == [chosen]
    kept = {path.stem: json.loads(path.read_text())["choice"] for path in (out / "choices").glob("*.json")}
    assert kept.keys() == set(small.STAGES) and kept["init"] == chosen
    shown = small.stagerun("plan", schedule, "--out", out, *how).stdout
    assert "`init`: AUTO chose for 2 workers: TOP_K" in shown or not first
