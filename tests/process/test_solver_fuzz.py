"""spec, plan, lint: mutated solver files give a schedule, or mistakes with their places; `scripts/reliability solvers` tries more of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_spec_resolve import A, messages, read

from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.plan.render import render_text
from stagerun.tools.lint import lint

SCRIPT = Path(__file__).parents[1] / "reliability" / "fuzz_solvers.py"


def test_three_hundred_mutated_folders() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "300"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 folders" in done.stdout and " 0 failures" in done.stdout


# ---- what it has found


@pytest.mark.parametrize("number", ["2.55f", "2.5F", "25e-1f", ".5e1"])
def test_a_duration_in_epochs_may_be_a_float_of_c(number: str) -> None:
    schedule = read(a=A.replace("max_epoch: 2.5", f"max_epoch: {number} # 9 epochs"))
    text = render_text(make_plan(schedule, Inventory()))
    assert ("max_epoch: 2.55f is 25.50 iterations, rounded to 26" in text) is (number == "2.55f")
    assert "comment-number" in [f.id for f in lint(schedule)]


def test_an_ensemble_of_a_schedule_without_stages() -> None:
    text = 'model { name: "resnet18" num_classes: 10 } data { train { source: "t" images: 9 } } ensemble { name: "e" members: "x" }'
    assert "member `x` of ensemble `e` is not a stage" in messages(schedule=text)
