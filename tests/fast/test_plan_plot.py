"""`stagerun plan --plot FILE.svg`: what is drawn, and what is refused."""

import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import small
from click.testing import CliRunner, Result

from stagerun.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.make_schedule(tmp_path / "tree", tmp_path / "nowhere")


def plan(folder: Path, *words: object, code: int = 0) -> Result:
    arguments = ["plan", str(folder), "--out", str(folder.parent / "out"), *map(str, words)]
    result = CliRunner().invoke(main, arguments, prog_name="stagerun")
    assert result.exit_code == code, result.output
    return result


def texts(file: Path) -> list[str]:
    return [node.text or "" for node in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]


def test_a_file_and_nothing_beside_it(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "pictures" / "tree.SVG"
    target.parent.mkdir()
    target.write_text("old")
    result = plan(folder, "--plot", target)
    assert result.stderr.strip().endswith(f"written to {target}") and "stage     from" in result.stdout
    assert {"learning rate", "epochs", "init", "cyc1", "collapse", "early"} <= {*texts(target)}
    assert os.listdir(target.parent) == [target.name]
    first = target.read_bytes()
    assert b"var(" not in first and b"data-" not in first, "a converter of SVG knows no variables"
    plan(folder, "--plot", target)
    assert target.read_bytes() == first


def test_x_and_scale(folder: Path, tmp_path: Path) -> None:
    plan(folder, "--plot", tmp_path / "a.svg", "--x", "images", "--scale", "log")
    plan(folder, "--plot", tmp_path / "b.svg", "--x", "iterations", "--scale", "linear")
    assert "images" in texts(tmp_path / "a.svg") and "iterations" in texts(tmp_path / "b.svg")


@pytest.mark.parametrize("speed", ["0.001", "1000000000"])
def test_hours_at_the_ends_of_what_a_speed_may_be(folder: Path, tmp_path: Path, speed: str) -> None:
    plan(folder, "--plot", tmp_path / "x.svg", "--x", "hours", "--images-per-second", speed)
    assert "hours" in texts(tmp_path / "x.svg")


def test_hours_need_a_speed(folder: Path) -> None:
    assert (
        "--x hours needs to know how fast training is"
        in plan(folder, "--plot", "x.svg", "--x", "hours", code=64).stderr
    )
