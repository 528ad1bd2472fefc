"""The axes of a small picture."""

from dataclasses import dataclass

from stagerun.drawing.colours import GRID, INK, RULE, SOFT
from stagerun.drawing.scale import Scale, labels
from stagerun.drawing.svg import Place, line, text


@dataclass(frozen=True, slots=True)
class Frame:
    """A panel whose upper left corner is at (`left`, `top`), in pixels. `y` is None where rows have names instead of values."""

    left: float
    top: float
    width: float
    height: float
    x: Scale
    y: Scale | None = None

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def across(self, value: float) -> float:
        return self.left + _share(self.x, value) * self.width

    def place(self, x: float, y: float) -> Place:
        assert self.y is not None
        return self.across(x), self.bottom - _share(self.y, y) * self.height

    def drawn(self, title: str, under: str, beside: str) -> str:
        """Title, grid, ticks and the names of both axes."""
        found = [text(title, self.left, self.top - 14, 13)]
        ticks = self.x.ticks(max(2, int(self.width // 80)))
        for value, said in zip(ticks, labels(ticks), strict=True):
            at = self.across(value)
            found += [
                line([(at, self.top), (at, self.bottom)], GRID),
                text(said, at, self.bottom + 15, fill=SOFT, anchor="middle"),
            ]
        ticks = self.y.ticks(max(2, int(self.height // 40))) if self.y else []
        for value, said in zip(ticks, labels(ticks), strict=True):
            at = self.place(self.x.low, value)[1]
            found += [
                line([(self.left, at), (self.right, at)], GRID),
                text(said, self.left - 6, at + 4, fill=SOFT, anchor="end"),
            ]
        corner = [(self.left, self.top), (self.left, self.bottom), (self.right, self.bottom)]
        found += [
            line(corner, RULE),
            text(under, self.left + self.width / 2, self.bottom + 34, fill=INK, anchor="middle"),
        ]
        found += [text(beside, 16, self.top + self.height / 2, anchor="middle", turned=True)]
        return "".join(found)


def _share(scale: Scale, value: float) -> float:
    low, high = scale.at(scale.low), scale.at(scale.high)
    return (scale.at(value) - low) / (high - low)
