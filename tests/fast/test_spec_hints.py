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
