"""The bands of a picture by matplotlib: a box for each stretch, with its text in it or behind it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from stagerun.plan.picture import Picture, Unit
from stagerun.report.plots.bands import Band, Segment
from stagerun.report.plots.colours import FILLS, RULE, SOFT, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 7.5  # of texts, in points
MARGIN = 0.045  # inches between a text and what it stands in


@dataclass(frozen=True, slots=True)
class Room:
    """`inch`: length of one along the x axis, which ends at `end`."""

    inch: float
    end: float

    def inside(self, segment: Segment, limit: float) -> bool:
        free = min(segment.end, limit) - segment.begin
        return wide(segment.label, SIZE) + 2 * MARGIN <= free / self.inch

    def fits(self, segment: Segment, limit: float) -> bool:
        behind = min(limit, self.end) - segment.end
        return self.inside(segment, limit) or wide(segment.label, SIZE) + 2 * MARGIN <= behind / self.inch


def wide(text: str, points: float) -> float:
    """Inches that a text takes."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=points, prop=FontProperties(family="DejaVu Sans")).get_extents().x1) / 72


def draw_band(picture: Picture, unit: Unit, band: Band, room: Room, axes: "Axes") -> None:
    """A row of the axes for each of its lines, the first on top."""
    axes.set_xlim(0, room.end)
    axes.set_ylim(len(band.lanes), 0)
    axes.axis("off")
    texts = list(dict.fromkeys(segment.text for lane in band.lanes for segment in lane))
    fills = {text: FILLS[n % len(FILLS)] if band.title != "stages" else FILLS[0] for n, text in enumerate(texts)}
    for row, lane in enumerate(band.lanes):
        _line(lane, row, fills, room, axes)
    if band.title == "stages":
        _stages(picture, unit, band, axes)
    axes.annotate(
        band.title, (0, 0.5), xycoords=("axes fraction", "data"), xytext=(-6, 0), textcoords="offset points",
        va="center_baseline", ha="right", size=SIZE, color=SOFT,
    )  # fmt: skip


def _line(lane: Sequence[Segment], row: int, fills: dict[str, str], room: Room, axes: "Axes") -> None:
    from matplotlib.patches import Rectangle

    limits = [segment.begin for segment in lane[1:]] + [math.inf]
    for segment, limit in zip(lane, limits, strict=True):
        long = segment.end - segment.begin
        axes.add_patch(
            Rectangle((segment.begin, row + 0.08), long, 0.84, facecolor=fills[segment.text], edgecolor="none")
        )
        if not segment.label:
            continue
        place = segment.begin if room.inside(segment, limit) else segment.end
        axes.annotate(
            segment.label, (place, row + 0.5), xytext=(72 * MARGIN, 0), textcoords="offset points", va="center_baseline",
            size=SIZE, annotation_clip=False,
        )  # fmt: skip
    for before, segment in pairwise(lane):
        if segment.begin <= before.end * (1 + 1e-9):  # a border where they touch
            axes.plot([segment.begin] * 2, [row + 0.08, row + 0.92], color=RULE, linewidth=0.9)


def _stages(picture: Picture, unit: Unit, band: Band, axes: "Axes") -> None:
    """Each in the colour of its curve, and a branch joined to the line of its parent."""
    lanes, of = picture.lanes(unit), strokes(picture, unit)
    for row, lane in enumerate(band.lanes):
        for segment in lane:
            stroke, ends = of[segment.stage], [segment.begin, segment.end]
            axes.plot(ends, [row + 0.9] * 2, color=stroke.colour, linewidth=1.8, linestyle=stroke.dashes)
    for stage in picture.stages:
        if stage.parent is not None and lanes[stage.name] != lanes[stage.parent]:
            ends = [lanes[stage.parent] + 0.92, lanes[stage.name] + 0.5]
            axes.plot([stage.x(0, unit)] * 2, ends, color=SOFT, linewidth=0.9, zorder=4, solid_capstyle="butt")
