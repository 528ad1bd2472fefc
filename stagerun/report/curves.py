"""The curves of a report, drawn by matplotlib as one SVG. Equal runs give equal bytes."""

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stagerun.errors import UsageError
from stagerun.report.history import StageHistory
from stagerun.report.runs import Run
from stagerun.report.thin import chunk_size, learning_rates, mean_loss, speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which are told apart by people who see fewer; from the eighth run on, dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
DASHES = ("solid", "dashed", "dotted")

POINTS = 900  # in each panel, shared by the runs
LEAST_POINTS = 60  # of one run

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "stagerun",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "lines.linewidth": 1.3,
}
_RESUME: dict[str, Any] = {"marker": "^", "markersize": 7, "markeredgecolor": "white", "linestyle": "none"}


def colour(number: int) -> tuple[str, str]:
    """Colour and dashes of the run with that number, 0-based."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def curves(runs: Sequence[Run]) -> tuple[str, str]:
    """The SVG, and a caption that says how it was drawn. UsageError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("curves need matplotlib, which is not installed", "pip install 'stagerun[plots]'") from error
    most = max(LEAST_POINTS, POINTS // len(runs))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        figure = Figure(figsize=(10.5, 11.5), layout="constrained")
        rates, losses, accuracy, work = figure.subplots(4, 1, height_ratios=(1, 1.2, 1.6, 0.9))
        for axes in (losses, accuracy):
            axes.sharex(rates)
        _learning_rates(runs, rates, most)
        smoothed = _losses(runs, losses, most)
        hidden = _accuracies(runs, accuracy)
        _mark_stages(_longest(runs), rates, (rates, losses, accuracy))
        for axes in (rates, losses):
            axes.tick_params(labelbottom=False)
        last = max((end for run in runs for _, _, end in _extents(run)), default=0.0)
        rates.set_xlim(0, 1.01 * last or 1.0)
        averaged = _by_time(runs, work, most)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    return _inline(buffer.getvalue()), _caption(runs, smoothed, averaged, hidden)


def _inline(svg: str) -> str:
    """As it stands in a page: without prolog, as wide as there is room, described for those who don't see it."""
    svg = svg[svg.index("<svg ") :]
    label = "Learning rate, training loss and top-1 over epochs, and images per second over time"
    opening, rest = svg[: svg.index(">")], svg[svg.index(">") :]
    opening = re.sub(r' (?:width|height)="[^"]*"', "", opening)
    return opening.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1) + rest


def _caption(runs: Sequence[Run], smoothed: int, averaged: int, hidden: float | None) -> str:
    def each(size: int) -> str:
        return "every iteration" if size == 1 else f"each point is the mean of {size} iterations at most"

    text = (
        "Learning rate: not smoothed; runs that have the same are drawn once. "
        f"Loss: {each(smoothed)}. "
        "Top-1: large dots at the end of a stage, small ones inside; hollow with averaged weights. "
    )
    if hidden is not None:
        text += f"Tests below {hidden:.1f} % are not shown. "
    text += (
        "Epochs count along the path of ancestors. "
        f"Images/s: {each(averaged)}, over the time that processes were alive, what was done again among it. "
        "Triangles: a resume."
    )
    longest = _longest(runs)
    if any(set(_extents(run)) - set(_extents(longest)) for run in runs):
        text += f" The stages are marked as in {longest.label}."
    return text


# -- over epochs


def _learning_rates(runs: Sequence[Run], axes: "Axes", most: int) -> None:
    drawn: dict[object, int] = {}
    lines = []
    for number, run in enumerate(runs):
        size = _size(run, most)
        found = [learning_rates(stage.points, size) for stage in run.history.stages if stage.points]
        if drawn.setdefault(repr(found), number) == number:
            lines.append((number, found))
    for number, found in reversed(lines):  # the first run lies on top
        hue, dashes = colour(number)
        for epochs, rates in found:
            axes.plot(epochs, rates, color=hue if len(lines) > 1 else "#444444", linestyle=dashes)
    axes.set_title("Learning rate")
    axes.set_ylim(bottom=0)


def _size(run: Run, most: int) -> int:
    return chunk_size(sum(len(stage.points) for stage in run.history.stages), most)


def _losses(runs: Sequence[Run], axes: "Axes", most: int) -> int:
    """How many iterations a point stands for at most."""
    for number, run in enumerate(runs):
        hue, dashes = colour(number)
        size = _size(run, most)
        for stage in run.history.stages:
            epochs, losses = mean_loss(stage.points, size)
            axes.plot(epochs, losses, color=hue, linestyle=dashes)
            at = [i // size for i, point in enumerate(stage.points) if point.iter - 1 in stage.resumes]
            axes.plot([epochs[i] for i in at], [losses[i] for i in at], color=hue, **_RESUME)
    axes.set_title("Training loss")
    return max(_size(run, most) for run in runs)


def _accuracies(runs: Sequence[Run], axes: "Axes") -> float | None:
    """What lies below the axis, if anything: it begins a little below the least result of a stage, since the first tests
    of a training are far below all that is worth comparing."""
    for number, run in enumerate(runs):
        hue, dashes = colour(number)
        for averaged in (True, False):
            ends: dict[str, tuple[float, float]] = {}
            for stage in run.history.stages:
                tests = [(epoch, 100 * test.top1) for epoch, test in stage.tests if test.ema is averaged]
                parent = run.history.follows(stage)
                from_parent = parent is not None and parent.name in ends and stage.name not in run.stale
                joined = [ends[parent.name], *tests] if from_parent and parent else tests
                style: dict[str, Any] = {"color": hue, "markerfacecolor": "white" if averaged else hue}
                axes.plot(*_xy(joined), color=hue, linestyle=dashes, linewidth=0.6 if averaged else 1.1)
                inside, end = (tests[:-1], tests[-1:]) if stage.finished else (tests, [])
                axes.plot(*_xy(inside), **style, marker="o", markersize=2.5, linestyle="none")
                axes.plot(*_xy(end), **style, marker="o", markersize=5.5, linestyle="none")
                if tests:
                    ends[stage.name] = tests[-1]
    axes.set_title("Test top-1, %")
    axes.set_xlabel("epochs")
    return _cut_off(runs, axes)


def _xy(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _cut_off(runs: Sequence[Run], axes: "Axes") -> float | None:
    stages = [stage for run in runs for stage in run.history.stages]
    ends = [100 * s.finished.top1 for s in stages if s.finished and s.finished.top1 is not None]
    tests = [100 * test.top1 for stage in stages for _, test in stage.tests]
    if not ends or not tests:
        return None
    low, high = min(ends), max(*ends, *tests)
    margin = max(0.5, 0.12 * (high - low))
    if low - margin <= min(tests):
        return None
    axes.set_ylim(low - margin, high + margin)
    return low - margin


def _extents(run: Run) -> tuple[tuple[str, float, float], ...]:
    """Name, first and last epoch of each stage that has begun, as far as it will go."""

    def end(stage: StageHistory) -> float:
        return stage.begin + stage.epochs * stage.max_iter / stage.iter if stage.iter else stage.begin

    return tuple((s.name, round(s.begin, 3), round(end(s), 3)) for s in run.history.stages if s.points)


def _longest(runs: Sequence[Run]) -> Run:
    """The first of those that have begun the most stages."""
    return max(runs, key=lambda run: len(_extents(run)))


def _mark_stages(run: Run, top: "Axes", panels: Sequence["Axes"]) -> None:
    """A line where a stage begins, its name above the first panel; where names would meet, on the next line above."""
    extents = _extents(run)
    whole = max((end for _, _, end in extents), default=0.0) or 1.0
    taken: list[float] = []  # how far each line of names is filled, in epochs
    for name, begin, _ in extents:
        for axes in panels:
            axes.axvline(begin, color="#bbbbbb", linewidth=0.8, zorder=0.5)
        row = next((i for i, end in enumerate(taken) if end <= begin), len(taken))
        taken[row : row + 1] = [begin + whole * (0.012 + 0.0095 * len(name))]
        top.annotate(
            name, (begin, 1.0), xycoords=("data", "axes fraction"), xytext=(2, 4 + 10 * row),
            textcoords="offset points", fontsize=8, color="#555555", parse_math=False, annotation_clip=False,
        )  # fmt: skip
    top.set_title(top.get_title(loc="left"), pad=10 + 10 * max(1, len(taken)))


# -- over time


_UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def _by_time(runs: Sequence[Run], axes: "Axes", most: int) -> int:
    """The panel of images/s. How many iterations a point stands for at most."""
    longest = max(run.history.wall_seconds for run in runs)
    _, unit, name = next(u for u in _UNITS if longest >= u[0])
    largest, fastest = 1, 0.0
    for number, run in enumerate(runs):
        hue, dashes = colour(number)
        lives = run.history.lives
        size = chunk_size(sum(len(life.work) for life in lives), most)
        largest = max(largest, size)
        offset = 0.0
        for life in lives:
            x, y = speed(life.work, size, life.begun, offset)
            axes.plot([s / unit for s in x], y, color=hue, linestyle=dashes)
            if life is not lives[0] and x:
                axes.plot([x[0] / unit], [y[0]], color=hue, **_RESUME)
            fastest = max(fastest, *y, 0.0)
            offset += life.ended - life.begun
    axes.set_title("Images/s")
    axes.set_xlabel(f"{name} of work")
    axes.set_ylim(0, 1.12 * fastest or 1.0)
    axes.set_xlim(0, 1.01 * longest / unit or 1.0)
    return largest
