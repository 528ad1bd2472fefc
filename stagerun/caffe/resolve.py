"""Resolution of a net's text to a `net.Net`: a walk through each phase follows the maps, their shapes, the shared parameters and the
output, and reports every mistake at its position."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from math import prod

from stagerun.base.errors import Problems, RecipeError, Span, nearest
from stagerun.base.recipe import Model
from stagerun.base.text import count
from stagerun.caffe.layers import merged
from stagerun.caffe.reading import (
    IMAGES,
    LARGEST,
    PHASES,
    TOO_LARGE,
    Blob,
    Layer,
    Made,
    Net,
    Pass,
    Reading,
    Shape,
    alike,
    layers_in,
    name_of,
    text,
    type_of,
)
from stagerun.caffe.text import LAYERS, TOO_MANY, NetText, read
from stagerun.language.lexer import MOST_MISTAKES, TooManyMistakes, shown
from stagerun.language.tree import Block, Value, View

Image = tuple[int, int, int]
LABELS: Shape = ()
JUDGES = ("SoftmaxWithLoss", "Accuracy", "Softmax")  # their first bottom is the logits
TAKE_LABELS = ("SoftmaxWithLoss", "Accuracy")  # as their second bottom
MOST_CANDIDATES = 500  # names to search for a similar one
RATES = ("lr_mult", "decay_mult")


class Walk:
    """The state of a walk through the layers of a phase. A phase without a data layer uses the `other` phase's."""

    def __init__(self, net: NetText, phase: str, other: str, shape: Image | None, problems: Problems) -> None:
        self.net, self.shape, self.problems = net, shape, problems
        own, others = layers_in(net.layers, phase), layers_in(net.layers, other)
        self.layers = own if net.readers(phase) else [*net.readers(other), *own]
        self.elsewhere = {top: block for block in (*others, *self.layers[::-1]) for top in View(block).texts("top")}
        self.name = ""  # of the current layer
        self.maps: dict[str, Shape | None] = {}
        self.makers: dict[str, Block] = {}
        self.untaken: dict[str, None] = {}  # tops that no layer has taken yet, in order
        self.names: dict[str, Block] = {}
        self.images = self.labels = self.logits = ""
        self.no_maps: set[str] = set()  # labels, and tops of an Accuracy
        self.passed_layers: list[Layer] = []
        self.blobs: dict[str, tuple[Blob, Span]] = {}  # by name, with the place of its first layer
        self.shared: dict[str, str] = {}  # parameter names by the name in `param`
        # Each multiplier, and the line of its layer.
        self.rated: dict[tuple[str, str], tuple[float, int]] = {}
        self.unknown = False  # a size or a layer is unknown
        self.failed = False  # also if the other phase has the same mistake

    def size_of(self, top: str) -> Shape:
        return self.maps[top] or ()

    def passed(self) -> Pass | None:
        """Return the pass; None after a mistake or if a size is unknown."""
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
                settled = (one._replace(blobs=tuple(map(self._settled, one.blobs))) for one in self.passed_layers)
                return Pass(layers=tuple(settled), images=self.images, labels=self.labels, logits=self.logits)
        return None

    def fail(self, span: Span, message: str, hint: str = "") -> None:
        """Add a mistake. Raise TooManyMistakes to bound the time that a hostile net takes."""
        self.problems.add(span, f"layer {shown(self.name)}: {message}", hint)
        self.unknown = self.failed = True
        if self.problems.count(self.net.path) > MOST_MISTAKES:
            raise TooManyMistakes

    def layer(self, block: Block) -> None:
        view, kind = View(block), type_of(block)
        written, row, span = view.text("name") or "", LAYERS[kind], view.place("name")
        self.name = written or kind
        if written and (twin := self.names.setdefault(written, block)) is not block:
            self.fail(span, "another layer has this name", f"it is in line {twin.place.line}")
        self._refuse_unbuilt(block, kind)
        bottoms, tops = (block.entries[name].values if name in block.entries else () for name in ("bottom", "top"))
        dims = tuple(map(self._taken, bottoms))
        fits = self._count(span, kind, "bottom", len(bottoms), row.bottoms)
        fits &= self._count(span, kind, "top", len(tops), row.tops)
        before = self.problems.count(self.net.path)
        settings = view.inside(row.param) if row.param else view
        names, shapes_in = view.texts("bottom"), tuple(shape for shape in dims if shape is not None)
        reading = Reading(block, kind, self.name, names, shapes_in, len(tops), self.problems, settings)
        made = row.read(reading) if fits and len(shapes_in) == len(dims) else None
        if made is not None:
            made = self._read_images(view, tops, made) if kind in IMAGES else made
            made = self._filled_by_norm(reading, made) if kind == "Scale" else made
            self._refuse_labels(kind, bottoms)
            if not written and (made.blobs or kind == "BatchNorm"):
                self.fail(span, "it has no `name`", "parameters and statistics are stored under the layer's name")
        shapes = made.tops if made is not None else (None,) * len(tops)
        for i, (top, shape) in enumerate(zip(tops, shapes, strict=True)):
            self._put(block, top, shape, row.in_place and names[i : i + 1] == (top.value,))
        if made is None or self.problems.count(self.net.path) > before:
            self.unknown = True
            self.failed |= kind in JUDGES  # else another map would pass for the logits
            return
        self.unknown |= any(0 in blob.shape for blob in made.blobs)
        self.passed_layers.append(
            Layer(
                name=written,
                type=kind,
                settings=made.settings,
                bottoms=names,
                tops=view.texts("top"),
                shapes=tuple(dims or () for dims in shapes),
                blobs=self._parameters(block, made.blobs),
            )
        )

    def _count(self, span: Span, kind: str, what: str, number: int, allowed: tuple[int, int]) -> bool:
        low, high = allowed
        if low <= number <= high:
            return True
        wanted = f"at least {low}" if number < low else f"at most {high}"
        if high <= low + 1:
            wanted = f"{low}" if low == high else f"{low} or {high}"
        self.fail(span, f"{count(number, what)}, and {kind} has {wanted}", f"write `{what}` once for each")
        return False

    def _refuse_unbuilt(self, block: Block, kind: str) -> None:
        entries = block.entries
        if "include" in entries and "exclude" in entries:
            self.fail(entries["exclude"].name, "it has both `include` and `exclude`", "Caffe allows one of them")
        if "blobs" in entries:
            self.fail(entries["blobs"].name, "weights in a net's text aren't read", "give them as `weights`")
        for i, value in enumerate(entries["propagate_down"].values if "propagate_down" in entries else ()):
            if value.value is False and not (kind in TAKE_LABELS and i == 1):
                message = "`propagate_down: false` isn't supported"
                self.fail(value.span, message, "write `lr_mult: 0` in the layers below")

    def _taken(self, bottom: Value) -> Shape | None:
        name = str(bottom.value)
        self.untaken.pop(name, None)
        if name in self.maps:
            return self.maps[name]
        message = f"no layer has the top {shown(name)}"
        if (other := self.elsewhere.get(name)) is not None:
            message = (
                f"no earlier layer has the top {shown(name)}, only {shown(name_of(other))} in line {other.place.line}"
            )
            hint = "layers run in the order of the text, and `include` and `exclude` choose a phase's layers"
        else:
            hint = nearest(name, islice(self.maps, MOST_CANDIDATES)) or "a bottom is the top of an earlier layer"
        self.fail(bottom.span, message, hint)
        self.maps[name] = None  # report it once
        return None

    def _refuse_labels(self, kind: str, bottoms: Sequence[Value]) -> None:
        for i, bottom in enumerate(bottoms):
            name = str(bottom.value)
            if name in self.no_maps and kind != "Silence" and not (kind in TAKE_LABELS and i == 1):
                hint = "labels are the second bottom of a loss or an Accuracy, and nothing takes the top of an Accuracy"
                self.fail(bottom.span, f"bottom {shown(name)} is not a map of images", hint)

    def _put(self, block: Block, value: Value, dims: Shape | None, in_place: bool) -> None:
        """Add a layer's top to the maps."""
        kind, top, span = type_of(block), str(value.value), value.span
        if top in self.makers and not in_place:
            if top in View(block).texts("bottom"):
                self.fail(span, f"{kind} can't be computed in place", "give its top another name")
            else:
                line = self.makers[top].place.line
                self.fail(span, f"top {shown(top)} already exists", f"the layer in line {line} has it")
        if dims is not None and (size := prod(dims)) > LARGEST:
            self.fail(span, f"top {shown(top)} has {size} values for an image, more than {LARGEST}", TOO_LARGE)
            dims = None
        self.no_maps.discard(top)
        if kind == "Accuracy" or (kind in IMAGES and dims == LABELS):
            self.no_maps.add(top)
        elif dims is None or 0 in dims:
            self.unknown = True
        self.maps[top], self.makers[top] = dims, block
        self.untaken[top] = None

    def _read_images(self, view: View, tops: Sequence[Value], made: Made) -> Made:
        """Tell the images from the labels among the tops of a layer that reads images."""
        shapes: list[Shape | None] = []
        from_disk = view.text("type") in ("Data", "ImageData")
        for i, (value, dims) in enumerate(zip(tops, made.tops, strict=True)):
            top, span = str(value.value), value.span
            if i == 0 if from_disk else dims is not None and len(dims) == 3:
                if self.images:
                    self.fail(span, f"{shown(self.images)} are images already", "an image classifier takes one")
                self.images = self.images or top
                crop = view.inside("transform_param").whole("crop_size") or 0
                shapes.append(self.shape or dims or (0, crop, crop))
            elif from_disk or dims == LABELS:
                self.labels = self.labels or top
                shapes.append(LABELS)
            else:
                size = f"a shape of {len(dims) + 1} axes" if dims is not None else "no shape"
                self.fail(span, f"top {shown(top)} has {size}: neither images nor labels", "images have 4 axes")
                shapes.append(None)
        return made._replace(tops=tuple(shapes))

    def _filled_by_norm(self, scale: Reading, made: Made) -> Made:
        """Use the fillers of the BatchNorm before a Scale: Intel's Caffe joins the two layers."""
        norm = self.makers.get(scale.bottoms[0])
        if norm is None or type_of(norm) != "BatchNorm" or merged(norm):
            return made
        inside, blobs = scale.of(View(norm).inside("batch_norm_param")), list(made.blobs)
        for i, (blob, field, value) in enumerate(zip(blobs, ("filler", "bias_filler"), (1.0, 0.0), strict=False)):
            if inside.view.has(field):
                blobs[i] = blob._replace(filler=inside.filler(field, value))
        return made._replace(blobs=tuple(blobs))

    def _find_logits(self) -> str:
        """Return the logits that `net.Pass` describes; for a Softmax its bottom, whose name is the same if computed in place."""
        outputs = [top for top in self.untaken if top not in (self.labels, self.images)]
        logits = outputs[-1] if outputs else ""
        for kind in JUDGES:
            judging = [layer for layer in self.passed_layers if layer.type == kind]
            counting = [one for one in judging if getattr(one.settings, "loss_weight", 1)]
            if judging:
                logits = (counting or judging)[-1].bottoms[0]
                break
        seen = {""}
        while logits not in seen and type_of(self.makers[logits]) == "Softmax":
            seen.add(logits)
            logits = View(self.makers[logits]).texts("bottom")[0]
        return logits

    def _are_logits(self) -> bool:
        """Return whether the logits have a shape of one number per class; add a mistake if they have another shape."""
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
        """Return a layer's parameters, with the rates of `param` and the names of shared ones."""
        params: list[View | None] = list(View(block).views("param"))
        statistics = 3 if type_of(block) == "BatchNorm" else 0
        if len(params) > len(new) + statistics:
            message = f"{len(params)} `param`, and the layer has {len(new) + statistics} parameters"
            self.fail(block.entries["param"].name, message, "remove the extra ones")
        for param in params[:statistics]:
            if param is not None and param.text("name"):
                self.fail(param.place("name"), "statistics that layers share are not built", "take the `name` out")
        blobs = []
        for made, param in zip(new, [*params[statistics:], *[None] * len(new)], strict=False):
            if (size := prod(made.shape)) > LARGEST:
                part = made.name.rpartition(".")[2]
                self.fail(block.place, f"its {part} has {size} values, more than {LARGEST}", TOO_LARGE)
            made = self._shared(made, param, block.place) if param is not None else made
            self.blobs.setdefault(made.name, (made, block.place))
            blobs.append(made)
        return tuple(blobs)

    def _shared(self, blob: Blob, param: View, span: Span) -> Blob:
        """Return an earlier layer's parameter with the same name in `param`, if any. The first layer with a multiplier sets it for all."""
        name = param.text("name") or ""
        first_name = self.shared.setdefault(name, blob.name) if name else ""
        owner, place = self.blobs.get(first_name, (blob, span))
        if not alike(blob.shape, owner.shape):
            message = f"parameter {shown(name)} is {text(blob.shape)} here and {text(owner.shape)} in line {place.line}"
            self.fail(param.place("name"), message, "shared parameters have one shape")
        for field in filter(param.has, RATES):
            value = param.number(field) or 0.0
            first, line = self.rated.setdefault((owner.name, field), (value, span.line))
            if first != value:
                self.fail(param.place(field), f"`{field}` of {shown(name)} differs in line {line}", "give one")
        return blob._replace(name=owner.name, filler=owner.filler)

    def _settled(self, blob: Blob) -> Blob:
        """Return the blob with the multipliers that its layers settled on."""
        lr, decay = (self.rated.get((blob.name, field), (1.0, 0))[0] for field in RATES)
        return blob._replace(lr_mult=lr, decay_mult=decay)


# -- both phases

MOST_PARAMETERS = 1_000_000_000


def resolve(net: NetText, shape: Image | None, problems: Problems) -> Net | None:
    """Build the net; None after a mistake or if a size is unknown. Without `shape`, check all that doesn't need it.
    `shape`: of an image, (channels, height, width); overrides Input and DummyData. A phase without a data layer uses
    the other's."""
    before = problems.count(net.path)
    one, other = (Walk(net, *phases, shape, problems) for phases in (PHASES, PHASES[::-1]))
    trained, tested = one.passed(), other.passed()
    if problems.count(net.path) > before or trained is None or tested is None:
        return None
    for name, (blob, span) in one.blobs.items():
        twin, _ = other.blobs.get(name, (blob, span))
        if twin.shape != blob.shape:
            message = f"{name} is {text(blob.shape)} in training and {text(twin.shape)} in testing"
            problems.add(span, message, "layers of the same name have the same parameters")
    classes, others = (walk.size_of(walk.logits)[0] for walk in (one, other))
    if classes != others:
        message = f"the number of classes is {classes} in training and {others} in testing"
        problems.add(net.place, message, "both phases have the same outputs")
    sizes = {name: prod(blob.shape) for name, (blob, _) in one.blobs.items()}
    if (total := sum(sizes.values())) > MOST_PARAMETERS:
        largest = max(sizes, key=lambda name: sizes[name])
        message = f"the net has {total:,} parameters, {sizes[largest]:,} of them in {largest}"
        hint = f"at most {MOST_PARAMETERS:,} are built: is a `num_output` wrong?"
        problems.add(one.blobs[largest][1], message, hint)
    if problems.count(net.path) > before:
        return None
    size = one.size_of(one.images)
    return Net(name=net.name, shape=size, num_classes=classes, train=trained, test=tested, text=net.canonical())


def net_of(canonical: str, shape: Image | None) -> Net:
    """Build the net of a canonical form stored in a snapshot. RecipeError if it can't be built."""
    problems = Problems()
    net = read(canonical, "net", problems)
    resolved = resolve(net, shape, problems) if net is not None else None
    if resolved is None and not problems and net is not None:
        problems.add(net.place, "the size of the images is unknown", "give it as `input_shape`")
    if resolved is None:
        raise RecipeError(problems.all())
    return resolved


@lru_cache(maxsize=16)
def of_model(model: Model) -> Net:
    """Implement `base.wings.of_model`."""
    assert model.net is not None
    channels, height, width = model.input_shape
    try:
        return net_of(model.net, (channels, height, width))
    except RecipeError as error:
        raise ValueError("; ".join(problem.message for problem in error.problems[:3])) from error
