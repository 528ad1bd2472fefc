"""What the manual shows of the library runs; and user code that uses it has types."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small
import tiny

import stagerun
from stagerun.manual.pages import FOLDER

ROOT = Path(__file__).parents[2]


def missing(*packages: str) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to work in, with the schedules that are named, on a few images."""
    tiny.make_data(tmp_path / "data")
    small.make_schedule(tmp_path / "solvers" / "mine", tmp_path / "data")
    file = tmp_path / "solvers" / "mine" / "schedule.prototxt"
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


def test_the_examples_of_the_manual_run(folder: Path) -> None:
    text = (FOLDER / "library.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == 5
    out = python("\n".join(blocks), folder)
    assert "init 0.1 6\n" in out and "init fresh 6\n" in out and "| init " in out and "torch.Size([1, 10])\n" in out


def test_a_script_and_the_command_have_the_same_bits(finished: Path, tmp_path: Path) -> None:
    program = f"import stagerun\nlist(stagerun.run({str(finished / 'schedule')!r}, 'out', threads=1))"
    assert python(program, tmp_path) == ""
    ends = [
        {p.stage.name: p.end.id for p in stagerun.plan(finished / "schedule", out).stages if p.end}
        for out in (finished / "out", tmp_path / "out")
    ]
    assert ends[0] == ends[1] and len(ends[0]) == 4


def test_the_end_of_the_process_saves(folder: Path) -> None:
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


@pytest.mark.long
@pytest.mark.skipif(missing("mypy") != [], reason="mypy is not installed")
def test_user_code_has_types(tmp_path: Path) -> None:
    lines = {
        'schedule = stagerun.load("x", ["seed=2"])': "",
        "reveal_type(schedule)": '"stagerun.base.recipe.Schedule"',
        "reveal_type(stagerun.plan(schedule, redo='init'))": '"stagerun.tools.library.plan.Plan"',
        'reveal_type(stagerun.plan("x").stages[0].stage.solver.base_lr)': '"float"',
        'reveal_type(next(stagerun.run("x")))': '"stagerun.base.events.RunStarted | ',
        'reveal_type(stagerun.Snapshot("x").model())': '"torch.nn.modules.module.Module"',
        'reveal_type(stagerun.report("out"))': '"stagerun.tools.library.report.Report"',
        "stagerun.plan(3)": 'error: Argument 1 to "plan" has incompatible type "int"',
    }
    (tmp_path / "user.py").write_text("import stagerun\n" + "\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", "user.py"],
        capture_output=True, text=True, timeout=600, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    said = dict(re.findall(r"^user\.py:(\d+): (.*)$", done.stdout, re.M))
    for number, expected in enumerate(lines.values(), 2):
        assert expected in said.get(str(number), ""), done.stdout
    assert sum(text.startswith("error: ") for text in said.values()) == 1, done.stdout
