"""What the manual shows of the library runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small

import stagerun

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, data):
    """A folder to work in, with the schedules that are named, on a few images."""
    file = small.make_schedule(tmp_path / "solvers" / "mine", data) / "schedule.prototxt"
    file.write_text(file.read_text().replace('name: "tiny"', 'name: "mine"'))
    shutil.copytree(tmp_path / "solvers" / "mine", tmp_path / "solvers" / "fashion_collapse")
    return tmp_path


def python(program: str, folder: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=300, cwd=folder, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_examples_of_the_manual_run(folder):
    text = (ROOT / "stagerun/manual/library.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == 5
    out = python("\n".join(blocks), folder)
    assert "init 0.1 6\n" in out and "init fresh 6\n" in out and "\ninit  " in out and "torch.Size([1, 10])\n" in out


def test_the_end_of_the_process_saves(folder):
    program = """
import stagerun
run = stagerun.run("solvers/mine", "out", overrides=["init.snapshot=0"], threads=1)
for event in run:
    if getattr(event, "iter", 0) == 3:
        break
"""
    assert python(program, folder) == ""
    planned = stagerun.plan(folder / "solvers" / "mine", folder / "out", overrides="init.snapshot=0").stages[0]
    assert planned.iter >= 3
