"""How a command ends: one message for the user, and the exit code."""

import errno
import functools
import io
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

import stagerun
from stagerun import signals
from stagerun.errors import ExitCode, StagerunError, StorageError
from stagerun.pace import colour, strip
from stagerun.text import shown, size, wrapped

# Of torch's allocator; of oneDNN, which makes code in memory of its own; of a library that is loaded.
_NO_MEMORY = re.compile("allocate memory|could not create a primitive|failed to map segment")


class Printable:
    """A text stream that gets what a terminal may get: names, keys and messages come from files that others have made."""

    def __init__(self, stream: TextIO) -> None:
        # Where rich looks: its own commands go there, and `report.console.Terminal` sees to its words.
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
    """Columns of a terminal; None for what is none, or is that of a launcher which may write what comes there into a file."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    from stagerun.world import relayed

    return None if relayed() else columns or None


class _OverLiveLine(Printable):
    """On which each line takes the place of what stands in the one that it comes to."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._inside = False

    def write(self, text: str) -> int:
        stream = self.rich_proxied_file
        self._inside, before = not text.endswith("\n"), self._inside
        return stream.write(shown(text) if before else signals.over_live_line(stream.fileno()) + shown(text))


def over_live_line() -> None:
    """From now on stderr and the line in which rank 0, here or in another process, draws how far it is don't get mixed up."""
    if width_of(sys.stderr) is not None and not isinstance(sys.stderr, _OverLiveLine):
        sys.stderr = _OverLiveLine(_under(sys.stderr))  # type: ignore[assignment]


def _under(stream: TextIO) -> TextIO:
    """The stream that takes what a terminal carries out."""
    return getattr(stream, "rich_proxied_file", stream)


def show(text: str, marks: Mapping[str, str] | None = None) -> None:
    """On stdout; on a terminal with lines that fit, and in colour what `text` has of the strip of `marks`. JSON is left as it is."""
    coloured = False
    if not text.startswith("{"):
        text = wrapped(shown(text), width_of(sys.stdout))
        if marks and (coloured := _in_colour(sys.stdout)):
            painted = {name: click.style(mark, colour(mark)) if colour(mark) else mark for name, mark in marks.items()}
            text = text.replace(strip(marks), strip(painted), 1)
    click.echo(text, _under(sys.stdout) if coloured else None, color=coloured or None)


def _in_colour(stream: TextIO) -> bool:
    """As rich has it."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def tell(text: str) -> None:
    """On stderr. Where nobody reads it any more, the exit code still says it."""
    if not text:
        return
    try:
        click.echo(wrapped(text, width_of(sys.stderr)), err=True)
    except OSError:
        to_nowhere(sys.stderr)


def to_nowhere(stream: TextIO) -> None:
    """Sends a stream to /dev/null from now on, so that neither a later line nor the flush at exit fails."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def end_with(error: BaseException) -> NoReturn:
    """Shows an error the way a user should see it, and exits with its code. Our own bugs keep their traceback in a file."""
    if isinstance(error, StagerunError):
        tell(error.render())
        sys.exit(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        tell("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    # All that is said on stderr goes through `tell`, and what is read and written through the error tree: these are stdout's.
    if isinstance(error, BrokenPipeError):  # `stagerun plan ... | head`
        to_nowhere(sys.stdout)
        sys.exit(ExitCode.DONE)
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
        to_nowhere(sys.stdout)
        tell(f"standard output can't be written: {error.strerror}")
        sys.exit(ExitCode.STORAGE)
    if (known := of_surroundings(error)) is not None:
        tell(known.render())
        sys.exit(known.exit_code)
    tell(bug_report(error))
    sys.exit(ExitCode.BUG)


def of_surroundings(error: BaseException) -> StagerunError | None:
    """An error that only a limit of this shell or machine explains, in words that torch has none of. StorageError names the limit."""
    again = "and run the same command again"
    number, text = getattr(error, "errno", None), str(error)
    if number == errno.EMFILE or "Too many open files" in text:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return StorageError(
            f"no more files can be opened: a process may have {files} open here",
            f"raise that limit (ulimit -n 1024) {again}",
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _NO_MEMORY.search(text):
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        if memory != resource.RLIM_INFINITY:
            return StorageError(
                f"there is no more memory: a process may have {size(memory)} of address space here",
                f"raise that limit (ulimit -v unlimited) {again}",
            )
    if isinstance(error, RuntimeError) and "/dev/urandom" in text:
        return StorageError(
            f"torch needs random numbers of the system: {text}", f"make or bind /dev/urandom in this container {again}"
        )
    return None


def bug_report(error: BaseException) -> str:
    """One message for an exception that no user should ever meet; the traceback goes to a file beside it."""
    path = Path(f"stagerun-bug-{os.getpid()}.txt")
    text = "".join(traceback.format_exception(error))
    try:
        path.write_text(f"stagerun {stagerun.__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n{text}")
        where = f"please report it with {path.absolute()}"
    except OSError:
        where = f"please report it with these lines:\n{text}"
    return f"this is a bug of stagerun: {type(error).__name__}: {error}\n  hint: {where}"


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.exceptions.Exit, click.ClickException, click.Abort, SystemExit):
            raise
        except BaseException as error:
            end_with(error)

    return wrapper
