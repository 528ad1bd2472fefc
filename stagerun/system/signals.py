"""Which signals ask for a stop, and what they lead to as long as there is nothing to finish.

Imported before anything else, so that no signal finds a process without an answer: it needs little itself.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """A class of its own, since Python ends a process by SIGINT when a plain KeyboardInterrupt has come through code that it made from a
    string, as dataclasses are, whatever is done about it further up."""


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1, without those that this process was started to ignore (nohup and SIGHUP)."""
    return [s for s in _STOP if signal.getsignal(s) is not signal.SIG_IGN]


def leave(code: int, text: str) -> None:
    """From now on a stop signal ends the process at once with `code`, and `text` on stderr ('': nothing is said).

    For as long as nothing is started: imports, files that are only read. Not by an exception, which the machinery of imports and
    extension modules may turn into another one on its way.
    """

    def ends(number: int, frame: FrameType | None) -> NoReturn:
        end_at_once(code, f"{signal.Signals(number).name}: {text}" if text else "")

    _handle(ends)


def say(text: str) -> None:
    """On stderr, from a handler, which may interrupt a print half way."""
    with contextlib.suppress(OSError):  # no one reads any more
        os.write(2, f"{erase_line(2) or chr(10)}{text}\n".encode())


def erase_line(file: int) -> str:
    """What goes before a line on a terminal in which another process may have drawn its live line; '' for other files."""
    return "\r\x1b[2K" if os.isatty(file) and os.environ.get("TERM", "dumb") != "dumb" else ""


def end_at_once(code: int, text: str) -> NoReturn:
    """Ends the process from a handler or another thread, with `text` on stderr if there is any."""
    if text:
        say(text)
    os._exit(code)


def interrupt() -> None:
    """From now on a stop signal is a KeyboardInterrupt (Interrupted), so that what was started is tidied up on the way out."""

    def interrupts(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted

    _handle(interrupts)


def settle() -> None:
    """From now on stop signals do nothing: all is done, and what is left to do is to say so."""
    _handle(signal.SIG_IGN)


def release() -> None:
    """Lets them through again; what has come meanwhile comes now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Around what starts threads or processes: these inherit the stop signals blocked, those that are ignored, too, in case a library
    installs a handler for them. The kernel hands a signal to any thread that lets it through, so one of a library would take what
    another one waits for. What comes meanwhile comes after."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    try:
        yield
    finally:
        release()


def _handle(handler: object) -> None:
    for number in stop_signals():
        signal.signal(number, handler)  # type: ignore[arg-type]
