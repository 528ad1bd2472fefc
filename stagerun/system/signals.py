"""Stop signals, and their handlers while nothing has to be finished.

Imported first, so that every signal has a handler; it imports little.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """A subclass, since Python ends a process by SIGINT after a plain KeyboardInterrupt has passed code compiled from a string, such as
    a dataclass's, even if it is caught."""


def stop_signals() -> list[signal.Signals]:
    """Return SIGTERM, SIGINT, SIGHUP and SIGUSR1, without signals ignored from the start (nohup and SIGHUP)."""
    return [s for s in _STOP if signal.getsignal(s) is not signal.SIG_IGN]


def leave(code: int, text: str) -> None:
    """Make stop signals end the process at once with `code`, and `text` on stderr, if any.

    For imports and reading of files. Not by an exception, which the import system and extension modules may replace by another.
    """

    def ends(number: int, frame: FrameType | None) -> NoReturn:
        end_at_once(code, f"{signal.Signals(number).name}: {text}" if text else "")

    _handle(ends)


def say(text: str) -> None:
    """Print on stderr, from a handler that may interrupt a print."""
    with contextlib.suppress(OSError):  # the reader has gone
        os.write(2, f"{erase_line(2) or chr(10)}{text}\n".encode())


def erase_line(file: int) -> str:
    """Return the control codes that erase another process's live line on a terminal; '' for other files."""
    return "\r\x1b[2K" if os.isatty(file) and os.environ.get("TERM", "dumb") != "dumb" else ""


def end_at_once(code: int, text: str) -> NoReturn:
    """End the process from a handler or another thread, with `text`, if any, on stderr."""
    if text:
        say(text)
    os._exit(code)


def interrupt() -> None:
    """Make stop signals raise Interrupted, so that the caller cleans up."""

    def interrupts(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted

    _handle(interrupts)


def settle() -> None:
    """Ignore stop signals from now on: the exit code is fixed."""
    _handle(signal.SIG_IGN)


def release() -> None:
    """Unblock stop signals; pending ones arrive now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Block stop signals while threads or processes start, which inherit the mask: the kernel delivers a signal to any thread that accepts
    it, and a library's thread would swallow it. Ignored signals are blocked, too, in case a library installs a handler. Signals arrive after
    the body."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    try:
        yield
    finally:
        release()


def _handle(handler: object) -> None:
    for number in stop_signals():
        signal.signal(number, handler)  # type: ignore[arg-type]
