"""`stagerun export`: the file to write may stand where people put it."""

import pytest

from stagerun.base.errors import UsageError
from stagerun.tools.weights.export import ExportOptions, _with_file


@pytest.mark.parametrize(("first", "second"), [("end-00000001-a0001", "net.onnx"), ("net.onnx", "end-00000001-a0001")])
def test_the_file_may_follow_the_format_or_the_snapshot(first: str, second: str) -> None:
    snapshot, options = _with_file(first, ExportOptions(onnx=True, file=second))
    assert (snapshot, options.output) == ("end-00000001-a0001", "net.onnx")


def test_a_file_that_is_named_twice() -> None:
    with pytest.raises(UsageError, match=r"a\.pth, and --output b\.pth"):
        _with_file("end-00000001-a0001", ExportOptions(torch=True, file="a.pth", output="b.pth"))
