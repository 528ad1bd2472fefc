"""One phase of a net: which map each layer takes, what shape it has, which parameters are shared, what comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod

from stagerun.base.errors import Problems, Span, nearest
from stagerun.base.text import count
from stagerun.caffe.blocks import IMAGES, PHASES, name_of, type_of
from stagerun.caffe.layers import merged
from stagerun.caffe.net import Blob, Layer, Pass, Shape
from stagerun.caffe.reading import LARGEST, TOO_LARGE, Made, Reading, alike, text
from stagerun.caffe.text import LAYERS, TOO_MANY, NetText
from stagerun.language.lexer import MOST_MISTAKES, TooManyMistakes, shown
from stagerun.language.tree import Block
from stagerun.language.view import View

Image = tuple[int, int, int]
LABELS: Shape = ()
JUDGES = ("SoftmaxWithLoss", "Accuracy", "Softmax")  # whose first bottom are the logits
TAKE_LABELS = ("SoftmaxWithLoss", "Accuracy")  # as their second bottom
MOST_LIKENED = 500  # names among which a similar one is looked for
RATES = ("lr_mult", "decay_mult")


class Walk:
    """The maps there are while the layers of a phase are gone through. `kept`: the layers of both phases. One without a data layer has that of
    the other."""

    def __init__(
        self, net: NetText, phase: str, kept: Mapping[str, list[Block]], shape: Image | None, problems: Problems
    ) -> None:
        self.net, self.shape, self.problems = net, shape, problems
        (other,) = (kept[one] for one in PHASES if one != phase)
        images = () if any(type_of(one) in IMAGES for one in kept[phase]) else other
        self.layers = [*(one for one in images if type_of(one) in IMAGES), *kept[phase]]
        others = [*other, *reversed(self.layers)]
        self.elsewhere = {top: block for block in others for top in View(block).texts("top")}
        self.name = ""  # of the layer that is read
        self.maps: dict[str, Shape | None] = {}
        self.makers: dict[str, Block] = {}
        self.untaken: dict[str, None] = {}  # tops that nothing takes so far, in their order
        self.names: dict[str, Block] = {}
        self.images = self.labels = self.logits = ""
        self.no_maps: set[str] = set()  # labels, and what an Accuracy says
        self.found: list[Layer] = []
        self.blobs: dict[str, Blob] = {}  # by name
        self.places: dict[str, Span] = {}  # of the layers that have them first
        self.shared: dict[str, str] = {}  # by the name in `param` that of the parameter
        # Each multiplier, and the line of the layer that says it.
        self.rated: dict[tuple[str, str], tuple[float, int]] = {}
        self.unknown = False  # a size or a layer is not known
        self.failed = False  # also where the other phase has the same mistake

    def size_of(self, top: str) -> Shape:
        return self.maps[top] or ()

    def passed(self) -> Pass | None:
        """None where there is a mistake or a size is not known."""
        try:
            for layer in self.layers:
                self.layer(layer)
        except TooManyMistakes:
            self.problems.add(layer.place, TOO_MANY, "is it a net?")
            return None
        if not self.images and None not in self.maps.values():
            self.problems.add(self.net.place, "no layer gives images", f"write one of {', '.join(IMAGES)}")
        elif not self.failed:
            self.logits = self._find_logits()
            if not self.logits and not self.unknown:
                self.problems.add(self.net.place, "no layer computes anything", "write the layers of a network")
            elif self._are_logits() and not self.unknown and len(self.size_of(self.images)) == 3:
                layers = tuple(replace(one, blobs=tuple(map(self._settled, one.blobs))) for one in self.found)
                return Pass(layers=layers, images=self.images, labels=self.labels, logits=self.logits)
        return None

    def fail(self, place: Span, message: str, hint: str = "") -> None:
        """TooManyMistakes, so that no net makes its reader work for long."""
        self.problems.add(place, f"layer {shown(self.name)}: {message}", hint)
        self.unknown = self.failed = True
        if self.problems.count(self.net.path) > MOST_MISTAKES:
            raise TooManyMistakes

    def layer(self, block: Block) -> None:
        view, kind = View(block), type_of(block)
        written, row, place = view.text("name") or "", LAYERS[kind], view.place("name")
        self.name = written or kind
        if written and (twin := self.names.setdefault(written, block)) is not block:
            self.fail(place, "there is another layer of this name", f"it stands in line {twin.place.line}")
        self._refuse_unbuilt(block, kind)
        bottoms, tops = view.texts("bottom"), view.texts("top")
        dims = tuple(self._taken(block, i, bottom) for i, bottom in enumerate(bottoms))
        fits = self._count(place, kind, "bottom", len(bottoms), row.bottoms)
        fits &= self._count(place, kind, "top", len(tops), row.tops)
        before = self.problems.count(self.net.path)
        own = view.inside(row.param) if row.param else view
        known = tuple(shape for shape in dims if shape is not None)
        reading = Reading(block, kind, self.name, bottoms, known, len(tops), self.problems, own)
        made = row.read(reading) if fits and len(known) == len(dims) else None
        if made is not None:
            made = self._read_images(view, tops, made) if kind in IMAGES else made
            made = self._filled_by_norm(reading, made) if kind == "Scale" else made
            self._refuse_labels(block, kind, bottoms)
            if not written and (made.blobs or kind == "BatchNorm"):
                self.fail(place, "it has no `name`", "parameters and statistics are found by the layer's name")
        shapes = made.tops if made is not None else (None,) * len(tops)
        for i, (top, shape) in enumerate(zip(tops, shapes, strict=True)):
            self._put(block, i, shape, row.in_place and bottoms[i : i + 1] == (top,))
        if made is None or self.problems.count(self.net.path) > before:
            self.unknown = True
            self.failed |= kind in JUDGES  # else another map would be taken for the logits
            return
        self.unknown |= any(0 in blob.shape for blob in made.blobs)
        self.found.append(
            Layer(
                name=written,
                type=kind,
                settings=made.settings,
                bottoms=bottoms,
                tops=tops,
                shapes=tuple(dims or () for dims in shapes),
                blobs=self._parameters(block, made.blobs),
            )
        )

    def _count(self, place: Span, kind: str, what: str, number: int, allowed: tuple[int, int]) -> bool:
        low, high = allowed
        if low <= number <= high:
            return True
        wanted = f"at least {low}" if number < low else f"at most {high}"
        if high <= low + 1:
            wanted = f"{low}" if low == high else f"{low} or {high}"
        self.fail(place, f"{count(number, what)}, and {kind} has {wanted}", f"`{what}` stands once for each")
        return False

    def _refuse_unbuilt(self, block: Block, kind: str) -> None:
        entries = block.entries
        if "include" in entries and "exclude" in entries:
            self.fail(entries["exclude"].name, "it has both `include` and `exclude`", "Caffe allows one of them")
        if "blobs" in entries:
            self.fail(entries["blobs"].name, "weights in a net's text aren't read", "give them as `weights`")
        for i, value in enumerate(entries["propagate_down"].values if "propagate_down" in entries else ()):
            if value.value is False and not (kind in TAKE_LABELS and i == 1):
                message = "`propagate_down: false` isn't known here"
                self.fail(value.span, message, "write `lr_mult: 0` in the layers below")

    def _taken(self, block: Block, at: int, bottom: str) -> Shape | None:
        self.untaken.pop(bottom, None)
        place = block.entries["bottom"].values[at].span
        if bottom in self.maps:
            return self.maps[bottom]
        if (other := self.elsewhere.get(bottom)) is not None:
            message = f"no layer before it has the top {shown(bottom)}, only {shown(name_of(other))}"
            hint = "layers stand in their order, and `include` and `exclude` choose those of a phase"
            self.fail(place, f"{message} in line {other.place.line}", hint)
        else:
            hint = nearest(bottom, islice(self.maps, MOST_LIKENED)) or "a bottom is the top of a layer before it"
            self.fail(place, f"no layer has the top {shown(bottom)}", hint)
        self.maps[bottom] = None  # said once
        return None

    def _refuse_labels(self, block: Block, kind: str, bottoms: Sequence[str]) -> None:
        for i, bottom in enumerate(bottoms):
            if bottom in self.no_maps and kind != "Silence" and not (kind in TAKE_LABELS and i == 1):
                hint = "labels are the second bottom of a loss or an Accuracy, and nothing takes what an Accuracy says"
                place = block.entries["bottom"].values[i].span
                self.fail(place, f"bottom {shown(bottom)} is no map of images", hint)

    def _put(self, block: Block, at: int, dims: Shape | None, in_place: bool) -> None:
        """A layer's top among the maps."""
        kind, value = type_of(block), block.entries["top"].values[at]
        top, place = str(value.value), value.span
        if top in self.makers and not in_place:
            if top in View(block).texts("bottom"):
                self.fail(place, f"{kind} can't be computed in place", "give its top a name of its own")
            else:
                line = self.makers[top].place.line
                self.fail(place, f"top {shown(top)} is there already", f"the layer in line {line} has it")
        if dims is not None and (size := prod(dims)) > LARGEST:
            self.fail(place, f"top {shown(top)} has {size} values for an image, more than {LARGEST}", TOO_LARGE)
            dims = None
        self.no_maps.discard(top)
        if kind == "Accuracy" or (kind in IMAGES and dims == LABELS):
            self.no_maps.add(top)
        elif dims is None or 0 in dims:
            self.unknown = True
        self.maps[top], self.makers[top] = dims, block
        self.untaken[top] = None

    def _read_images(self, view: View, tops: Sequence[str], made: Made) -> Made:
        """The tops of a layer that reads images: which are images, which labels."""
        found: list[Shape | None] = []
        from_disk = view.text("type") in ("Data", "ImageData")
        for i, (top, dims) in enumerate(zip(tops, made.tops, strict=True)):
            place = view.block.entries["top"].values[i].span
            if i == 0 if from_disk else dims is not None and len(dims) == 3:
                if self.images:
                    self.fail(place, f"{shown(self.images)} are images already", "an image classifier takes one")
                self.images = self.images or top
                crop = view.inside("transform_param").whole("crop_size") or 0
                found.append(self.shape or dims or (0, crop, crop))
            elif from_disk or dims == LABELS:
                self.labels = self.labels or top
                found.append(LABELS)
            else:
                size = f"a shape of {len(dims) + 1} axes" if dims is not None else "no shape"
                self.fail(place, f"top {shown(top)} has {size}: neither images nor labels", "images have 4 axes")
                found.append(None)
        return replace(made, tops=tuple(found))

    def _filled_by_norm(self, scale: Reading, made: Made) -> Made:
        """Intel's Caffe joins a Scale to the BatchNorm before it, and the fillers written there are its."""
        norm = self.makers.get(scale.bottoms[0]) if len(scale.bottoms) == 1 else None
        inside = norm.block("batch_norm_param") if norm is not None and type_of(norm) == "BatchNorm" else None
        if norm is None or inside is None or merged(norm):
            return made
        blobs = list(made.blobs)
        for i, (blob, field, value) in enumerate(zip(blobs, ("filler", "bias_filler"), (1.0, 0.0), strict=False)):
            if field in inside.entries:
                blobs[i] = replace(blob, filler=scale.of(View(inside)).filler(field, value))
        return replace(made, blobs=tuple(blobs))

    def _find_logits(self) -> str:
        """As `net.Pass` says; of a Softmax what it takes, which has the same name where that is computed in place."""
        outputs = [top for top in self.untaken if top not in (self.labels, self.images)]
        found = outputs[-1] if outputs else ""
        for kind in JUDGES:
            judging = [layer for layer in self.found if layer.type == kind]
            counting = [one for one in judging if getattr(one.settings, "loss_weight", 1)]
            if judging:
                found = (counting or judging)[-1].bottoms[0]
                break
        seen = {""}
        while found not in seen and type_of(self.makers[found]) == "Softmax":
            seen.add(found)
            found = View(self.makers[found]).texts("bottom")[0]
        return found

    def _are_logits(self) -> bool:
        """Whether the logits are known, and an answer for an image; a mistake if not."""
        if (dims := self.maps.get(self.logits)) is None:
            return False
        if dims and all(n < 2 for n in dims[1:]) and self.logits != self.images:
            return True
        maker = self.makers[self.logits]
        self.name = name_of(maker)
        output = f"its top {shown(self.logits)}, {text(dims)}, is the net's output"
        self.fail(maker.place, f"{output}, and a classifier has one number for each class of an image")
        return False

    # -- parameters

    def _parameters(self, block: Block, new: Sequence[Blob]) -> tuple[Blob, ...]:
        """Those of a layer, with the rates of `param`, and the names of shared ones."""
        params: list[View | None] = list(View(block).views("param"))
        statistics = 3 if type_of(block) == "BatchNorm" else 0
        if len(params) > len(new) + statistics:
            message = f"{len(params)} `param`, and the layer has {len(new) + statistics} parameters"
            self.fail(block.entries["param"].name, message, "remove those too many")
        for param in params[:statistics]:
            if param is not None and param.text("name"):
                self.fail(param.place("name"), "statistics that layers share are not built", "take the `name` out")
        found = []
        for made, param in zip(new, [*params[statistics:], *[None] * len(new)], strict=False):
            if (size := prod(made.shape)) > LARGEST:
                part = made.name.rpartition(".")[2]
                self.fail(block.place, f"its {part} has {size} values, more than {LARGEST}", TOO_LARGE)
            made = self._shared(made, param, block.place) if param is not None else made
            self.blobs.setdefault(made.name, made)
            self.places.setdefault(made.name, block.place)
            found.append(made)
        return tuple(found)

    def _shared(self, blob: Blob, param: View, place: Span) -> Blob:
        """As the parameter of the same name in `param`, if a layer before has it. The first layer that says a multiplier counts for all."""
        name = param.text("name") or ""
        owner = self.blobs.get(self.shared.setdefault(name, blob.name), blob) if name else blob
        if not alike(blob.shape, owner.shape):
            there = f"{text(owner.shape)} in line {self.places[owner.name].line}"
            message = f"parameter {shown(name)} is {text(blob.shape)} here and {there}"
            self.fail(param.place("name"), message, "shared parameters have one shape")
        for field in filter(param.has, RATES):
            value = param.number(field) or 0.0
            first, line = self.rated.setdefault((owner.name, field), (value, place.line))
            if first != value:
                self.fail(param.place(field), f"`{field}` of {shown(name)} is another in line {line}", "give one")
        return replace(blob, name=owner.name, filler=owner.filler)

    def _settled(self, blob: Blob) -> Blob:
        """With the multipliers that the layers which share it come to."""
        lr, decay = (self.rated.get((blob.name, field), (1.0, 0))[0] for field in RATES)
        return replace(blob, lr_mult=lr, decay_mult=decay)
