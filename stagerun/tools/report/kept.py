"""What compression kept of each layer's gradient, drawn over the displayed iterations. Equal runs give equal bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING

from stagerun.drawing.colours import CURVES, RULE
from stagerun.tools.report.history import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 60  # iterations that are drawn, of all that were displayed
STEPS = 10  # of a shade
WIDE, ROW, LABEL, GAP, LINE = 11.0, 0.13, 2.2, 0.42, 1.1  # inches; LINE: the height of the panel of bytes

CAPTION = (
    "Of rank 0's first sender, in displayed iterations. Kept: 1 - (norm of what the message lacks / norm of gradient plus residual)^2; "
    "the darker, the more, and blank is nothing or unknown. The residual's norm is drawn against the largest that the layer has had"
)

Cells = Sequence[Sequence[float | None]]  # a row for each layer, 0 to 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """`places`: (stage, iteration) of each column."""

    places: tuple[tuple[str, int], ...]
    names: tuple[str, ...]
    kept: Cells
    residual: Cells
    sent: tuple[int, ...]  # bytes of all messages, by column


def matrix(run: Run) -> Matrix | None:
    """None where nothing was compressed."""
    found = [event for stage in run.history.stages for event in stage.compressed]
    if not found:
        return None
    events = [found[i * len(found) // min(len(found), COLUMNS)] for i in range(min(len(found), COLUMNS))]
    items = [{item.name: item for item in event.items} for event in events]
    names = tuple(dict.fromkeys(name for column in items for name in column))
    norms = [[column[name].residual_norm if name in column else None for column in items] for name in names]
    tops = [max((norm for norm in row if norm is not None), default=0.0) for row in norms]
    return Matrix(
        places=tuple((event.stage, event.iter) for event in events),
        names=names,
        kept=[[column[name].kept if name in column else None for column in items] for name in names],
        residual=[[n and n / top if top else n for n in row] for row, top in zip(norms, tops, strict=True)],
        sent=tuple(sum(item.bytes for item in column.values()) for column in items),
    )


def draw(matrix: Matrix, title: str) -> str:
    """An SVG. UsageError without matplotlib."""
    from stagerun.drawing.figure import drawing, saved_svg
    from stagerun.drawing.html import inline

    with drawing():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams.update({"svg.hashsalt": f"stagerun kept {title}", "font.size": 8.5, "axes.titlesize": 9.5})
        high = max(ROW * len(matrix.names), 0.3)
        height = 3 * GAP + 2 * high + LINE + 0.3
        figure = Figure(figsize=(WIDE, height), dpi=72, facecolor="none")
        at = GAP
        for name, cells in (("Share kept", matrix.kept), ("Norm of the residual", matrix.residual)):
            axes = figure.add_axes(_box(at, high, height), facecolor="none")
            _shade(cells, matrix.names, axes)
            axes.set_title(name)
            _stages(matrix, axes, labels=False)
            at += high + GAP
        axes = figure.add_axes(_box(at, LINE, height), facecolor="none")
        axes.step(
            range(len(matrix.sent) + 1),
            [s / 1000 for s in (*matrix.sent, matrix.sent[-1])],
            where="post",
            color=CURVES[0],
        )
        axes.set_ylim(bottom=0)
        axes.set_title("Messages of an iteration, kB")
        _stages(matrix, axes, labels=True)
        return inline(saved_svg(figure, title), "What compression kept of each layer's gradient, over iterations")


def _box(top: float, high: float, height: float) -> tuple[float, float, float, float]:
    return LABEL / WIDE, 1 - (top + high) / height, (WIDE - LABEL - 0.15) / WIDE, high / height


def _shade(cells: Cells, names: Sequence[str], axes: "Axes") -> None:
    """Neighbours of one shade are one rectangle, and all rectangles of a shade one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    shapes: dict[int, list[Path]] = {}
    for row, values in enumerate(cells):
        begin = 0
        for step, same in groupby(0 if value is None else min(STEPS, max(0, ceil(STEPS * value))) for value in values):
            end = begin + len(list(same))
            corners = [(begin, row), (end, row), (end, row + 1), (begin, row + 1), (begin, row)]
            shapes.setdefault(step, []).append(Path(corners, closed=True))
            begin = end
    for step, paths in sorted(shapes.items()):
        if step:
            path = Path.make_compound_path(*paths)
            axes.add_patch(PathPatch(path, facecolor=CURVES[0], alpha=step / STEPS, edgecolor="none", linewidth=0))
    axes.set_ylim(len(cells), 0)
    axes.set_yticks([row + 0.5 for row in range(len(names))], names, size=6.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)


def _stages(matrix: Matrix, axes: "Axes", labels: bool) -> None:
    """A line where a stage begins, and beneath the last panel its name and first iteration."""
    begins = [i for i, (stage, _) in enumerate(matrix.places) if not i or stage != matrix.places[i - 1][0]]
    axes.set_xlim(0, len(matrix.places))
    for begin in begins[1:]:
        axes.axvline(begin, color=RULE, linewidth=0.9)
    texts = [f"{matrix.places[i][0]} {matrix.places[i][1]}" for i in begins]
    axes.set_xticks(begins, texts if labels else [""] * len(begins), ha="left")
    axes.tick_params(axis="x", length=3, color=RULE)
