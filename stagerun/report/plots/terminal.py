"""A picture as lines of text: plotext draws the frame and the curves, the bands are lined up with it.

Plain characters first, colours after: each curve is drawn alone, and what meets in a cell is put together here. So a pipe and
a terminal without colours get the same picture. Nothing paints a background, and the colours stand out on black and on white.
"""

import math
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from stagerun.errors import UsageError
from stagerun.plan.picture import Kind, Picture, StagePicture, Unit
from stagerun.report.plots.bands import Band, Segment, bands, factor_text, jumps, keyed, leaves
from stagerun.report.plots.scale import Scale, labels, round_steps

# Of the 256 colours those of middling lightness (the trunk has the terminal's own): told apart from black and from white.
COLOURS = ("color(33)", "color(166)", "color(29)", "color(169)", "color(136)", "color(30)", "color(99)")

HEIGHT = 16  # rows of the canvas
LEAST_WIDTH = 50
GUTTER = 13  # columns left of the canvas, its frame included
BLANK_BRAILLE = 0x2800
BORDER = "┊"
WARM_UP = "w"  # above the place where one ends as it should


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where places stand in a line of text: the first and the last column of the canvas are the two ends of the axis."""

    count: int
    end: float

    def at(self, x: float) -> int:
        return round(x / self.end * (self.count - 1))


def draw(picture: Picture, unit: Unit, scale: Scale, width: int) -> Text:
    """`width` columns, as far as it is LEAST_WIDTH or more. Lines of text, without a line break at the end."""
    columns = _Columns(max(width, LEAST_WIDTH) - GUTTER - 1, picture.end(unit))
    styles = stage_styles(picture, unit)
    lines = [Text(_title(picture, unit, scale)), Text("")]
    lines += [Text(" " * GUTTER + row) for row in _labels(picture, unit, columns)]
    lines += _chart(picture, unit, scale, columns, styles)
    for band in bands(picture, unit):
        lines += _band(band, columns, styles)
    remarks = [f"LR {jump}" for jump in jumps(picture)] + _branches(picture)
    if any(mark.kind is Kind.WARM_UP and not mark.jumps for stage in picture.stages for mark in stage.marks):
        remarks.append(f"{WARM_UP}: the end of a warm-up")
    if scale.hidden:
        remarks.append(f"rates below {scale.low:.2g} are drawn at the lower edge")
    if remarks:
        lines += [Text(""), *(Text(remark) for remark in remarks)]
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def stage_styles(picture: Picture, unit: Unit) -> dict[str, str]:
    """Of each stage its colour; '' on the trunk's line, `dim` where it is not enabled."""
    lanes = picture.lanes(unit)
    branches = [stage.name for stage in picture.stages if lanes[stage.name]]
    styles = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(branches)}
    return {stage.name: styles.get(stage.name, "") if stage.enabled else "dim" for stage in picture.stages}


def _title(picture: Picture, unit: Unit, scale: Scale) -> str:
    return f"{picture.name}: learning rate over {unit.value}{', logarithmic' if scale.log else ''}"


def _branches(picture: Picture) -> list[str]:
    """Those that leave their parent without a jump, of which nothing else is said."""
    smooth = [stage for stage in picture.stages if stage.leaves_early and not stage.marks[0].jumps]
    return [f"LR {s.name}: {s.points[0].lr:.4g} -> {s.points[-1].lr:.4g}, {leaves(s)}" for s in smooth]


# -- the chart


def _chart(picture: Picture, unit: Unit, scale: Scale, columns: _Columns, styles: dict[str, str]) -> list[Text]:
    frame = _built(unit, scale, columns, None)
    rows = [list(line) for line in frame]
    marks: dict[tuple[int, int], str] = {}
    first = GUTTER
    for stage in picture.stages:
        column = first + columns.at(stage.extent(unit)[0])
        if stage.parent is not None and column > first:
            for row in rows[1 : HEIGHT + 1]:
                row[column] = BORDER
    for stage in picture.stages:
        for r, line in enumerate(_built(unit, scale, columns, stage)[1 : HEIGHT + 1], 1):
            for c in range(first, first + columns.count):
                if _is_braille(line[c]):
                    old = ord(rows[r][c]) if _is_braille(rows[r][c]) else BLANK_BRAILLE
                    rows[r][c] = chr(old | ord(line[c]))
                    marks[r, c] = styles[stage.name]
    lines = []
    for r, row in enumerate(rows):
        text = Text("".join(row))
        for c in range(len(row)):
            if style := marks.get((r, c)):
                text.stylize(style, c, c + 1)
        lines.append(text)
    return lines


def _is_braille(character: str) -> bool:
    return BLANK_BRAILLE < ord(character) <= BLANK_BRAILLE + 0xFF


def _plotext() -> Any:
    """It has a part in machine code, which may not load on a system that its wheels are not for."""
    try:
        import plotext
    except (ImportError, OSError) as error:
        hint = "give --plot a file (pip install 'stagerun[plots]'), or install plotext anew"
        raise UsageError(f"a picture in the terminal needs plotext, which can't be loaded: {error}", hint) from error
    return plotext


def _built(unit: Unit, scale: Scale, columns: _Columns, stage: StagePicture | None) -> list[str]:
    """The frame with its ticks, and the curve of one stage in it, as lines of equal length."""
    plotext = _plotext()
    figure = plotext.figure  # the one figure there is
    figure.clear()
    plotext.terminal.limit(False, False)  # the size is ours to choose, in a pipe too
    figure.theme("colorless")
    figure.plot_size(GUTTER + columns.count + 1, HEIGHT + 3)
    low, high = scale.at(scale.low), scale.at(scale.high)
    figure.ruler("x", "lower").lim(0, columns.end)
    figure.ruler("y", "left").lim(low, high)
    rates = scale.ticks(HEIGHT // 2)
    figure.ruler("y", "left").ticks([scale.at(v) for v in rates], [v.rjust(GUTTER - 1) for v in labels(rates)])
    places = round_steps(0.0, columns.end, max(2, columns.count // 9))
    figure.ruler("x", "lower").ticks(places, labels(places))
    line = (
        [(stage.x(iter, unit), scale.at(lr)) for iter, lr in stage.line()] if stage is not None else [(0.0, low - 1.0)]
    )
    signal = figure.signal([x for x, _ in line], [y for _, y in line], marker="braille")
    figure.draw(signal.lines().density("full"))
    return str(plotext.uncolorize(figure.build())).split("\n")


def _labels(picture: Picture, unit: Unit, columns: _Columns) -> list[str]:
    """Above its place the factor of each jump, and WARM_UP where a warm-up ends without, on as many rows as it takes."""
    found = []
    for stage in picture.stages:
        for mark in stage.marks:
            text = factor_text(mark.factor) if mark.jumps else WARM_UP if mark.kind is Kind.WARM_UP else ""
            if text:
                found.append((columns.at(stage.x(mark.iter, unit)), text))
    rows: list[str] = []
    for column, text in sorted(set(found)):
        column = min(column, columns.count - len(text))
        row = next((i for i, line in enumerate(rows) if len(line) < column), len(rows))
        if row == len(rows):
            rows.append("")
        rows[row] = rows[row].ljust(column) + text
    return rows[::-1]


# -- the bands


def _band(band: Band, columns: _Columns, styles: dict[str, str]) -> list[Text]:
    def fits(segment: Segment, limit: float) -> bool:
        begin, end, free = _extent(segment, limit, columns)
        return len(segment.text) < end - begin + (free > end) or len(segment.text) + 2 < free - end

    short = keyed(band, fits)
    lines = []
    for number, lane in enumerate(short.lanes):
        line = Text((band.title if number == 0 else "").ljust(GUTTER))
        limits = [segment.begin for segment in lane[1:]] + [math.inf]
        filled = 0
        for segment, limit in zip(lane, limits, strict=True):
            begin, part = _part(segment, limit, filled, columns)
            line.append(" " * (begin - filled))
            line.append(part, styles.get(segment.stage, ""))
            filled = begin + len(part)
        lines.append(line)
    return lines + [Text(" " * GUTTER + f"{key} = {text}") for key, text in short.keys]


def _extent(segment: Segment, limit: float, columns: _Columns) -> tuple[int, int, int]:
    """Columns at which a segment begins and ends, and at which the next one begins: its own end where they touch."""
    begin, end = columns.at(segment.begin), columns.at(segment.end)
    free = columns.count + 1 if limit == math.inf else columns.at(limit)
    return begin, max(end, begin + 1), free


def _part(segment: Segment, limit: float, filled: int, columns: _Columns) -> tuple[int, str]:
    """Where it begins, and `├text───`, with `┤` if nothing follows at once; behind that the text where there is more room.

    `filled`: columns that are taken. A segment of less than a column has its `├` all the same.
    """
    begin, end, free = _extent(segment, limit, columns)
    begin = max(begin, filled)
    closed = free > end
    if len(segment.text) < end - begin + closed or len(segment.text) + 2 >= free - end:
        line = ("├" + segment.text)[: max(1, free - begin)].ljust(end - begin, "─")
        return begin, line + ("┤" if closed and len(line) <= end - begin else "")
    return begin, "├".ljust(end - begin, "─") + "┤ " + segment.text


def ascii_only(text: str) -> str:
    """For an output that has no other characters: every mark of a curve a star."""

    def plain(character: str) -> str:
        if _is_braille(character):
            return "*"
        return {"┊": ":", "─": "-", "│": "|", "→": ">"}.get(character, character if character.isascii() else "+")

    return "".join(map(plain, text))
