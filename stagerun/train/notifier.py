"""The process that runs the commands of `run --notify`: it follows OUT/log.jsonl for the ends of stages, and reads on stdin how the run ends.

It stands beside the process that the user called, and not beside a worker: so it says of a job whose workers are killed and started again only
how that ended, once. Where its stdin ends without a word, the log says how the run ended; else it was killed.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stagerun.base.errors import EXIT_MEANINGS, ExitCode
from stagerun.base.events import Event, Failed, Iterated, RunFinished, StageFinished, StageStarted, Stopped, Tested
from stagerun.system import signals
from stagerun.system.host import host_name
from stagerun.train.log_file import Tail

TIMEOUT_S = 30.0
_LOOK_S = 1.0
_KEPT = 1 << 12  # bytes of what a command prints
_STOPPED = (ExitCode.SAVED, ExitCode.INTERRUPTED)
_KILLED = "the command was killed, or ended at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What a command reads on its stdin, as one line of JSON. `event`: stage, finished, stopped or failed. `accuracy`: the newest top-1, 0 to 1."""

    event: str
    schedule: str | None
    out: str | None
    stage: str | None
    iter: int | None
    accuracy: float | None
    message: str
    exit_code: int | None
    host: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """`size`: of the log when the run began; what comes after that is its own. `out`: None where no one knows."""

    commands: tuple[str, ...]
    schedule: str | None
    out: str | None
    size: int


class Notifier:
    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.log = Tail(Path(orders.out) / "log.jsonl", orders.size) if orders.out is not None else list
        self.stage: str | None = None
        self.iter: int | None = None
        self.accuracy: float | None = None
        self.last: Event | None = None  # of those that end a run
        self.warned: set[str] = set()

    def look(self) -> None:
        """Tells of each stage that has ended since."""
        with suppress(OSError):
            for _, event in self.log():
                self._see(event)
                if isinstance(event, StageFinished):
                    self._tell("stage", f"stage {event.stage} is trained", None)

    def _see(self, event: Event) -> None:
        match event:
            case StageStarted() | Iterated():
                self.stage, self.iter, self.last = event.stage, event.iter, None
            case Tested(ema=False):
                self.accuracy = event.top1
            case StageFinished():
                self.stage, self.iter, self.accuracy = event.stage, event.iterations, event.top1
            case Stopped() | Failed() | RunFinished():
                self.last = event

    def end(self, words: dict[str, Any]) -> None:
        """`words`: `code` and `text`; {} if there was no time to say any."""
        self.look()
        found = self._found()
        code, text = words.get("code", found[0]), words.get("text") or found[1]
        event = "finished" if code == ExitCode.DONE else "stopped" if code in _STOPPED else "failed"
        self._tell(event, text or (EXIT_MEANINGS[ExitCode(code)] if code in set(ExitCode) else _KILLED), code)

    def _found(self) -> tuple[int | None, str]:
        """What the log says of the end."""
        match self.last:
            case RunFinished():
                return int(ExitCode.DONE), ""
            case Stopped(reason=reason):
                return int(ExitCode.SAVED), reason
            case Failed(code=code, text=text):
                return code, text
        return None, ""

    def _tell(self, event: str, message: str, code: int | None) -> None:
        notice = Notice(
            event=event,
            schedule=self.orders.schedule,
            out=self.orders.out,
            stage=self.stage,
            iter=self.iter,
            accuracy=self.accuracy,
            message=message,
            exit_code=code,
            host=host_name(),
            time=round(time.time(), 3),
        )
        line = json.dumps(asdict(notice)) + "\n"
        failures = {command: why for command, why in run_all(self.orders.commands, line).items() if why}
        for command, why in failures.items():
            if command not in self.warned:
                self.warned.add(command)
                signals.say(f"warning: --notify {command}: {why}; the run goes its way")


def run_all(commands: Iterable[str], line: str) -> dict[str, str]:
    """Runs the commands at the same time; by command what went wrong, '' where nothing did."""
    end = time.monotonic() + TIMEOUT_S
    ways = {command: _start(command, line) for command in commands}
    return {command: way if isinstance(way, str) else way.ended(end) for command, way in ways.items()}


def _start(command: str, line: str) -> "_Started | str":
    """Or why it can't be."""
    try:
        return _Started(command, line)
    except OSError as error:
        return f"can't be started: {error.strerror}"


class _Started:
    """A command's process, fed and read by threads: no file is written, since a full disk may be what there is to tell."""

    def __init__(self, command: str, line: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._said = b""  # the last of it
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._feed, args=(line.encode(),), daemon=True).start()

    def _feed(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it need not read
            self._process.stdin.write(line)
        with suppress(OSError):
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            while new := os.read(printed.fileno(), 1 << 16):
                self._said = (self._said + new)[-_KEPT:]

    def ended(self, end: float) -> str:
        """What went wrong; '' if nothing did."""
        process = self._process
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.wait()
            self._reader.join(1)
            return f"took longer than {TIMEOUT_S:.0f} s, and was ended"
        self._reader.join(1)  # what it has left behind may print on
        words = self._said.decode(errors="replace").strip().splitlines()
        return f"ended with code {code}" + (f": {words[-1]}" if words else "") if code else ""


def main() -> None:
    """stdin: a line of Orders, and a line with the words at the end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # The run answers them. SIG_IGN would have the commands ignore them, too.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    read, notifier, lines = b"", None, []
    while True:
        if select.select([0], [], [], _LOOK_S)[0]:
            if not (new := os.read(0, 1 << 16)):
                break
            read += new
            *lines, _ = read.split(b"\n")
            if lines and notifier is None:
                orders = json.loads(lines[0])
                notifier = Notifier(Orders(**{**orders, "commands": tuple(orders["commands"])}))
            if len(lines) > 1:
                break
        if notifier is not None:
            notifier.look()
    if notifier is not None:
        notifier.end(json.loads(lines[1]) if len(lines) > 1 else {})


if __name__ == "__main__":
    main()
