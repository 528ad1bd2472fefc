"""`stagerun preflight` on this machine, with workers."""

import json
from pathlib import Path

import pytest
import small
from test_preflight import links as links
from test_preflight import measured as measured
from test_preflight import said as said


def test_a_host_that_is_not_ready_is_told_before_any_worker_starts(base: Path, tmp_path: Path) -> None:
    done = small.stagerun("preflight", base / "schedule", "--set", f"data.val.source={tmp_path / 'none'}", cwd=tmp_path)
    assert done.returncode == 65 and "no val" in done.stdout
    assert f"{tmp_path / 'none'}: no such folder" in done.stdout and "nothing was measured" in done.stdout


@pytest.mark.slow
def test_one_machine(base: Path, tmp_path: Path) -> None:
    words = ["preflight", base / "schedule", "--nproc", 2, "--threads", 1]
    done = small.stagerun(*words, cwd=tmp_path)
    assert done.returncode == 0 and "verdict: ready" in done.stdout, done.stdout + done.stderr
    said = json.loads(small.stagerun(*words, "--json", cwd=tmp_path).stdout)
    assert said["code"] == 0 and said["measured"]["workers"] == 2 and said["measured"]["links"] == []
    assert 0 < said["measured"]["alone_seconds"] < 60 and said["measured"]["all_reduce_seconds"] > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
