"""How a command ends where nobody reads its output: the exit code still tells."""

import contextlib
import io
import itertools
import os
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import lmdb
import made_up_runs
import pytest
import small
import tiny
from click.testing import CliRunner
from rich.text import Text

from stagerun import events
from stagerun.cli.ending import printable
from stagerun.cli.main import main
from stagerun.proto.caffe_pb2 import Datum
from stagerun.report.console import Terminal

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def unread(*words: object, cwd: Path) -> int:
    """The exit code of a command whose stdout and stderr go to a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        return subprocess.run(
            [sys.executable, "-m", "stagerun", *map(str, words)],
            stdout=pipe, stderr=pipe, env=ENVIRONMENT, cwd=cwd, timeout=120,
        ).returncode  # fmt: skip


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ending")
    tiny.make_data(base / "data")
    return small.make_schedule(base / "schedule", base / "data", cyc1='base_lr: 1e6 lr_policy: "fixed" max_iter: 9')


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_error_keeps_its_exit_code(schedule: Path, tmp_path: Path, nproc: int) -> None:
    words = ("run", schedule, "--out", tmp_path / "out", "--nproc", nproc, "--threads", 1)
    assert unread(*words, cwd=tmp_path) == 79
    log = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert '"event": "Failed", "code": 79, "text": "in stage `cyc1` ' in log[-1]
    assert not list(tmp_path.glob("stagerun-bug-*"))


def test_a_mistake_and_a_listing_that_nobody_wants_to_its_end(schedule: Path, tmp_path: Path) -> None:
    assert unread("check", "/nowhere", cwd=tmp_path) == 64
    assert unread("plan", schedule, cwd=tmp_path) == 0


def test_a_full_disk_behind_stdout(schedule: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stagerun", "plan", str(schedule)],
            stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=60,
        )  # fmt: skip
    assert done.returncode == 74 and done.stderr == "standard output can't be written: No space left on device\n"
    assert not list(tmp_path.glob("stagerun-bug-*"))


def test_a_second_interrupt_whose_reader_is_gone() -> None:
    program = (
        "import os, signal\n"
        "from stagerun.launch import StopRequest\n"
        "StopRequest().install()\n"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 2)\n"
        "signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, timeout=60)
    assert done.returncode == 130 == 128 + signal.SIGINT


# -- what is printed of files that others have made

ESC = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
SHOWN = "_]0;owned__[2J_31m_".replace("_", "\N{REPLACEMENT CHARACTER}")


def foreign(base: Path) -> dict[str, list[Path | str]]:
    """Commands that print what stands in files, by what these hold: sequences that a terminal would carry out."""
    story = made_up_runs.Story(base / "out").begin()
    story.write(events.Note(text=f"note {ESC}", warning=True))
    story.write(events.Failed(code=70, text=f"failed {ESC}"))
    records = [Datum(channels=1, height=2, width=2, data=bytes(4), label=i).SerializeToString() for i in range(2)]
    with lmdb.open(str(base / "db")) as env, env.begin(write=True) as txn:
        for key, record in zip((f"a{ESC}", f"b{ESC}"), (*records[:1], b"no Datum"), strict=True):
            txn.put(key.encode(), record)
    (base / "names").write_text(f"cat{ESC}\ndog{ESC}\n")
    small.make_schedule(base / "bad", base / "data", init=f'base_lr: 0.1 lr_policy: "{ESC}" max_iter: 3')
    (base / "out" / "snapshots" / f"x{ESC}-00000003-a0001").mkdir()
    (base / "out" / "snapshots" / f".bad-x{ESC}-00000003-a0001").mkdir()
    return {
        "failed": ["status", base / "out"],
        "made_up": ["report", base / "out"],
        "nothing": ["snapshots", base / "out"],
        "not a Caffe Datum": ["data", "index", base / "db", "--classes", base / "names", "--max-bad", "1"],
        "cat": ["data", "info", base / "db"],
        "]0;owned": ["data", "verify", base / "db"],
        "lr_policy": ["check", base / "bad"],
        "no such": ["check", base / f"gone{ESC}"],
        "lr_polcy": ["plan", base / "bad", "--set", f"solver.lr_polcy={ESC}"],
    }


def test_what_others_wrote_commands_no_terminal(tmp_path: Path) -> None:
    for word, command in foreign(tmp_path).items():
        done = CliRunner().invoke(main, [str(part) for part in command])
        text = done.output + done.stderr
        assert word in text or word == "nothing", (command, text)
        assert not [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")], (command, text)
        assert done.exit_code != 70, done.output


def test_a_caret_stands_under_its_place_and_rich_shows_its_own_colours(tmp_path: Path) -> None:
    small.make_schedule(tmp_path, tmp_path / "data", init=f'base_lr: 0.1 type: "{ESC}" lr_polcy: "fixed" max_iter: 3')
    said = CliRunner().invoke(main, ["check", str(tmp_path)]).output.splitlines()
    lines = [(line, carets) for line, carets in itertools.pairwise(said) if "^" in carets]
    assert [line[carets.index("^") :].split()[0] for line, carets in lines] == [f'"{SHOWN}"', "lr_polcy:"]
    page = io.StringIO()
    with contextlib.redirect_stdout(page), printable():
        terminal = Terminal(force_terminal=True, color_system="standard", legacy_windows=False)
        terminal.print(Text(f"red {ESC}".replace("\x07", ""), style="red"))
    assert page.getvalue() == f"\x1b[31mred {SHOWN[:9]}{SHOWN[10:]}\x1b[0m\n"
