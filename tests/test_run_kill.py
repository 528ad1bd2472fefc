"""Killed at random moments, and carried to the end by the same command: the same bits, and no process left behind."""

import random
from pathlib import Path

import kill_test
import pytest
import small
import tiny


@pytest.mark.parametrize(
    "workers, kills",
    [(2, 3), (3, 3), pytest.param(1, 6, marks=pytest.mark.slow), pytest.param(4, 12, marks=pytest.mark.slow)],
)
def test_kills(workers: int, kills: int, tmp_path: Path) -> None:
    tiny.make_data(tmp_path / "data")
    schedule = small.make_schedule(tmp_path / "schedule", tmp_path / "data")
    said: list[str] = []
    tally = kill_test.attack(schedule, tmp_path / "out", workers, kills, random.Random(workers), said.append)
    assert tally.kills == kills and tally.finished >= 1, said
    assert (tally.different, tally.failures, tally.orphans) == (0, 0, 0), said
