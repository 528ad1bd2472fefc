"""Which layers of a net there are in training and in testing, and what tells one network from another. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from stagerun.errors import Span
from stagerun.spec.tree import Block
from stagerun.spec.view import View


@dataclass(frozen=True, slots=True)
class State:
    """Caffe's NetState."""

    phase: str
    level: int = 0
    stages: frozenset[str] = field(default_factory=frozenset)


def state_of(block: Block | None, phase: str) -> State:
    """A train_state or test_state; without one, the phase alone."""
    if block is None:
        return State(phase)
    view = View(block)
    stages = block.entries["stage"].values if "stage" in block.entries else ()
    return State(phase, view.whole("level") or 0, frozenset(str(v.value) for v in stages))


def layers_in(net: Block, state: State) -> list[Block]:
    """The layers that Caffe's FilterNet keeps: one `include` rule is met, or no `exclude` rule is."""
    return [layer for layer in net.blocks("layer") if _kept(layer, state)]


def _kept(layer: Block, state: State) -> bool:
    include, exclude = list(layer.blocks("include")), list(layer.blocks("exclude"))
    if include:
        return any(_meets(View(rule), state) for rule in include)
    return not any(_meets(View(rule), state) for rule in exclude)


def _meets(rule: View, state: State) -> bool:
    if rule.has("phase") and rule.text("phase") != state.phase:
        return False
    low, high = rule.whole("min_level"), rule.whole("max_level")
    if (low is not None and state.level < low) or (high is not None and state.level > high):
        return False
    wanted, unwanted = (_texts(rule.block, name) for name in ("stage", "not_stage"))
    return wanted <= state.stages and not unwanted & state.stages


def _texts(block: Block, name: str) -> set[str]:
    return {str(v.value) for v in block.entries[name].values} if name in block.entries else set()


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


def shapes(layers: list[Block]) -> list[Shape]:
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


def of_type(layers: list[Block], *types: str) -> Iterator[Block]:
    return (layer for layer in layers if text_of(layer, "type") in types)
