"""`rehearse --workers 1,2,4`: what is made of its turns, and mistakes."""

from collections.abc import Sequence

import pytest
import small
from click.testing import CliRunner

from stagerun.base.spans import BACKWARD, DATA, FORWARD, UPDATE, WAIT
from stagerun.cli import main
from stagerun.tools.rehearse.scaling import Share, Turn, notes, render, rows


def turn(round: int, workers: int, seconds: Sequence[float], wait: float = 0.0) -> Turn:
    parts = {DATA: 0.5, FORWARD: 1.0, BACKWARD: 2.0, WAIT: wait, UPDATE: 0.5}
    shares = tuple(Share(f"n{i // 2}", s, parts, 2 * wait, wait) for i, s in enumerate(seconds))
    return Turn(round=round, workers=workers, iterations=2, shares=shares)


TURNS = [
    turn(0, 1, [4.0]),
    turn(0, 2, [2.5, 2.4], 1.0),
    turn(1, 2, [5.0, 4.0], 1.0),  # all is half as fast in this round
    turn(1, 1, [8.0]),
    turn(2, 1, [4.0]),
    turn(2, 2, [2.0, 2.0], 1.0),
]


def test_a_machine_that_is_slower_in_one_round_changes_no_efficiency() -> None:
    one, two = rows(TURNS, 100)
    assert (one.workers, one.images_per_second, one.low, one.high, one.efficiency) == (1, 50, 25, 50, 1)
    assert (two.images_per_second, two.low, two.high) == (80, 40, 100)  # of the slower rank
    assert two.efficiency == pytest.approx(4 / 2.5 / 2)
    assert (one.computing, one.communicating, one.waiting) == (3.5 / 4, 0, 0.5 / 4)
    assert (two.computing, two.communicating, two.waiting) == (3.5 / 5, 1 / 5, 0.5 / 5)
    assert (two.sending, two.hidden) == (1.0, 0.5)


def test_what_is_told() -> None:
    text = render(rows(TURNS, 100), notes(TURNS, 100, 5, "cpu", 2, 2, "28 x 28, raw"))
    assert "strong scaling" in text and "a cluster behaves otherwise" in text and "fewer than their 4 threads" in text
    assert "dealt out evenly to 2" in text and "28 x 28, raw" in text
    assert len(notes([turn(0, 1, [1.0])], 100, 5, "cpu", 2, 2, "")) == 2


def test_mistakes(tmp_path) -> None:
    words = ["rehearse", str(small.make_schedule(tmp_path, tmp_path / "none"))]
    for more, said in (
        (["--workers", "0,1"], "growing numbers"),
        (["--workers", "2,1"], "growing numbers"),
        (["--workers", "a"], "numbers"),
        (["--workers", "1,2", "--only", "b", "--synthetic"], "no stage of"),
        (["--workers", "1,2", "--nproc", "2", "--synthetic"], "--nproc with --workers 1,2"),
    ):
        answer = CliRunner().invoke(main, [*words, *more])
        assert answer.exit_code == 64 and said in answer.output, answer.output
    answer = CliRunner().invoke(main, [*words, "--workers", "1,2"])
    assert answer.exit_code == 65 and "--synthetic" in answer.output
    answer = CliRunner().invoke(main, ["bench", "scaling", *words[1:]])
    assert answer.exit_code == 64 and "rehearse DIR --workers 1,2,4" in answer.output
