"""What the function of a layer gets and gives. Sizes are None where an image's are not known yet."""

import struct
from dataclasses import dataclass
from math import prod

from stagerun.base import net
from stagerun.base.errors import Problems, Span
from stagerun.language.lexer import shown
from stagerun.language.tree import Block, Entry
from stagerun.language.view import View

Size = int | None
Dims = tuple[Size, ...]  # of one image's map
LARGEST = 2**31 - 1  # values of a map or a parameter, as in Caffe
TOO_LARGE = "is a size or a `num_output` wrong?"
MOST_AXES = 32  # of a map, as in Caffe


@dataclass(frozen=True, slots=True)
class NewBlob:
    """A parameter of a layer: `name` within it."""

    name: str
    dims: Dims
    filler: net.Filler


@dataclass(frozen=True, slots=True)
class Made:
    """`tops`: None for one of which nothing is known."""

    settings: net.Settings
    tops: tuple[Dims | None, ...]
    blobs: tuple[NewBlob, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """A layer, and the shapes of its bottoms; None of one of which nothing is known."""

    block: Block
    name: str
    bottoms: tuple[str, ...]
    dims: tuple[Dims | None, ...]
    tops: int
    problems: Problems

    def inside(self, message: str) -> View:
        return View(self.block).inside(message)

    @property
    def first(self) -> Dims | None:
        return self.dims[0] if self.dims else None

    def bottom(self, at: int = 0) -> str:
        """Its name, for messages."""
        return shown(self.bottoms[at])

    def fail(self, message: str, hint: str = "", place: Span | Entry | None = None) -> None:
        """`place`: that of the layer's name by default."""
        name = self.block.entries.get("name")
        span = place or (name.place if name is not None else self.block.place)
        self.problems.add(span.place if isinstance(span, Entry) else span, f"layer {shown(self.name)}: {message}", hint)

    def wrong(self, view: View, field: str, message: str, hint: str = "") -> None:
        """At the place of a field, or of its message where it isn't written."""
        entry = view.block.entries.get(field)
        self.fail(message, hint, entry.place if entry is not None else view.block.place)

    def require(self, view: View, field: str, value: float, fits: bool, rule: str, hint: str = "") -> None:
        """A mistake unless it fits. `rule`: what it has to be, `above 0`."""
        if not fits:
            self.wrong(view, field, f"`{field}: {value:g}` is not {rule}", hint)

    def number(self, view: View, field: str) -> float:
        """As Caffe has it: in single precision. 0 where neither it nor a default is written."""
        return self.single(view, field, view.number(field) or 0.0)

    def single(self, view: View, field: str, written: float) -> float:
        """The nearest number of single precision; a mistake at the field where there is none."""
        try:
            (found,) = struct.unpack("<f", struct.pack("<f", written))
        except OverflowError:
            self.wrong(view, field, f"`{field}: {written:g}` is too large for Caffe's numbers", "at most 3.4e38")
            return written
        return float(found)

    def rank(self, least: int, what: str) -> Dims | None:
        """The first bottom, if it has at least so many axes besides the images'."""
        dims = self.first
        if dims is not None and len(dims) < least:
            self.fail(f"bottom {self.bottom()} is {text(dims)}, and {what}", "is it the bottom that is meant?")
            return None
        return dims

    def axis(self, view: View, field: str, dims: Dims, older: str = "") -> int | None:
        """An axis of `dims`, counted as Caffe does; None, and a mistake, where it has none such or it is that of the images."""
        name = older if older and view.has(older) else field
        written = view.whole(name) or 0
        axis = written + len(dims) + 1 if written < 0 else written
        if older and view.has(older) and view.has(field):
            self.wrong(
                view, older, f"both `{older}` and `{field}` are given", f"`{older}` is the older name: take it out"
            )
        elif axis == 0:
            self.wrong(view, name, "axis 0 is that of the images, which are computed apart", "give the axis of a map")
        elif not 0 < axis <= len(dims):
            message = f"`{name}: {written}`, and the axes of {text(dims)} are 1 to {len(dims)}"
            self.wrong(view, name, message, "axis 1: the channels")
        else:
            return axis
        return None


def text(dims: Dims) -> str:
    """`64 x 7 x 7`; `?` for a size that is not known."""
    return " x ".join("?" if n is None else str(n) for n in dims) or "one number"


def volume(dims: Dims) -> Size:
    """How many values; None where a size is not known."""
    known = [n for n in dims if n is not None]
    return prod(known) if len(known) == len(dims) else None


def alike(one: Dims, other: Dims) -> bool:
    return len(one) == len(other) and all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))
