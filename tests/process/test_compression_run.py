"""`compress_param` in whole runs: stopped, killed, and by other numbers of workers."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import processes
import pytest
import small
import tiny


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    tiny.make_data(folder / "data")
    return small.make_schedule(folder / "schedule", folder / "data")


def compressing(how: str, determinism: str = "FIXED") -> tuple[str, ...]:
    return ("--set", f"solver.compress_param={{{how}}}", "--set", f"determinism={determinism}")


def whole(schedule: Path, out: Path, *arguments: str, nproc: int) -> str:
    done = small.run(schedule, out, *arguments, nproc=nproc)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stopped(schedule: Path, out: Path, *arguments: str, nproc: int, number: int) -> None:
    """Ended by a signal in the second stage, after its first snapshot."""
    run = small.start(schedule, out, *arguments, *small.ENDLESS, nproc=nproc)
    small.wait_for(out / "snapshots" / "cyc1-00000002-a0001", run)
    os.kill(run.process.pid, number)
    code, text = run.wait()
    assert code == (75 if number == signal.SIGTERM else -number), text
    assert run.gone(30)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_run_that_was_ended_goes_on_to_the_same_bits(schedule: Path, tmp_path: Path, number: int) -> None:
    how = compressing("method: TOP_K ratio: 0.1")
    whole(schedule, tmp_path / "straight", *how, nproc=2)
    stopped(schedule, tmp_path / "ended", *how, nproc=2, number=number)
    text = whole(schedule, tmp_path / "ended", *how, *small.AGAIN, nproc=2)
    assert "resume is BIT-EXACT" in text or "resume" not in text
    assert processes.ends(tmp_path / "straight") == processes.ends(tmp_path / "ended")


def test_elastic_goes_on_with_other_workers_to_the_same_bits(schedule: Path, tmp_path: Path) -> None:
    how = compressing('method: QSGD memory: RESIDUAL start_epoch: 0.05 param { name: "fc*" method: NONE }', "ELASTIC")
    whole(schedule, tmp_path / "alone", *how, nproc=1)
    stopped(schedule, tmp_path / "many", *how, nproc=3, number=signal.SIGTERM)
    whole(schedule, tmp_path / "many", *how, *small.AGAIN, nproc=2)
    assert processes.ends(tmp_path / "alone") == processes.ends(tmp_path / "many")


@pytest.mark.slow
def test_fixed_goes_on_with_other_workers_and_says_what_becomes_of_residuals(schedule: Path, tmp_path: Path) -> None:
    how = compressing("method: POWER_SGD rank: 2")
    stopped(schedule, tmp_path / "out", *how, nproc=2, number=signal.SIGTERM)
    text = whole(schedule, tmp_path / "out", *how, *small.AGAIN, nproc=3)
    assert "resume is EQUIVALENT, not BIT-EXACT" in text and "workers: 2 -> 3" in text
    assert "the residuals of 2 senders are shared out evenly over 3" in text


def test_a_pattern_that_fits_nothing_is_a_mistake_with_a_place(schedule: Path, tmp_path: Path) -> None:
    done = small.run(
        schedule, tmp_path / "out", *compressing('method: TOP_K ratio: 0.1 param { name: "head*" method: NONE }')
    )
    assert done.returncode == 64
    assert "`compress_param.param` with name `head*` and kind ANY fits no parameter of the model" in done.stderr
    assert "--set" in done.stderr


def choices(out: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text())["choice"] for path in (out / "choices").glob("*.json")}


def test_what_auto_chose_before_it_was_killed_is_kept(schedule: Path, tmp_path: Path) -> None:
    """Killed right after the choice, before any update: two workers then train by it, whatever the link is like by then."""
    how, out = compressing("method: AUTO ratio: 0.1 allow: TOP_K"), tmp_path / "out"
    run = small.start(schedule, out, *how, *small.ENDLESS, nproc=2)
    path = out / "choices" / "init.json"
    small.wait_for(path, run)
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    assert run.gone(30)
    record = json.loads(path.read_text())
    assert record["workers"] == 2 and record["seconds"]
    first = not list((out / "snapshots").glob("init-*"))
    if first:
        path.write_text(json.dumps({**record, "choice": {"*": "TOP_K"}}))
    text = whole(schedule, out, *how, *small.AGAIN, nproc=2)
    chosen = {"*": "TOP_K"} if first else record["choice"]
    assert "as chosen before, in OUT/choices" in text or not first
    ends = list((out / "snapshots").glob("init-00000006-*"))
    assert [json.loads((end / "state.json").read_text())["choice"] for end in ends] == [chosen]
    assert choices(out).keys() == set(small.STAGES) and choices(out)["init"] == chosen
    shown = small.stagerun("plan", schedule, "--out", out, *how).stdout
    assert "`init`: AUTO chose for 2 workers: TOP_K" in shown or not first
