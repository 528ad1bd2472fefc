"""The picture of `bench compression`: accuracy against bytes."""

from typing import TYPE_CHECKING

from stagerun.base.text import size
from stagerun.drawing.colours import COLOURS, GRID, INK, SOFT
from stagerun.drawing.figure import drawing, saved_svg
from stagerun.tools.bench.cases import DENSE
from stagerun.tools.bench.outcome import Bench, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWEST = 10.0  # points below dense; what is lower stands at the bottom, with its value
# By scope; filled where there is a memory.
_MARKERS = {"": "D", "LAYERWISE": "o", "ENTIRE_MODEL": "s"}
_SHAPES = ("layer-wise", "o"), ("entire model", "s")


def accuracy_picture(bench: Bench) -> bytes | None:
    """An SVG; None where no bytes were sent. UsageError without matplotlib."""
    rows = [row for row in bench.rows if row.bytes and row.top1 is not None]
    if not rows:
        return None
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5.2), dpi=72, facecolor="white", layout="constrained")
        axes = figure.subplots()
        colours = _colours(rows)
        bottom = _bottom(rows)
        for row in rows:
            _point(axes, row, colours[_method(row)], bottom)
        _reference(axes, rows)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: size(value))
        axes.set_xlabel("bytes that a worker sends per step")
        axes.set_ylabel("top-1, %")
        axes.grid(color=GRID)
        axes.set_title(f"{bench.schedule}, stage {bench.stage}")
        _legend(axes, colours)
        return saved_svg(figure, bench.schedule).encode()


def _method(row: Row) -> str:
    return row.case.method


def _colours(rows: list[Row]) -> dict[str, tuple[str, str]]:
    """Colour and width of the edge's dashes by method: from the eighth on the colours come again, with a ring."""
    methods = [method for method in dict.fromkeys(_method(row) for row in rows) if method != DENSE.method]
    found = {DENSE.method: (INK, "solid")}
    for number, method in enumerate(methods):
        found[method] = COLOURS[number % 6], "solid" if number < 6 else "ring"
    return found


def _bottom(rows: list[Row]) -> float:
    """The lowest that is drawn to scale, in percent."""
    dense = [100 * row.top1.mean for row in rows if row.case == DENSE and row.top1 is not None]
    return dense[0] - LOWEST if dense else 0.0


def _point(axes: "Axes", row: Row, style: tuple[str, str], bottom: float) -> None:
    colour, edge = style
    assert row.top1 is not None and row.bytes
    y, sd = 100 * row.top1.mean, 100 * (row.top1.sd or 0)
    if y < bottom:
        axes.annotate(
            f"{y:.1f} %", (row.bytes, bottom), xytext=(8, 0), textcoords="offset points", va="center", color=SOFT
        )
        y, sd = bottom, 0.0
    filled = row.case.memory != "NONE"
    axes.errorbar(
        [row.bytes], [y], yerr=[sd] if sd else None, marker=_MARKERS[row.case.scope], markersize=8, color=colour, capsize=3,
        markerfacecolor=colour if filled else "white", markeredgewidth=1.4, linestyle="none", zorder=3,
    )  # fmt: skip
    if edge == "ring":
        axes.plot([row.bytes], [y], marker=_MARKERS[row.case.scope], markersize=3, color=INK, zorder=4)


def _reference(axes: "Axes", rows: list[Row]) -> None:
    """Dense, as a line across."""
    for row in rows:
        if row.case == DENSE and row.top1 is not None:
            axes.axhline(100 * row.top1.mean, color=SOFT, linewidth=0.9, linestyle="dashed")


def _legend(axes: "Axes", colours: dict[str, tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D

    def mark(label: str, marker: str, colour: str, face: str) -> Line2D:
        return Line2D([], [], marker=marker, color=colour, markerfacecolor=face, linestyle="none", label=label)

    handles = [
        mark(name + (" (dotted)" if edge == "ring" else ""), "D" if name == DENSE.method else "o", colour, colour)
        for name, (colour, edge) in colours.items()
    ]
    handles += [mark(label, marker, SOFT, SOFT) for label, marker in _SHAPES]
    handles.append(mark("hollow: without memory", "o", SOFT, "white"))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
