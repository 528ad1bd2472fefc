"""`stagerun plan --plot`: which picture goes where, what is refused, and `--watch`."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small
from click.testing import CliRunner, Result

from stagerun.base.errors import RecipeError, StorageError
from stagerun.cli import main
from stagerun.drawing.picture import Unit
from stagerun.tools.plan.plot import SETTLED, TERMINAL, PlotOptions, Seen, changes, look_at, watch

WORD = "learning rate over epochs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.make_schedule(tmp_path / "tree", tmp_path / "nowhere")


def plan(folder: Path, *words: object, code: int = 0) -> Result:
    arguments = ["plan", str(folder), "--out", str(folder.parent / "out"), *map(str, words)]
    result = CliRunner().invoke(main, arguments, prog_name="stagerun")
    assert result.exit_code == code, result.output
    return result


# -- once


def test_the_terminal_s_picture_comes_below_the_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    found = plan(folder, "--plot").stdout
    assert found.index("stage     from") < found.index(WORD)
    assert "\x1b" not in found
    assert max(len(line) for line in found[found.index("┌") - 20 :].split("\n")[:19]) == 72
    for name in ("init", "cyc1", "collapse", "early"):
        assert name in found[found.index(WORD) :]


@pytest.mark.parametrize("ending", ["svg", "png", "html", "SVG"])
def test_a_file_and_nothing_beside_it(folder: Path, tmp_path: Path, ending: str) -> None:
    target = tmp_path / "pictures" / f"tree.{ending}"
    target.parent.mkdir()
    target.write_text("old")
    result = plan(folder, "--plot", target)
    assert result.stderr.strip().endswith(f"written to {target}")
    assert "stage     from" in result.stdout and WORD not in result.stdout
    assert target.read_bytes().startswith(
        {"svg": b"<?xml", "png": b"\x89PNG", "html": b"<!DOCTYPE html>"}[ending.lower()]
    )
    assert os.listdir(target.parent) == [target.name]


def test_x_and_scale(folder: Path) -> None:
    assert "over images, logarithmic" in plan(folder, "--plot", "--x", "images", "--scale", "log").stdout
    assert "over iterations\n" in plan(folder, "--plot", "--x", "iterations", "--scale", "linear").stdout


def test_hours_at_a_speed_that_is_told(folder: Path) -> None:
    # The longest path has 6 + 5 + 3 iterations of 16 images: an hour of training at 224 per hour, and the evaluations.
    found = plan(folder, "--plot", "--x", "hours", "--images-per-second", 224 / 3600).stdout
    assert "learning rate over hours" in found
    ticks = next(line for line in found[found.index("└") :].split("\n")[1:] if line.strip())
    assert 1.0 <= float(ticks.split()[-1]) < 2.0


@pytest.mark.parametrize(
    "words, message",
    [
        (["--plot", "x.pdf"], "its ending names no format"),
        (["--plot", "x"], "end it in .svg, .png or .html"),
        (["--x", "images"], "--x is for a picture"),
        (["--scale", "log"], "--scale is for a picture"),
        (["--watch"], "--watch is for a picture"),
        (["--plot", "--json"], "both for stdout"),
        (["--plot", "--watch", "--csv", "f"], "--csv is for the plan as text"),
        (["--plot", "--watch", "--redo", "init"], "--redo is for the plan as text"),
        (["--plot", "--x", "hours"], "--x hours needs to know how fast training is"),
        (["--plot", "--x", "days"], "'days' is not one of"),
        (["--plot", "--x", "hours", "--images-per-second", "1e-300"], "is not in the range"),
        (["--plot", "--x", "hours", "--images-per-second", "1e300"], "is not in the range"),
    ],
)
def test_what_is_refused(folder: Path, words: list[str], message: str) -> None:
    assert message in plan(folder, *words, code=64).stderr


def test_a_folder_after_plot_is_taken_for_its_file(folder: Path) -> None:
    result = CliRunner().invoke(main, ["plan", "--plot", str(folder)], prog_name="stagerun")
    assert result.exit_code == 64 and f"stagerun plan {folder} --plot" in result.stderr


def test_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'stagerun[plots]'" in plan(folder, "--plot", "x.svg", code=64).stderr
    assert WORD in plan(folder, "--plot").stdout


def test_without_plotext(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotext", None)
    assert "needs plotext, which can't be loaded" in plan(folder, "--plot", code=64).stderr


@pytest.mark.parametrize("speed", ["0.001", "1000000000"])
def test_hours_at_the_ends_of_what_a_speed_may_be(folder: Path, tmp_path: Path, speed: str) -> None:
    for words in (["--plot"], ["--plot", tmp_path / "x.html"]):
        plan(folder, *words, "--x", "hours", "--images-per-second", speed)


def test_a_file_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    """A folder that isn't there may be one that is misspelt: none is made, and nothing is shown before that is said."""
    (tmp_path / "file").write_text("")
    for parent in ("file", "missing", "missing/below"):
        result = plan(folder, "--plot", tmp_path / parent / "x.svg", code=74)
        assert f"there is no folder {tmp_path / parent}\n" in result.stderr and "--out" not in result.stderr
        assert result.stdout == ""
    assert not (tmp_path / "missing").exists()


def test_a_disk_that_is_full_speaks_of_plot(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(disk: object, path: Path, data: bytes) -> None:
        raise StorageError(f"can't write {path.name}", "give another output folder with --out")

    monkeypatch.setattr("stagerun.tools.plan.plot.write_atomic", full)
    said = plan(folder, "--plot", tmp_path / "x.svg", code=74).stderr
    assert "can't write x.svg\n  hint: give --plot another file" in said and "--out" not in said


# -- watching


def looks(*seen: Seen) -> tuple[Callable[[], Seen], Callable[[float], None], list[float]]:
    """A look for each of them, then an interrupt; and what was waited."""
    left, waits = iter(seen), []

    def look() -> Seen:
        found = next(left, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    return look, waits.append, waits


def drawn(changed: Iterator[None]) -> int:
    count = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in changed:
            count += 1
    return count


A, B, C = ({"a": (n, 1, 1)} for n in range(3))


@pytest.mark.parametrize(
    "seen, times",
    [
        ((A, A, A), 1),
        ((A, B, B, B), 2),
        ((A, B, C, C, C), 2),  # still being written at the second look
        ((A, B, A, A, A), 1),  # written back
        ((A, {}, {}, {}), 2),  # taken away
        ((A, {}, A, A, A), 1),  # replaced by a file that is the same
        ((A, B, B, C, C, C), 3),
    ],
    ids=range(7),
)
def test_changes(seen: tuple[Seen, ...], times: int) -> None:
    look, wait, waits = looks(*seen)
    assert drawn(changes(look, wait)) == times
    assert all(w > 0 for w in waits) and (times == 1 or SETTLED in waits)


def test_what_is_looked_at(folder: Path) -> None:
    text = (folder / "schedule.prototxt").read_text()
    (folder / "schedule.prototxt").write_text(text + 'stage { name: "late" solver: "more/late.txt" }\n')
    (folder / "notes.md").write_text("")
    names = {"schedule.prototxt", *(f"{name}.prototxt" for name in small.STAGES)}
    assert {*look_at(folder)} == names
    (folder / "more").mkdir()
    (folder / "more" / "late.txt").write_text("")
    assert {*look_at(folder)} == names | {"more/late.txt"}
    assert look_at(folder / "gone") == {}


def edits(folder: Path, *steps: Callable[[], object]) -> Callable[[float], None]:
    """What happens while it waits: an edit each time it looks for changes, at last an interrupt."""
    left = iter(steps)

    def wait(seconds: float) -> None:
        if seconds == SETTLED:
            return
        step = next(left, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    return wait


def watched(folder: Path, file: str, *steps: Callable[[], object], **options: object) -> None:
    with pytest.raises(KeyboardInterrupt):
        watch(PlotOptions(file=file, folder=str(folder), **options), edits(folder, *steps))  # type: ignore[arg-type]


def writing(path: Path, text: str) -> Callable[[], object]:
    return lambda: path.write_text(text)


def test_watching_in_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = folder / "init.prototxt"
    sound, seen = init.read_text(), []

    def then(step: Callable[[], object]) -> Callable[[], object]:
        def do() -> None:
            seen.append(capsys.readouterr().out)
            step()

        return do

    watched(
        folder,
        TERMINAL,
        then(writing(init, sound.replace("base_lr: 0.1", "base_lr: 0.7"))),
        then(writing(init, sound + "max_iter: x\nbase_ls: 3\n")),
        then(lambda: None),  # nothing happens, nothing is drawn
        then((folder / "cyc1.prototxt").unlink),
        then(writing(folder / "cyc1.prototxt", small.STAGES["cyc1"])),
        then(writing(init, sound)),
        then(lambda: None),
    )
    first, second, broken, idle, missing, *_, mended = seen
    assert WORD in first and WORD in second and first != second
    assert "base_ls" in broken and "mistakes" in broken and WORD not in broken
    assert idle == ""
    assert "cyc1.prototxt" in missing and WORD not in missing
    assert mended.split("\n")[:-2] == first.split("\n")[:-2]  # but for the time of day


@pytest.mark.parametrize("ending", ["svg", *(pytest.param(e, marks=pytest.mark.long) for e in ("html", "png"))])
def test_watching_into_a_file_of_the_folder_itself(folder: Path, ending: str) -> None:
    target, init = folder / f"tree.{ending}", folder / "init.prototxt"
    sound, seen = init.read_text(), []

    def then(text: str) -> Callable[[], object]:
        return lambda: (seen.append(target.read_bytes()), init.write_text(text))

    watched(folder, str(target), then(sound + "nonsense"), then(sound), then(sound))
    assert len(seen) == 3 and seen[0] == seen[2] != seen[1]
    if ending != "png":
        assert b"nonsense" in seen[1] and b"cyc1" not in seen[1]


def test_a_page_that_is_watched_no_more_does_not_look_for_changes(folder: Path) -> None:
    """Whatever it shows at the end: the picture, or mistakes."""
    target, init, seen = folder.parent / "tree.html", folder / "init.prototxt", []
    sound = init.read_text()
    looks = lambda: seen.append(target.read_text())  # noqa: E731
    watched(folder, str(target), looks)
    assert 'http-equiv="refresh"' in seen[0]
    assert target.read_text() == seen[0].replace('<meta http-equiv="refresh" content="2">\n', "")
    init.write_text(sound + "nonsense")
    watched(folder, str(target), looks)
    assert "nonsense" in target.read_text() and 'http-equiv="refresh"' in seen[1]
    assert 'http-equiv="refresh"' not in target.read_text()


def test_hours_that_an_edit_takes_away_are_a_mistake_like_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(folder, TERMINAL, unit=Unit.HOURS, out=str(folder.parent / "out"))
    assert "--x hours needs to know" in capsys.readouterr().out


def test_watching_ends_where_a_file_cannot_be_written_or_there_is_no_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        watch(PlotOptions(file=str(tmp_path / "file" / "x.svg"), folder=str(folder)), edits(folder))
    with pytest.raises(RecipeError):
        watch(PlotOptions(file=TERMINAL, folder=str(tmp_path / "gone")), edits(folder))
