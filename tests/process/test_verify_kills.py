"""`stagerun verify DIR`: its runs are killed and stopped, and end in the same bits; nothing is left; and what it says of others.

What it refuses: tests/cases/verify.txt."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import processes
import pytest
import small
from click.testing import CliRunner

from stagerun.cli import main
from stagerun.tools.verify import Life, Verdict, VerifyOptions, render


def verdict(tmp_path: Path, *more: object) -> tuple[int, dict[str, Any]]:
    done = small.stagerun(
        "verify", "--threads", 1, "--json", *more, timeout=600, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    return done.returncode, json.loads(done.stdout)


def test_killed_once_it_is_bit_exact(base, tmp_path):
    code, found = verdict(tmp_path, base / "schedule", "--nproc", 1, "--kills", 1, "--iters", 2, "--seed", 3)
    assert (code, found["verdict"], found["different"]) == (0, "BIT-EXACT", [])
    assert any(life["resumed"] for life in found["lives"]) and any(life["hit"] for life in found["lives"])
    assert not list(tmp_path.iterdir()), "nothing is left"


@pytest.mark.slow
def test_killed_and_stopped_again_and_again_it_is_bit_exact(base, tmp_path):
    words = ("--nproc", 2, "--kills", 4, "--iters", 2, "--seed", 3, "--synthetic")
    code, found = verdict(tmp_path, base / "schedule", *words)
    assert (code, found["verdict"], found["promised"], found["different"]) == (0, "BIT-EXACT", True, [])
    stages = found["stages"]
    assert list(stages) == list(small.STAGES) and all(straight == end for straight, end in stages.values())
    assert sum(bool(life["hit"]) for life in found["lives"]) >= 4
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


def test_it_is_not_for_a_launcher(base, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(main, ["verify", str(base / "schedule")])
    assert done.exit_code == 64 and "run it once, without a launcher" in done.output


def test_a_difference_is_reported():
    lives = [Life("", False, "SIGKILL to rank 0", 69), Life("init-2", True, "", 0)]
    found = Verdict("DIFFERENT", True, lives, {"init": ("a" * 64, "b" * 64)}, ["init"])
    text = render(found, VerifyOptions("s"))
    assert (
        "DIFFERENT: init ended in other bits than in the uninterrupted run (interrupted 1 times, resumed 1 times"
        in text
    )
    assert "On a CPU they should be the same" in text
