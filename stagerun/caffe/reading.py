"""What a type of layer is: a class of its settings, which reads a layer's text. A size of 0 is not known yet, as that of
an image."""

import struct
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self, dataclass_transform

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base.errors import Problems, Span
from stagerun.base.recipe import Filler, VarianceNorm
from stagerun.caffe.net import Blob, Layer, Shape
from stagerun.language.lexer import shown
from stagerun.language.networks import FILLER_FIELDS
from stagerun.language.tree import Block
from stagerun.language.view import View

LARGEST = 2**31 - 1  # values of a map or a parameter, as in Caffe
TOO_LARGE = "is a size or a `num_output` wrong?"
MOST_AXES = 32  # of a map, as in Caffe
MANY = 1_000  # bottoms or tops


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Settings:
    """What a layer says. A subclass is one type of layer, or the `types`: its fields, and how they, the shapes of the tops and the
    parameters follow from the text, by Caffe's formulas. `functions` computes it.

    `param`: the message with its settings. `bottoms`, `tops`: least and most of them. `in_place`: a top may be the bottom.
    """

    types: ClassVar[tuple[str, ...]] = ()
    param: ClassVar[str] = ""
    bottoms: ClassVar[tuple[int, int]] = (1, 1)
    tops: ClassVar[tuple[int, int]] = (1, 1)
    in_place: ClassVar[bool] = False

    def __init_subclass__(cls, types: tuple[str, ...] = (), **said: object) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.types = types or (cls.__name__,)
        for name, value in said.items():
            setattr(cls, name, value)

    @classmethod
    def read(cls, layer: "Reading") -> "Made | None":
        """What the layer is; what is wrong goes to its problems. None: nothing is known of its tops. By default its settings, and a top
        for each that is as the bottom."""
        return Made(cls.written(layer), (layer.first,) * layer.tops)

    @classmethod
    def written(cls, layer: "Reading", **known: object) -> Self:
        """The fields that are called as one of the message's, besides those that are `known`."""
        of_message = layer.view.block.kind.fields_by_name
        for one in fields(cls):  # type: ignore[arg-type]
            if one.name in of_message and one.name not in known:
                is_float = of_message[one.name].cpp_type == FieldDescriptor.CPPTYPE_FLOAT
                known[one.name] = layer.number(one.name) if is_float else layer.view.scalar(one.name)
        return cls(**known)

    def multiply_adds(self, layer: Layer, bottom: Shape) -> int:
        """Of convolutions and linear layers, without their biases."""
        return 0


@dataclass(frozen=True, slots=True)
class Made:
    """What a layer's text says. `tops`: None for one of which nothing is known."""

    settings: Settings
    tops: tuple[Shape | None, ...]
    blobs: tuple[Blob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
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
        return replace(self, view=view)

    def bottom(self, at: int = 0) -> str:
        """Its name, for messages."""
        return shown(self.bottoms[at])

    def fail(self, message: str, hint: str = "", place: Span | None = None) -> None:
        """`place`: that of the layer's name by default."""
        place = place or View(self.block).place("name")
        self.problems.add(place, f"layer {shown(self.name)}: {message}", hint)

    def wrong(self, field: str, message: str, hint: str = "") -> None:
        """At the place of a setting, or of its message where it isn't written."""
        self.fail(message, hint, self.view.place(field))

    def require(self, field: str, value: float, fits: bool, rule: str, hint: str = "") -> None:
        """A mistake unless it fits. `rule`: what it has to be, `above 0`."""
        if not fits:
            self.wrong(field, f"`{field}: {value:g}` is not {rule}", hint)

    def number(self, field: str) -> float:
        """As Caffe has it: in single precision. 0 where neither it nor a default is written."""
        return self.single(field, self.view.number(field) or 0.0)

    def single(self, field: str, written: float) -> float:
        """The nearest number of single precision; a mistake at the field where there is none."""
        try:
            return float(struct.unpack("<f", struct.pack("<f", written))[0])
        except OverflowError:
            self.wrong(field, f"`{field}: {written:g}` is too large for Caffe's numbers", "at most 3.4e38")
            return written

    def image(self, what: str) -> Shape | None:
        """The first bottom, if it has channels, height and width."""
        if len(self.first) == 3:
            return self.first
        self.fail(f"bottom {self.bottom()} is {text(self.first)}, and {what}", "is it the bottom that is meant?")
        return None

    def axis(self, dims: Shape, field: str = "axis", older: str = "") -> int | None:
        """An axis of `dims`, counted as Caffe does, with the images as axis 0; None, and a mistake, where it is none or theirs."""
        name = older if older and self.view.has(older) else field
        written = self.view.whole(name) or 0
        axis = written + len(dims) + 1 if written < 0 else written
        if name == older and self.view.has(field):
            self.wrong(older, f"both `{older}` and `{field}` are given", f"`{older}` is the older name: take it out")
        elif axis == 0:
            self.wrong(name, "axis 0 is that of the images, which are computed apart", "give the axis of a map")
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
            self.wrong("num_output", "`num_output` must be at least 1", "say how many outputs the layer has")
        return count

    def weights(self, weight: Shape, outputs: int) -> tuple[Blob, ...]:
        """The weight, and the bias where the layer has one."""
        found = (self.blob("weight", weight, "weight_filler"),)
        return (*found, self.blob("bias", (outputs,), "bias_filler")) if self.view.flag("bias_term") else found

    def blob(self, part: str, dims: Shape, field: str, value: float = 0.0) -> Blob:
        name = f"{View(self.block).text('name') or ''}.{part}"
        return Blob(name=name, shape=dims, filler=self.filler(field, value))

    def filler(self, field: str, value: float) -> Filler:
        """`value`: that of a filler that is not written. One that is written and empty is Caffe's constant 0."""
        if not self.view.has(field):
            return Filler(value=value)
        view = self.view.inside(field)
        inner, kind = self.of(view), view.text("type") or ""
        if kind not in FILLER_FIELDS:
            inner.wrong("type", f"there is no filler `{shown(kind)}`", f"known: {', '.join(FILLER_FIELDS)}")
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
    """`64 x 7 x 7`; `?` for a size that is not known."""
    return " x ".join(str(n or "?") for n in dims) or "one number"


def alike(one: Shape, other: Shape) -> bool:
    return len(one) == len(other) and all(a == b or 0 in (a, b) for a, b in zip(one, other, strict=True))
