"""What a net's layers cost. A multiply and the add after it count once, as in the papers that publish such figures; counted are
convolutions and linear layers alone, without their biases."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from stagerun.base import net


@dataclass(frozen=True, slots=True)
class Cost:
    """`parameters`: those that no layer before has. `multiply_adds`: of one image's forward pass."""

    layer: net.Layer
    parameters: int
    multiply_adds: int


def costs(of: net.Pass) -> Iterator[Cost]:
    """Layer by layer."""
    shapes: dict[str, net.Shape] = {}
    counted: set[str] = set()
    for layer in of.layers:
        new = [blob for blob in layer.blobs if blob.name not in counted]
        counted.update(blob.name for blob in new)
        yield Cost(layer, sum(prod(blob.shape) for blob in new), _multiply_adds(layer, shapes))
        shapes.update(zip(layer.tops, layer.shapes, strict=True))


def _multiply_adds(layer: net.Layer, shapes: dict[str, net.Shape]) -> int:
    """Each weight is used once for each place of the map: of the top, of a transposed convolution of the bottom."""
    match layer.settings:
        case net.Convolution(transposed=transposed):
            places = shapes[layer.bottoms[0]] if transposed else layer.shapes[0]
            return prod(layer.blobs[0].shape) * prod(places[1:])
        case net.InnerProduct(axis=axis):
            return prod(layer.blobs[0].shape) * prod(layer.shapes[0][: axis - 1])
    return 0
