"""What rank 0 shows and stores, for made-up events; also of compressed gradients and stale pushes, and that nothing is seen of none."""

import io
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import log_help
import pytest
from contract import stagerun
from facade import (
    Compressed,
    CompressedItem,
    Console,
    Event,
    Iterated,
    JsonLines,
    Note,
    PermissionDenied,
    Retraced,
    SnapshotFailed,
    SnapshotWritten,
    StageFinished,
    StageStarted,
    Stopped,
    StorageError,
    Synchronised,
    Tested,
    duration,
    read_last_life,
    size,
)
from log_help import feed, room, run_started
from made_up_runs import Story

PARENTS = {"init": None, "collapse": "init"}
DENSE = 1_000_000
PUSHES = ((0, 0), (1, 0), (2, 1), (0, 0), (1, 0), (2, 1))  # (staleness, replica) of iterations 1 to 6
BEGUN = run_started(schedule="two", out="out/two", stages=("init", "collapse"), iterations=20, iterations_left=20)


def finished(stage: str, top1: float, **changes: Any) -> StageFinished:
    rates = {"first_lr": 0.1, "last_lr": 0.01, "weight_decay": 5e-4, "augmentation": "mirror"}
    return replace(log_help.finished(stage, 10, top1, 61.0, epochs=0.5, test_loss=2.2, **rates), **changes)


def started(stage: str, number: int, **changes: Any) -> StageStarted:
    return replace(log_help.stage_started(stage, number=number, max_iter=10, start="seed 1", batch_size=32), **changes)


def iterated(stage: str, iter: int, **changes: Any) -> Iterated:
    rates = {"epoch": 0.05 * iter, "lr": 0.1, "weight_decay": 5e-4, "loss": 2.5, "images": 32, "seconds": 0.5}
    return log_help.iterated(stage, iter, **{**rates, **changes})


def test_console_lines(capsys):
    with Console({"init": 5, "collapse": 0}, PARENTS) as console:
        feed(
            console,
            BEGUN,
            started("init", 1),
            Note(text="resume is BIT-EXACT"),
            Note(text="resume is EQUIVALENT", warning=True),
            (iterated("init", i) for i in range(1, 11)),
            SnapshotWritten(
                stage="init", iter=10, name="init-00000010-a0001", bytes=2_500_000, blocked_seconds=0, seconds=0.25
            ),
            SnapshotFailed(stage="init", iter=3, message="no space left"),
            Tested(stage="init", iter=10, images=100, top1=0.14, top5=0.71, loss=2.25, seconds=3.2),
            finished("init", 0.14),
            started("collapse", 2),
            iterated("collapse", 1),
            finished("collapse", 0.19, iterations=5, epochs=0.25, train_seconds=9.0),
            Stopped(stage="collapse", iter=1, reason="asked to stop"),
        )
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
        "stage     iterations  epochs  LR first -> last  decay   augmentation  train loss  top-1    gain   top-5    time",
        "collapse  5           0.25    0.1 -> 0.01       0.0005  mirror        2.3000      19.00 %  +5.00  90.00 %  9 s",
        "stopped in collapse after iteration 1 (asked to stop), everything is saved: run the same command again to resume",
    ]


def test_up_to_five_classes_have_no_top5(capsys):
    with Console({}, PARENTS, few={"init"}) as console:
        scores = {"top1": 0.14, "top5": 1.0, "loss": 2.25, "seconds": 3.2}
        beside = ("other", 0.5, 1.0, 1.25, False)
        feed(console, BEGUN, started("init", 1), Tested(stage="init", iter=10, images=100, **scores))
        feed(console, finished("init", 0.14, beside=(beside,)), started("collapse", 2), finished("collapse", 0.19))
    lines = capsys.readouterr().out.splitlines()
    assert "init 10: test top-1 14.00 %, loss 2.2500 on 100 images in 3 s" in lines
    assert "init on other: top-1 50.00 %, loss 1.2500" in lines
    assert ["top-5" in line for line in lines if line.startswith("stage  ")] == [False, True]


@pytest.mark.parametrize("classes, shown", [("3", False), ("5", False), ("10", True)])
def test_a_report_of_up_to_five_classes_has_no_top5(tmp_path, classes, shown):
    story = Story(tmp_path / "out", model__num_classes=classes).begin(("init",), ensembles=("both",))
    story.start("init", None)
    story.train("init", 1, 6, 0)
    story.end("init", None, 0.6)
    story.ensemble("both", "init")
    for options in ((), ("--by", "iteration")):
        done = stagerun(["report", tmp_path / "out", *options], tmp_path)
        assert done.exit_code == 0 and "60.00 %" in done.stdout and ("top-5" in done.stdout) is shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


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
def test_the_live_line_of_a_terminal(at_terminal, monkeypatch, width, line):
    monkeypatch.setenv("COLUMNS", str(width))
    with redirect_stdout(at_terminal), Console({"collapse": 1}, PARENTS) as console:
        feed(console, replace(BEGUN, iterations_left=5001), started("collapse", 2, max_iter=10000))
        strip = seen(at_terminal.getvalue())[-2]
        console(iterated("collapse", 5000))
    assert strip == "init -  collapse 0 %" and "\x1b[36mcollapse" in at_terminal.getvalue()
    live, *lines = seen(at_terminal.getvalue())
    assert re.sub("[━╸╺]+", "#", live) == line and len(live) < width
    assert lines[-2:] == [strip, ""], "the live line is not left behind"


def test_the_live_line_is_drawn_a_few_times_a_second_and_gives_way_to_what_is_said(at_terminal):
    begun = time.monotonic()
    with redirect_stdout(at_terminal), Console({"collapse": 1}, PARENTS) as console:
        feed(console, BEGUN, started("collapse", 2), (iterated("collapse", i) for i in range(1, 1001)))
        drawn, took = at_terminal.getvalue().count("img/s"), time.monotonic() - begun
        console(Note(text="a word", warning=True))
    assert 1 <= drawn <= 1 + 2 * took
    assert seen(at_terminal.getvalue())[-2:] == ["warning: a word", ""]
    assert "\x1b[33mwarning" in at_terminal.getvalue()


@pytest.mark.parametrize(
    "environment, live, coloured",
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "xterm", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, False, True),
    ],
)
def test_where_there_is_a_live_line_and_colour(at_terminal, monkeypatch, environment, live, coloured):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with redirect_stdout(at_terminal):
        console = Console({}, PARENTS)
        console(Note(text="a word", warning=True))
    assert console.live is live and ("\x1b[33m" in at_terminal.getvalue()) is coloured


# -- gradients


STALE = [iterated("init", i, staleness=s, replica=r) for i, (s, r) in enumerate(PUSHES, 1)]
SENT = [iterated("init", i, sent_bytes=20_000 + 4_000 * (i % 2)) for i in range(1, 7)]


@pytest.mark.parametrize(
    "dense, iterations, words",
    [
        (0, [iterated("init", i) for i in range(1, 7)], ["", "", ""]),
        (0, SENT, ["", "", ""]),
        (DENSE, SENT, ["22.0 kB sent, 2.2 % of dense  "] * 3),
        (0, STALE, ["staleness 0.5, at most 1  ", "staleness 0.75, at most 2  ", "staleness 1, at most 2  "]),
    ],
)
def test_progress_lines_say_what_was_sent_and_how_stale_it_was(dense, iterations, words, capsys):
    with Console({"init": 2}, PARENTS) as console:
        feed(console, BEGUN, started("init", 1, dense_bytes=dense), *iterations)
    lines = [line for line in capsys.readouterr().out.splitlines() if "images/s" in line]
    assert [re.sub(".*images/s  (.*?)[0-9]+ s left.*", r"\1", line) for line in lines] == words


def logged(path: Path, *events: Event | Iterator[Event]) -> list[dict[str, object]]:
    with JsonLines(path, print) as log:
        feed(log, *events)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_has_bytes_and_staleness_only_where_there_are_any(tmp_path):
    again = Retraced(stage="init", iter=1, until=2, lr=0.1, loss=1.0, images=1, seconds=1.0)
    silent = logged(tmp_path / "one", started("init", 1), iterated("init", 1), again)
    assert not any({"sent_bytes", "dense_bytes", "staleness", "replica"} & set(record) for record in silent)
    start, iteration, retraced = logged(
        tmp_path / "two", started("init", 1, dense_bytes=DENSE), replace(SENT[1], staleness=0, replica=0), replace(again, sent_bytes=20_000)
    )  # fmt: skip
    assert start["dense_bytes"] == DENSE and iteration["sent_bytes"] == retraced["sent_bytes"] == 20_000
    assert (iteration["staleness"], iteration["replica"]) == (0, 0), "0 says something here"


def test_the_last_life_leaves_out_what_compression_kept_and_knows_the_newest_synchronisation(tmp_path):
    """A long run has many such lines, and long ones."""
    item = CompressedItem(name="conv.weight", norm=6.0, residual_norm=3.0, kept=0.75, bytes=800)
    events: list[Event] = [BEGUN, started("init", 1, dense_bytes=DENSE)]
    for i in range(1, 5001):
        events += [iterated("init", i, sent_bytes=i), Compressed(stage="init", iter=i, items=(item, item))]
        if i <= 2000 and i % 10 == 0:
            events.append(Synchronised(stage="init", iter=i, bytes=5000, iterations=10, sent_bytes=6000))
    logged(tmp_path / "log.jsonl", *events)
    life = read_last_life(tmp_path / "log.jsonl")
    assert life is not None and life.seen[1][1] == events[1] and len(life.seen) == 2
    assert [e.sent_bytes for e in life.window] == list(range(4951, 5001)) and life.unreadable == 0
    assert life.met is not None and life.met.iter == 2000
    logged(tmp_path / "log.jsonl", started("collapse", 2), iterated("collapse", 1))
    life = read_last_life(tmp_path / "log.jsonl")
    assert life is not None and life.met is None, "of another stage"


# -- numbers


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"), (86399, "23 h 59 min"), (86400, "1 d 00 h"), (273600, "3 d 04 h"),
    ],
)  # fmt: skip
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_540_000, "1.5 MB"), (102_550_000_000, "102.5 GB"), (3e12, "3.0 TB"),
     (5e15, "5000.0 TB")],
)  # fmt: skip
def test_size(count, text):
    assert size(count) == text


# -- log.jsonl


def test_jsonl_appends_whole_lines_and_leaves_a_torn_one_on_a_line_of_its_own(tmp_path):
    said: list[str] = []
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        with JsonLines(path, said.append) as log:
            feed(log, BEGUN, iterated("init", 1))
        with open(path, "a") as file:
            file.write('{"event": "Iter')
    first, second, torn, *rest = path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in (first, second, *rest[:2])] == ["RunStarted", "Iterated"] * 2
    assert json.loads(second)["lr"] == 0.1 and json.loads(first)["time"] > 1e9 and not said
    assert torn == rest[2] == '{"event": "Iter'


def test_jsonl_on_a_full_disk_warns_once_and_goes_on_when_there_is_room(tmp_path):
    said: list[str] = []
    with JsonLines(tmp_path / "log.jsonl", said.append) as log:
        with room(300):
            feed(log, *(iterated("init", i) for i in range(1, 5)))
        log(iterated("init", 5))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["iter"] == 1 and json.loads(lines[-1])["iter"] == 5 and len(lines) == 3
    assert len(said) == 1 and "log.jsonl can't be written" in said[0]


def test_jsonl_that_cant_be_opened(tmp_path):
    with pytest.raises(StorageError, match=r"no-such-folder/log\.jsonl"):
        JsonLines(tmp_path / "no-such-folder" / "log.jsonl", print)
    if os.geteuid() != 0:
        (tmp_path / "log.jsonl").touch(mode=0o400)
        with pytest.raises(PermissionDenied):
            JsonLines(tmp_path / "log.jsonl", print)
