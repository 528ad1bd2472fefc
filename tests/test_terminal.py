"""What a person sees at a terminal: tables and prose that fit its width, and nothing of that in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest
import small
import tiny
from click.testing import CliRunner

from stagerun import text
from stagerun.cli import ending, main

ROOT = Path(__file__).parent.parent
WIDTHS = (60, 80, 120)
CUT = ("mistakes", "explain")  # source lines with a caret


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/, schedule/ and its output out/; wrong/, a schedule with mistakes."""
    base = tmp_path_factory.mktemp("terminal")
    tiny.make_data(base / "data")
    small.make_schedule(base / "schedule", base / "data")
    done = small.run(base / "schedule", base / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    far = "lr_policy: 'fixed' max_iter: 6  # a long comment behind what is right " + "and so on " * 6
    small.make_schedule(base / "wrong", base / "data", init=f"base_lr: 0.05 {far}\n{' ' * 70} power: two  {far}")
    return base


COMMANDS = {
    "plan": ["plan", str(ROOT / "solvers" / "resnet50_72ep")],
    "status": ["status", "out"],
    "snapshots": ["snapshots", "out"],
    "report": ["report", "out"],
    "data info": ["data", "info", "data/train"],
    "diff": ["diff", str(ROOT / "solvers" / "resnet50_72ep"), str(ROOT / "solvers" / "resnet50_8nodes")],
    "check --lint": ["check", "schedule", "--lint"],
    "help": ["help", "lr_policy"],
    "help lint": ["help", "lint"],
    "explain": ["explain", "schedule", "init.base_lr"],
    "--help": ["--help"],
    "mistakes": ["check", "wrong"],
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_lines_fit_and_words_stay_whole(base: Path, monkeypatch: pytest.MonkeyPatch, command: str, width: int) -> None:
    monkeypatch.chdir(base)
    monkeypatch.setattr("time.time", lambda: 2e9)
    into_a_pipe = CliRunner().invoke(main.main, COMMANDS[command]).output
    for module in (ending, main):
        monkeypatch.setattr(module, "width_of", lambda stream: width)
    seen = CliRunner().invoke(main.main, COMMANDS[command]).output
    for line in seen.splitlines():
        assert len(line) <= width or len(line.split()) <= 2, "too long, and there was a place to break it"
    lost = Counter(into_a_pipe.split()) - Counter(seen.split())
    assert not [w for w in lost if not set(w) <= set("|-:") and command not in CUT]
    assert text.terminal() is None


@pytest.mark.parametrize("width", WIDTHS)
def test_a_caret_stays_below_its_place(base: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.chdir(base)
    monkeypatch.setattr(ending, "width_of", lambda stream: width)
    lines = CliRunner().invoke(main.main, ["check", "wrong"]).output.splitlines()
    (caret,) = [i for i, line in enumerate(lines) if line.strip(" ") == "^^^"]
    at = lines[caret].index("^")
    assert lines[caret - 1][at : at + 3] == "two" and lines[caret - 1].endswith("...")


def test_a_table_is_folded_and_then_cut() -> None:
    rows = [
        ("name", "number", "what it is"),
        ("a", "1", "one word after another and no end of it at all"),
        ("b", "2", ""),
    ]
    assert max(map(len, text.columns(rows))) == 60
    try:
        text.terminal = lambda: 50
        assert text.columns(rows)[1:] == [
            "a     1       one word after another and no end of",
            "              it at all",
            "b     2",
        ]
        text.terminal = lambda: 40
        assert [line[:14].rstrip() for line in text.columns(rows, indent=2)] == [
            "name  number", "a     1", "b     2", "", "name  what it", "a     one word", "      end of i", "b",
        ]  # fmt: skip
    finally:
        text.terminal = text.no_terminal


class Terminal:
    """`stagerun ARGUMENTS` in a pseudo-terminal of that width, and all that it writes there."""

    def __init__(self, width: int, *arguments: object, **environment: str) -> None:
        self.side, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        unset = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
        env = {**unset, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment}
        words = [sys.executable, "-m", "stagerun", *map(str, arguments)]
        self.process = subprocess.Popen(words, stdin=other, stdout=other, stderr=other, env=env, start_new_session=True)
        os.close(other)
        self.seen = b""

    def until(self, words: bytes) -> "Terminal":
        while words not in self.seen and self._read():
            pass
        assert words in self.seen, self.seen.decode()
        return self

    def end(self) -> tuple[int, str]:
        """The exit code, and what was written."""
        while self._read():
            pass
        os.close(self.side)
        return self.process.wait(120), self.seen.decode()

    def _read(self) -> bool:
        try:
            more = os.read(self.side, 1 << 16)
        except OSError:  # the last process has closed its end
            return False
        self.seen += more
        return bool(more)


def test_the_width_is_that_of_the_terminal(base: Path) -> None:
    code, seen = Terminal(70, "snapshots", base / "out").end()
    assert code == 0 and 60 < max(len(line) for line in seen.splitlines()) <= 70
