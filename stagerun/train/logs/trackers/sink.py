"""The run's side of a tracker: it starts the process that follows the log, and says what that one has to say."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from stagerun.base.events import Event
from stagerun.system.process import program
from stagerun.train.logs.trackers.follower import Orders

_LOOK_S = 1.0


class Following:
    """A sink, for rank 0. It does nothing with the events: the log has them. `patience`: seconds at the end of the run."""

    def __init__(self, orders: Orders, warn: Callable[[str], None], patience: float) -> None:
        self.orders, self.warn, self.patience = orders, warn, patience
        self.looked, self.news = 0.0, b""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Following":
        folder = Path(self.orders.out) / "trackers"
        try:
            folder.mkdir(exist_ok=True)
            with open(folder / f"{self.orders.tracker}.txt", "wb") as printed:
                self.process = subprocess.Popen(
                    [sys.executable, *program("stagerun.train.logs.trackers.follower")],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, start_new_session=True,
                )  # fmt: skip
            assert self.process.stdin is not None and self.process.stdout is not None
            os.set_blocking(self.process.stdout.fileno(), False)
            self.process.stdin.write(json.dumps(asdict(self.orders)).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            self._warn(error.strerror or str(error))
        return self

    def __call__(self, event: Event) -> None:
        if time.monotonic() >= self.looked + _LOOK_S:
            self._look()

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            code = self.process.wait(self.patience)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
            self._say(f"has not taken all lines within {self.patience:.0f} s of the run's end")
        else:
            self._look()
            if code:
                self._say("lacks the last lines")
        self.process.stdout.close()

    def _look(self) -> None:
        """Says what the process wants the user to know."""
        self.looked = time.monotonic()
        if self.process is None or self.process.stdout is None:
            return
        with suppress(OSError):
            self.news += os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.news = self.news.split(b"\n")
        for line in lines:
            self._warn(line.decode(errors="replace"))

    def _warn(self, why: str) -> None:
        self.warn(
            f"warning: {self.orders.tracker} does not take the run's lines: {why}; training goes on, and they are sent when it does"
        )

    def _say(self, what: str) -> None:
        name = self.orders.tracker
        self.warn(f"warning: {name} {what}; the next `run` with --log {name} sends them")
