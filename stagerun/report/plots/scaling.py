"""The plot of `bench scaling`: efficiency by number of workers beside what was published, and where an iteration's time goes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagerun.report.bench_scaling import Measured, Row
from stagerun.report.plots.colours import GRID, RULE, SOFT
from stagerun.report.plots.figure import drawing, saved_png, saved_svg
from stagerun.report.published import PUBLISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = (("computing", "#4c78a8"), ("communicating", "#e45756"), ("waiting for data", "#f2b134"))
_MARKERS = ("x", "+", "^", "s", "d", "v")


def scaling_picture(found: Sequence[Row], measured: Measured, png: bool) -> bytes:
    """An SVG, or a PNG. UsageError without matplotlib."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.6), dpi=72, facecolor="white", layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _efficiency(left, found)
        _shares(right, found)
        figure.suptitle(
            f"{measured.schedule}, stage {measured.stage}: {measured.batch_size} images per iteration on {measured.device}",
            size=11,
        )
        return saved_png(figure) if png else saved_svg(figure, measured.schedule).encode()


def _efficiency(axes: "Axes", found: Sequence[Row]) -> None:
    for system, marker in zip(dict.fromkeys(p.system for p in PUBLISHED), _MARKERS, strict=False):
        points = [(p.workers, p.efficiency) for p in PUBLISHED if p.system == system]
        axes.plot(*zip(*points, strict=True), marker, color=SOFT, zorder=2, label=f"published: {system}")
    fewest = found[0]
    # Of the range of speeds, what it would make of the efficiency.
    low = [row.efficiency * (1 - row.low / row.images_per_second) for row in found]
    high = [row.efficiency * (row.high / row.images_per_second - 1) for row in found]
    axes.errorbar(
        [row.workers for row in found], [row.efficiency for row in found], yerr=[low, high], marker="o", color="#4c78a8", capsize=3,
        label="measured here, strong scaling (range of the speeds)", zorder=3,
    )  # fmt: skip
    axes.axhline(1.0, color=RULE, linewidth=0.9)
    axes.set_xscale("log", base=2)
    ticks = [2**n for n in range(10)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_ylim(0, max(1.1, *(row.efficiency + h for row, h in zip(found, high, strict=True))))
    axes.set_xlabel("workers")
    axes.set_ylabel(f"efficiency against {fewest.workers}")
    axes.grid(color=GRID)
    axes.legend(loc="lower left", fontsize=7)


def _shares(axes: "Axes", found: Sequence[Row]) -> None:
    names = [str(row.workers) for row in found]
    below = [0.0] * len(found)
    for (title, colour), values in zip(
        _PARTS, zip(*((r.computing, r.communicating, r.waiting) for r in found), strict=True), strict=True
    ):
        axes.bar(names, values, bottom=below, color=colour, label=title)
        below = [b + v for b, v in zip(below, values, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_xlabel("workers")
    axes.set_ylabel("share of an iteration")
    axes.legend(loc="lower right", fontsize=7)
