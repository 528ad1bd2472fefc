"""A net as a drawing: a box for each layer below those whose tops it takes, layers computed in place in the box of theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagerun.base import net
from stagerun.base.errors import UsageError
from stagerun.drawing.colours import FILLS, INK, RULE, SOFT
from stagerun.drawing.figure import drawing, saved_svg
from stagerun.language.net.cost import Cost

MOST_BOXES = 2000
WIDTH, HEIGHT, BESIDE, BELOW, EDGE = 1.9, 0.62, 0.35, 0.3, 0.4  # inches: of a box, between boxes, around all
# What a box is filled with, by the type of its layer; others are white.
KINDS = {
    "Convolution": FILLS[0], "Deconvolution": FILLS[0], "InnerProduct": FILLS[1], "Pooling": FILLS[2], "LRN": FILLS[3], "BatchNorm": FILLS[3],
    "Scale": FILLS[3], "Concat": FILLS[4], "Eltwise": FILLS[4], "Slice": FILLS[4], "Split": FILLS[4], "SoftmaxWithLoss": FILLS[5],
    "Softmax": FILLS[5], "Accuracy": FILLS[5],
}  # fmt: skip


@dataclass(slots=True)
class Box:
    """`above`: the boxes whose tops it takes. `x` in boxes from the middle."""

    layer: net.Layer
    row: int
    above: list["Box"]
    inside: list[str] = field(default_factory=list)
    x: float = 0.0
    parameters: int = 0


def layout(cost: Sequence[Cost], labels: str) -> list[list[Box]]:
    """Rows of boxes, each below all that it takes from, apart from the labels."""
    makers: dict[str, Box] = {}
    boxes: list[Box] = []
    for one in cost:
        layer = one.layer
        above = list({id(makers[b]): makers[b] for b in layer.bottoms if b in makers and b != labels}.values())
        if layer.tops and set(layer.tops) <= set(layer.bottoms) and len(above) == 1:
            above[0].inside.append(layer.type)
            above[0].parameters += one.parameters
            continue
        box = Box(layer, 1 + max((b.row for b in above), default=-1), above, parameters=one.parameters)
        boxes.append(box)
        makers |= dict.fromkeys(layer.tops, box)
    rows: list[list[Box]] = [[] for _ in range(1 + max((b.row for b in boxes), default=0))]
    for box in boxes:
        rows[box.row].append(box)
    for row in rows:
        row.sort(key=lambda b: sum(a.x for a in b.above) / max(1, len(b.above)))
        for i, box in enumerate(row):
            box.x = i - (len(row) - 1) / 2
    return rows


def svg(name: str, of: net.Pass, cost: Sequence[Cost]) -> str:
    """UsageError without matplotlib, or for a net of very many layers."""
    if len(cost) > MOST_BOXES:
        raise UsageError(f"the net has {len(cost)} layers, and a drawing at most {MOST_BOXES}", "leave --svg out")
    rows = layout(cost, of.labels)
    wide = max(len(row) for row in rows) * (WIDTH + BESIDE) + 2 * EDGE + WIDTH
    high = len(rows) * (HEIGHT + BELOW) + 2 * EDGE
    with drawing():
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch, PathPatch
        from matplotlib.path import Path

        figure = Figure(figsize=(wide, high), dpi=72)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set(xlim=(0, wide), ylim=(high, 0))
        axes.axis("off")
        axes.text(EDGE / 2, EDGE / 2, name, weight="bold", va="center")

        def middle(box: Box) -> float:
            return wide / 2 + box.x * (WIDTH + BESIDE)

        def top(box: Box) -> float:
            return EDGE + BELOW + box.row * (HEIGHT + BELOW)

        for box in (box for row in rows for box in row):
            for upper in box.above:
                points = _way((middle(upper), top(upper) + HEIGHT), (middle(box), top(box)), box.row - upper.row > 1)
                codes = [Path.MOVETO] + [Path.CURVE4] * 3
                axes.add_patch(PathPatch(Path(points, codes), fill=False, edgecolor=RULE, linewidth=1.0, zorder=1))
            left, fill = middle(box) - WIDTH / 2, KINDS.get(box.layer.type, "white")
            shape = FancyBboxPatch(
                (left, top(box)),
                WIDTH,
                HEIGHT,
                "round,pad=0,rounding_size=0.06",
                facecolor=fill,
                edgecolor=RULE,
                zorder=2,
            )
            axes.add_patch(shape)
            for i, (line, colour) in enumerate(zip(lines(box), (INK, SOFT, SOFT), strict=True)):
                axes.text(left + 0.08, top(box) + 0.15 + 0.17 * i, line, size=6.5, color=colour, va="center", zorder=3)
        return saved_svg(figure, name)


def lines(box: Box) -> tuple[str, str, str]:
    """What a box says: its name, its type with those in place, its shape and parameters."""
    shape = next(("x".join(map(str, s)) for s in box.layer.shapes if s), "")
    parameters = f"{box.parameters:,} parameters" if box.parameters else ""
    return (
        _short(box.layer.name, 34),
        _short(" + ".join([box.layer.type, *box.inside]), 38),
        "   ".join(filter(None, (shape, parameters))),
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _way(start: tuple[float, float], end: tuple[float, float], far: bool) -> list[tuple[float, float]]:
    """A curve from the foot of one box to the head of another; past the boxes between them where it is far."""
    (x, y), (u, v) = start, end
    aside = WIDTH / 2 + BESIDE if far and abs(x - u) < WIDTH else 0.0
    if not aside:
        return [(x, y), (x, (y + v) / 2), (u, (y + v) / 2), (u, v)]
    side = max(x, u) + aside * 4 / 3
    return [(x, y), (side, y), (side, v), (u, v)]
