"""Reading a log: what has been read bit by bit is what one reading finds."""

import os
from pathlib import Path

import made_schedules
import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from log_help import stage_started
from long_log import line, write_log

from stagerun.base.errors import StorageError, UsageError
from stagerun.base.events import Event, Failed, Note, NotFinite
from stagerun.drawing.picture import make_picture
from stagerun.tools.report.history import History
from stagerun.tools.report.replay import Reader

MOST = 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A log with branches, restarts, lines that aren't a run's, and one that begins a stage once more."""
    out = write_log(tmp_path_factory.mktemp("log"), make_picture(made_schedules.branches()), restarts=3, ema=True)
    data = (out / "log.jsonl").read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    again = line(2e9, stage_started("main", 0)).encode()
    return data[:half] + b'{"time": 1e9, "event": "New"}\n{"ti\n\n' + data[half:] + again + b'{"time"'


def read(reader: Reader) -> History | None:
    try:
        return reader.read()
    except UsageError:
        return None


def write(out: Path, data: bytes) -> None:
    with open(out / "log.jsonl", "ab") as file:
        file.write(data)


@given(st.data())
@examples(20)
def test_bit_by_bit_it_is_what_one_reading_finds(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    out = tmp_path_factory.mktemp("out")
    reader = Reader(out, MOST)
    write(out, b"")
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        write(out, whole[begin:end])
        assert read(reader) == read(Reader(out, MOST))


@pytest.mark.parametrize("how", ["replaced", "cut short"])
def test_another_log_is_read_from_its_start(how: str, whole: bytes, tmp_path: Path) -> None:
    write(tmp_path, whole)
    reader, log = Reader(tmp_path, MOST), tmp_path / "log.jsonl"
    reader.read()
    other = whole[: whole.index(b"\n", len(whole) // 2) + 1].replace(b'"loss": ', b'"loss": 1')
    if how == "replaced":
        (tmp_path / "new").write_bytes(other + other)
        os.replace(tmp_path / "new", log)
    else:
        log.write_bytes(other)
    assert reader.read() == read(Reader(tmp_path, MOST))


def test_a_log_that_is_gone_or_holds_nothing_is_said(tmp_path: Path, whole: bytes) -> None:
    reader = Reader(tmp_path, MOST)
    with pytest.raises(UsageError, match=r"has no log\.jsonl"):
        reader.read()
    write(tmp_path, b"")
    with pytest.raises(UsageError, match="holds no event"):
        reader.read()
    write(tmp_path, whole)
    assert reader.read().lives
    (tmp_path / "log.jsonl").unlink()
    os.mkfifo(tmp_path / "log.jsonl")  # which no one writes to
    with pytest.raises(StorageError, match="not a regular file"):
        reader.read()


def incidents(out: Path, *more: Event) -> list[tuple[str, str, int]]:
    write_log(out, make_picture(made_schedules.steps()), share=0.5, restarts=1)
    write(out, "".join(line(2e9, event) for event in more).encode())
    return [(one.kind, one.text, one.iter) for one in Reader(out).read().incidents]


def test_what_has_happened_has_its_place(tmp_path: Path) -> None:
    stages = make_picture(made_schedules.steps()).stages
    stage, half = stages[0], sum(stage.iterations for stage in stages) // 2
    fails = NotFinite(
        stage=stage.name, iter=30, lr=0.1, what="the loss", done="ROLLBACK", number=1, most=3, position=0, images=1, seconds=1.0,
        back_to=20,
    )  # fmt: skip
    found = incidents(tmp_path, fails, Note(text="plain"), Failed(code=1, text="no space\nleft"))
    assert [(kind, iter) for kind, _, iter in found] == [
        ("warning", half // 2), ("restart", half // 2), ("rollback", half), ("warning", half),
    ]  # fmt: skip
    assert found[1][1] == f"process life 2 goes on with {stage.name} at {half // 2}"
    assert "back to 20" in found[2][1] and found[3][1] == "no space"
    assert incidents(tmp_path, stage_started(stage.name, 0)) == [], "a stage that starts over loses its incidents"
