"""The comments of a solver file, each with its place. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.spec.lexer import Kind, tokens


@dataclass(frozen=True, slots=True)
class Comment:
    """`text` from its `#` to the line's end; `column` is that of the `#`. `alone`: nothing else stands in the line. `head`: no
    field stands before it in the file."""

    path: str
    line: int
    column: int
    text: str
    alone: bool
    head: bool


def comments_of(path: str, text: str) -> Iterator[Comment]:
    """All comments of a text, in its order. A `#` inside a string is none."""
    text = text.removeprefix("\N{BYTE ORDER MARK}")
    ends: dict[int, int] = {}  # of the last token in a line
    first = len(text)
    for token in tokens(text):
        if token.kind is not Kind.END:
            ends[token.line] = token.column - 1 + len(token.text)
            first = min(first, token.line)
    for number, line in enumerate(text.split("\n"), 1):
        end = ends.get(number, 0)
        at = line.find("#", end)
        if at >= 0:
            yield Comment(path, number, at + 1, line[at:].rstrip(), number not in ends, number < first)
