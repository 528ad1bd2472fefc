"""What the blocks of a net's layers say: their types, the phases that they are in, and the shapes of images that stand in the text."""

from collections.abc import Iterable

from stagerun.language.tree import Block
from stagerun.language.view import View

TRAIN, TEST = PHASES = ("TRAIN", "TEST")
IMAGES = ("Data", "ImageData", "DummyData", "Input")
# The types whose tops have shapes in the text, and the messages where these stand.
SHAPED = {"Input": "input_param", "DummyData": "dummy_data_param"}


def type_of(layer: Block) -> str:
    return View(layer).text("type") or ""


def name_of(layer: Block) -> str:
    """Its name, or its type where it has none."""
    return View(layer).text("name") or type_of(layer)


# -- phases


def layers_in(layers: Iterable[Block], phase: str) -> list[Block]:
    """The layers that one `include` rule lets in, or, where there is none, no `exclude` rule keeps out: at level 0, without stages."""

    def meets(rule: View) -> bool:
        right = not rule.has("phase") or rule.text("phase") == phase
        return (
            right and (rule.whole("min_level") or 0) <= 0 <= (rule.whole("max_level") or 0) and not rule.texts("stage")
        )

    def kept(layer: View) -> bool:
        include = list(layer.views("include"))
        return any(map(meets, include)) if include else not any(map(meets, layer.views("exclude")))

    return [layer for layer in layers if kept(View(layer))]


# -- shapes


def top_shapes(layer: Block) -> list[tuple[int, ...]]:
    """The shapes of an Input or DummyData layer, with Caffe's first axis; one for each top. None of other layers."""
    view = View(layer)
    if (message := SHAPED.get(type_of(layer))) is None:
        return []
    own, tops = view.inside(message), len(view.texts("top"))
    shapes = [tuple(int(n) for n in shape.numbers("dim")) for shape in own.views("shape")]
    return shapes * tops if len(shapes) == 1 else shapes


def map_shapes(layer: Block) -> list[tuple[int, ...]]:
    """The same for one image. () for labels, which have one to four axes in Caffe."""
    shapes = (dims[1:] for dims in top_shapes(layer))
    return [() if dims in ((1,), (1, 1), (1, 1, 1)) else dims for dims in shapes]


def image_shape(layer: Block) -> tuple[int, int, int] | None:
    """(channels, height, width) of Input and DummyData; None of others."""
    found = (dims for dims in map_shapes(layer) if len(dims) == 3)
    return next(found, None)  # type: ignore[arg-type]
