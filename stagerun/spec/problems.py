"""Collecting the mistakes of several files. The one mutable thing in spec, alive while one schedule is read."""

from stagerun.errors import Problem, Span

LONGEST_LINE = 200  # characters of a line that are shown


class Problems:
    """Mistakes found so far. The same message at the same place (a setting that five stages inherit) counts once."""

    def __init__(self) -> None:
        self._found: dict[tuple[Span, str], Problem] = {}
        self._lines: dict[str, list[str]] = {}

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
