"""Hints that depend on what else is written."""

from pathlib import Path

import pytest

from stagerun.base.errors import Problem, RecipeError
from stagerun.language import load

SCHEDULE = """
model { name: "resnet18" num_classes: 10 }
data { train { source: "train" images: 1000 } val { source: "val" images: 200 } }
solver { batch_size: 48 SOLVER base_lr: 0.1 lr_policy: "fixed" max_iter: 10 }
stage { name: "a" }
stage { name: "b" KEY: "b.prototxt" from: "a" }
"""


def mistakes(folder: Path, solver: str = "", key: str = "solver") -> tuple[Problem, ...]:
    (folder / "schedule.prototxt").write_text(SCHEDULE.replace("SOLVER", solver).replace("KEY", key))
    (folder / "a.prototxt").write_text("")
    (folder / "b.prototxt").write_text("")
    with pytest.raises(RecipeError) as caught:
        load(str(folder))
    return caught.value.problems


def test_a_device_batch_that_lacks_is_offered_once_and_divides(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path)
    assert (found.span.line, "`device_batch_size: 24`" in found.hint) == (4, True)


def test_a_stages_file_is_its_solver(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path, "device_batch_size: 16", "file")
    assert (found.message, found.hint) == ("StageEntry has no field `file`", "did you mean `solver`?")


@pytest.mark.parametrize(
    "solver, message, hint",
    [
        ("momentum: 0,9", "expected a field's name, not `9`", "a number has a point: `0.9`"),
        ("stepvalue: 30, 60", "expected a field's name, not `60`", "numbers of a list stand in brackets: `[30, 60]`"),
        ("momentum: 0.9, 9", "expected a field's name, not `9`", "numbers of a list stand in brackets: `[0.9, 9]`"),
    ],
)
def test_a_comma_in_a_number(tmp_path: Path, solver: str, message: str, hint: str) -> None:
    [found] = mistakes(tmp_path, f"device_batch_size: 16 {solver}")
    assert found.message == message and hint in found.hint and "0.9.9" not in found.hint


def test_a_parent_that_was_renamed(tmp_path: Path) -> None:
    (tmp_path / "schedule.prototxt").write_text(
        SCHEDULE.replace("SOLVER", "device_batch_size: 16").replace('KEY: "b.prototxt" from: "a"', 'from: "warm"')
    )
    for name in "ab":
        (tmp_path / f"{name}.prototxt").write_text("")
    with pytest.raises(RecipeError) as caught:
        load(str(tmp_path))
    assert (
        caught.value.problems[0].hint
        == 'was it renamed? The other one is `a`; write `from: ""` to start from fresh weights'
    )
