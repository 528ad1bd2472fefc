"""A table of differences as an SVG: each row a dot with its 95 % interval, those of one value together."""

from itertools import groupby

from stagerun.drawing.colours import CURVES, INK
from stagerun.drawing.frame import Frame
from stagerun.drawing.scale import Scale
from stagerun.drawing.svg import document, element, line, text, wide
from stagerun.tools.report.table import Table, Value

ROW, SIZE = 15.0, 11.0  # pixels


def picture(table: Table, name: str) -> bytes:
    """Of a table of `effects`."""
    at = {column.key: number for number, column in enumerate(table.columns)}
    groups = [(str(place), list(rows)) for place, rows in groupby(table.rows, lambda row: row[0])]
    values = list(dict.fromkeys(str(row[1]) for row in table.rows))
    colours = {value: CURVES[n % len(CURVES)] for n, value in enumerate(values)}
    ends = [_points(row[at[key]]) for row in table.rows for key in ("difference", "low", "high")]
    known = [0.0, *(end for end in ends if end is not None)]
    margin = 0.06 * (max(known) - min(known)) or 1.0
    left = 40 + max(wide(place, SIZE) for place, _ in groups)
    high = ROW * (len(table.rows) + len(groups) + 1)
    frame = Frame(left, 40, 480, high, Scale(False, min(known) - margin, max(known) + margin))
    spread = any(row[at["low"]] is not None for row in table.rows)
    under = "difference of top-1 in percentage points" + (", 95 % intervals over runs" if spread else "")
    title = f"{name}: {table.title[0].lower()}{table.title[1:]}"
    zero = frame.across(0.0)
    drawn = [frame.drawn(title, under, table.columns[0].title), line([(zero, 40), (zero, 40 + high)], INK)]
    y = frame.top + ROW
    for place, rows in groups:
        drawn.append(text(place, left - 6, y + (len(rows) - 1) * ROW / 2 + 4, SIZE, anchor="end"))
        for row in rows:
            mean, low, upper = (_points(row[at[key]]) for key in ("difference", "low", "high"))
            colour = colours[str(row[1])]
            if low is not None and upper is not None:
                drawn.append(line([(frame.across(low), y), (frame.across(upper), y)], colour, 1.6))
            if mean is not None:
                drawn.append(element("circle", cx=frame.across(mean), cy=y, r=2.6, fill=colour))
            y += ROW
        y += ROW
    names = [table.columns[1].title, *values]
    for number, words in enumerate(names):
        y = frame.top + 10 + ROW * number
        drawn.append(text(words, frame.right + 26, y, SIZE))
        if number:
            drawn.append(element("circle", cx=frame.right + 16, cy=y - 4, r=2.6, fill=colours[words]))
    wide_names = max(wide(words, SIZE) for words in names)
    return document(title, frame.right + 40 + wide_names, max(frame.bottom, 40 + ROW * len(names)) + 50, *drawn)


def _points(value: Value) -> float | None:
    return None if value is None else 100 * float(value)
