"""The loss over the rate, in a terminal and as a file."""

import math

from stagerun.drawing.colours import COLOURS, GRID, RULE, SOFT
from stagerun.drawing.figure import drawing, saved_png, saved_svg
from stagerun.drawing.scale import labels, round_steps
from stagerun.drawing.terminal import curve
from stagerun.tools.find_lr.sweep import Sweep, suggestion

NEAR = 1.25  # times the largest smoothed loss: what one batch has above that is not shown


def _range(sweep: Sweep) -> tuple[float, float]:
    high = NEAR * max(point.smoothed for point in sweep.points)
    return min(min(point.loss, point.smoothed) for point in sweep.points) * 0.95, high


def _decades(sweep: Sweep) -> list[int]:
    first, last = sweep.points[0].lr, sweep.points[-1].lr
    return list(range(math.ceil(math.log10(first) - 1e-9), math.floor(math.log10(last) + 1e-9) + 1))


def in_terminal(sweep: Sweep, width: int) -> list[str]:
    """The smoothed loss; the rates are logarithmic. UsageError where plotext can't be loaded."""
    line = [(math.log10(point.lr), point.smoothed) for point in sweep.points]
    low, high = min(y for _, y in line), max(y for _, y in line)
    margin = 0.05 * (high - low) or 0.1
    low, high = low - margin, high + margin
    ticks = round_steps(low, high, 6)
    across = [(float(decade), f"1e{decade}") for decade in _decades(sweep)]
    lines = curve(line, across, list(zip(ticks, labels(ticks), strict=True)), (low, high), width)
    return ["smoothed loss over the rate", "", *lines]


def picture(sweep: Sweep, png: bool) -> bytes:
    """An SVG, or a PNG. UsageError without matplotlib."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4.6), dpi=72, facecolor="white", layout="constrained")
        axes = figure.subplots()
        rates = [point.lr for point in sweep.points]
        axes.plot(rates, [p.loss for p in sweep.points], ".", color=RULE, markersize=4, label="loss of each batch")
        axes.plot(rates, [p.smoothed for p in sweep.points], color=COLOURS[0], linewidth=1.6, label="smoothed")
        best = suggestion(sweep)
        for value, name, colour in ((best.steepest, "steepest", COLOURS[2]), (best.tenth, "minimum/10", COLOURS[1])):
            if value is not None:
                axes.axvline(value, color=colour, linewidth=1.2, linestyle="dashed", label=f"{name}: {value:.3g}")
        axes.set_xscale("log")
        decades = _decades(sweep)
        axes.set_xticks([10.0**decade for decade in decades], [f"1e{decade}" for decade in decades])
        axes.minorticks_off()
        axes.set_ylim(*_range(sweep))
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss", color=SOFT)
        axes.grid(color=GRID)
        axes.legend(loc="upper left", fontsize=8)
        figure.suptitle(
            f"{sweep.schedule}, stage {sweep.stage}: {sweep.batch_size} images per iteration, from {sweep.start}",
            size=11,
        )
        return saved_png(figure) if png else saved_svg(figure, sweep.schedule).encode()
