"""`terminal.py FILE.svg` records the terminal session of README: a mistake, a run that Ctrl-C stops, and the same command again.

It trains solvers/fashion_collapse on two workers, for minutes. Lines that repeat what others show are left out and marked `...`.
"""

import io
import os
import pty
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
COLUMNS = 100
CTRL_C = b"\x03"
SEEN_BEFORE_CTRL_C = b"snapshot init-"
PROGRESS = re.compile(r"[^\r\n]* left(?=\r)")
NO_FONT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def terminal_output(words: list[str], folder: Path, interrupted: bool = False) -> str:
    """Return what a command writes to a terminal; Ctrl-C is typed after the first snapshot."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that runs this in the background ignores it
        os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
        os.execv(sys.executable, [sys.executable, "-m", "stagerun", *words])
    output = b""
    while chunk := read(terminal):
        output += chunk
        if interrupted and SEEN_BEFORE_CTRL_C in output:
            os.write(terminal, CTRL_C)
            interrupted = False
    os.waitpid(child, 0)
    return output.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux: the command has ended
        return b""


def screen(output: str) -> list[str]:
    """Return the lines that stay on the screen: after a carriage return a line is written over."""
    return [line.split("\r")[-1].replace("\x1b[2K", "") for line in output.split("\n")]


def between(lines: list[str], first: str, last: str | None = None) -> list[str]:
    """Return the lines from the one that starts with `first` to the next that starts with `last`, or to the end."""
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    end = len(lines) if last is None else next(i for i in range(start, len(lines)) if lines[i].startswith(last)) + 1
    return lines[start:end]


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "solvers" / "fashion_collapse", folder / "fashion_collapse")
        schedule = folder / "fashion_collapse" / "schedule.prototxt"
        schedule.write_text(schedule.read_text().replace("../../.data", str(ROOT / ".data")))
        solver = folder / "fashion_collapse" / "collapse.prototxt"
        right = solver.read_text()
        run = ["run", "fashion_collapse", "--nproc", "2"]

        solver.write_text(right.replace("lr_policy:", "lr_polcy:"))
        mistake = screen(terminal_output(["check", "fashion_collapse"], folder))
        solver.write_text(right)
        stopped = terminal_output(run, folder, interrupted=True)
        resumed = screen(terminal_output(run, folder))
    command = f"$ stagerun {' '.join(run)}"
    session = ["$ stagerun check fashion_collapse", *mistake, f"{command}    # after the correction"]
    session += between(screen(stopped), "stage 1/5", "stage 1/5")
    session += [PROGRESS.findall(stopped)[-1].replace("\x1b[2K", ""), "^C"]
    session += between(screen(stopped), "stopped in")
    session += [command, *between(resumed, "fashion_collapse: ", "stage 1/5"), "..."]
    session += between(resumed, "done in", "total")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in session:
        console.print(Text.from_ansi(f"\x1b[1m{line}\x1b[0m" if line.startswith("$") else line), soft_wrap=True)
    file.write_text(console.export_svg(title="stagerun", code_format=NO_FONT))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
