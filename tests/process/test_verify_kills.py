"""`stagerun verify DIR`: its runs are killed and stopped, and end in the same bits; nothing is left."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import processes
import pytest
import small


def verdict(tmp_path: Path, *more: object) -> tuple[int, dict[str, Any]]:
    done = small.stagerun(
        "verify", "--threads", 1, "--json", *more, timeout=600, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.smoke
def test_killed_once_it_is_bit_exact(base, tmp_path):
    code, found = verdict(tmp_path, base / "schedule", "--nproc", 1, "--kills", 1, "--iters", 2)
    assert (code, found["verdict"], found["different"]) == (0, "BIT-EXACT", [])
    assert any(life["resumed"] for life in found["lives"]) and any(life["hit"] for life in found["lives"])
    assert not list(tmp_path.iterdir()), "nothing is left"


@pytest.mark.slow
def test_killed_and_stopped_with_other_workers_each_time_it_is_bit_exact(base, tmp_path):
    elastic = ("--set", "determinism=ELASTIC", "--nproc", 2, "--then-workers", 1)
    code, found = verdict(tmp_path, base / "schedule", *elastic, "--kills", 2, "--iters", 2, "--synthetic")
    assert (code, found["verdict"], found["promised"], found["different"]) == (0, "BIT-EXACT", True, [])
    lives, stages = found["lives"], found["stages"]
    assert list(stages) == list(small.STAGES) and all(wanted == end for wanted, end in stages.values())
    assert {"SIGKILL", "SIGTERM"} <= {life["hit"].partition(" ")[0] for life in lives}
    assert [life["workers"] for life in lives][:2] == [2, 1]
    assert not list(tmp_path.iterdir()), "nothing is left"


@pytest.mark.slow
def test_ctrl_c_ends_all_and_leaves_nothing(base, tmp_path):
    run = processes.Run(["verify", str(base / "schedule"), "--nproc", "2"], {"TMPDIR": str(tmp_path)}).start()
    while not list(tmp_path.glob("stagerun-verify-*/straight/log.jsonl")):
        assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    code, said = run.wait()
    assert code == 130 and "Traceback" not in said, said
    assert run.gone() and not list(tmp_path.iterdir())
