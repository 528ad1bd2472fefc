"""What `stagerun data` says meanwhile, where there is no terminal."""

import itertools
import time

import contract
from facade import Datum, write_lmdb


def test_progress_without_a_terminal_is_a_line_now_and_then(tmp_path, monkeypatch):
    """Every ten seconds. A look at the clock takes 10 ms, and there is one for each record: 100 a second."""
    raw = Datum(channels=1, height=1, width=2, data=b"ab").SerializeToString()
    write_lmdb(str(tmp_path / "lmdb"), [raw] * 2500)
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 100 + next(ticks) / 100)
    done = contract.stagerun(["data", "verify", "lmdb", "--threads", 1], tmp_path)
    lines = [line for line in done.stderr.splitlines() if " of 2500" in line]
    assert len(lines) == 2, done.output
    assert lines[0] == "verify: 1000 of 2500"
