"""Following a log: what has been read bit by bit is what one reading finds."""

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
from stagerun.tools.report import read_log as reading
from stagerun.tools.report.history import History
from stagerun.tools.report.read_log import read_log
from stagerun.tools.report.replay import history
from stagerun.tools.view.follow import LITTLE, Follower

MOST = 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A log with branches, restarts, lines that aren't a run's, and one that begins a stage once more."""
    out = write_log(tmp_path_factory.mktemp("log"), make_picture(made_schedules.branches()), restarts=3, ema=True)
    data = (out / "log.jsonl").read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    again = line(2e9, stage_started("main", 0)).encode()
    return data[:half] + b'{"time": 1e9, "event": "New"}\n{"ti\n\n' + data[half:] + again + b'{"time"'


def fresh(out: Path) -> History | None:
    try:
        return history(read_log(out), MOST)
    except UsageError:
        return None


def read(follower: Follower) -> History | None:
    try:
        return follower.read()
    except UsageError:
        return None


def write(out: Path, data: bytes) -> None:
    with open(out / "log.jsonl", "ab") as file:
        file.write(data)


@given(st.data())
@examples(40)
def test_bit_by_bit_it_is_what_one_reading_finds(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    out, complete = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("complete")
    follower = Follower(out, MOST)
    write(out, b"")
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        write(out, whole[begin:end])
        found = read(follower)
        lines, newline, _ = whole[:end].rpartition(b"\n")
        (complete / "log.jsonl").write_bytes(lines + newline)
        assert found == fresh(complete)


@pytest.mark.parametrize("how", ["replaced", "cut short", "written anew", "written anew and longer"])
def test_another_log_is_read_from_its_start(how: str, whole: bytes, tmp_path: Path) -> None:
    half = whole[: whole.index(b"\n", len(whole) // 2) + 1]
    write(tmp_path, half)
    follower, log = Follower(tmp_path, MOST), tmp_path / "log.jsonl"
    follower.read()
    other = half.replace(b'"loss": ', b'"loss": 1')
    if how == "replaced":
        (tmp_path / "new").write_bytes(other)
        os.replace(tmp_path / "new", log)
    elif how == "cut short":
        log.write_bytes(other[: other.index(b"\n", len(other) // 2) + 1])
    else:
        longer = whole[: whole.rindex(b"\n") + 1].replace(b'"loss": ', b'"loss": 1')
        log.write_bytes(longer if how.endswith("longer") else other)
    assert follower.read() == fresh(tmp_path)


def test_a_log_that_is_gone_or_holds_nothing_is_said(tmp_path: Path, whole: bytes) -> None:
    follower = Follower(tmp_path, MOST)
    with pytest.raises(UsageError, match=r"has no log\.jsonl"):
        follower.read()
    write(tmp_path, b"")
    with pytest.raises(UsageError, match="holds no event"):
        follower.read()
    write(tmp_path, whole)
    assert follower.read().lives
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(StorageError):
        follower.read()
    (tmp_path / "log.jsonl").rmdir()
    os.mkfifo(tmp_path / "log.jsonl")  # which no one writes to
    with pytest.raises(StorageError, match="not a regular file"):
        follower.read()


def test_without_time_a_log_is_begun_and_no_more(whole: bytes, tmp_path: Path) -> None:
    data = whole[: whole.rindex(b"\n") + 1]
    write(tmp_path, data * (2 * LITTLE // len(data) + 1))
    follower = Follower(tmp_path, MOST)
    first = follower.read(0)
    assert first.lives and follower.behind and follower.read(0) is first
    assert follower.read() == fresh(tmp_path)


def test_a_line_without_an_end_is_not_kept(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_BLOCK", 1000)
    monkeypatch.setattr(reading, "_LONGEST", 4000)
    first = whole[: whole.index(b"\n", 1000) + 1]
    write(tmp_path, first + 100_000 * b"x")
    log = reading.Log()
    with reading.opened(tmp_path) as file:
        kept = max(file.tell() - log.read for _ in reading.whole_lines(file, log))
    assert kept < 10_000 and log.damaged > 0
    write(tmp_path, b"\n" + first)
    follower = Follower(tmp_path, MOST)
    assert follower.read().stages and follower.read().damaged > 0


def marks(out: Path, *more: Event) -> list[tuple[str, str, int]]:
    write_log(out, make_picture(made_schedules.steps()), share=0.5, restarts=1)
    write(out, "".join(line(2e9, event) for event in more).encode())
    follower = Follower(out, MOST)
    return [(mark.kind, mark.text, mark.iter) for mark in follower.trace("", follower.read(), True).marks]


def test_what_has_happened_has_its_place(tmp_path: Path) -> None:
    stages = make_picture(made_schedules.steps()).stages
    stage, half = stages[0], sum(stage.iterations for stage in stages) // 2
    quarter = half // 2
    assert half <= stage.iterations
    fails = NotFinite(
        stage=stage.name, iter=30, lr=0.1, what="the loss", done="ROLLBACK", number=1, most=3, position=0, images=1, seconds=1.0,
        back_to=20,
    )  # fmt: skip
    found = marks(tmp_path, fails, Note(text="plain"), Failed(code=1, text="no space\nleft"))
    assert [(kind, iter) for kind, _, iter in found] == [
        ("warning", quarter), ("restart", quarter), ("rollback", half), ("warning", half),
    ]  # fmt: skip
    assert found[1][1] == f"process life 2 goes on with {stage.name} at {quarter}"
    assert found[2][1].endswith("goes back to 20") and found[3][1] == "no space"


def test_a_stage_that_starts_over_loses_its_incidents(tmp_path: Path) -> None:
    assert marks(tmp_path, stage_started(make_picture(made_schedules.steps()).stages[0].name, 0)) == []


def test_snapshots_are_those_on_disk(tmp_path: Path, whole: bytes) -> None:
    write(tmp_path, whole)
    follower = Follower(tmp_path, MOST)

    def saved() -> tuple[tuple[str, int], ...]:
        return follower.trace("", follower.read(), True).snapshots

    assert saved() == ()
    for name in ("main-00000020-a0001", "main-00000020-a0002", ".tmp-main-00000030-a0001-00000000", "notes"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert saved() == (("main", 20),)
    os.rmdir(tmp_path / "snapshots" / "main-00000020-a0001")
    os.rmdir(tmp_path / "snapshots" / "main-00000020-a0002")
    assert saved() == ()
