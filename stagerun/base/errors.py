"""What can go wrong, as values: problems with a place in a file, errors with an exit code.

Library code raises subclasses of StagerunError; only the command line turns them into text and an exit code. An exception of another kind
that reaches the user is a bug of stagerun (70).
"""

import difflib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagerun.base.text import count, listed


class ExitCode(enum.IntEnum):
    """How a command ended. Only 69, 74, 75, 80 and death by a signal are worth trying again as they are."""

    meaning: str

    DONE = 0, "done"
    RECIPE = 64, "a mistake in a solver file or on the command line"
    DATA = 65, "images that can't be used"
    PEER = 69, "a worker, host or service is gone; the same command goes on"
    BUG = 70, "a bug of stagerun"
    IN_USE = 73, "another run holds the output folder"
    STORAGE = 74, "disk full, read-only or gone, or a limit of this shell (ulimit)"
    SAVED = 75, "stopped and saved; the same command goes on"
    PERMISSION = 77, "no permission for a file or folder"
    RESUME_REFUSED = (
        78,
        "refused, for what is on disk: made from something else, damaged, pinned, or no progress in three lives",
    )
    DIVERGED = 79, "the loss is not finite"
    RANKS_DIFFER = 80, "a worker held other weights than the others; the same command goes on from the last snapshot"
    INTERRUPTED = 130, "interrupted; nothing saved since the last snapshot"

    def __new__(cls, code: int, meaning: str = "") -> "ExitCode":
        self = int.__new__(cls, code)
        self._value_, self.meaning = code, meaning
        return self


# Another start of the same command may mend these; with another code it would end in the same way.
WORTH_ANOTHER_START = (ExitCode.PEER, ExitCode.STORAGE, ExitCode.SAVED, ExitCode.RANKS_DIFFER)
AGAIN = "run the same command again: it goes on from the newest snapshot"  # a hint


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
    """How bad something in a solver file is: a mistake can't be trained, a warning fails `check --strict`, a note never fails."""

    MISTAKE = "mistake"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about a solver file. `source` is the line that `span` points into; `id` that of a finding's rule."""

    message: str
    span: Span
    source: str = ""
    hint: str = ""
    level: Level = Level.MISTAKE
    id: str = ""

    @property
    def head(self) -> str:
        """`path:line:col: message` of a mistake, else `path:line:col: warning: message`."""
        level = "" if self.level is Level.MISTAKE else f"{self.level.value}: "
        return f"{self.span}: {level}{self.message}"

    def render(self) -> str:
        """The head, the line, a caret under the place, a hint."""
        text = self.head
        if self.source:
            # A caret under a tab must stand where the terminal puts it: the margin repeats the line's own tabs.
            margin = "".join("\t" if c == "\t" else " " for c in self.source[: self.span.column - 1])
            carets = max(1, min(self.span.width, len(self.source) - self.span.column + 1))
            text += f"\n  {self.source}\n  {margin}{'^' * carets}"
        if self.hint:
            text += f"\n  hint: {self.hint}"
        return text


class StagerunError(Exception):
    """Base of everything a user may see. `hint` says what to do about it."""

    exit_code = ExitCode.BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        return self.message + (f"\n  hint: {self.hint}" if self.hint else "")

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows (IPython asks for it): where in stagerun it was found says nothing to the user."""
        return self.render().splitlines()


class RecipeError(StagerunError):
    """Mistakes in solver files or arguments, all of them at once; `problems` are sorted by place."""

    exit_code = ExitCode.RECIPE

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(problems, key=lambda p: p.span))
        super().__init__(count(len(self.problems), "mistake"))

    def render(self) -> str:
        return "\n\n".join([*(p.render() for p in self.problems), self.message])

    def __str__(self) -> str:
        return self.render()  # a script that doesn't catch it shows this, and "3 mistakes" helps no one


class UsageError(StagerunError):
    """An argument that names nothing."""

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
    """What is on disk was made from something else, is damaged, or shows no progress."""

    exit_code = ExitCode.RESUME_REFUSED


class Diverged(StagerunError):
    exit_code = ExitCode.DIVERGED


class RanksDiffer(StagerunError):
    """Workers hold different bits of the same state."""

    exit_code = ExitCode.RANKS_DIFFER


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``did you mean `x`?`` for the known word nearest to `word`, or ''; equal ones have a likeness of 1, and `cutoff` is the least."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean `{match[0]}`?" if match else ""


def listing(words: Sequence[str], last: str = "or") -> str:
    """`a`, `b` or `c`; `last`: the word before the last one."""
    return listed([f"`{word}`" for word in words], last=last)


# -- the mistakes of several files: the only mutable thing here, alive while one schedule is read

LONGEST_LINE = 200  # characters of a line that are shown


class Problems:
    """Mistakes and findings so far. The same message at the same place (a setting that five stages inherit) counts once, and so do
    messages of the same `key`. The `id` of a finding ends its message."""

    def __init__(self, files: Iterable[tuple[str, str]] = ()) -> None:
        self._found: dict[tuple[Span, str], Problem] = {}
        self._lines: dict[str, list[str]] = {}
        for path, text in files:
            self.file(path, text)

    def __bool__(self) -> bool:
        return bool(self._found)

    def count(self, path: str) -> int:
        return sum(1 for span, _ in self._found if span.path == path)

    def all(self) -> tuple[Problem, ...]:
        return tuple(self._found.values())

    def file(self, path: str, text: str) -> None:
        """Makes the lines of a text known, before mistakes in it are added."""
        self._lines[path] = text.split("\n")

    def add(
        self, span: Span, message: str, hint: str = "", level: Level = Level.MISTAKE, id: str = "", key: str = ""
    ) -> None:
        if (span, key or message) not in self._found:
            source = "" if level is Level.NOTE else self.line(span)
            text = f"{message} [{id}]" if id else message
            self._found[span, key or message] = Problem(text, span, source, hint, level, id)

    def line(self, span: Span) -> str:
        """The line that a place is in, as far as it can be shown; '' where it is not known."""
        lines = self._lines.get(span.path, [])
        line = lines[span.line - 1] if span.line <= len(lines) else ""
        if span.column > LONGEST_LINE:
            return ""
        # A control character in a file must not reach the terminal; one mark for one character keeps the caret right.
        shown = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line.rstrip())
        return shown[:LONGEST_LINE]
