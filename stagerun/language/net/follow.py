"""One phase of a net: which map each layer takes, what shape it has, which parameters are shared, what comes out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from stagerun.base import net
from stagerun.base.errors import Problems, Span, nearest
from stagerun.base.text import count
from stagerun.language.lexer import shown
from stagerun.language.net.blobs import filler_of
from stagerun.language.net.given import LARGEST, TOO_LARGE, Dims, Given, Made, text, volume
from stagerun.language.net.layers import IMAGES, LAYERS
from stagerun.language.net.parameters import Parameters
from stagerun.language.net.text import TOO_MANY, NetText, type_of
from stagerun.language.net.weighted import merged
from stagerun.language.parse import MOST_MISTAKES, TooManyMistakes
from stagerun.language.tree import Block
from stagerun.language.view import View

Image = tuple[int, int, int]
LABELS: Dims = ()
JUDGES = ("SoftmaxWithLoss", "Accuracy", "Softmax")  # whose first bottom are the logits
MOST_LIKENED = 500  # names among which a similar one is looked for


@dataclass(frozen=True, slots=True)
class Passed:
    """A phase in which all sizes are known. `places`: of each parameter's layer, by the parameter's name."""

    made: net.Pass
    image: Image
    classes: int
    blobs: Mapping[str, net.Blob]
    places: Mapping[str, Span]


def follow(
    net_text: NetText,
    layers: Sequence[Block],
    phase: str,
    other: Iterable[Block],
    shape: Image | None,
    problems: Problems,
) -> Passed | None:
    """None where there is a mistake or a size is not known. `other`: the layers of the other phase, for hints."""
    walk = _Walk(net_text.path, phase, shape, problems, {top: b for b in other for top in View(b).texts("top")})
    walk.later = _first_tops(layers)
    for layer in layers:
        try:
            walk.layer(layer)
        except TooManyMistakes:
            problems.add(layer.place, TOO_MANY, "is it a net?")
            return None
    return walk.end(net_text.place)


def _first_tops(layers: Sequence[Block]) -> dict[str, Block]:
    found: dict[str, Block] = {}
    for layer in layers:
        for top in View(layer).texts("top"):
            found.setdefault(top, layer)
    return found


class _Walk:
    """The maps there are while the layers are gone through."""

    def __init__(
        self, path: str, phase: str, shape: Image | None, problems: Problems, elsewhere: Mapping[str, Block]
    ) -> None:
        self.phase, self.shape, self.problems, self.elsewhere = phase, shape, problems, elsewhere
        self.path = path
        self.later: Mapping[str, Block] = {}
        self.maps: dict[str, Dims | None] = {}
        self.makers: dict[str, Block] = {}
        self.untaken: dict[str, None] = {}  # tops that nothing takes so far, in their order
        self.names: dict[str, Block] = {}
        self.images = self.labels = ""
        self.found: list[net.Layer] = []
        self.parameters = Parameters(self.fail)
        self.unknown = False  # a size or a layer is not known
        self.unnamed: int | None = None  # the line of the layer with parameters and without a name
        self.failed = False  # also where the other phase has the same mistake

    def fail(self, place: Span, name: str, message: str, hint: str = "") -> None:
        """TooManyMistakes, so that no net makes its reader work for long."""
        self.problems.add(place, f"layer {shown(name)}: {message}", hint)
        self.unknown = self.failed = True
        if self.problems.count(self.path) > MOST_MISTAKES:
            raise TooManyMistakes

    def layer(self, block: Block) -> None:
        view, kind = View(block), type_of(block)
        written, bottoms, tops = view.text("name") or "", view.texts("bottom"), view.texts("top")
        name = written or kind
        row = LAYERS[kind]
        place = block.entries["name"].place if "name" in block.entries else block.place
        if written in self.names:
            line = self.names[name].place.line
            self.fail(place, name, "there is another layer of this name", f"it stands in line {line}")
        if written:
            self.names[name] = block
        self._rules(block, name)
        dims = tuple(self._taken(block, name, i, bottom) for i, bottom in enumerate(bottoms))
        fits = self._count(place, name, kind, "bottom", len(bottoms), row.bottoms)
        fits &= self._count(place, name, kind, "top", len(tops), row.tops)
        before = self.problems.count(self.path)
        given = Given(block, name, bottoms, dims, len(tops), self.problems)
        made = row.make(given) if fits else None
        if made is not None and kind in IMAGES:
            made = self._read(block, name, kind, tops, made)
        if made is not None and kind == "Scale":
            made = self._filled_by_norm(given, made, bottoms)
        if made is not None and not written and (made.blobs or kind == "BatchNorm"):
            if self.unnamed is not None:
                message = f"it has no `name`, as the layer in line {self.unnamed}"
                self.fail(place, name, message, "parameters and statistics are found by the layer's name")
            self.unnamed = place.line
        self._put(block, name, tops, bottoms if row.in_place else (), made)
        if made is None or self.problems.count(self.path) > before:
            self.unknown = True
            self.failed |= kind in JUDGES  # else another map would be taken for the logits
            return
        blobs = self.parameters.of(block, written, kind, made.blobs)
        shapes = tuple(() if d is None else tuple(n or 0 for n in d) for d in made.tops)
        self.found.append(
            net.Layer(
                name=written, type=kind, settings=made.settings, bottoms=bottoms, tops=tops, shapes=shapes, blobs=blobs
            )
        )

    def _count(self, place: Span, name: str, kind: str, what: str, number: int, allowed: tuple[int, int]) -> bool:
        low, high = allowed
        if low <= number <= high:
            return True
        wanted = (
            f"{low}"
            if low == high
            else f"{low} or {high}"
            if high == low + 1
            else f"at least {low}"
            if number < low
            else f"at most {high}"
        )
        self.fail(place, name, f"{count(number, what)}, and {kind} has {wanted}", f"`{what}` stands once for each")
        return False

    def _rules(self, block: Block, name: str) -> None:
        if "include" in block.entries and "exclude" in block.entries:
            self.fail(
                block.entries["exclude"].name, name, "it has both `include` and `exclude`", "Caffe allows one of them"
            )
        if "blobs" in block.entries:
            self.fail(
                block.entries["blobs"].name, name, "weights in a net's text aren't read", "give them as `weights`"
            )
        backward = block.entries.get("propagate_down")
        for i, value in enumerate(backward.values if backward else ()):
            if value.value is False and not (type_of(block) in ("SoftmaxWithLoss", "Accuracy") and i == 1):
                message = "`propagate_down: false` isn't known here"
                self.fail(value.span, name, message, "write `lr_mult: 0` in the layers below")

    def _taken(self, block: Block, name: str, at: int, bottom: str) -> Dims | None:
        self.untaken.pop(bottom, None)
        if bottom in self.maps:
            return self.maps[bottom]
        place = block.entries["bottom"].values[at].span
        later, other = self.later.get(bottom), self.elsewhere.get(bottom)
        if later is not None:
            maker = View(later).text("name") or type_of(later)
            what = "itself" if later is block else f"layer {shown(maker)} in line {later.place.line}"
            message = f"bottom {shown(bottom)} comes from {what}, and not from a layer before"
            self.fail(place, name, message, "layers stand in their order")
        elif other is not None:
            there = "training" if self.phase == "TEST" else "testing"
            here = "testing" if self.phase == "TEST" else "training"
            message = f"bottom {shown(bottom)} is there in {there} alone, not in {here}"
            self.fail(place, name, message, f"see `include` in line {other.place.line}")
        else:
            self.fail(
                place,
                name,
                f"no layer has the top {shown(bottom)}",
                nearest(bottom, islice(self.maps, MOST_LIKENED)) or "a bottom is the top of a layer before it",
            )
        self.maps[bottom] = None  # said once
        return None

    def _put(self, block: Block, name: str, tops: Sequence[str], in_place: Sequence[str], made: Made | None) -> None:
        """The layer's tops among the maps."""
        for i, top in enumerate(tops):
            place = block.entries["top"].values[i].span
            if top in self.maps and not (i < len(in_place) and in_place[i] == top) and top in self.makers:
                line = self.makers[top].place.line
                own = top in View(block).texts("bottom")
                what = f"{type_of(block)} can't be computed in place" if own else f"top {shown(top)} is there already"
                self.fail(
                    place, name, what, "give its top a name of its own" if own else f"the layer in line {line} has it"
                )
            dims = made.tops[i] if made is not None else None
            size = volume(dims) if dims is not None else None
            if size is not None and size > LARGEST:
                self.fail(
                    place, name, f"top {shown(top)} has {size} values for an image, more than {LARGEST}", TOO_LARGE
                )
                dims = None
            if dims is None or None in dims:
                self.unknown |= type_of(block) != "Accuracy"
            self.maps[top], self.makers[top] = dims, block
            self.untaken[top] = None

    def _read(self, block: Block, name: str, kind: str, tops: Sequence[str], made: Made) -> Made:
        """The tops of a layer that reads images: which are images, which labels."""
        found: list[Dims | None] = []
        for i, (top, dims) in enumerate(zip(tops, made.tops, strict=True)):
            place = block.entries["top"].values[i].span
            is_image = i == 0 if kind in ("Data", "ImageData") else dims is not None and len(dims) == 3
            if is_image:
                if self.images:
                    self.fail(place, name, f"{shown(self.images)} are images already", "an image classifier takes one")
                self.images = self.images or top
                crop = View(block).inside("transform_param").whole("crop_size") or None
                found.append(self.shape or dims or (None, crop, crop))
            elif kind in ("Data", "ImageData") or dims == ():
                self.labels = self.labels or top
                found.append(LABELS)
            else:
                size = text(dims) if dims is not None else "without a shape"
                self.fail(place, name, f"top {shown(top)} is {size}: neither images nor labels", "images have 4 axes")
                found.append(None)
        return replace(made, tops=tuple(found))

    def _filled_by_norm(self, given: Given, made: Made, bottoms: Sequence[str]) -> Made:
        """Intel's Caffe joins a Scale to the BatchNorm before it, and the fillers written there are its."""
        norm = self.makers.get(bottoms[0]) if len(bottoms) == 1 else None
        inside = norm.block("batch_norm_param") if norm is not None and type_of(norm) == "BatchNorm" else None
        if norm is None or inside is None or merged(norm):
            return made
        names = {"weight": ("filler", 1.0), "bias": ("bias_filler", 0.0)}
        blobs = tuple(
            replace(blob, filler=filler_of(given, View(inside), field, blob.dims, value))
            if field in inside.entries
            else blob
            for blob, (field, value) in ((blob, names[blob.name]) for blob in made.blobs)
        )
        return replace(made, blobs=blobs)

    def end(self, place: Span) -> Passed | None:
        """None where a size is not known."""
        if not self.images and not any(self.maps[b] is None for b in self.maps):
            self.problems.add(place, "no layer gives images", f"write one of {', '.join(IMAGES)}")
            return None
        if self.failed:
            return None
        logits = self._logits()
        dims = self.maps.get(logits)
        if not logits and not self.unknown:
            self.problems.add(place, "no layer computes anything", "write the layers of a network")
            return None
        if logits and dims is not None and self._are_no_logits(logits, dims):
            return None
        image = self.maps.get(self.images)
        if self.unknown or self.parameters.unknown or dims is None or image is None or len(image) != 3:
            return None
        channels, height, width = (n or 0 for n in image)
        made = net.Pass(
            layers=self.parameters.settled(self.found), images=self.images, labels=self.labels, logits=logits
        )
        return Passed(made, (channels, height, width), dims[0] or 0, self.parameters.blobs, self.parameters.places)

    def _logits(self) -> str:
        """As `net.Pass` says; of a Softmax what it takes, which has the same name where that is computed in place."""
        found = ""
        for kind in JUDGES:
            of_kind = [layer for layer in self.found if layer.type == kind]
            if of_kind:
                trained = [
                    s
                    for s in of_kind
                    if not (isinstance(s.settings, net.SoftmaxWithLoss) and not s.settings.loss_weight)
                ]
                found = (trained or of_kind)[-1].bottoms[0]
                break
        else:
            outputs = [top for top in self.untaken if top not in (self.labels, self.images)]
            found = outputs[-1] if outputs else ""
        seen = {""}
        while found not in seen and type_of(self.makers[found]) == "Softmax":
            seen.add(found)
            found = View(self.makers[found]).texts("bottom")[0]
        return found

    def _are_no_logits(self, logits: str, dims: Dims) -> bool:
        """Whether it is no answer for an image; the mistake of it."""
        if dims and all(n in (1, None) for n in dims[1:]) and logits != self.images:
            return False
        maker = self.makers[logits]
        name = View(maker).text("name") or type_of(maker)
        message = f"its top {shown(logits)}, {text(dims)}, is the net's output, and a classifier has one number for each class of an image"
        self.fail(maker.place, name, message)
        return True
