"""`bench scaling`: what is made of its turns, and a run of it; `run --profile` with two workers."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import small
import tiny
from click.testing import CliRunner

from stagerun.cli.main import main
from stagerun.errors import StorageError
from stagerun.report.bench_scaling import Measured, Share, Turn, as_record, notes, render, rows, sharing
from stagerun.spans import BACKWARD, DATA, FORWARD, REDUCTION, UPDATE, WAIT
from stagerun.store.write import require_writable


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tiny.make_data(folder)
    return folder


def turn(round: int, workers: int, seconds: Sequence[float], wait: float = 0.0) -> Turn:
    shares = tuple(
        Share(f"n{i // 2}", s, {DATA: 0.5, FORWARD: 1.0, BACKWARD: 2.0, WAIT: wait, UPDATE: 0.5}, 2 * wait, wait)
        for i, s in enumerate(seconds)
    )
    return Turn(round=round, workers=workers, iterations=2, shares=shares)


TURNS = [
    turn(0, 1, [4.0]),
    turn(0, 2, [2.5, 2.4], 1.0),
    turn(1, 2, [5.0, 4.0], 1.0),  # all is half as fast in this round
    turn(1, 1, [8.0]),
    turn(2, 1, [4.0]),
    turn(2, 2, [2.0, 2.0], 1.0),
]
MEASURED = Measured(
    schedule="s", stage="a", device="cpu", batch_size=100, logical_workers=5, threads=2, processors=2, sharing=2,
    synthetic="28 x 28, raw", rounds=3, iterations=2,
)  # fmt: skip


def test_a_machine_that_is_slower_in_one_round_changes_no_efficiency():
    one, two = rows(TURNS, 100, 5)
    assert (one.workers, one.images_per_second, one.low, one.high, one.efficiency) == (1, 50, 25, 50, 1)
    assert (two.images_per_second, two.low, two.high) == (80, 40, 100)  # of the slower rank
    assert two.efficiency == pytest.approx(4 / 2.5 / 2)
    assert (one.computing, one.communicating, one.waiting) == (3.5 / 4, 0, 0.5 / 4)
    assert (two.computing, two.communicating, two.waiting) == (3.5 / 5, 1 / 5, 0.5 / 5)
    assert (two.sending, two.hidden) == (1.0, 0.5)
    assert (one.best, two.best) == (1, 5 / 6)  # 3 and 2 device batches
    assert sharing(TURNS) == 2 and sharing([turn(0, 5, [1.0] * 5)]) == 2


def test_what_is_told():
    found = rows(TURNS, 100, 5)
    text = render(found, MEASURED)
    assert "strong scaling" in text and "says nothing of a cluster" in text and "fewer than their 4 threads" in text
    assert "2 (0.83 at best)" in text and "published by others" in text and "4630.4" in text
    record = as_record(found, MEASURED, TURNS)
    assert json.loads(json.dumps(record))["rows"][1]["images_per_second"] == 80
    apart = replace(MEASURED, sharing=1, synthetic="")
    assert not any("machine" in text or "synthetic" in text for text in notes(found, apart))


def test_it_says_that_workers_are_bound():
    bound = replace(MEASURED, bound="bound to cores (why): worker 0 to CPU 0; 1 thread each")
    found = rows(TURNS, 100, 5)
    assert "note: bound to cores (why)" in render(found, bound)
    assert not any("bound" in text for text in notes(found, MEASURED))


def test_a_file_that_is_there_stays_until_there_is_something_better(tmp_path):
    """A short life after a crash, or a mistake, would leave nothing in the place of a good trace."""
    there = tmp_path / "trace.json"
    there.write_text("old")
    require_writable(str(there))
    assert there.read_text() == "old"
    require_writable(str(tmp_path / "new"))
    with pytest.raises(StorageError):
        require_writable(str(tmp_path / "none" / "x"))


@pytest.mark.parametrize("counts", ["0,1", "2,1", "1,1", "a", "1,,2", ""])
def test_numbers_of_workers_that_are_none(counts):
    answer = CliRunner().invoke(main, ["bench", "scaling", "x", "--workers", counts])
    assert answer.exit_code == 64 and "numbers" in answer.output


def test_mistakes(tmp_path):
    schedule = small.make_schedule(tmp_path, tmp_path / "none")
    words = ["bench", "scaling", str(schedule), "--workers", "1"]
    for more, said in (
        (["--stage", "b", "--synthetic"], "no stage of"),
        (["--plot", str(tmp_path / "x.jpg"), "--synthetic"], "FILE.svg or FILE.png"),
        (["--synthetic", "--rounds", "0"], "must be 1 or more"),
    ):
        answer = CliRunner().invoke(main, [*words, *more])
        assert answer.exit_code == 64 and said in answer.output, answer.output
    answer = CliRunner().invoke(main, words)
    assert answer.exit_code == 65 and "--synthetic" in answer.output


def test_profile_iterations_alone_is_a_mistake(tmp_path):
    schedule = small.make_schedule(tmp_path, tmp_path / "none")
    answer = CliRunner().invoke(main, ["run", str(schedule), "--profile-iterations", "3"])
    assert answer.exit_code == 64 and "--profile FILE" in answer.output


@pytest.mark.slow
def test_scaling_for_real(tmp_path):
    schedule = small.make_schedule(tmp_path, tmp_path / "none")
    processors = len(os.sched_getaffinity(0))
    # A batch system's word that the machine is the job's own: `auto` binds there.
    whole = {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": str(processors), "OMP_NUM_THREADS": "1"}
    done = small.stagerun(
        "bench", "scaling", schedule, "--workers", "1,2", "--synthetic", "--rounds", 2, "--iterations", 2, "--json",
        "--plot", tmp_path / "p.svg", timeout=300, env={**os.environ, **whole},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["workers"] for row in found["rows"]] == [1, 2] and len(found["turns"]) == 4
    assert found["processors"] == processors and found["bound"].startswith("bound to cores" * (processors > 1))
    one, two = found["rows"]
    assert one["sending"] == 0 and two["sending"] > 0 and two["communicating"] > 0
    # What the network took beside backward is what the training thread waited, noted by another clock.
    assert two["sending"] - two["hidden"] <= 1.5 * two["communicating"] * two["step"] + 1e-3
    for row in found["rows"]:
        assert 0 < row["computing"] < 1 and row["low"] <= row["images_per_second"] <= row["high"]
    assert "<svg" in (tmp_path / "p.svg").read_text()


@pytest.mark.slow
def test_reductions_lie_within_backward(tmp_path, data):
    schedule = small.make_schedule(tmp_path, data, init='base_lr: 0.1 lr_policy: "fixed" max_iter: 12')
    trace = tmp_path / "trace.json"
    done = small.run(schedule, tmp_path / "out", "--profile", trace, "--profile-iterations", 4, nproc=2, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "profile of 4 iterations on 2 workers" in done.stdout
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in (0, 1):
        for iter in range(3, 7):
            mine = [e for e in events if e["pid"] == rank and e["args"]["iteration"] == iter]
            backward = [e for e in mine if e["cat"] == BACKWARD][-1]
            sums = [e for e in mine if e["cat"] == REDUCTION]
            assert len(sums) >= 2  # the tail, and the gradients
            # They leave while backward goes on, and are there before the update.
            assert all(backward["ts"] <= e["ts"] <= backward["ts"] + backward["dur"] + 1e4 for e in sums)
            update = next(e for e in mine if e["cat"] == UPDATE)
            assert all(e["ts"] + e["dur"] <= update["ts"] + 1e3 for e in sums)
    assert {e["args"]["iteration"] for e in events} == set(range(3, 7))
