"""What is drawn in which colour, on white and on black. A colour of the light set stands for one role alone, so that a page
can put another in its place."""

from stagerun.plan.picture import Picture, Unit
from stagerun.report.curves import COLOURS, DASHES

INK, SOFT, RULE, GRID = "#1d2430", "#5b6472", "#c3c9d2", "#e6e8ec"

# What the values of a band are filled with, in turn.
FILLS = ("#e3eaf3", "#cfdcec", "#f3ebdc", "#e0eedf", "#efe0ea", "#dfecee")

# Of the curves: first the trunk's.
CURVES = tuple(colour.lower() for colour in COLOURS)
OFF = "#8a929e"  # of a stage that is not enabled

DARK = {
    INK: "#e6e9ee",
    SOFT: "#a3abb8",
    RULE: "#4a525e",
    GRID: "#2b313a",
    OFF: "#7b8593",
    **dict(zip(FILLS, ("#2a3647", "#34465e", "#473e2c", "#2f422f", "#452f3f", "#2c4145"), strict=True)),
    **dict(zip(CURVES, ("#5fb2f0", "#ff8f4d", "#2fc79b", "#e79ac8", "#f2bb45", "#93d0f5", "#c9ced6"), strict=True)),
}


def curve_colours(picture: Picture, unit: Unit) -> dict[str, tuple[str, str]]:
    """Of each stage its colour and dashes: all on the trunk's line have one, each branch its own."""
    lanes = picture.lanes(unit)
    branches = [name for name, lane in lanes.items() if lane]
    found = {}
    for stage in picture.stages:
        number = 1 + branches.index(stage.name) if lanes[stage.name] else 0
        dashes = DASHES[number // len(CURVES) % len(DASHES)]
        found[stage.name] = (CURVES[number % len(CURVES)], dashes) if stage.enabled else (OFF, "dashed")
    return found
