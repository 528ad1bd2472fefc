"""How stale the pushes of each stage were, and each replica's part of them, drawn. Equal runs give equal bytes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stagerun.base.staleness import Staleness
from stagerun.drawing.colours import CURVES, RULE
from stagerun.tools.report.history import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, HIGH, GAP, BAR, BARS = 11.0, 1.5, 0.75, 0.8, 24  # inches, but BAR of a place, and BARS of a histogram
LETTERS = 75  # that have room beneath a panel
LEFT, MIDDLE = 0.6, 0.5  # inches, and between the two panels

CAPTION = (
    "Left: updates between the pull of an iteration's weights and its own, and in percent how many iterations had so many. Right: the "
    "percent of the iterations that each replica, a rank, has computed"
)


def rows(run: Run) -> list[tuple[str, Staleness]]:
    """The stages whose replicas pushed."""
    return [(s.name, s.trained.staleness) for s in run.history.stages if s.trained and s.trained.staleness]


def draw(rows: Sequence[tuple[str, Staleness]], title: str) -> str:
    """An SVG, of a row for each stage. UsageError without matplotlib."""
    from stagerun.drawing.figure import drawing, saved_svg
    from stagerun.drawing.html import inline

    with drawing():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams.update({"svg.hashsalt": f"stagerun stale {title}", "font.size": 8.5, "axes.titlesize": 9.5})
        height = len(rows) * (HIGH + GAP)
        figure = Figure(figsize=(WIDE, height), dpi=72, facecolor="none")
        width = (WIDE - 2 * LEFT - MIDDLE) / 2
        for number, (name, found) in enumerate(rows):
            bottom = (height - (number + 1) * (HIGH + GAP) + GAP / 2) / height
            replicas = {str(rank): share for rank, share in found.shares.items()}
            panels = (f"{name}: {found}", dict(found.bars(BARS))), (f"{name}: replicas", replicas)
            for column, (text, shares) in enumerate(panels):
                left = (LEFT + column * (width + MIDDLE)) / WIDE
                axes = figure.add_axes((left, bottom, width / WIDE, HIGH / height), facecolor="none")
                axes.set_title(text)
                _bars(shares, CURVES[column], axes)
        return inline(saved_svg(figure, title), "Histograms of staleness, and each replica's part of the iterations")


def _bars(shares: Mapping[str, float], colour: str, axes: "Axes") -> None:
    places = range(len(shares))
    axes.bar(places, [100 * share for share in shares.values()], BAR, color=colour, linewidth=0)
    every = -(-sum(len(name) + 2 for name in shares) // LETTERS)
    axes.set_xticks(places[::every], list(shares)[::every])
    axes.set_xlim(-0.6, len(shares) - 0.4)
    axes.set_ylim(0, 108 * max(shares.values()))
    axes.tick_params(axis="x", length=0, color=RULE)
    axes.grid(False, axis="x")
