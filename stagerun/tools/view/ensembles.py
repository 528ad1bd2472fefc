"""The ensembles in the chart: a line each beneath the stages, and their members on the curve. Pure."""

from collections.abc import Iterable

from stagerun.drawing.svg import element, number, title, wide, words
from stagerun.tools.view.panel import SIZE, Axis, Panel, hue

HIGH, LINE, WRITTEN = 22.0, 4.0, 17.0  # pixels: of each line, to its dots, and to the foot of its text
APART = 5.0  # between dots


def ensembles(axis: Axis, top: float) -> str:
    """Their members in the colours of their curves, and the name below them."""
    found = [words("ensembles", axis.left - 8, top + WRITTEN, "band", "end")]
    for row, ensemble in enumerate(axis.picture.ensembles):
        y, places = top + HIGH * row, axis.picture.places(ensemble, axis.unit)
        first, last = axis.x(places[0][0]), axis.x(places[-1][0])
        label = ensemble.label(lambda text: wide(text, SIZE) <= axis.right - axis.left)
        inside = [title(ensemble.label(lambda _: True))]
        inside.append(element("path", d=f"M{number(first)},{number(y + LINE)}H{number(last)}", class_="join"))
        inside.append(_dots(axis, ((axis.x(x), y + LINE, stage.name) for x, stage, _ in places)))
        inside.append(words(label, min(first, axis.right - wide(label, SIZE)), y + WRITTEN))
        found.append(element("g", *inside))
    return "".join(found)


def members_on(panel: Panel) -> str:
    """Each where its stage's curve is after as many iterations."""
    axis = panel.axis
    every = (place for ensemble in axis.picture.ensembles for place in axis.picture.places(ensemble, axis.unit))
    return _dots(axis, ((axis.x(x), panel.y(stage.until(iter)[-1][1]), stage.name) for x, stage, iter in every))


def _dots(axis: Axis, places: Iterable[tuple[float, float, str]]) -> str:
    """Those that would lie on each other are one."""
    found = {(stage, round(x / APART)): (x, y) for x, y, stage in places}
    return "".join(
        element("circle", cx=x, cy=y, r=2.2, class_=f"dot {hue(axis.strokes[stage])}")
        for (stage, _), (x, y) in found.items()
    )
