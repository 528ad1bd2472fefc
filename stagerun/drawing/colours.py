"""What is drawn in which colour, on white and on black. A colour of the light set stands for one role alone, so that a page
can put another in its place."""

from dataclasses import dataclass

from stagerun.drawing.picture import Picture, Unit

# Okabe and Ito's colours, which colour-blind people can distinguish; from the eighth run on, dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
DASHES = ("solid", "dashed", "dotted")

INK, SOFT, RULE, GRID = "#1d2430", "#5b6472", "#c3c9d2", "#e6e8ec"
TEXTS = {"ink": INK, "soft": SOFT, "rule": RULE, "grid": GRID}

# What the values of a band are filled with, in turn.
FILLS = ("#e3eaf3", "#cfdcec", "#f3ebdc", "#e0eedf", "#efe0ea", "#dfecee")

# The colours of curves, the trunk's first.
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

OVER = "over"  # the dashes of the second of two sides: the first is seen through it


@dataclass(frozen=True, slots=True)
class Stroke:
    """How a stage's curve is drawn. `dashes` is one of DASHES, or OVER."""

    colour: str
    dashes: str


def stroke_of_run(number: int) -> Stroke:
    """Of several runs that with this number, 0-based."""
    return Stroke(CURVES[number % len(CURVES)], DASHES[number // len(CURVES) % len(DASHES)])


def strokes(picture: Picture, unit: Unit) -> dict[str, Stroke]:
    """By stage: a colour for each of `Picture.curves`, and none for what is not enabled."""
    numbers = picture.curves(unit)
    found = {}
    for stage in picture.stages:
        number = numbers[stage.name]
        dashes = DASHES[number // len(CURVES) % len(DASHES)]
        if stage.side != picture.sides[0]:
            dashes = OVER
        elif not stage.enabled:
            dashes = "dashed"
        found[stage.name] = Stroke(CURVES[number % len(CURVES)] if stage.enabled else OFF, dashes)
    return found


# -- as styles of a page or an SVG


def variable(colour: str) -> str:
    """The style variable that stands for a colour of the light set."""
    return "--c" + colour.lstrip("#")


def colour_style() -> str:
    """The variables of a page, light or dark as the reader's system is. Those of texts follow the others."""
    light = "".join(f"{variable(colour)}: {colour}; " for colour in DARK)
    texts = "".join(f"--{word}: var({variable(colour)}); " for word, colour in TEXTS.items())
    dark = "".join(f"{variable(colour)}: {other}; " for colour, other in DARK.items())
    return f":root {{ {light}{texts}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
