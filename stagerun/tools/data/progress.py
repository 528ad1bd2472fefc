"""How far a command over many images has come: a bar on a terminal, else a line every ten seconds, on stderr; and its threads."""

import math
import os
import time
from typing import Annotated

import click
from rich.progress import BarColumn, Progress, TextColumn

from stagerun.base.text import duration
from stagerun.command.ending import tell
from stagerun.command.options import option
from stagerun.command.terminal import Terminal

DataThreads = Annotated[
    int | None,
    option("--threads N", "Threads.  [default: one per processor of this process]", type=click.IntRange(1)),
]

_LINE_EVERY_S = 10.0
_REDRAWN_EVERY_S = 0.1


class Shown:
    """A context manager; the work calls `progress` and `say`, one call at a time. `noun`: what is counted.

    The rate is that of this process: what an earlier one has done doesn't count.
    """

    def __init__(self, what: str, noun: str = "images") -> None:
        console = Terminal(stderr=True)
        self._what, self._noun = what, noun
        self._first: tuple[float, int] | None = None
        self._next = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            # No markup: a folder's name may have brackets in it.
            columns = (TextColumn("{task.description}", markup=False), TextColumn("{task.fields[text]}", markup=False))
            self._bar = Progress(columns[0], BarColumn(), columns[1], console=console, transient=True)
            self._task = self._bar.add_task(what, total=None, text="")

    def __enter__(self) -> "Shown":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._next = now + (_LINE_EVERY_S if self._bar is None else 0)
            self._first = now, done
        if now < self._next:
            return
        since, first = self._first
        text = f"{done} of {total} {self._noun}{self.rate(done)}"
        if done > first and now - since > 1:
            text += f", {duration((total - done) * (now - since) / (done - first))} left"
        if self._bar is None:
            self._next = now + _LINE_EVERY_S
            tell(f"{self._what}: {text}")
        else:
            self._next = now + _REDRAWN_EVERY_S
            self._bar.update(self._task, completed=done, total=total, text=text)

    def say(self, text: str) -> None:
        if self._bar is None:
            tell(text)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def rate(self, done: int) -> str:
        """`, 1480 images/s`, or '' where it is too soon to say."""
        since, first = self._first or (math.inf, 0)
        seconds = time.monotonic() - since
        return f", {(done - first) / seconds:.0f} {self._noun}/s" if seconds > 0.1 and done > first else ""


def threads_here(given: int | None) -> int:
    """Those asked for, or as many as there are processors for this process."""
    return given or len(os.sched_getaffinity(0))
