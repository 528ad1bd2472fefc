"""`bench scaling`: what is made of its turns, and a run of it; `run --profile` with two workers."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import small
from click.testing import CliRunner

from stagerun.base.errors import StorageError
from stagerun.base.spans import BACKWARD, DATA, FORWARD, UPDATE, WAIT
from stagerun.cli import main
from stagerun.system.files import require_writable
from stagerun.tools.bench.report import Measured, Share, Turn, as_record, notes, render, rows, sharing


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
