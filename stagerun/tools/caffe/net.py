"""Which of stagerun's networks the layers of a net are. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagerun.base.errors import Span
from stagerun.language.caffe_names import GROUPS, RESNET50
from stagerun.language.tree import Block
from stagerun.language.view import View


def text_of(block: Block, name: str) -> str:
    """A text field, '' where it is not written."""
    value = View(block).text(name) if name in block.entries else None
    return value or ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer with weights, as far as it makes a difference. `sizes`: outputs, kernel, stride, pad, groups; outputs alone of
    an InnerProduct."""

    name: str
    type: str
    sizes: tuple[int, ...]
    bias: bool
    place: Span


def shapes(layers: Sequence[Block]) -> list[Shape]:
    """The convolutions and linear layers of a network, in order."""
    found = []
    for layer in layers:
        name, kind = text_of(layer, "name"), text_of(layer, "type")
        if kind == "Convolution":
            view = View(layer).inside("convolution_param")
            sizes: tuple[int, ...] = (
                view.whole("num_output") or 0,
                _first(view, "kernel_size", "kernel_h", 0),
                _first(view, "stride", "stride_h", 1),
                _first(view, "pad", "pad_h", 0),
                view.whole("group") or 1,
            )
        elif kind == "InnerProduct":
            view = View(layer).inside("inner_product_param")
            sizes = (view.whole("num_output") or 0,)
        else:
            continue
        found.append(Shape(name, kind, sizes, view.flag("bias_term"), layer.place))
    return found


def _first(view: View, name: str, side: str, default: int) -> int:
    values = view.numbers(name)
    return int(values[0]) if values else view.whole(side) or default


def of_type(layers: Sequence[Block], *types: str) -> Iterator[Block]:
    return (layer for layer in layers if text_of(layer, "type") in types)


# -- nets that are one of stagerun's networks


def recognise(found: Sequence[Shape]) -> str:
    """The name of the network that the layers surely are, '' otherwise.

    The one there is: ResNet-50 of models/intel_optimized_models in sara-nl/caffe, which is recognised by name, width, kernel,
    stride, padding and bias of each of its 53 convolutions, and one linear layer at the end.
    """
    convolutions = {s.name: (s.sizes, s.bias) for s in found if s.type == "Convolution"}
    linear = [s for s in found if s.type == "InnerProduct"]
    return RESNET50 if convolutions == _resnet50() and len(linear) == 1 and found[-1] is linear[0] else ""


def _resnet50() -> dict[str, tuple[tuple[int, ...], bool]]:
    net: dict[str, tuple[tuple[int, ...], bool]] = {"conv1": ((64, 7, 2, 3, 1), True)}
    for group, blocks, width, out in GROUPS:
        for letter in "abcdef"[:blocks]:
            stride = 2 if letter == "a" and group > 2 else 1
            name = f"res{group}{letter}_branch"
            if letter == "a":
                net[f"{name}1"] = ((out, 1, stride, 0, 1), False)
            net[f"{name}2a"] = ((width, 1, 1, 0, 1), False)
            net[f"{name}2b"] = ((width, 3, stride, 1, 1), False)
            net[f"{name}2c"] = ((out, 1, 1, 0, 1), False)
    return net


def zero_gamma(layers: Sequence[Block]) -> str | None:
    """In which blocks of Intel's ResNet-50 the last scale starts at zero, as stagerun's Model.zero_gamma; None where it is
    another pattern. Intel's Caffe takes that from the filler of a BatchNorm, whose MKL-DNN form has scale and shift; BVLC's from
    that of a Scale layer.
    """
    zero = set()
    for layer in layers:
        for name in ("batch_norm_param", "scale_param"):
            settings = layer.block(name)
            filler = settings.block("filler") if settings else None
            if filler is not None and View(filler).number("value") == 0:
                zero.add(text_of(layer, "name").replace("scale", "bn", 1))
    every = {f"bn{g}{letter}_branch2c" for g, blocks, _, _ in GROUPS for letter in "abcdef"[:blocks]}
    last = {f"bn{g}{'abcdef'[blocks - 1]}_branch2c" for g, blocks, _, _ in GROUPS}
    return {frozenset(): "NONE", frozenset(last): "LAST", frozenset(every): "ALL"}.get(frozenset(zero))
