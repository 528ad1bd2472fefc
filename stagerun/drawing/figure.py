"""A picture as SVG or PNG, by matplotlib. Equal schedules give equal bytes.

One panel with the learning rate, and beneath it a strip for each band, all over the same x axis. Sizes are in inches from the
top left corner, so that a strip is as high as its lines whatever there are of them.
"""

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from stagerun.base.errors import UsageError
from stagerun.drawing.bands import Band, Label, Segment, bands, captions, keyed, mark_labels, mark_text, on_rows
from stagerun.drawing.colours import FILLS, RULE, SETTINGS, SOFT, strokes
from stagerun.drawing.picture import Kind, Picture, Unit
from stagerun.drawing.scale import Scale, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    for stage, ensemble in picture.joins(unit):
        ends = [lanes[stage.parent or ""] + 0.92, lanes[stage.name] + 0.5]
        if ensemble is not None:
            ends = [lanes[stage.name] + 0.92, len(band.lanes) + GAP / ROW + ensemble + LINE]
        axes.plot(
            [stage.x(0, unit)] * 2, ends, color=SOFT, linewidth=0.9, zorder=4, solid_capstyle="butt",
            clip_on=ensemble is None,
        )  # fmt: skip


LINE, WRITTEN = 0.16, 0.64  # of the height of an ensemble's line: its dots, and its text
DOT, DOTS = 3.6, 160  # points across; places across the panel where one can stand


def draw_ensembles(picture: Picture, unit: Unit, room: Room, axes: "Axes") -> None:
    """A row of the axes for each: its members in the colours of their curves, and its name below them."""
    axes.set_xlim(0, room.end)
    axes.set_ylim(len(picture.ensembles), 0)
    axes.axis("off")
    axes.annotate(
        "ensembles", (0, WRITTEN), xycoords=("axes fraction", "data"), xytext=(-6, 0), textcoords="offset points",
        va="center_baseline", ha="right", size=SIZE, color=SOFT,
    )  # fmt: skip
    for row, ensemble in enumerate(picture.ensembles):
        places = picture.places(ensemble, unit)
        axes.plot([places[0][0], places[-1][0]], [row + LINE] * 2, color=SOFT, linewidth=0.9)
        _dots(picture, unit, [(x, row + LINE, stage.name) for x, stage, _ in places], axes)
        label = ensemble.label(lambda text: wide(text, SIZE) <= room.end / room.inch)
        inside = places[0][0] + wide(label, SIZE) * room.inch <= room.end
        place, side = (places[0][0], "left") if inside else (room.end, "right")
        axes.annotate(label, (place, row + WRITTEN), va="center_baseline", ha=side, size=SIZE, annotation_clip=False)


def _dots(picture: Picture, unit: Unit, places: Sequence[tuple[float, float, str]], axes: "Axes") -> None:
    """One for each place, in the colour of its stage; those that would lie on each other are one."""
    of, apart = strokes(picture, unit), picture.end(unit) / DOTS
    found = {(stage, round(x / apart)): (x, y) for x, y, stage in places}
    for stage in dict.fromkeys(stage for stage, _ in found):
        xs, ys = zip(*(at for (own, _), at in found.items() if own == stage), strict=True)
        axes.plot(xs, ys, "o", color=of[stage].colour, markersize=DOT, markeredgewidth=0, zorder=5, clip_on=False)


# -- the picture

WIDTH, LEFT, RIGHT = 11.0, 1.15, 0.25
TOP, PANEL, BELOW = 0.45, 3.6, 0.55  # the title; the curve; its ticks and label
ROW, GAP, LABELS = 0.235, 0.07, 0.17  # one line of a band; between bands; one line of factors
LABEL_SIZE = 7.5  # points
WRAP = 150  # characters of a line of the caption
TICKS = 1000  # places across the panel where a tick for a synchronisation can stand


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a band: `lane` of the stages it is for, None for all of them; its place from the top, in points."""

    lane: int | None
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure at 72 dots per inch, so that a dot is a point of the SVG."""

    figure: "Figure"
    curve: "Axes"
    rows: tuple[Row, ...]

    @property
    def height(self) -> float:
        return float(self.figure.get_figheight()) * 72

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The place of a point of the curve (y as `Scale.at` has it), in points from the top left."""
        right, up = self.curve.transData.transform((x, y))
        return float(right), self.height - float(up)


def svg(picture: Picture, unit: Unit, scale: Scale) -> str:
    """UsageError without matplotlib."""
    with drawing():
        return saved_svg(draw(picture, unit, scale).figure, picture.name)


def png(picture: Picture, unit: Unit, scale: Scale) -> bytes:
    """1650 dots wide. UsageError without matplotlib."""
    with drawing():
        return saved_png(draw(picture, unit, scale).figure)


def saved_svg(figure: "Figure", name: str) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata={**nothing, "Title": name})
    return buffer.getvalue()


def saved_png(figure: "Figure") -> bytes:
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=150, metadata={"Software": None})
    return pixels.getvalue()


@contextmanager
def drawing() -> Iterator[None]:
    """matplotlib with the settings of all pictures, whatever the user's own are. UsageError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "a picture in a file needs matplotlib, which is not installed",
            "pip install 'stagerun[plots]'; `--plot` without a file draws in the terminal",
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def problem(text: str) -> "Figure":
    """What is wrong, in place of a picture. Inside `drawing`."""
    from matplotlib.figure import Figure

    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, 125, replace_whitespace=False) or [""]]
    height = 0.6 + 0.18 * len(lines)
    figure = Figure(figsize=(WIDTH, height), dpi=72)
    figure.text(0.3 / WIDTH, 1 - 0.3 / height, "\n".join(lines), family="DejaVu Sans Mono", va="top", linespacing=1.3)
    return figure


def draw(picture: Picture, unit: Unit, scale: Scale, paper: str = "white") -> Drawn:
    """Inside `drawing`."""
    from matplotlib.figure import Figure

    room = Room(picture.end(unit) / (WIDTH - LEFT - RIGHT), picture.end(unit))
    shown = [keyed(band, room.fits) for band in bands(picture, unit)]
    names, left_out = _label_rows(picture, unit, room)
    caption = _caption(picture, scale, shown, left_out)
    above = TOP + LABELS * len(names)
    heights = [ROW * len(band.lanes) for band in shown]
    members = (ROW * len(picture.ensembles) + GAP) * bool(picture.ensembles)
    height = above + PANEL + BELOW + sum(heights) + GAP * len(heights) + members + 0.1 + 0.16 * len(caption)
    figure = Figure(figsize=(WIDTH, height), dpi=72, facecolor=paper)

    def panel(top: float, high: float) -> "Axes":
        across = (WIDTH - LEFT - RIGHT) / WIDTH
        return figure.add_axes((LEFT / WIDTH, 1 - (top + high) / height, across, high / height), facecolor="none")

    figure.text(LEFT / WIDTH, 1 - 0.25 / height, f"{picture.name}: learning rate", size=11, weight="bold", va="center")
    curve = panel(above, PANEL)
    _curve(picture, unit, scale, curve)
    _mark(picture, unit, curve, names)
    _meet(picture, unit, curve)
    top, rows = above + PANEL + BELOW, []
    for band, high in zip(shown, heights, strict=True):
        draw_band(picture, unit, band, room, panel(top, high))
        for lane in range(len(band.lanes)):
            common = all(segment.stage == "" for segment in band.lanes[lane])
            rows.append(Row(None if common else lane, 72 * (top + lane * ROW), 72 * (top + (lane + 1) * ROW)))
        top += high + GAP
        if band.title == "stages" and members:
            draw_ensembles(picture, unit, room, panel(top, members - GAP))
            rows.append(Row(None, 72 * top, 72 * (top + members - GAP)))
            top += members
    figure.text(
        LEFT / WIDTH, 1 - (top + 0.06) / height, "\n".join(caption), size=7.5, color=SOFT, va="top", linespacing=1.4
    )
    return Drawn(figure, curve, tuple(rows))


# -- the curve


def _curve(picture: Picture, unit: Unit, scale: Scale, axes: "Axes") -> None:
    of = strokes(picture, unit)
    for stage in picture.stages:
        stroke = of[stage.name]
        xs, rates = zip(*((stage.x(iter, unit), scale.at(lr)) for iter, lr in stage.line()), strict=True)
        axes.plot(
            xs, rates, color=stroke.colour, linestyle=stroke.dashes, linewidth=1.5, zorder=3, solid_joinstyle="miter"
        )
        for mark in stage.marks:
            if mark.jumps and mark.kind is Kind.START:
                ends = [scale.at(mark.before), scale.at(mark.after)]
                axes.plot([xs[0]] * 2, ends, color=stroke.colour, linewidth=0.8, linestyle=(0, (1, 1)), zorder=3)
    if picture.ensembles:
        every = [place for ensemble in picture.ensembles for place in picture.places(ensemble, unit)]
        dots = [(x, scale.at(stage.until(iter)[-1][1]), stage.name) for x, stage, iter in every]
        _dots(picture, unit, dots, axes)
    ticks = scale.ticks(8)
    axes.set_yticks([scale.at(rate) for rate in ticks], labels(ticks))
    axes.set_ylim(scale.at(scale.low), scale.at(scale.high))
    axes.set_xlim(0, picture.end(unit))
    if unit in (Unit.IMAGES, Unit.ITERATIONS):
        places = [v for v in axes.get_xticks() if 0 <= v <= picture.end(unit)]
        axes.set_xticks(places, labels(places))
    axes.set_xlabel(unit.value)
    axes.tick_params(length=3, color=RULE)


def _mark(picture: Picture, unit: Unit, axes: "Axes", rows: list[list[tuple[float, Label]]]) -> None:
    numbers, of = picture.curves(unit), strokes(picture, unit)
    for stage in picture.stages:
        if stage.parent is not None:
            axes.axvline(stage.x(0, unit), color=RULE, linewidth=0.9, zorder=1)
        for mark in stage.marks:
            if mark.kind is not Kind.START:
                axes.axvline(stage.x(mark.iter, unit), color=RULE, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    for number, row in enumerate(rows):
        for place, label in row:
            first = label.stages[0].name
            axes.annotate(
                label.text, (place, 1.0), xycoords=("data", "axes fraction"),
                xytext=(2, 3 + 72 * LABELS * number), textcoords="offset points", size=LABEL_SIZE,
                color=of[first].colour if numbers[first] else SOFT, annotation_clip=False,
            )  # fmt: skip


def _meet(picture: Picture, unit: Unit, axes: "Axes") -> None:
    """A tick at the foot of the panel for each synchronisation; those that would lie on each other are one."""
    of, apart = strokes(picture, unit), picture.end(unit) / TICKS
    for stage in picture.stages:
        if stage.meetings:
            places = {round(stage.x(iter, unit) / apart): stage.x(iter, unit) for iter in stage.meetings}
            across = axes.get_xaxis_transform()  # y is a share of the panel's height
            axes.vlines(list(places.values()), 0, 0.03, colors=of[stage.name].colour, linewidth=0.5, transform=across)


def _label_rows(picture: Picture, unit: Unit, room: Room) -> tuple[list[list[tuple[float, Label]]], int]:
    """What is written above the panel and where on the x axis, and how many labels have no room there."""

    def extent(label: Label) -> tuple[float, float]:
        long = wide(label.text, LABEL_SIZE) + 0.08
        begin = min(label.at / room.inch, WIDTH - LEFT - long)  # inside the figure
        return begin, begin + long

    rows, left_out = on_rows(mark_labels(picture, mark_text, lambda s, mark: round(s.x(mark.iter, unit), 9)), extent)
    return [[(begin * room.inch, label) for begin, label in row] for row in rows], left_out


# -- the text beneath


def _caption(picture: Picture, scale: Scale, shown: list[Band], left_out: int) -> list[str]:
    return [line for text in captions(picture, scale, shown, left_out) for line in textwrap.wrap(text, WRAP)]
