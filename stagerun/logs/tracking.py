"""The run's side of a tracker: it starts the process that follows the log, and says what that one has to say."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from stagerun.base.events import Event
from stagerun.logs.follower import Orders
from stagerun.logs.log_file import LOG
from stagerun.logs.table import Opened
from stagerun.system.process import program

_LOOK_S = 1.0


class Following:
    """A sink, for rank 0. It does nothing with the events: the log has them."""

    def __init__(self, tracker: str, opened: Opened) -> None:
        self.tracker, self.opened = tracker, opened
        self.looked, self.news = 0.0, b""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Following":
        folder = self.opened.out / "trackers"
        try:
            folder.mkdir(exist_ok=True)
            with open(folder / f"{self.tracker}.txt", "wb") as printed:
                self.process = subprocess.Popen(
                    [sys.executable, *program("stagerun.logs.follower")],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, start_new_session=True,
                )  # fmt: skip
            assert self.process.stdin is not None and self.process.stdout is not None
            os.set_blocking(self.process.stdout.fileno(), False)
            self.process.stdin.write(json.dumps(asdict(self._orders())).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            self._warn(error.strerror or str(error))
        return self

    def _orders(self) -> Orders:
        plan, out = self.opened.plan, self.opened.out
        return Orders(
            tracker=self.tracker,
            project=plan.schedule.name,
            out=str(out.absolute()),
            size=(out / LOG).stat().st_size,
            before=self.opened.places(),
            settings={
                stage.name: {field: _plain(value) for field, value in stage.identity.items()}
                for stage in plan.schedule.stages
            },
            workers=self.opened.workers,
        )

    def __call__(self, event: Event) -> None:
        if time.monotonic() >= self.looked + _LOOK_S:
            self._look()

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        again = f"the next `run` with --log {self.tracker} sends them"
        try:
            code = self.process.wait(self.opened.patience)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
            late = f"has not taken all lines within {self.opened.patience:.0f} s of the run's end"
            self.opened.warn(f"warning: {self.tracker} {late}; {again}")
        else:
            self._look()
            if code:
                self.opened.warn(f"warning: {self.tracker} lacks the last lines; {again}")
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
        self.opened.warn(
            f"warning: {self.tracker} does not take the run's lines: {why}; training goes on, and they are sent when it does"
        )


def _plain(value: str) -> Any:
    """A number or a text, of what is written in a schedule."""
    try:
        return json.loads(value)
    except ValueError:
        return value
