"""Lines of the files that are written, each with the place in Caffe's that it comes from. Values."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stagerun.base.errors import Span
from stagerun.language.tree import Block, Entry

COMMENT_COLUMN = 34  # where a comment beside a field begins, as in the folders of solvers/


@dataclass(frozen=True, slots=True)
class Line:
    """`span` is None for what no file of Caffe's says. `asks`: a value that the user is to fill in."""

    text: str
    span: Span | None = None
    comment: str = ""
    asks: bool = False

    def __str__(self) -> str:
        return f"{self.text:<{COMMENT_COLUMN - 2}}  # {self.comment}" if self.comment else self.text


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of stagerun's Solver: one line, or a message."""

    name: str
    lines: tuple[Line, ...]

    @property
    def value(self) -> tuple[str, ...]:
        """What it says, comments left out: equal for equal settings."""
        return tuple(line.text for line in self.lines)


def setting(name: str, text: str, span: Span | None = None, comment: str = "") -> Setting:
    return Setting(name, (Line(f"{name}: {text}", span, comment),))


def message(name: str, inside: Iterable[Line], span: Span | None, comment: str = "") -> tuple[Line, ...]:
    """`name { ... }` over several lines."""
    return (Line(f"{name} {{", span, comment), *indented(inside), Line("}", span))


def indented(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(replace(line, text=f"  {line.text}") for line in lines)


def plain(text: str, instead: str) -> str:
    """What a comment may hold: `instead` stands for what does not print."""
    return "".join(c if c.isprintable() else instead for c in text)


def written(entry: Entry) -> str:
    """A scalar field's value as it stands in Caffe's file, which means the same here: one value, or a list."""
    texts = [v.text for v in entry.values]
    return f"[{', '.join(texts)}]" if entry.field.is_repeated else texts[0]


def copied(block: Block, names: Iterable[str]) -> list[Line]:
    """The fields that are written in the block, under the same names."""
    entries = [block.entries[name] for name in names if name in block.entries]
    return [Line(f"{e.field.name}: {written(e)}", e.place) for e in entries if e.values]
