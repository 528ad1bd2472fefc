"""Files of weights that are not on this machine: `check` and `plan` say so."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagerun.cli import main

SCHEDULE = """
model { name: "resnet18" num_classes: 10 }
data { train { source: "/nowhere/train" images: 1000 } val { source: "/nowhere/val" images: 200 } }
solver { batch_size: 16 device_batch_size: 16 base_lr: 0.1 lr_policy: "fixed" max_iter: 10 }
stage { name: "a" solver_param { FIELD } }
"""


@pytest.mark.parametrize(
    "field, place",
    [
        ('weights { file: "lost.safetensors" }', "a.weights.file"),
        ('solverstate: "lost.solverstate" momentum_form: CAFFE', "a.solverstate"),
    ],
)
@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_file_of_weights_that_is_not_there_is_noted(command: str, field: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "schedule.prototxt").write_text(SCHEDULE.replace("FIELD", field))
    done = CliRunner().invoke(main, [command, str(tmp_path)])
    assert done.exit_code == 0, done.output
    if command == "plan":
        assert re.search(r"^a +lost\.", done.output, re.M)  # it starts from the file, and not from the seed
    assert f"note: {place}: {tmp_path}/lost." in done.output and "`run` will refuse this" in done.output
