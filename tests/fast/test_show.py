"""`stagerun plan --net` of what is no text; cases/plan_net has the rest."""

from pathlib import Path

import contract
import pytest
from facade import ExitCode


@pytest.mark.parametrize("size", [3_000, 2_000_000])
def test_weights_are_no_net(size: int, tmp_path: Path) -> None:
    (tmp_path / "net.caffemodel").write_bytes(b"\x0a\x05LeNet\x00\xa2" * (size // 9))
    done = contract.stagerun(["plan", "--net", "net.caffemodel"], tmp_path)
    assert (done.exit_code, "is it a .prototxt?" in done.stderr) == (ExitCode.RECIPE, True)
    assert done.stderr.count("hint:") == 1
