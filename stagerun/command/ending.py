"""The end of a command: one message for the user, and the exit code."""

import errno
import io
import os
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

import stagerun
from stagerun.base.errors import ExitCode, StagerunError, StorageError
from stagerun.base.pace import colour, strip
from stagerun.base.text import duration, shown, size, wrapped
from stagerun.system import signals
from stagerun.system.host import open_files

# Messages of torch's allocator, of oneDNN's code generator, and of the loader of libraries.
_NO_MEMORY = re.compile("allocate memory|could not create a primitive|failed to map segment")


class Printable:
    """A text stream that escapes control characters: names, keys and messages come from others' files."""

    def __init__(self, stream: TextIO) -> None:
        # rich writes its control codes here; `logs.console.Terminal` escapes its text.
        self.rich_proxied_file = stream
        if not (stream.encoding or "utf-8").lower().startswith("utf") and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(shown(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self.rich_proxied_file.writelines(map(shown, lines))

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would go round this
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)


@contextmanager
def printable() -> Iterator[None]:
    """Escape everything printed inside by `shown`. A stream closed from the start stays None."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (Printable(stream) if stream else stream for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def width_of(stream: TextIO) -> int | None:
    """Return the columns of a terminal; None for other files, and for a launcher's terminal, which it may write to a file."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    from stagerun.system.world import relayed

    return None if relayed() else columns or None


class _OverLiveLine(Printable):
    """Erases the current line before it prints."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._inside = False

    def write(self, text: str) -> int:
        stream = self.rich_proxied_file
        self._inside, before = not text.endswith("\n"), self._inside
        return stream.write(shown(text) if before else signals.erase_line(stream.fileno()) + shown(text))


def over_live_line() -> None:
    """Keep stderr apart from rank 0's live line, in this process or another."""
    if width_of(sys.stderr) is not None and not isinstance(sys.stderr, _OverLiveLine):
        sys.stderr = _OverLiveLine(_under(sys.stderr))  # type: ignore[assignment]


def _under(stream: TextIO) -> TextIO:
    """Return the stream that takes control codes."""
    return getattr(stream, "rich_proxied_file", stream)


def show(text: str, marks: Mapping[str, str] | None = None) -> None:
    """Print on stdout. On a terminal lines are folded, and the strip of `marks` in `text` is coloured; JSON is not."""
    coloured = False
    if not text.startswith("{"):
        text = wrapped(shown(text), width_of(sys.stdout))
        if marks and (coloured := _in_colour(sys.stdout)):
            painted = {name: click.style(mark, colour(mark)) if colour(mark) else mark for name, mark in marks.items()}
            text = text.replace(strip(marks), strip(painted), 1)
    click.echo(text, _under(sys.stdout) if coloured else None, color=coloured or None)


def say(text: str) -> None:
    """Print `text`. Training continues after the reader has gone (`stagerun run ... | head`)."""
    try:
        show(text)
    except OSError:
        to_nowhere(sys.stdout)


def _in_colour(stream: TextIO) -> bool:
    """Return whether to print in colour, by rich's rules."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def tell(text: str) -> None:
    """Print on stderr, if it is open."""
    if not text:
        return
    try:
        click.echo(wrapped(text, width_of(sys.stderr)), err=True)
    except OSError:
        to_nowhere(sys.stderr)


def end_with(error: BaseException) -> NoReturn:
    """Print an error for the user, and exit with its code. A bug's traceback goes to a file."""
    if isinstance(error, KeyboardInterrupt):
        tell("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    # `tell` and the error tree handle stderr and files, so these errors are stdout's.
    if isinstance(error, BrokenPipeError):  # `stagerun plan ... | head`
        to_nowhere(sys.stdout)
        sys.exit(ExitCode.DONE)
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
        to_nowhere(sys.stdout)
        error = StorageError(f"standard output can't be written: {error.strerror}")
    explained = error if isinstance(error, StagerunError) else of_surroundings(error)
    tell(explained.render() if explained else bug_report(error))
    sys.exit(explained.exit_code if explained else ExitCode.BUG)


def of_surroundings(error: BaseException) -> StagerunError | None:
    """Return an error that names the limit of this shell or machine behind `error`; None for another cause."""
    again = "and run the same command again"
    number, text = getattr(error, "errno", None), str(error)
    if number == errno.EMFILE or "Too many open files" in text:
        message = f"too many open files: the limit of this process is {open_files()}"
        return StorageError(message, f"raise that limit (ulimit -n 1024) {again}")
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _NO_MEMORY.search(text):
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        if memory != resource.RLIM_INFINITY:
            message = f"out of memory: the limit of this process is {size(memory)} of address space"
            return StorageError(message, f"raise that limit (ulimit -v unlimited) {again}")
    return None


def bug_report(error: BaseException) -> str:
    """Return the message of an unexpected exception; the traceback goes to a file."""
    path = Path(f"stagerun-bug-{os.getpid()}.txt")
    text = "".join(traceback.format_exception(error))
    try:
        content = f"stagerun {stagerun.__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n{text}"
        path.write_text(content, errors="surrogateescape")  # a path need not be UTF-8
        where = f"please report it with {path.absolute()}"
    except OSError:
        where = f"please report it with these lines:\n{text}"
    return f"this is a bug of stagerun: {type(error).__name__}: {error}\n  hint: {where}"


@contextmanager
def stopped_after(seconds: float | None) -> Iterator[None]:
    """Run the body; after `seconds`, if any, this process sends itself a stop signal.

    It is the process of the user's command, so a launcher forwards the signal as any other. Among workers of another program only rank 0
    has a timer, which the others follow as a signal to one of them.
    """
    from stagerun.system.world import rank_said

    if seconds is None or rank_said() != 0:
        yield
        return

    def strike() -> None:
        # A second SIGINT would end the process at once.
        numbers = [number for number in signals.stop_signals() if number != signal.SIGINT]
        if numbers:  # none once all is done
            signals.say(f"--stop-after {duration(seconds)}: the time is up")
            os.kill(os.getpid(), signal.SIGTERM if signal.SIGTERM in numbers else numbers[0])

    clock = threading.Timer(seconds, strike)
    clock.daemon = True
    with signals.held():  # the timer's thread must not get its signal
        clock.start()
    try:
        yield
    finally:
        clock.cancel()


def to_nowhere(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that neither a later line nor the flush at exit fails."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
