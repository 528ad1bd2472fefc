"""How a command ends: one message for the user, and the exit code."""

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

# Messages of torch's allocator, of oneDNN, which makes code in memory of its own, and of the loader of libraries.
_NO_MEMORY = re.compile("allocate memory|could not create a primitive|failed to map segment")


class Printable:
    """A text stream that gets what a terminal may get: names, keys and messages come from files that others have made."""

    def __init__(self, stream: TextIO) -> None:
        # Where rich looks: its own commands go there, and `command.terminal.Terminal` sees to its words.
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
    """All that is printed inside is made `shown`. A stream that is closed from the start is None, and stays so."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (Printable(stream) if stream else stream for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def width_of(stream: TextIO) -> int | None:
    """Columns of a terminal; None for anything else, and for a launcher's terminal, which may end up in a file."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    from stagerun.system.world import relayed

    return None if relayed() else columns or None


class _OverLiveLine(Printable):
    """Erases what stands in a line before it prints there."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._inside = False

    def write(self, text: str) -> int:
        stream = self.rich_proxied_file
        self._inside, before = not text.endswith("\n"), self._inside
        return stream.write(shown(text) if before else signals.erase_line(stream.fileno()) + shown(text))


def over_live_line() -> None:
    """From now on stderr doesn't mix with the live line of rank 0, in this process or another."""
    if width_of(sys.stderr) is not None and not isinstance(sys.stderr, _OverLiveLine):
        sys.stderr = _OverLiveLine(_under(sys.stderr))  # type: ignore[assignment]


def _under(stream: TextIO) -> TextIO:
    """The stream that takes what a terminal carries out."""
    return getattr(stream, "rich_proxied_file", stream)


def show(text: str, marks: Mapping[str, str] | None = None) -> None:
    """Prints on stdout. On a terminal lines are folded and the strip of `marks` inside `text` is coloured. JSON is left as it is."""
    coloured = False
    if not text.startswith("{"):
        text = wrapped(shown(text), width_of(sys.stdout))
        if marks and (coloured := _in_colour(sys.stdout)):
            painted = {name: click.style(mark, colour(mark)) if colour(mark) else mark for name, mark in marks.items()}
            text = text.replace(strip(marks), strip(painted), 1)
    click.echo(text, _under(sys.stdout) if coloured else None, color=coloured or None)


def say(text: str) -> None:
    """Shows `text`. Where no one reads any more (`stagerun run ... | head`), training goes on all the same."""
    try:
        show(text)
    except OSError:
        to_nowhere(sys.stdout)


def _in_colour(stream: TextIO) -> bool:
    """Whether to print in colour, by rich's rules."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def tell(text: str) -> None:
    """Prints on stderr. If that is closed, the exit code still says what happened."""
    if not text:
        return
    try:
        click.echo(wrapped(text, width_of(sys.stderr)), err=True)
    except OSError:
        to_nowhere(sys.stderr)


def end_with(error: BaseException) -> NoReturn:
    """Shows an error the way a user should see it, and exits with its code. Our own bugs keep their traceback in a file."""
    if isinstance(error, KeyboardInterrupt):
        tell("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    # stderr is written through `tell`, and files through the error tree, so these errors are stdout's.
    if isinstance(error, BrokenPipeError):  # `stagerun plan ... | head`
        to_nowhere(sys.stdout)
        sys.exit(ExitCode.DONE)
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
        to_nowhere(sys.stdout)
        error = StorageError(f"standard output can't be written: {error.strerror}")
    known = error if isinstance(error, StagerunError) else of_surroundings(error)
    tell(known.render() if known else bug_report(error))
    sys.exit(known.exit_code if known else ExitCode.BUG)


def of_surroundings(error: BaseException) -> StagerunError | None:
    """An error that names the limit of this shell or machine behind `error`, which torch's own doesn't; None if there is none."""
    again = "and run the same command again"
    number, text = getattr(error, "errno", None), str(error)
    if number == errno.EMFILE or "Too many open files" in text:
        message = f"no more files can be opened: a process may have {open_files()} open here"
        return StorageError(message, f"raise that limit (ulimit -n 1024) {again}")
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _NO_MEMORY.search(text):
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        if memory != resource.RLIM_INFINITY:
            message = f"there is no more memory: a process may have {size(memory)} of address space here"
            return StorageError(message, f"raise that limit (ulimit -v unlimited) {again}")
    return None


def bug_report(error: BaseException) -> str:
    """One message for an exception that no user should ever meet; the traceback goes to a file beside it."""
    path = Path(f"stagerun-bug-{os.getpid()}.txt")
    text = "".join(traceback.format_exception(error))
    try:
        said = f"stagerun {stagerun.__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n{text}"
        path.write_text(said, errors="surrogateescape")  # a path need not be UTF-8
        where = f"please report it with {path.absolute()}"
    except OSError:
        where = f"please report it with these lines:\n{text}"
    return f"this is a bug of stagerun: {type(error).__name__}: {error}\n  hint: {where}"


@contextmanager
def stopped_after(seconds: float | None) -> Iterator[None]:
    """Within it this process gets a stop signal from itself after that time; None: never.

    The process is the one that the user called, so a launcher hands the signal on as it does any other. Of the workers that another
    program started, rank 0 alone has a clock, and the others follow it as they follow a signal that reached one of them.
    """
    from stagerun.system.world import rank_said

    if seconds is None or rank_said() != 0:
        yield
        return

    def strike() -> None:
        # A second SIGINT would end it at once.
        numbers = [number for number in signals.stop_signals() if number != signal.SIGINT]
        if numbers:  # none once all is done
            signals.say(f"--stop-after {duration(seconds)}: the time is up")
            os.kill(os.getpid(), signal.SIGTERM if signal.SIGTERM in numbers else numbers[0])

    clock = threading.Timer(seconds, strike)
    clock.daemon = True
    with signals.held():  # so that the thread which sends the signal is not the one that gets it
        clock.start()
    try:
        yield
    finally:
        clock.cancel()


def to_nowhere(stream: TextIO) -> None:
    """Sends a stream to /dev/null from now on, so that neither a later line nor the flush at exit fails."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
