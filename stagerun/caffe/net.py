"""A net of Caffe's as values: what `resolve` makes of a prototxt and `network` builds.

Shapes are those of one image: (channels, height, width) or (outputs,), without Caffe's first axis.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from stagerun.base.recipe import Filler

if TYPE_CHECKING:
    from stagerun.caffe.reading import Settings

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A parameter. `name` is that in the network's state, `conv1.weight`; of a shared one that of the layer which has it first."""

    name: str
    shape: Shape
    filler: Filler
    lr_mult: float = 1.0
    decay_mult: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """`bottoms` and `tops` are names of maps. A top that is also a bottom is computed in place. `shapes`: of the tops, as far as they are
    maps of images; a loss has (), labels have ()."""

    name: str
    type: str  # Caffe's word
    settings: "Settings"
    bottoms: tuple[str, ...] = ()
    tops: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    blobs: tuple[Blob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The layers of one phase in their order. `images` and `labels`: the maps that go in ('' where no labels do).
    `logits`: what comes out, [classes] for each image: the first bottom of the last SoftmaxWithLoss, else of an Accuracy or a Softmax,
    else the last top that nothing takes."""

    layers: tuple[Layer, ...]
    images: str
    labels: str
    logits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """Both phases; layers of the same name have the same blobs. `shape` is that of an image. `text`: the canonical form of the prototxt."""

    name: str
    shape: Shape
    num_classes: int
    train: Pass
    test: Pass
    text: str = ""

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (*self.train.layers, *self.test.layers)


def costs(of: Pass) -> Iterator[tuple[Layer, int, int]]:
    """Each layer, its parameters that no layer before has, and the multiply-adds of one image's forward pass; a multiply and the add after
    it count once, as in the papers that publish such figures."""
    shapes: dict[str, Shape] = {}
    counted: set[str] = set()
    for layer in of.layers:
        new = {blob.name: prod(blob.shape) for blob in layer.blobs if blob.name not in counted}
        counted |= new.keys()
        adds = layer.settings.multiply_adds(layer, shapes.get(layer.bottoms[0], ()) if layer.bottoms else ())
        yield layer, sum(new.values()), adds
        shapes.update(zip(layer.tops, layer.shapes, strict=True))
