"""What can go wrong, as values: problems with a place in a file, errors with an exit code.

    StagerunError              base: message, hint, exit code
     ├─ RecipeError            mistakes in solver files or arguments: all of them at once, each with its place      64
     ├─ UsageError             an argument that names nothing                                                       64
     ├─ DataError              an LMDB or a record that can't be used                                                65
     ├─ PeerError              a worker, host or service is gone                                                     69
     ├─ FolderInUseError       another run holds the output folder                                                   73
     ├─ StorageError           the disk is full, read-only or gone                                                   74
     ├─ PermissionDenied       a folder or file may not be read or written                                           77
     ├─ ResumeRefused          what is on disk was made from something else, is damaged, or shows no progress        78
     ├─ Diverged               the loss is not finite                                                                79
     └─ RanksDiffer            workers hold other weights than others                                                80

Library code raises these; only the command line turns them into text and an exit code. An exception of another kind
that reaches the user is a bug of stagerun (70).
"""

import difflib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """How a command ended. Only 69, 74, 75, 80 and death by a signal are worth trying again as they are."""

    DONE = 0
    RECIPE = 64
    DATA = 65
    PEER = 69
    BUG = 70
    IN_USE = 73
    STORAGE = 74
    SAVED = 75
    PERMISSION = 77
    RESUME_REFUSED = 78
    DIVERGED = 79
    RANKS_DIFFER = 80
    INTERRUPTED = 130


EXIT_MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.RECIPE: "a mistake in a solver file or on the command line",
    ExitCode.DATA: "images that can't be used",
    ExitCode.PEER: "a worker, host or service is gone; the same command goes on",
    ExitCode.BUG: "a bug of stagerun",
    ExitCode.IN_USE: "another run holds the output folder",
    ExitCode.STORAGE: "disk full, read-only or gone, or a limit of this shell (ulimit)",
    ExitCode.SAVED: "stopped and saved; the same command goes on",
    ExitCode.PERMISSION: "no permission for a file or folder",
    ExitCode.RESUME_REFUSED: "refused, for what is on disk: made from something else, damaged, pinned, or no progress in three lives",
    ExitCode.DIVERGED: "the loss is not finite",
    ExitCode.RANKS_DIFFER: "a worker held other weights than the others; the same command goes on from the last snapshot",
    ExitCode.INTERRUPTED: "interrupted; nothing saved since the last snapshot",
}


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
    """Something about a solver file. `source` is the line that `span` points into."""

    message: str
    span: Span
    source: str = ""
    hint: str = ""
    level: Level = Level.MISTAKE

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
    """Mistakes in solver files or arguments; `problems` are sorted by place."""

    exit_code = ExitCode.RECIPE

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(problems, key=lambda p: p.span))
        count = len(self.problems)
        super().__init__(f"{count} mistake{'s' if count != 1 else ''}")

    def render(self) -> str:
        return "\n\n".join([*(p.render() for p in self.problems), self.message])

    def __str__(self) -> str:
        return self.render()  # a script that doesn't catch it shows this, and "3 mistakes" helps no one


class UsageError(StagerunError):
    exit_code = ExitCode.RECIPE


class DataError(StagerunError):
    exit_code = ExitCode.DATA


class PeerError(StagerunError):
    exit_code = ExitCode.PEER


class FolderInUseError(StagerunError):
    exit_code = ExitCode.IN_USE


class StorageError(StagerunError):
    exit_code = ExitCode.STORAGE


class PermissionDenied(StagerunError):
    exit_code = ExitCode.PERMISSION


class ResumeRefused(StagerunError):
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
    quoted = [f"`{w}`" for w in words]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + f" {last} " + quoted[-1]


# -- the mistakes of several files: the only mutable thing here, alive while one schedule is read

LONGEST_LINE = 200  # characters of a line that are shown


class Problems:
    """Mistakes found so far. The same message at the same place (a setting that five stages inherit) counts once."""

    def __init__(self, files: Iterable[tuple[str, str]] = ()) -> None:
        """`files`: the path and text of each, as `Schedule.files`, whose lines are shown."""
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

    def add(self, span: Span, message: str, hint: str = "") -> None:
        self._found.setdefault((span, message), Problem(message, span, self.line(span), hint))

    def line(self, span: Span) -> str:
        """The line that a place is in, as far as it can be shown; '' where it is not known."""
        lines = self._lines.get(span.path, [])
        line = lines[span.line - 1] if span.line <= len(lines) else ""
        if span.column > LONGEST_LINE:
            return ""
        # A control character in a file must not reach the terminal; one mark for one character keeps the caret right.
        shown = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line.rstrip())
        return shown[:LONGEST_LINE]
