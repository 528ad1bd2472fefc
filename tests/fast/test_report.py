"""What rank 0 shows and stores, for made-up events."""

import errno
import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stagerun.base import events
from stagerun.base.errors import PermissionDenied, StorageError
from stagerun.base.events import (
    Event,
    Iterated,
    Note,
    RunStarted,
    SnapshotFailed,
    SnapshotWritten,
    StageFinished,
    StageStarted,
    Stopped,
)
from stagerun.base.text import duration, size
from stagerun.train.log_file import JsonLines
from stagerun.train.logs.console import Console
from stagerun.train.logs.results import results_table

PARENTS = {"init": None, "collapse": "init"}


def finished(stage: str, top1: float | None, **changes: object) -> StageFinished:
    whole = StageFinished(
        stage=stage, iterations=10, epochs=0.5, first_lr=0.1, last_lr=0.01, weight_decay=5e-4, augmentation="mirror",
        loss=2.3, top1=top1, top5=None if top1 is None else 0.9, test_loss=2.2, train_seconds=61.0,
        images_per_second=100.0, snapshot=f"{stage}-00000010-a0001",
    )  # fmt: skip
    return replace(whole, **changes)  # type: ignore[arg-type]


def started(left: int = 20) -> RunStarted:
    return RunStarted(
        schedule="two", out="out/two", workers=2, device="cpu", threads=1, stages=("init", "collapse"),
        iterations=20, iterations_left=left, version="0",
    )  # fmt: skip


def stage_started(stage: str, number: int, iter: int = 0) -> StageStarted:
    return StageStarted(
        stage=stage, number=number, iter=iter, max_iter=10, start="seed 1", batch_size=32, device_batch_size=4
    )


def iterated(stage: str, iter: int) -> Iterated:
    return Iterated(
        stage=stage,
        iter=iter,
        epoch=0.05 * iter,
        lr=0.1,
        momentum=0.9,
        weight_decay=5e-4,
        loss=2.5,
        images=32,
        seconds=0.5,
    )


def test_console_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Console({"init": 5, "collapse": 0}, PARENTS) as console:
        happened: list[Event] = [
            started(),
            stage_started("init", 1),
            Note(text="resume is BIT-EXACT"),
            Note(text="resume is EQUIVALENT", warning=True),
            *(iterated("init", i) for i in range(1, 11)),
            SnapshotWritten(
                stage="init", iter=10, name="init-00000010-a0001", bytes=2_500_000, blocked_seconds=0, seconds=0.25
            ),
            SnapshotFailed(stage="init", iter=3, message="no space left"),
            events.Tested(stage="init", iter=10, images=100, top1=0.14, top5=0.71, loss=2.25, seconds=3.2),
            finished("init", 0.14),
            stage_started("collapse", 2),
            iterated("collapse", 1),
            Stopped(stage="collapse", iter=1, reason="asked to stop"),
        ]
        for event in happened:
            console(event)
    assert capsys.readouterr().out.splitlines() == [
        "two: 20 of 20 iterations to do, 2 workers on cpu, 1 thread each, output in out/two",
        "stage 1/2 init: iterations 0 to 10, batch 32, from seed 1",
        "note: resume is BIT-EXACT",
        "warning: resume is EQUIVALENT",
        "stage 1/2 init  5/10  epoch 0.25  LR 0.1  loss 2.5000  64 images/s  2 s left in stage, 8 s in all",
        "stage 1/2 init  10/10  epoch 0.50  LR 0.1  loss 2.5000  64 images/s  0 s left in stage, 5 s in all",
        "init 10: snapshot init-00000010-a0001, 2.5 MB in 0.25 s",
        "warning: no snapshot of init at 3: no space left",
        "init 10: test top-1 14.00 %, top-5 71.00 %, loss 2.2500 on 100 images in 3 s",
        "stage  iterations  epochs  LR first -> last  decay   augmentation  train loss  top-1    gain  top-5    time",
        "init   10          0.50    0.1 -> 0.01       0.0005  mirror        2.3000      14.00 %        90.00 %  1 min 01 s",
        "stage 2/2 collapse: iterations 0 to 10, batch 32, from seed 1",
        "stopped in collapse after iteration 1 (asked to stop), everything is saved: run the same command again to go on",
    ]


class Terminal(io.StringIO):
    now = 0.0

    def isatty(self) -> bool:
        return True


def at_terminal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("time.monotonic", lambda: 1000 + terminal.now)
    for name, value in {"TERM": "xterm-256color", **environment}.items():
        monkeypatch.setenv(name, value)
    return terminal


def seen(text: str) -> list[str]:
    """What the live line was, and the lines that stand there in the end; without colours."""
    assert set(re.findall(r"\x1b\[[\d;?]*([A-Za-z])", text)) <= {"K", "m"}, "nothing that would have to be taken back"
    plain = [line.split("\r\x1b[2K") for line in re.sub(r"\x1b\[[\d;]*m", "", text).split("\n")]
    return ["|".join(part for line in plain for part in line[:-1]), *(line[-1] for line in plain)]


@pytest.mark.parametrize(
    "width, line",
    [
        (130, "init -  collapse 50 %  #  5000/10000  epoch 250.00  LR 0.1  64 images/s  loss 2.5000  41 min 40 s of 41 min 40 s left"),
        (100, "init -  collapse 50 %  #  5000/10000  64 img/s  loss 2.5000  41 min 40 s of 41 min 40 s left"),
        (80, "collapse  5000/10000  64 img/s  loss 2.5000  41 min 40 s of 41 min 40 s left"),
    ],
)  # fmt: skip
def test_the_live_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, line: str) -> None:
    terminal = at_terminal(monkeypatch, COLUMNS=str(width))
    with Console({"collapse": 1}, PARENTS) as console:
        console(started(left=5001))
        console(replace(stage_started("collapse", 2), max_iter=10000))
        strip = seen(terminal.getvalue())[-2]
        console(iterated("collapse", 5000))
    assert strip == "init -  collapse 0 %" and "\x1b[36mcollapse" in terminal.getvalue()
    live, *lines = seen(terminal.getvalue())
    assert re.sub("[━╸╺]+", "#", live) == line and len(live) < width
    assert lines[-2:] == [strip, ""], "the live line is not left behind"


def test_the_live_line_is_drawn_a_few_times_a_second_and_gives_way_to_what_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = at_terminal(monkeypatch, COLUMNS="80")
    with Console({"collapse": 1}, PARENTS) as console:
        console(started())
        console(stage_started("collapse", 2))
        for i in range(1, 1001):
            terminal.now = i / 1000
            console(iterated("collapse", i))
        drawn = terminal.getvalue().count("img/s")
        console(Note(text="a word", warning=True))
    assert 2 <= drawn <= 3
    assert seen(terminal.getvalue())[-2:] == ["warning: a word", ""] and "\x1b[33mwarning" in terminal.getvalue()


@pytest.mark.parametrize(
    "environment, live, coloured",
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "xterm", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, False, True),
    ],
)
def test_where_there_is_a_live_line_and_colour(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], live: bool, coloured: bool
) -> None:
    terminal = at_terminal(monkeypatch, **environment)
    console = Console({}, PARENTS)
    console(Note(text="a word", warning=True))
    assert console.live is live and ("\x1b[33m" in terminal.getvalue()) is coloured


# -- the table


def test_results_table_gain_against_the_parent_and_total() -> None:
    results = [finished("init", 0.5), finished("collapse", 0.55, iterations=5, epochs=0.25, train_seconds=9.0)]
    lines = [line.split() for line in results_table(results, PARENTS).splitlines()]
    assert "+5.00" in lines[2] and "+" not in "".join(lines[1])
    assert lines[3] == ["total", "15", "0.75", "1", "min", "10", "s"]


# -- numbers


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"), (86399, "23 h 59 min"), (86400, "1 d 00 h"), (273600, "3 d 04 h"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_540_000, "1.5 MB"), (102_550_000_000, "102.5 GB"), (3e12, "3.0 TB"),
     (5e15, "5000.0 TB")],
)  # fmt: skip
def test_size(count: float, text: str) -> None:
    assert size(count) == text


# -- log.jsonl


def test_jsonl_appends_whole_lines(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with JsonLines(tmp_path / "log.jsonl", said.append) as log:
            log(started())
            log(iterated("init", 1))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["RunStarted", "Iterated"] * 2
    assert lines[1]["lr"] == 0.1 and lines[0]["time"] > 1e9 and not said


def test_jsonl_leaves_a_torn_line_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "Note"}\n{"event": "Iter')
    with JsonLines(path, print) as log:
        log(iterated("init", 1))
        log(iterated("init", 2))
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and lines[1] == '{"event": "Iter'
    assert [json.loads(line)["iter"] for line in lines[2:]] == [1, 2]


class Disk(io.RawIOBase):
    """Takes `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, b""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self.room]
        self.room -= len(part)
        self.taken += part
        return len(part)


def test_jsonl_on_a_full_disk_warns_once_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    said: list[str] = []
    with JsonLines(tmp_path / "log.jsonl", said.append) as log:
        log._file.close()
        disk = log._file = Disk(room=300)  # type: ignore[assignment]
        for i in range(1, 5):
            log(iterated("init", i))
        disk.room = 10_000
        log(iterated("init", 5))
    lines = disk.taken.decode().splitlines()
    assert json.loads(lines[0])["iter"] == 1 and json.loads(lines[-1])["iter"] == 5 and len(lines) == 3
    assert len(said) == 1 and "log.jsonl can't be written" in said[0]


def test_jsonl_that_cant_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no-such-folder/log\.jsonl"):
        JsonLines(tmp_path / "no-such-folder" / "log.jsonl", print)
    if os.geteuid() != 0:
        (tmp_path / "log.jsonl").touch(mode=0o400)
        with pytest.raises(PermissionDenied):
            JsonLines(tmp_path / "log.jsonl", print)
