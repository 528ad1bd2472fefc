"""rich's console with what stagerun prints: no character in it commands a terminal."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console as RichConsole
from rich.segment import Segment

from stagerun.base.text import shown


class Terminal(RichConsole):
    """rich's console, which cleans words as `ending.Printable` does."""

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=shown(segment.text))
