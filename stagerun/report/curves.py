"""The curves of a report, drawn by matplotlib as SVG. Equal runs give equal bytes."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stagerun.report.branches import begun, colour, ensembles, extents, hidden, hues, lanes, lines
from stagerun.report.history import StageHistory
from stagerun.report.plots.colours import FILLS, GRID, INK, RULE, SOFT
from stagerun.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 11.0, 4.6  # inches; the narrow one is for phones
LANE = 0.235  # inches of a line of stages
LEFT, RIGHT, TOP, GAP = 0.55, 0.12, 0.3, 0.34  # inches beside, above and between panels

# Panels from top to bottom: what they show, and their inches. The last is over time, the others over epochs.
PANELS = (
    ("top1", "Test top-1, %", 2.5),
    ("loss", "Loss", 2.1),
    ("lr", "Learning rate", 1.4),
    ("speed", "Images/s", 1.4),
)
_RESUME: dict[str, Any] = {"marker": "^", "markersize": 6, "linestyle": "none", "markeredgecolor": "none"}


@dataclass(frozen=True, slots=True)
class Drawing:
    """`svg` and, for each panel over epochs, what it shows and where: x and y each as (place, place, value, value), places in
    points of the SVG from the top left."""

    svg: str
    panels: list[tuple[str, list[float], list[float]]]


def draw(runs: Sequence[Run], width: float, title: str) -> Drawing | None:
    """None where no run has done anything yet. UsageError without matplotlib."""
    from stagerun.report.plots.figure import drawing, saved_svg
    from stagerun.report.plots.html import inline

    longest = max(runs, key=lambda run: len(begun(run)))
    panels = [panel for panel in PANELS if _has(runs, panel[0])]
    if not panels:
        return None
    with drawing():
        import matplotlib
        from matplotlib.figure import Figure

        # Two in one page have no names in common.
        matplotlib.rcParams.update({"svg.hashsalt": f"stagerun{width}", "font.size": 8.5, "axes.titlesize": 9.5})
        rows = 1 + max(lanes(longest).values(), default=0)
        height = TOP + sum(high + GAP for *_, high in panels) + LANE * rows + 0.45
        figure = Figure(figsize=(width, height), dpi=72, facecolor="none")
        last = max((end for run in runs for _, _, end in extents(run)), default=0.0)
        placed, at = [], TOP
        for kind, name, high in panels:
            if kind == "speed":  # beneath the lines of stages
                _stages(longest, len(runs) == 1, _axes(figure, at + 0.06, LANE * rows), last)
                at += LANE * rows + 0.4
            axes = _axes(figure, at, high)
            _DRAW[kind](runs, axes)
            axes.set_title(name)
            axes.grid(color=GRID)
            axes.tick_params(length=3, color=RULE)
            at += high + GAP
            if kind != "speed":
                axes.set_xlim(0, 1.01 * last or 1.0)
                placed.append((kind, axes))
                for _, begin, _ in extents(longest):
                    axes.axvline(begin, color=RULE, linewidth=0.8, zorder=0.5)
        for _, axes in placed[:-1]:
            axes.tick_params(labelbottom=False)
        if placed:
            placed[-1][1].set_xlabel("epochs")
        found = []
        for kind, axes in placed:
            box, x, y = axes.bbox, axes.get_xlim(), axes.get_ylim()
            high = 72 * height
            found.append((kind, [box.x0, box.x1, *x], [high - box.y1, high - box.y0, y[1], y[0]]))
        label = "Top-1, loss and learning rate over epochs, and images per second over time"
        return Drawing(inline(saved_svg(figure, title), label), found)


def _axes(figure: "Figure", top: float, high: float) -> "Axes":
    width, height = figure.get_size_inches()
    across = (width - LEFT - RIGHT) / width
    return figure.add_axes((LEFT / width, 1 - (top + high) / height, across, high / height), facecolor="none")


def _has(runs: Sequence[Run], kind: str) -> bool:
    if kind == "top1":
        return any(stage.tests for run in runs for stage in run.history.stages)
    if kind == "speed":
        return any(life.speeds for run in runs for life in run.history.lives)
    return any(begun(run) for run in runs)


class _Strokes:
    """Lines and dots of one panel; what looks the same is one object of matplotlib, which takes long for each."""

    def __init__(self) -> None:
        self._found: dict[tuple[tuple[str, Any], ...], tuple[list[float], list[float]]] = {}

    def add(self, pairs: Iterable[tuple[float, float]], **style: Any) -> None:
        for x, y in (*pairs, (math.nan, math.nan)):
            xs, ys = self._found.setdefault(tuple(style.items()), ([], []))
            xs.append(x)
            ys.append(y)

    def tests(self, stage: StageHistory, hue: str, tests: dict[bool, list[tuple[float, float]]]) -> None:
        for ema, found in tests.items():
            style = {"color": hue, "markerfacecolor": "none" if ema else hue, "marker": "o", "linestyle": "none"}
            inside, end = (found[:-1], found[-1:]) if stage.finished else (found, [])
            self.add(inside, **style, markersize=2.5)
            self.add(end, **style, markersize=5)

    def draw(self, axes: "Axes") -> None:
        for style, (xs, ys) in self._found.items():
            if any(x == x for x in xs):
                axes.plot(xs, ys, **dict(style))


# -- over epochs


def _rates(runs: Sequence[Run], axes: "Axes") -> None:
    drawn, strokes = set(), _Strokes()
    for _, stage, hue, dashes in reversed(lines(runs)):
        rates = [place for bin in (stage.trained.bins if stage.trained else ()) for place in bin.rates]
        if repr(rates) not in drawn:
            strokes.add(rates, color=hue, linestyle=dashes)
        drawn.add(repr(rates))
    strokes.draw(axes)
    axes.set_ylim(bottom=0)


def _losses(runs: Sequence[Run], axes: "Axes") -> None:
    strokes = _Strokes()
    for _, stage, hue, dashes in lines(runs):
        bins = stage.trained.bins if stage.trained else ()
        strokes.add(((b.epoch, b.loss) for b in bins), color=hue, linestyle=dashes, linewidth=1.0)
        at = [bisect_left(bins, resume + 1, key=lambda b: b.iter) for resume in stage.resumes]
        strokes.add(((bins[i].epoch, bins[i].loss) for i in at if i < len(bins)), color=hue, **_RESUME)
        strokes.tests(stage, hue, {ema: [(e, t.loss) for e, t in stage.tests if t.ema is ema] for ema in (True, False)})
    strokes.draw(axes)
    axes.set_ylim(bottom=0)


def _accuracies(runs: Sequence[Run], axes: "Axes") -> None:
    ends: dict[tuple[str, str, bool], tuple[float, float]] = {}
    strokes = _Strokes()
    for run, stage, hue, dashes in lines(runs):
        tests = {ema: [(e, 100 * t.top1) for e, t in stage.tests if t.ema is ema] for ema in (True, False)}
        parent = run.history.follows(stage) if stage.name not in run.stale else None
        for ema, found in tests.items():
            before = ends.get((run.label, parent.name, ema)) if parent else None
            joined = [*([before] if before else []), *found]
            strokes.add(joined, color=hue, linestyle=dashes, linewidth=0.6 if ema else 1.1)
            if found:
                ends[run.label, stage.name, ema] = found[-1]
        strokes.tests(stage, hue, tests)
    together = [(epoch, 100 * tested.top1) for run in runs for tested, epoch in ensembles(run)]
    strokes.add(together, marker="D", color=INK, markerfacecolor="none", markersize=8, linestyle="none")
    strokes.draw(axes)
    if (least := hidden(runs)) is not None:
        axes.set_ylim(bottom=least)


def _stages(run: Run, alone: bool, axes: "Axes", last: float) -> None:
    """A line for each branch, joined to its parent's; filled as far as a stage has come."""
    from matplotlib.patches import Rectangle

    from stagerun.report.plots.strips import MARGIN, SIZE, wide

    found, own = lanes(run), {stage.name: hue for stage, hue, _ in hues(run, None)}
    axes.set_xlim(0, 1.01 * last or 1.0)
    axes.set_ylim(1 + max(found.values(), default=0), 0)
    axes.axis("off")
    inch = (axes.get_xlim()[1]) / (axes.bbox.width / 72)
    for stage, (name, begin, end) in zip(begun(run), extents(run), strict=True):
        row, done = found[name], begin + stage.epochs
        axes.add_patch(Rectangle((begin, row + 0.08), done - begin, 0.84, facecolor=FILLS[0], edgecolor="none"))
        axes.add_patch(
            Rectangle((begin, row + 0.08), end - begin, 0.84, facecolor="none", edgecolor=RULE, linewidth=0.7)
        )
        axes.plot([begin, done], [row + 0.9] * 2, color=own[name] if alone else SOFT, linewidth=1.8)
        if wide(name, SIZE) + 2 * MARGIN <= (end - begin) / inch:
            axes.annotate(
                name, (begin, row + 0.5), (72 * MARGIN, 0), textcoords="offset points", va="center_baseline", size=SIZE
            )
        if stage.parent in found and found[stage.parent] != row:
            axes.plot([begin] * 2, [found[stage.parent] + 0.92, row + 0.5], color=SOFT, linewidth=0.9, zorder=4)


# -- over time

_UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def _speeds(runs: Sequence[Run], axes: "Axes") -> None:
    longest = max(run.history.wall_seconds for run in runs)
    _, unit, name = next(u for u in _UNITS if longest >= u[0])
    fastest, strokes = 0.0, _Strokes()
    for number, run in enumerate(runs):
        hue, dashes = colour(number)
        offset = 0.0
        for life in run.history.lives:
            line = [((offset + seconds) / unit, speed) for seconds, speed in life.speeds]
            strokes.add(line, color=hue, linestyle=dashes)
            strokes.add(line[:1] if life.number > 1 else [], color=hue, **_RESUME)
            fastest = max(fastest, *(speed for _, speed in line), 0.0)
            offset += life.ended - life.begun
    strokes.draw(axes)
    axes.set_xlabel(f"{name} of work")
    axes.set_ylim(0, 1.12 * fastest or 1.0)
    axes.set_xlim(0, 1.01 * longest / unit or 1.0)


_DRAW = {"top1": _accuracies, "loss": _losses, "lr": _rates, "speed": _speeds}
