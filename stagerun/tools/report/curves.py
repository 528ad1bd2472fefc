"""The curves of a report: what they show, and drawn by matplotlib as SVG. Equal runs give equal bytes."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stagerun.base.events import EnsembleTested
from stagerun.base.recipe import point
from stagerun.drawing.colours import COLOURS, CURVES, DASHES, FILLS, GRID, INK, RULE, SOFT
from stagerun.drawing.html import variable
from stagerun.tools.report.history import Run, StageHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 900  # in each panel, shared by the runs
LEAST_POINTS = 60  # of one run

COLUMNS = ("top1", "loss", "lr")  # of a point, after its series, iteration and epoch; `loss` of training or validation


def most(runs: int) -> int:
    """How many points a run's curve has where so many runs share a panel."""
    return max(LEAST_POINTS, POINTS // runs)


def colour(number: int) -> tuple[str, str]:
    """Colour and dashes of the run, or of one run's branch, with that number, 0-based."""
    return CURVES[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def started(run: Run) -> list[StageHistory]:
    return [stage for stage in run.history.stages if stage.trained]


def lanes(run: Run) -> dict[str, int]:
    """The line of each stage that has started. The first to go on from its parent's end shares the parent's; 0 is the trunk's."""
    found: dict[str, int] = {}
    followed: set[str] = set()
    for stage in started(run):
        parent = run.history.follows(stage)
        goes_on = parent is not None and parent.name in found and parent.name not in followed
        found[stage.name] = found[parent.name] if parent and goes_on else max(found.values(), default=-1) + 1
        followed |= {parent.name} if parent and goes_on else set()
    return found


def extents(run: Run) -> tuple[tuple[str, float, float], ...]:
    """Name, first and last epoch of each stage that has started, as far as it will go."""

    def end(stage: StageHistory) -> float:
        done = stage.iter - stage.begins
        return stage.begin + stage.epochs * (stage.max_iter - stage.begins) / done if done > 0 else stage.begin

    return tuple((s.name, round(s.begin, 3), round(end(s), 3)) for s in started(run))


def hues(run: Run, number: int | None) -> list[tuple[StageHistory, str, str]]:
    """Colour and dashes of each stage: its run's, or where that is the only one (None) its branch's."""
    found = lanes(run)
    return [(s, *colour(found.get(s.name, 0) if number is None else number)) for s in run.history.stages]


def lines(runs: Sequence[Run]) -> list[tuple[Run, StageHistory, str, str]]:
    """All stages, with colour and dashes. Those of the first run come last, so that they lie on top."""
    numbered = [(run, None if len(runs) == 1 else n) for n, run in enumerate(runs)]
    return [(run, *line) for run, number in reversed(numbered) for line in hues(run, number)]


def ensembles(run: Run) -> list[tuple[EnsembleTested, float]]:
    """With the epoch at which the last of the members ends, or lies where it is a snapshot in a stage's midst."""

    def epoch(member: str) -> float:
        name, iter = point(member)
        stage = run.history.stage(name)
        if stage is None:
            return 0.0
        done = stage.iter - stage.begins
        share = 1.0 if iter is None or done <= 0 else (iter - stage.begins) / done
        return stage.begin + share * stage.epochs

    return [(tested, max(map(epoch, tested.members))) for tested in run.history.ensembles]


def points(runs: Sequence[Run]) -> tuple[list[dict[str, str]], list[list[object]]]:
    """Series, one for each stage of each run, and what can be pointed at: [series, iteration, epoch, top-1 in percent, loss,
    learning rate, what it is], None for what it doesn't have. Numbers are short."""
    series: list[dict[str, str]] = []
    found: list[list[object]] = []
    for number, run in enumerate(runs):
        for stage, hue, _ in hues(run, None if len(runs) == 1 else number):
            name = stage.name if len(runs) == 1 else f"{run.label}: {stage.name}"
            for bin in stage.trained.bins if stage.trained else ():
                what = "" if bin.updates == 1 else f"mean of {bin.updates} iterations"
                rate = _short(bin.rates[-1][1])
                found.append([len(series), bin.iter, _short(bin.epoch), None, _short(bin.loss), rate, what])
            for epoch, test in stage.tests:
                what = "validation" + (", averaged weights" if test.ema else "")
                top1 = float(f"{100 * test.top1:.2f}")
                found.append([len(series), test.iter, _short(epoch), top1, _short(test.loss), None, what])
            series.append({"name": name, "colour": f"var({variable(hue)})"})
        for tested, epoch in ensembles(run):
            loss = None if tested.loss is None else _short(tested.loss)
            name = f"ensemble {tested.name}" if len(runs) == 1 else f"{run.label}: ensemble {tested.name}"
            found.append([len(series), None, _short(epoch), float(f"{100 * tested.top1:.2f}"), loss, None, tested.rule])
            series.append({"name": name, "colour": f"var({variable(INK)})"})
    return series, found


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def caption(runs: Sequence[Run]) -> str:
    """How they were drawn."""
    bins = max((b.updates for run in runs for s in run.history.stages if s.trained for b in s.trained.bins), default=1)
    each = "every iteration" if bins == 1 else f"each point is the mean of {bins} iterations at most"
    longest = max(runs, key=lambda run: len(started(run)))
    same = "; runs that have the same are drawn once" if len(runs) > 1 else ""
    found = [
        "Top-1 and validation loss: large dots at the end of a stage, small ones inside; hollow with averaged weights",
        f"Loss: the line is that of training, {each}; dots are validation",
        f"Learning rate: of as many iterations the first, the least, the largest and the last{same}",
        "Epochs count along the path of ancestors",
        "Images/s: over the time that processes were alive, what was done again among it",
    ]
    if any(run.history.ensembles for run in runs):
        found.insert(1, "Diamonds: ensembles, where the last of their members ends")
    if any(len(run.history.lives) > 1 for run in runs):
        found.append("Triangles: a resume")
    if any(set(extents(run)) - set(extents(longest)) for run in runs):
        found.append(f"The stages are marked as in {longest.label}")
    return ". ".join(found) + "."


# -- drawn

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
    from stagerun.drawing.figure import drawing, saved_svg
    from stagerun.drawing.html import inline

    longest = max(runs, key=lambda run: len(started(run)))
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
    return any(started(run) for run in runs)


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


def _stages(run: Run, alone: bool, axes: "Axes", last: float) -> None:
    """A line for each branch, joined to its parent's; filled as far as a stage has come."""
    from matplotlib.patches import Rectangle

    from stagerun.drawing.figure import MARGIN, SIZE, wide

    found, own = lanes(run), {stage.name: hue for stage, hue, _ in hues(run, None)}
    axes.set_xlim(0, 1.01 * last or 1.0)
    axes.set_ylim(1 + max(found.values(), default=0), 0)
    axes.axis("off")
    inch = (axes.get_xlim()[1]) / (axes.bbox.width / 72)
    for stage, (name, begin, end) in zip(started(run), extents(run), strict=True):
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
            offset += life.ended - life.began
    strokes.draw(axes)
    axes.set_xlabel(f"{name} of work")
    axes.set_ylim(0, 1.12 * fastest or 1.0)
    axes.set_xlim(0, 1.01 * longest / unit or 1.0)


_DRAW = {"top1": _accuracies, "loss": _losses, "lr": _rates, "speed": _speeds}
