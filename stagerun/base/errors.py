"""Problems with a position in a file, and errors with an exit code, as values.

Library code raises subclasses of StagerunError; only the command line turns them into text and an exit code. Any other exception that reaches
the user is a bug of stagerun (70).
"""

import difflib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagerun.base.text import count, listed


class ExitCode(enum.IntEnum):
    """The exit code of a command. Only 69, 74, 75, 80 and death by a signal are worth a retry of the same command."""

    meaning: str

    DONE = 0, "done"
    RECIPE = 64, "a mistake in a solver file or on the command line"
    DATA = 65, "images that can't be used"
    PEER = 69, "a worker, host or service is gone; the same command resumes"
    BUG = 70, "a bug of stagerun"
    IN_USE = 73, "another run holds the output folder"
    STORAGE = 74, "disk full, read-only or gone, or a limit of this shell (ulimit)"
    SAVED = 75, "stopped and saved; the same command resumes"
    PERMISSION = 77, "no permission for a file or folder"
    RESUME_REFUSED = 78, "refused because of the snapshots: stale, damaged, pinned, or no progress in three starts"
    DIVERGED = 79, "the loss is not finite"
    RANKS_DIFFER = 80, "the weights of a worker differ; the same command resumes from the last snapshot"
    INTERRUPTED = 130, "interrupted; nothing saved since the last snapshot"

    def __new__(cls, code: int, meaning: str = "") -> "ExitCode":
        self = int.__new__(cls, code)
        self._value_, self.meaning = code, meaning
        return self


# A retry of the same command may fix these; with another code it would end in the same way.
WORTH_ANOTHER_START = (ExitCode.PEER, ExitCode.STORAGE, ExitCode.SAVED, ExitCode.RANKS_DIFFER)
AGAIN = "run the same command again: it resumes from the newest snapshot"  # a hint


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A stretch of one line of a file: `line` and `column` count from 1, `width` is in characters (at least 1)."""

    path: str
    line: int
    column: int
    width: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


class Level(enum.Enum):
    """The severity of a problem in a solver file: a mistake can't be trained, a warning fails `check --strict`, a note never fails."""

    MISTAKE = "mistake"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a solver file. `source`: the line that `span` points into; `id`: of the rule of a finding."""

    message: str
    span: Span
    source: str = ""
    hint: str = ""
    level: Level = Level.MISTAKE
    id: str = ""

    @property
    def head(self) -> str:
        """Return `path:line:col: message` for a mistake, else `path:line:col: warning: message`."""
        level = "" if self.level is Level.MISTAKE else f"{self.level.value}: "
        return f"{self.span}: {level}{self.message}"

    def render(self) -> str:
        """Return the head, the line, carets under the span, and the hint."""
        text = self.head
        if self.source:
            # The margin repeats the line's tabs, so that the carets line up on a terminal.
            margin = "".join("\t" if c == "\t" else " " for c in self.source[: self.span.column - 1])
            carets = max(1, min(self.span.width, len(self.source) - self.span.column + 1))
            text += f"\n  {self.source}\n  {margin}{'^' * carets}"
        if self.hint:
            text += f"\n  hint: {self.hint}"
        return text


class StagerunError(Exception):
    """Base of all errors for users. `hint`: what to do."""

    exit_code = ExitCode.BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        return self.message + (f"\n  hint: {self.hint}" if self.hint else "")

    def _render_traceback_(self) -> list[str]:
        """Return the lines for a notebook (an IPython hook), without stagerun's traceback."""
        return self.render().splitlines()


class RecipeError(StagerunError):
    """Mistakes in solver files or arguments, all at once; `problems` are sorted by span."""

    exit_code = ExitCode.RECIPE

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(problems, key=lambda p: p.span))
        super().__init__(count(len(self.problems), "mistake"))

    def render(self) -> str:
        return "\n\n".join([*(p.render() for p in self.problems), self.message])

    def __str__(self) -> str:
        return self.render()  # shown by a script that doesn't catch it


class UsageError(StagerunError):
    """An invalid argument."""

    exit_code = ExitCode.RECIPE


class DataError(StagerunError):
    """An LMDB or a record that can't be used."""

    exit_code = ExitCode.DATA


class PeerError(StagerunError):
    """A worker, host or service is gone."""

    exit_code = ExitCode.PEER


class FolderInUseError(StagerunError):
    exit_code = ExitCode.IN_USE


class StorageError(StagerunError):
    """The disk is full, read-only or gone."""

    exit_code = ExitCode.STORAGE


class PermissionDenied(StagerunError):
    exit_code = ExitCode.PERMISSION


class ResumeRefused(StagerunError):
    """The snapshots on disk are stale, damaged, or show no progress."""

    exit_code = ExitCode.RESUME_REFUSED


class Diverged(StagerunError):
    exit_code = ExitCode.DIVERGED


class RanksDiffer(StagerunError):
    """Workers hold different bits of the same state."""

    exit_code = ExitCode.RANKS_DIFFER


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``did you mean `x`?`` for the word most similar to `word`, or ''; `cutoff`: the least similarity, 1 for equal words."""
    match = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return f"did you mean `{match[0]}`?" if match else ""


def listing(words: Sequence[str], last: str = "or") -> str:
    """Return `a`, `b` or `c` in backquotes; `last`: the word before the last one."""
    return listed([f"`{word}`" for word in words], last=last)


# -- the mistakes of several files: the only mutable object here, alive while one schedule is read

LONGEST_LINE = 200  # characters of a line that are shown


class Problems:
    """Mistakes and findings so far. The same message at the same span (a setting that five stages inherit) counts once, and so do messages
    with the same `key`. The `id` of a finding ends its message."""

    def __init__(self, files: Iterable[tuple[str, str]] = ()) -> None:
        self._problems: dict[tuple[Span, str], Problem] = {}
        self._lines: dict[str, list[str]] = {}
        for path, text in files:
            self.file(path, text)

    def __bool__(self) -> bool:
        return bool(self._problems)

    def count(self, path: str) -> int:
        return sum(1 for span, _ in self._problems if span.path == path)

    def all(self) -> tuple[Problem, ...]:
        return tuple(self._problems.values())

    def file(self, path: str, text: str) -> None:
        """Store the lines of a text, before mistakes in it are added."""
        self._lines[path] = text.split("\n")

    def add(
        self, span: Span, message: str, hint: str = "", level: Level = Level.MISTAKE, id: str = "", key: str = ""
    ) -> None:
        if (span, key or message) not in self._problems:
            source = "" if level is Level.NOTE else self.line(span)
            text = f"{message} [{id}]" if id else message
            self._problems[span, key or message] = Problem(text, span, source, hint, level, id)

    def line(self, span: Span) -> str:
        """Return the line of a span, as far as it can be shown; '' if unknown."""
        lines = self._lines.get(span.path, [])
        line = lines[span.line - 1] if span.line <= len(lines) else ""
        if span.column > LONGEST_LINE:
            return ""
        # A control character in a file must not reach the terminal; one mark for one character keeps the caret right.
        shown = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line.rstrip())
        return shown[:LONGEST_LINE]
