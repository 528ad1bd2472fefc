"""A Block read with its defaults. Values."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

from stagerun.base.errors import Span
from stagerun.language import tree
from stagerun.language.tree import Block, Scalar


class Doubtful(Exception):
    """The field could not be read, which has been reported: a check that needs it is left out."""


@dataclass(frozen=True, slots=True)
class View:
    block: Block

    def has(self, name: str) -> bool:
        """Whether the field is written. Doubtful if that is not known."""
        if name in self.block.entries:
            return True
        if self.block.broken or name in self.block.doubtful:
            raise Doubtful(name)
        return False

    def scalar(self, name: str) -> Scalar | None:
        """The value, else the default of the .proto, else None."""
        if self.has(name):
            value = self.block.entries[name].values[0].value
            assert not isinstance(value, Block)
            return value
        return tree.default(self.block.kind.fields_by_name[name])

    def asks(self, name: str) -> bool:
        """Whether the field wants anything done: a message that is written, a value that is not false, 0 or empty."""
        field = self.block.kind.fields_by_name[name]
        if field.message_type or field.is_repeated:
            return self.has(name) and bool(self.block.entries[name].values)
        return bool(self.scalar(name))

    def known(self, *path: str) -> Any:
        """The value of a field inside messages; None where it isn't written, or could not be read."""
        *around, name = path
        with suppress(Doubtful):
            return reduce(View.inside, around, self).scalar(name)
        return None

    def number(self, name: str) -> float | None:
        value = self.scalar(name)
        return float(value) if value is not None and not isinstance(value, str) else None

    def whole(self, name: str) -> int | None:
        value = self.scalar(name)
        return value if isinstance(value, int) else None

    def text(self, name: str) -> str | None:
        value = self.scalar(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool:
        return self.scalar(name) is True

    def numbers(self, name: str) -> tuple[float, ...]:
        """The values of a repeated field of numbers."""
        values = self.block.entries[name].values if self.has(name) else ()
        return tuple(v.value for v in values if isinstance(v.value, int | float))

    def texts(self, name: str) -> tuple[str, ...]:
        """The values of a repeated field of texts, or of an enum."""
        values = self.block.entries[name].values if self.has(name) else ()
        return tuple(v.value for v in values if isinstance(v.value, str))

    def view(self, name: str) -> "View | None":
        block = self.block.block(name) if self.has(name) else None
        return View(block) if block else None

    def inside(self, name: str) -> "View":
        """A message in which every field has a default, written or not."""
        found = self.view(name)
        return found or View(Block(self.block.kind.fields_by_name[name].message_type, self.block.place))

    def views(self, name: str) -> "Iterator[View]":
        self.has(name)
        return (View(b) for b in self.block.blocks(name))

    def written(self, name: str) -> str:
        """A duration as it was written: `max_epoch: 5`, or `max_iter: 780`."""
        text = self.block.entries[name].values[0].text
        return text if ":" in text else f"{name}: {text}"

    def origin(self, name: str) -> str:
        """The same, and where."""
        place = self.block.entries[name].place
        return f"`{self.written(name)}` in {place.path}:{place.line}"

    def place(self, name: str) -> Span:
        """The place of the value; if the field isn't written, that of its block."""
        entry = self.block.entries.get(name)
        return entry.place if entry else self.block.place
