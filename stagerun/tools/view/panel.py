"""Where things stand in the chart: the x axis that all of it shares, and panels with a y axis of their own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stagerun.drawing.bands import Segment
from stagerun.drawing.colours import DASHES, OVER, SOFT, Stroke, strokes, variable
from stagerun.drawing.picture import Picture, StagePicture, Unit
from stagerun.drawing.scale import Scale, labels
from stagerun.drawing.svg import Place, element, number, thinned, wide, words

SIZE, MARGIN = 11.0, 4.0  # pixels: of texts, and between a text and what it stands in
_DASHES: dict[str, str | None] = {**dict(zip(DASHES, (None, "6 3", "1.5 2.5"), strict=True)), OVER: "4 3"}


def hue(stroke: Stroke) -> str:
    """The class of what is drawn in its colour."""
    return variable(stroke.colour).lstrip("-")


def dash(stroke: Stroke) -> str | None:
    return _DASHES[stroke.dashes]


@dataclass(frozen=True, slots=True)
class Axis:
    """The x axis, from `left` to `right` in pixels, which stands for `end`. By name: the stages, and how and on which lines of the
    bands they are drawn."""

    picture: Picture
    unit: Unit
    left: float
    right: float
    end: float
    stages: Mapping[str, StagePicture]
    strokes: Mapping[str, Stroke]
    lanes: Mapping[str, int]

    @classmethod
    def of(cls, picture: Picture, unit: Unit, left: float, right: float, grey: bool) -> "Axis":
        """`grey`: the colours are for something else than stages."""
        stages, own = {stage.name: stage for stage in picture.stages}, strokes(picture, unit)
        if grey:
            own = {name: replace(stroke, colour=SOFT) for name, stroke in own.items()}
        return cls(picture, unit, left, right, picture.end(unit), stages, own, picture.lanes(unit))

    def x(self, at: float) -> float:
        return self.left + at / self.end * (self.right - self.left)

    def place(self, stage: str, iter: float) -> float:
        return self.x(self.stages[stage].x(iter, self.unit))

    def has(self, stage: str, iter: int) -> bool:
        """Whether the schedule still goes there."""
        return stage in self.stages and iter <= self.stages[stage].iterations

    def inside(self, segment: Segment, limit: float) -> bool:
        return wide(segment.text, SIZE) + 2 * MARGIN <= self.x(min(segment.end, limit)) - self.x(segment.begin)

    def fits(self, segment: Segment, limit: float) -> bool:
        behind = self.x(min(limit, self.end)) - self.x(segment.end)
        return self.inside(segment, limit) or wide(segment.text, SIZE) + 2 * MARGIN <= behind


@dataclass(frozen=True, slots=True)
class Panel:
    """`height` pixels from `top` down, for values on `scale`."""

    name: str
    axis: Axis
    top: float
    height: float
    scale: Scale

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def y(self, value: float) -> float:
        low, high = self.scale.at(self.scale.low), self.scale.at(self.scale.high)
        return self.bottom - (self.scale.at(value) - low) / (high - low) * self.height

    def line(self, values: Iterable[tuple[float, float]]) -> list[Place]:
        """(x, value) as places, those that make a difference."""
        low, high = self.scale.at(self.scale.low), self.scale.at(self.scale.high)
        across, up, at = (self.axis.right - self.axis.left) / self.axis.end, self.height / (high - low), self.scale.at
        left, foot = self.axis.left, self.bottom + low * up
        return thinned([(left + x * across, foot - at(value) * up) for x, value in values])

    def clipped(self, *inside: str) -> str:
        """What reaches out of it above or below is cut off."""
        x, y, width, height = self.axis.left - 2, self.top - 2, self.axis.right - self.axis.left + 4, self.height + 4
        box = " ".join(map(number, (x, y, width, height)))
        return element("svg", *inside, x=x, y=y, width=width, height=height, viewBox=box) if any(inside) else ""

    def frame(self) -> str:
        """Its name, its ticks with the lines of a grid, and the two axes."""
        left, right = self.axis.left, self.axis.right
        ticks = self.scale.ticks(max(2, int(self.height // 22)))
        found = [words(self.name, left - 8, self.top - 7, "name", "end")]
        for value, text in zip(ticks, labels(ticks), strict=True):
            y = self.y(value)
            found += [element("path", d=f"M{left},{number(y)}H{number(right)}", class_="grid")]
            found += [words(text, left - 8, y + 4, "tick", "end")]
        ends = f"M{left},{number(self.top)}V{number(self.bottom)}H{number(right)}"
        return "".join(found) + element("path", d=ends, class_="frame")
