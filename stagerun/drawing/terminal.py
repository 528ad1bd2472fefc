"""A picture as lines of text: plotext draws the frame and the curves, the bands are lined up with it.

Plain characters first, colours after: each curve is drawn alone, and what meets in a cell is put together here. So a pipe and
a terminal without colours get the same picture. Nothing paints a background, and the colours stand out on black and on white.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from stagerun.base.errors import UsageError
from stagerun.base.text import apart
from stagerun.drawing.bands import (
    Band,
    Label,
    Segment,
    bands,
    factor_text,
    jumps,
    keyed,
    leaves,
    mark_labels,
    not_shown,
    on_rows,
)
from stagerun.drawing.picture import Kind, Mark, Picture, StagePicture, Unit
from stagerun.drawing.scale import Scale, labels, round_steps

# Colours of middling lightness, which stand out on black and on white; the trunk has the terminal's own.
COLOURS = ("color(33)", "color(166)", "color(29)", "color(169)", "color(136)", "color(30)", "color(99)")

HEIGHT = 16  # rows of the canvas
LEAST_WIDTH = 50
GUTTER = 13  # columns left of the canvas, its frame included
BLANK_BRAILLE = 0x2800
BORDER = "┊"
MEMBER = "●"  # of an ensemble
WARM_UP = "w"  # above the place where one ends as it should
DASH = 3  # of so many columns the curve of a second side leaves one to the first


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
    styles = _styles(picture, unit)
    rows, left_out = _labels(picture, unit, columns)
    title = f"{picture.name}: learning rate over {unit.value}{', logarithmic' if scale.log else ''}"
    lines = [Text(title), Text("")]
    lines += [Text(" " * GUTTER + row) for row in rows]
    lines += _chart(picture, unit, scale, columns, styles)
    for band in bands(picture, unit):
        lines += _band(band, columns, styles)
        if band.title == "stages":
            lines += _ensembles(picture, unit, columns, styles)
    remarks = [f"LR {jump}" for jump in jumps(picture)] + _branches(picture) + not_shown(picture)
    if any(_label(mark) == WARM_UP for stage in picture.stages for mark in stage.marks):
        remarks.append(f"{WARM_UP}: the end of a warm-up")
    if left_out:
        remarks.append(f"{left_out} labels more are too close to others")
    if scale.remark:
        remarks.append(scale.remark)
    if remarks:
        lines += [Text(""), *(Text(remark) for remark in remarks)]
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def _styles(picture: Picture, unit: Unit) -> dict[str, str]:
    """The colour of each stage's curve; '' for the trunk's, `dim` if it is not enabled."""
    numbers = picture.curves(unit)

    def style(stage: StagePicture) -> str:
        number = numbers[stage.name]
        return "dim" if not stage.enabled else COLOURS[(number - 1) % len(COLOURS)] if number else ""

    return {stage.name: style(stage) for stage in picture.stages}


def _branches(picture: Picture) -> list[str]:
    """Stages that leave their parent without a jump: no other label mentions them."""
    smooth = [stage for stage in picture.stages if stage.leaves_early and not stage.marks[0].jumps]
    return [f"LR {stage.name}: {leaves(stage)} without a jump, {_course(stage)}" for stage in smooth]


def _course(stage: StagePicture) -> str:
    first, last = stage.points[0].lr, stage.points[-1].lr
    if first == last:
        return f"ends at {last:.4g}, too"
    return f"{'falls' if last < first else 'rises'} from {' to '.join(apart([first, last]))}"


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
        lines = _built(unit, scale, columns, stage)[1 : HEIGHT + 1]
        for c in range(first, first + columns.count):
            cells = [r for r, line in enumerate(lines, 1) if _is_braille(line[c])]
            if stage.side != picture.sides[0] and len(cells) == 1 and c % DASH == 0:
                continue  # a dash ends; where the curve is steep there is none
            for r in cells:
                old = ord(rows[r][c]) if _is_braille(rows[r][c]) else BLANK_BRAILLE
                rows[r][c] = chr(old | ord(lines[r - 1][c]))
                marks[r, c] = styles[stage.name]
    texts = []
    for r, row in enumerate(rows):
        text = Text("".join(row))
        for c in range(len(row)):
            if style := marks.get((r, c)):
                text.stylize(style, c, c + 1)
        texts.append(text)
    return texts


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


def curve(
    line: Sequence[tuple[float, float]],
    across: Sequence[tuple[float, str]],
    up: Sequence[tuple[float, str]],
    heights: tuple[float, float],
    width: int,
) -> list[str]:
    """One curve in its frame, with ticks across and up, as lines of equal length."""
    ends = min(x for x, _ in line), max(x for x, _ in line)
    return _framed(line, ends, heights, across, up, max(width, LEAST_WIDTH))


def _built(unit: Unit, scale: Scale, columns: _Columns, stage: StagePicture | None) -> list[str]:
    """The frame with its ticks, and the curve of one stage in it."""
    low, high = scale.at(scale.low), scale.at(scale.high)
    rates = scale.ticks(HEIGHT // 2)
    places = round_steps(0.0, columns.end, max(2, columns.count // 9))
    line = (
        [(stage.x(iter, unit), scale.at(lr)) for iter, lr in stage.line()] if stage is not None else [(0.0, low - 1.0)]
    )
    up = list(zip(map(scale.at, rates), labels(rates), strict=True))
    across = list(zip(places, labels(places), strict=True))
    return _framed(line, (0, columns.end), (low, high), across, up, GUTTER + columns.count + 1)


def _framed(
    line: Sequence[tuple[float, float]],
    ends: tuple[float, float],
    heights: tuple[float, float],
    across: Sequence[tuple[float, str]],
    up: Sequence[tuple[float, str]],
    width: int,
) -> list[str]:
    plotext = _plotext()
    figure = plotext.figure  # the one figure there is
    figure.clear()
    plotext.terminal.limit(False, False)  # the size is ours to choose, in a pipe too
    figure.theme("colorless")
    figure.plot_size(width, HEIGHT + 3)
    figure.ruler("x", "lower").lim(*ends)
    figure.ruler("y", "left").lim(*heights)
    figure.ruler("y", "left").ticks([place for place, _ in up], [text.rjust(GUTTER - 1) for _, text in up])
    figure.ruler("x", "lower").ticks([place for place, _ in across], [text for _, text in across])
    signal = figure.signal([x for x, _ in line], [y for _, y in line], marker="braille")
    figure.draw(signal.lines().density("full"))
    return str(plotext.uncolorize(figure.build())).split("\n")


def _label(mark: Mark) -> str:
    """The factor of a jump; WARM_UP where a warm-up ends without."""
    return factor_text(mark.factor) if mark.jumps else WARM_UP if mark.kind is Kind.WARM_UP else ""


def _labels(picture: Picture, unit: Unit, columns: _Columns) -> tuple[list[str], int]:
    """What stands above the chart, and how many labels have no room there."""

    def extent(label: Label) -> tuple[float, float]:
        column = min(int(label.at), columns.count - len(label.text))
        return column, column + len(label.text) + 1

    marked = mark_labels(picture, _label, lambda stage, mark: columns.at(stage.x(mark.iter, unit)))
    rows, left_out = on_rows(marked, extent)
    lines = []
    for row in rows[::-1]:
        line = ""
        for column, label in row:
            line = line.ljust(int(column)) + label.text
        lines.append(line)
    return lines, left_out


# -- the bands


@dataclass(frozen=True, slots=True)
class _Cells:
    """Columns of the canvas: a segment's `begin` and `end`, and where the next one begins, its own end if they touch."""

    begin: int
    end: int
    free: int

    @property
    def closed(self) -> bool:
        return self.free > self.end

    def inside(self, label: str) -> bool:
        return len(label) < self.end - self.begin + self.closed

    def behind(self, label: str) -> bool:
        return len(label) + 2 < self.free - self.end

    def drawn(self, label: str) -> str:
        """`├label───`, with `┤` if nothing follows at once; behind that a label that has no room before."""
        if not self.inside(label):
            return "├".ljust(self.end - self.begin, "─") + "┤ " + label
        line = ("├" + label).ljust(self.end - self.begin, "─")
        return line + ("┤" if self.closed and len(line) == self.end - self.begin else "")


def _cells(lane: Sequence[Segment], columns: _Columns) -> list[_Cells | None]:
    """None for a segment whose columns the one before has taken: each that is drawn has one at least."""
    spans: list[tuple[int, int] | None] = []
    filled = 0
    for segment in lane:
        begin, end = columns.at(segment.begin), columns.at(segment.end)
        begin, end = max(begin, filled), max(end, begin + 1)
        spans.append((begin, end) if end > begin else None)
        filled = max(end, filled)
    found: list[_Cells | None] = []
    free = columns.count + 1
    for span in reversed(spans):
        found.append(None if span is None else _Cells(*span, free))
        free = free if span is None else span[0]
    return found[::-1]


def _band(band: Band, columns: _Columns, styles: dict[str, str]) -> list[Text]:
    cells = [_cells(lane, columns) for lane in band.lanes]
    at = {
        (s.stage, s.begin): c for lane, of in zip(band.lanes, cells, strict=True) for s, c in zip(lane, of, strict=True)
    }

    def fits(segment: Segment, limit: float) -> bool:
        own = at[segment.stage, segment.begin]
        return own is not None and (own.inside(segment.label) or own.behind(segment.label))

    short = keyed(band, fits)
    lines = []
    for number, lane in enumerate(short.lanes):
        line = Text((band.title if number == 0 else "").ljust(GUTTER))
        for segment, own in zip(lane, cells[number], strict=True):
            if own is not None:
                line.append(" " * (GUTTER + own.begin - len(line)))
                line.append(own.drawn(segment.label), styles.get(segment.stage, ""))
        lines.append(line)
    notes = [*(f"{key} = {text}" for key, text in short.keys), *([short.remark] if short.remark else [])]
    return lines + [Text(" " * GUTTER + note) for note in notes]


def _ensembles(picture: Picture, unit: Unit, columns: _Columns, styles: dict[str, str]) -> list[Text]:
    """A line with the members of each; its name behind them, or on a line below where it has no room."""
    lines = []
    for number, ensemble in enumerate(picture.ensembles):
        places = [(columns.at(x), styles[stage.name]) for x, stage, _ in picture.places(ensemble, unit)]
        first, last = places[0][0], places[-1][0]
        line = Text(("" if number else "ensembles").ljust(GUTTER + first) + "─" * (last - first + 1))
        for at, style in places:
            line.plain = f"{line.plain[: GUTTER + at]}{MEMBER}{line.plain[GUTTER + at + 1 :]}"
            line.stylize(style, GUTTER + at, GUTTER + at + 1)
        whole = ensemble.label(lambda text: len(text) <= columns.count)
        if len(whole) + 2 <= columns.count - last:
            lines.append(line.append(f" {whole}"))
        else:
            lines += [line, Text(" " * (GUTTER + min(first, columns.count - len(whole))) + whole)]
    return lines


def ascii_only(text: str) -> str:
    """For an output that has no other characters: every mark of a curve a star."""

    def plain(character: str) -> str:
        if _is_braille(character):
            return "*"
        return {MEMBER: "o", "┊": ":", "─": "-", "│": "|", "→": ">"}.get(
            character, character if character.isascii() else "+"
        )

    return "".join(map(plain, text))
