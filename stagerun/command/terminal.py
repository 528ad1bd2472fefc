"""rich's console with what stagerun prints."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console as RichConsole
from rich.segment import Segment

from stagerun.base.text import shown
from stagerun.command.ending import to_nowhere


class Terminal(RichConsole):
    """Cleans words as `ending.Printable` does: no character in them commands a terminal. rich ends the program when no one reads its output any
    more; here the work goes on."""

    def on_broken_pipe(self) -> None:
        to_nowhere(self.file)  # type: ignore[arg-type]

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=shown(segment.text))
