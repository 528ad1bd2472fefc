"""What a person sees at a terminal: tables and prose that fit its width, and nothing of that in a pipe."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import small
from made_up_runs import Story

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base(finished):
    """data/, schedule/ and its output out/; wrong/, a schedule with mistakes."""
    far = "lr_policy: 'fixed' max_iter: 6  # a long comment behind what is right " + "and so on " * 6
    small.make_schedule(
        finished / "wrong", finished / "data", init=f"base_lr: 0.05 {far}\n{' ' * 70} power: two  {far}"
    )
    return finished


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
        return self.process.wait(300), self.seen.decode()

    def _read(self) -> bool:
        if not select.select([self.side], [], [], 300)[0]:
            self.process.kill()
            raise AssertionError(f"nothing came for 300 s, after {self.seen.decode()}")
        try:
            more = os.read(self.side, 1 << 16)
        except OSError:  # the last process has closed its end
            return False
        self.seen += more
        return bool(more)


# -- run


def lines_of(seen: str) -> list[str]:
    """What stands in the terminal: a line that is erased is not there."""
    assert "\x1b[?25l" not in seen, "the cursor was hidden, and a crash would leave it so"
    plain = re.sub(r"\x1b\[[\d;]*m", "", seen.replace("\r\n", "\n"))
    return [line.rpartition("\r\x1b[2K")[2] for line in plain.split("\n")]


def test_a_caret_stays_below_its_place_and_a_name_is_no_markup(base, tmp_path):
    lines = lines_of(Terminal(60, "check", base / "wrong").end()[1])
    (caret,) = [i for i, line in enumerate(lines) if line.strip(" ") == "^^^"]
    at = lines[caret].index("^")
    assert lines[caret - 1][at : at + 3] == "two" and lines[caret - 1].endswith("...")
    outs = [tmp_path / "t<1|2>", tmp_path / "other"]
    for out in outs:
        Story(out).whole(0.5, 0.6, 0.7)
    assert lines_of(Terminal(80, "report", *outs).end()[1])[2].startswith("t<1|2>  made_up ")


def test_a_run_at_a_terminal_and_what_it_says_when_it_goes_on(base, tmp_path):
    words = ["run", base / "schedule", "--out", tmp_path / "out", "--threads", 1, "--set", "determinism=ELASTIC"]
    words += ["--set", "early.max_iter=100000", "--set", "early.snapshot=1000"]
    run = Terminal(80, *words, "--nproc", 2).until(b"/100000  ")
    os.killpg(run.process.pid, signal.SIGINT)  # as the terminal does on Ctrl-C
    code, seen = run.end()
    lines = lines_of(seen)
    assert code == 75 and lines[-1] == "", "what comes next begins in the first column"
    assert lines[0].startswith("tiny: 4 stages") and any("LR first" in line for line in lines)
    assert "init ok  cyc1 -  collapse -  early -" in lines and "init ok  cyc1 ok  collapse ok  early 0 %" in lines
    assert any(line.startswith("SIGINT: stopping") for line in lines), "another process's word is whole"
    assert not [line for line in lines if "img/s" in line or (len(line) > 80 and " " in line.strip())]

    run = Terminal(80, *words, "--nproc", 1).until(b"EXACT")
    run.process.terminate()
    _, seen = run.end()
    lines = lines_of(seen)
    assert re.match(r"tiny: init, cyc1, collapse done; resumes early at \d+ of 100000$", lines[0])
    assert re.match(r"\d+ of 100014 iterations to do, about .* left", lines[1])
    shown = " ".join(" ".join(lines[2:12]).split())
    assert "`stagerun plan" in shown and "shows the full plan" in shown
    assert not any("LR first" in line for line in lines)

    seen = Terminal(80, "status", tmp_path / "out").end()[1]
    assert "init \x1b[32mok\x1b[0m  cyc1 \x1b[32mok\x1b[0m  collapse \x1b[32mok\x1b[0m  early \x1b[36m" in seen
    plain = small.stagerun("status", tmp_path / "out").stdout
    assert re.search(r"^init ok  cyc1 ok  collapse ok  early \d %$", plain, re.M) and "\x1b" not in plain
    assert "\x1b" not in Terminal(80, "status", tmp_path / "out", NO_COLOR="1").end()[1]
