"""A net as values, and the reading of a layer's text: the base class of the types of layers, whose fields are the layer's settings; its type,
phases and image shapes. A size of 0 is still unknown, such as an image's."""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import prod
from typing import ClassVar, NamedTuple, Self, dataclass_transform

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base.errors import Problems, Span
from stagerun.base.recipe import Filler, VarianceNorm
from stagerun.language.lexer import shown
from stagerun.language.networks import FILLER_FIELDS
from stagerun.language.tree import Block, View

# -- a net as values: `resolve` makes it from a prototxt, `network` builds it. Shapes are per image: (channels, height, width) or (outputs,)

Shape = tuple[int, ...]


class Blob(NamedTuple):
    """A parameter. `name` is its name in the network's state, `conv1.weight`; a shared parameter is named after its first layer."""

    name: str
    shape: Shape
    filler: Filler
    lr_mult: float = 1.0
    decay_mult: float = 1.0


class Layer(NamedTuple):
    """A layer. `bottoms` and `tops` are names of maps; a top that is also a bottom is computed in place. `shapes`: those tops' shapes,
    () for a loss and for labels."""

    name: str
    type: str  # Caffe's word
    settings: "Settings"
    bottoms: tuple[str, ...] = ()
    tops: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    blobs: tuple[Blob, ...] = ()


class Pass(NamedTuple):
    """The layers of one phase in order. `images` and `labels`: the input maps ('' without labels).
    `logits`: the output, [classes] for each image: the first bottom of the last SoftmaxWithLoss, else of an Accuracy or a Softmax,
    else the last unused top."""

    layers: tuple[Layer, ...]
    images: str
    labels: str
    logits: str


class Net(NamedTuple):
    """Both phases; layers of the same name share their blobs. `shape`: an image's. `text`: the canonical form of the prototxt."""

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
    """Yield each layer, its number of new parameters (shared ones count once), and the multiply-adds of one image's forward pass; a
    multiply and the following add count once, as in published figures."""
    shapes: dict[str, Shape] = {}
    counted: set[str] = set()
    for layer in of.layers:
        new = {blob.name: prod(blob.shape) for blob in layer.blobs if blob.name not in counted}
        counted |= new.keys()
        adds = layer.settings.multiply_adds(layer, shapes.get(layer.bottoms[0], ()) if layer.bottoms else ())
        yield layer, sum(new.values()), adds
        shapes.update(zip(layer.tops, layer.shapes, strict=True))


# -- the text of a layer

LARGEST = 2**31 - 1  # values of a map or a parameter, as in Caffe
TOO_LARGE = "is a size or a `num_output` wrong?"
MOST_AXES = 32  # of a map, as in Caffe
MANY = 1_000  # bottoms or tops


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Settings:
    """A layer's settings. A subclass is one type of layer, or the `types`; it reads its fields, the shapes of its tops
    and its parameters from the text, by Caffe's formulas. `network` computes it. `param`: the message with the
    settings. `bottoms`, `tops`: least and most. `in_place`: a top may be the bottom."""

    types: ClassVar[tuple[str, ...]] = ()
    param: ClassVar[str] = ""
    bottoms: ClassVar[tuple[int, int]] = (1, 1)
    tops: ClassVar[tuple[int, int]] = (1, 1)
    in_place: ClassVar[bool] = False

    def __init_subclass__(cls, types: tuple[str, ...] = (), **facts: object) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.types = types or (cls.__name__,)
        for name, value in facts.items():
            setattr(cls, name, value)

    @classmethod
    def read(cls, layer: "Reading") -> "Made | None":
        """Read the layer, and add its mistakes; None if the tops remain unknown. By default every top has the bottom's
        shape."""
        return Made(cls.written(layer), (layer.first,) * layer.tops)

    @classmethod
    def written(cls, layer: "Reading", **values: object) -> Self:
        """Make the settings of `values` and, for the other fields, of the message's fields with the same names."""
        of_message = layer.view.block.kind.fields_by_name
        for one in fields(cls):  # type: ignore[arg-type]
            if one.name in of_message and one.name not in values:
                is_float = of_message[one.name].cpp_type == FieldDescriptor.CPPTYPE_FLOAT
                values[one.name] = layer.number(one.name) if is_float else layer.view.scalar(one.name)
        return cls(**values)

    def multiply_adds(self, layer: Layer, bottom: Shape) -> int:
        """Count the multiply-adds of convolutions and linear layers, without their biases."""
        return 0


class Made(NamedTuple):
    """A layer as read. `tops`: None for an unknown shape."""

    settings: Settings
    tops: tuple[Shape | None, ...]
    blobs: tuple[Blob, ...] = ()


class Reading(NamedTuple):
    """A layer's text, and the shapes of its bottoms. `view`: the message with its settings."""

    block: Block
    type: str
    name: str
    bottoms: tuple[str, ...]
    dims: tuple[Shape, ...]
    tops: int
    problems: Problems
    view: View

    @property
    def first(self) -> Shape:
        return self.dims[0] if self.dims else ()

    def of(self, view: View) -> "Reading":
        """Return the same layer, read in another of its messages."""
        return self._replace(view=view)

    def bottom(self, at: int = 0) -> str:
        """Return a bottom's name for messages."""
        return shown(self.bottoms[at])

    def fail(self, message: str, hint: str = "", span: Span | None = None) -> None:
        """Add a mistake, at the layer's name by default."""
        span = span or View(self.block).place("name")
        self.problems.add(span, f"layer {shown(self.name)}: {message}", hint)

    def wrong(self, field: str, message: str, hint: str = "") -> None:
        """Add a mistake at a setting, or at its message if the setting isn't written."""
        self.fail(message, hint, self.view.place(field))

    def require(self, field: str, value: float, fits: bool, rule: str, hint: str = "") -> None:
        """Add a mistake unless the value fits. `rule`: `above 0`."""
        if not fits:
            self.wrong(field, f"`{field}: {value:g}` is not {rule}", hint)

    def number(self, field: str) -> float:
        """Return a field in single precision, as Caffe has it; 0 if it has neither a value nor a default."""
        return self.single(field, self.view.number(field) or 0.0)

    def single(self, field: str, written: float) -> float:
        """Round to single precision; add a mistake at the field if the number is too large."""
        try:
            return float(struct.unpack("<f", struct.pack("<f", written))[0])
        except OverflowError:
            self.wrong(field, f"`{field}: {written:g}` is too large for Caffe's numbers", "at most 3.4e38")
            return written

    def image(self, what: str) -> Shape | None:
        """Return the first bottom's shape; add a mistake unless it has channels, height and width."""
        if len(self.first) == 3:
            return self.first
        self.fail(f"bottom {self.bottom()} is {text(self.first)}, and {what}", "is it the bottom that is meant?")
        return None

    def axis(self, dims: Shape, field: str = "axis", older: str = "") -> int | None:
        """Return an axis of `dims`, counted as in Caffe, with the images as axis 0; None after a mistake, such as axis 0."""
        name = older if older and self.view.has(older) else field
        written = self.view.whole(name) or 0
        axis = written + len(dims) + 1 if written < 0 else written
        if name == older and self.view.has(field):
            self.wrong(older, f"both `{older}` and `{field}` are set", f"`{older}` is the older name: take it out")
        elif axis == 0:
            self.wrong(name, "axis 0 counts the images, which are computed independently", "give the axis of a map")
        elif not 0 < axis <= len(dims):
            message = f"`{name}: {written}`, and the axes of {text(dims)} are 1 to {len(dims)}"
            self.wrong(name, message, "axis 1: the channels")
        else:
            return axis
        return None

    # -- parameters

    def outputs(self) -> int:
        count = self.view.whole("num_output") or 0
        if not count:
            self.wrong("num_output", "`num_output` must be at least 1", "write how many outputs the layer has")
        return count

    def weights(self, weight: Shape, bias: Shape, field: str = "weight_filler", value: float = 0.0) -> tuple[Blob, ...]:
        """Return the weight, and the bias if the layer has one."""
        blobs = (self.blob("weight", weight, field, value),)
        return (*blobs, self.blob("bias", bias, "bias_filler")) if self.view.flag("bias_term") else blobs

    def blob(self, part: str, dims: Shape, field: str, value: float = 0.0) -> Blob:
        name = f"{View(self.block).text('name') or ''}.{part}"
        return Blob(name=name, shape=dims, filler=self.filler(field, value))

    def filler(self, field: str, value: float) -> Filler:
        """Read a filler. `value`: the constant if no filler is written. An empty filler is Caffe's constant 0."""
        if not self.view.has(field):
            return Filler(value=value)
        view = self.view.inside(field)
        inner, kind = self.of(view), view.text("type") or ""
        if kind not in FILLER_FIELDS:
            inner.wrong("type", f"unknown filler `{shown(kind)}`", f"fillers: {', '.join(FILLER_FIELDS)}")
        if view.whole("sparse") != -1:
            inner.wrong("sparse", "sparse weights are not built", "take it out")
        numbers = {name: inner.number(name) for name in ("value", "min", "max", "mean", "std")}
        std, least, most = numbers["std"], numbers["min"], numbers["max"]
        if kind == "gaussian":
            inner.require("std", std, std >= 0, "at least 0", "it is a standard deviation")
        if kind == "uniform":
            inner.require("min", least, least <= most, f"at most `max: {most:g}`", "values are between them")
        return Filler(type=kind, variance_norm=VarianceNorm(view.text("variance_norm")), **numbers)


def text(dims: Shape) -> str:
    """Return `64 x 7 x 7`, with `?` for an unknown size."""
    return " x ".join(str(n or "?") for n in dims) or "one number"


def alike(one: Shape, other: Shape) -> bool:
    return len(one) == len(other) and all(a == b or 0 in (a, b) for a, b in zip(one, other, strict=True))


TRAIN, TEST = PHASES = ("TRAIN", "TEST")
IMAGES = ("Data", "ImageData", "DummyData", "Input")
# Types whose top shapes are written in the text, and the message with them.
SHAPED = {"Input": "input_param", "DummyData": "dummy_data_param"}


def type_of(layer: Block) -> str:
    return View(layer).text("type") or ""


def name_of(layer: Block) -> str:
    """Return the layer's name, or its type if it is unnamed."""
    return View(layer).text("name") or type_of(layer)


# -- phases


def layers_in(layers: Iterable[Block], phase: str) -> list[Block]:
    """Return the layers that an `include` rule matches or, without such rules, that no `exclude` rule matches: at level 0, without stages."""

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
    """Return the shape of each top of an Input or DummyData layer, without Caffe's first axis; [] for other layers."""
    view = View(layer)
    if (message := SHAPED.get(type_of(layer))) is None:
        return []
    settings, tops = view.inside(message), len(view.texts("top"))
    shapes = [tuple(int(n) for n in shape.numbers("dim")[1:]) for shape in settings.views("shape")]
    return shapes * tops if len(shapes) == 1 else shapes


def map_shapes(layer: Block) -> list[tuple[int, ...]]:
    """Return the shapes for one image; () for labels, which have one to four axes in Caffe."""
    return [() if dims in ((1,), (1, 1), (1, 1, 1)) else dims for dims in top_shapes(layer)]


def image_shape(layer: Block) -> tuple[int, int, int] | None:
    """Return (channels, height, width) of an Input or DummyData layer; None for other layers."""
    shapes = (dims for dims in map_shapes(layer) if len(dims) == 3)
    return next(shapes, None)  # type: ignore[arg-type]
