"""`stagerun plan --net`: its table, where the size of the images comes from, its mistakes."""

from pathlib import Path

import net_texts
import pytest

from stagerun.base.errors import ExitCode
from stagerun.cli import main


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--net", *words])
    found = capsys.readouterr()
    return int(str(ended.value.code or 0)), found.out, found.err


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lenet.prototxt").write_text(net_texts.lenet())
    code, out, _ = shown(capsys, str(tmp_path / "lenet.prototxt"))
    assert code == 0
    assert out.startswith("LeNet: images of 1x28x28, 10 classes\n")
    rows = {line.split()[0]: line.split() for line in out.splitlines()[2:] if line}
    assert rows["conv2"] == ["conv2", "Convolution", "5x5", "pool1", "50x8x8", "25,050", "1,600,000"]
    assert rows["total"] == ["total", "431,080", "2,293,000"]
    assert "A multiply and its add count once" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--size", "24"), "images of 3x24x24"),
        (("--size", "1x24x40"), "images of 1x24x40"),
        (("--size", "24x40"), "images of 3x24x40"),
    ],
)
def test_the_size_of_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    file = tmp_path / "net.prototxt"
    file.write_text(net_texts.DATA + net_texts.END.replace("LAST", "data"))
    code, out, _ = shown(capsys, str(file), *words)
    assert (code, expected in out) == (0, True)


def test_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.prototxt"
    file.write_text(net_texts.DATA + net_texts.END.replace("LAST", "data"))
    code, _, err = shown(capsys, str(file))
    assert (code, "doesn't say the size of its images" in err) == (ExitCode.RECIPE, True)
    assert "`--size 1x28x28`" in err, "grey images would be shown with three channels"
    for size in (3_000, 2_000_000):
        (tmp_path / "net.caffemodel").write_bytes(b"\x0a\x05LeNet\x00\xa2" * (size // 9))
        code, _, err = shown(capsys, str(tmp_path / "net.caffemodel"))
        assert (code, "is it a .prototxt?" in err, err.count("hint:")) == (ExitCode.RECIPE, True, 1)
    code, _, err = shown(capsys, str(file), "--size", "big")
    assert (code, "it is not a size" in err) == (ExitCode.RECIPE, True)
    code, _, err = shown(capsys, str(tmp_path / "none.prototxt"))
    assert (code, "can't be read" in err) == (ExitCode.DATA, True)
    file.write_text('layer { name: "c" type: "Foo" }')
    code, _, err = shown(capsys, str(file))
    assert (code, "layer c: unknown type `Foo`" in err, "^^^^^" in err) == (ExitCode.RECIPE, True, True)
