"""A table of differences as a picture: each row a dot with its 95 % interval, those of one value together."""

from collections.abc import Sequence

from stagerun.drawing.colours import COLOURS, GRID, RULE, SOFT
from stagerun.drawing.figure import drawing, saved_png, saved_svg
from stagerun.tools.report.table import Table, Value

ROW, AROUND, WIDTH = 0.19, 1.15, 8.0  # inches: of a row, of all that is around them, across


def picture(table: Table, name: str, png: bool) -> bytes:
    """An SVG, or a PNG, of a table of `effects`. UsageError without matplotlib."""
    at = {column.key: number for number, column in enumerate(table.columns)}
    pairs = "other" in at
    groups: dict[str, list[Sequence[Value]]] = {}
    for row in table.rows:
        groups.setdefault("" if pairs else str(row[0]), []).append(row)
    series = {} if pairs else {str(row[1]): None for row in table.rows}
    colours = dict(zip(series, (COLOURS * len(series))[: len(series)], strict=True))
    with drawing():
        from matplotlib.figure import Figure

        count = len(table.rows) + len(groups)
        figure = Figure(figsize=(WIDTH, AROUND + ROW * count), dpi=72, facecolor="white", layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=RULE, linewidth=1.0)
        ticks: list[tuple[float, str]] = []
        place = 0.0
        for group, members in groups.items():
            if group:
                ticks.append((place + (len(members) - 1) / 2, group))
            for member in members:
                # Several settings in a row: the name of each is in the legend; of a pair it is at the axis.
                mean, low, high = (_points(member[at[key]]) for key in ("difference", "low", "high"))
                colour = colours.get(str(member[1]), COLOURS[0])
                if pairs:
                    ticks.append((place, f"{member[0]} : {member[1]}"))
                if low is not None and high is not None:
                    axes.plot([low, high], [place] * 2, color=colour, linewidth=1.6, solid_capstyle="butt")
                if mean is not None:
                    axes.plot([mean], [place], "o", color=colour, markersize=4)
                place += 1
            place += 1
        spread = any(row[at["low"]] is not None for row in table.rows)
        for value, colour in colours.items():
            axes.plot([], [], "o-" if spread else "o", color=colour, markersize=4, linewidth=1.6, label=value)
        if series:
            axes.legend(fontsize=8, loc="best", title=table.columns[1].title, title_fontsize=8)
        axes.set_yticks([y for y, _ in ticks], [text for _, text in ticks])
        axes.set_ylim(place - 1, -1)
        axes.set_ylabel("" if pairs else table.columns[0].title, color=SOFT)
        axes.set_xlabel("difference of top-1 in percentage points" + ", 95 % intervals over runs" * spread, color=SOFT)
        axes.grid(axis="x", color=GRID)
        figure.suptitle(f"{name}: {table.title[0].lower()}{table.title[1:]}", size=11)
        return saved_png(figure) if png else saved_svg(figure, name).encode()


def _points(value: Value) -> float | None:
    return None if value is None else 100 * float(value)
