"""The net of a stage -> `model` and the rules of `param`. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.base.errors import Span
from stagerun.language.caffe_names import RESNET50, parameter_prefix
from stagerun.language.networks import FILLER_FIELDS, NETWORKS
from stagerun.language.tree import Block, quoted
from stagerun.language.view import View
from stagerun.tools.caffe.lines import Line, Setting
from stagerun.tools.caffe.net import Shape, of_type, recognise, shapes, text_of, zero_gamma
from stagerun.tools.caffe.text import Findings

WHICH = "which network? `stagerun help Model.name` lists them"
CAFFES_FRACTION, CAFFES_EPS = "0.999", "1e-5"  # of BatchNorm, where the net says nothing else
# How the last layer of RESNET50 starts, as published.
PUBLISHED_FC = {"weight_filler": ("gaussian", "0.01"), "bias_filler": ("constant", "0")}


def whole_lines(net: Block, file: str, channels: int | None, there: bool) -> tuple[Line, ...]:
    """The inside of `model` with the net itself, in a file. What can't be known of images that aren't `there` is asked."""
    title, place = text_of(net, "name"), net.place
    comment = f"Caffe's net: {title}" if _printable(title) else ""
    lines = [Line(f"caffe_net: {quoted(file)}", place, comment, asks=not there)]
    if channels is not None:
        lines.append(Line(f"channels: {channels}", place))
    return tuple(lines)


def model_lines(
    net: Block, layers: Sequence[Block], name: str, channels: int | None, passes: int, found: Findings
) -> tuple[Line, ...]:
    """The inside of `model` with a network of stagerun's, called `name`, that stands for the net. `passes` of each worker make an
    iteration."""
    known = shapes(layers)
    title = text_of(net, "name")
    lines: list[Line] = []
    place = net.entries["name"].place if "name" in net.entries else net.place
    lines.append(Line(f"name: {quoted(name)}", place, f"Caffe's net: {title}" if _printable(title) else ""))
    if name != recognise(known):
        why = f"`{name}` of stagerun's stands for it, and layers and fillers were not compared"
        todo = "without `--model` the net is taken as it is"
        found.leave(net.place, f"net `{title}`" if _printable(title) else "net", why, todo)
    lines += _classes(known)
    if channels == 1:
        lines.append(Line("channels: 1", place))
    lines += _norm(layers, name, passes, found)
    if name == RESNET50:
        gamma = zero_gamma(layers)
        if gamma is None:
            why = "the scales that start at zero are in other blocks than `zero_gamma` can name"
            found.leave(net.place, "batch_norm_param.filler", why)
        elif gamma != "LAST":
            lines.append(Line(f"zero_gamma: {gamma}", place))
    lines += _fillers(layers, name, found)
    _note_losses(layers, found)
    return tuple(lines)


def _printable(title: str) -> bool:
    return bool(title) and title.isprintable() and len(title) < 60


def last_linear(layers: Sequence[Block]) -> str:
    """The name of the last InnerProduct; '' where there is none."""
    names = [text_of(layer, "name") for layer in of_type(layers, "InnerProduct")]
    return names[-1] if names else ""


def _classes(known: Sequence[Shape]) -> list[Line]:
    linear = [s for s in known if s.type == "InnerProduct"]
    if linear and linear[-1].sizes[0]:
        return [Line(f"num_classes: {linear[-1].sizes[0]}", linear[-1].place)]
    place = known[-1].place if known else None
    return [Line("num_classes: 0", place, "how many? the net ends in no InnerProduct layer", asks=True)]


def _norm(layers: Sequence[Block], name: str, passes: int, found: Findings) -> list[Line]:
    """batch_norm_param of all BatchNorm layers. Caffe's default is another one than those of stagerun's networks."""
    norms = list(of_type(layers, "BatchNorm"))
    if not norms or (name in NETWORKS and NETWORKS[name].batch_norm is None):
        return []
    said: list[tuple[str, str, Span]] = []
    for layer in norms:
        inside = layer.block("batch_norm_param")
        for field in ("use_global_stats", "stats_batch_size"):
            if inside is not None and field in inside.entries and inside.entries[field].values[0].value:
                found.leave(inside.entries[field].place, field, "BatchNorm takes the statistics of one device batch")
        texts = [
            inside.entries[field].values[0].text.rstrip("fF")
            if inside is not None and field in inside.entries
            else default
            for field, default in (("moving_average_fraction", CAFFES_FRACTION), ("eps", CAFFES_EPS))
        ]
        said.append((texts[0], texts[1], inside.place if inside else layer.place))
    fraction, eps, place = said[0]
    for other in said[1:]:
        if other[:2] != (fraction, eps):
            found.leave(other[2], "batch_norm_param", f"another than in the first BatchNorm ({fraction}, eps {eps})")
            break
    inner = f"moving_average_fraction: {fraction}" + (f" eps: {eps}" if float(eps) != 1e-5 else "")
    inner += f" moving_average_passes: {passes}" if passes > 1 else ""
    return [Line(f"batch_norm_param {{ {inner} }}", place)]


def _fillers(layers: Sequence[Block], name: str, found: Findings) -> list[Line]:
    """How the last linear layer starts, where the net says it."""
    linear = list(of_type(layers, "InnerProduct"))
    settings = linear[-1].block("inner_product_param") if linear else None
    network = NETWORKS.get(name)
    lines = []
    for field, there in (
        ("weight_filler", network is None or network.fc_weight),
        ("bias_filler", network is None or network.fc_bias),
    ):
        filler = settings.block(field) if settings else None
        if filler is None or not there:
            continue
        kind = View(filler).text("type") or ""
        if kind not in FILLER_FIELDS:
            found.leave(filler.place, field, f"there is no filler `{kind}`")
            continue
        inner = [f"type: {quoted(kind)}"]
        for entry in filler.entries.values():
            if entry.field.name in FILLER_FIELDS[kind]:
                inner.append(f"{entry.field.name}: {entry.values[0].text or entry.values[0].value}")
            elif entry.field.name in ("sparse", "scale"):
                found.leave(entry.place, f"{field}.{entry.field.name}", "stagerun's fillers have none")
        if name != RESNET50 or (kind, *(i.partition(": ")[2] for i in inner[1:])) not in _published(field):
            lines.append(Line(f"fc_{field} {{ {' '.join(inner)} }}", filler.place))
    return lines


def _published(field: str) -> tuple[tuple[str, ...], ...]:
    kind, value = PUBLISHED_FC[field]
    return ((kind, value), (kind,)) if kind == "constant" else ((kind, value),)


def _note_losses(layers: Sequence[Block], found: Findings) -> None:
    """Anything but one plain SoftmaxWithLoss."""
    losses = [layer for layer in layers if text_of(layer, "type").endswith("Loss")]
    for number, layer in enumerate(losses):
        name, kind = text_of(layer, "name"), text_of(layer, "type")
        if kind != "SoftmaxWithLoss" or number < len(losses) - 1:
            why = f"stagerun's loss is one SoftmaxWithLoss, on the last layer; this is {_article(kind)}"
            found.leave(layer.place, f"layer `{name}`", why)
            continue
        weights = View(layer).numbers("loss_weight")
        if weights and weights[0] != 1:
            place = layer.entries["loss_weight"].place
            found.leave(place, "loss_weight", "the loss counts once", "multiply base_lr and divide weight_decay by it")
        parameters = View(layer).inside("loss_param")
        for field in ("ignore_label", "pre_fixed_normalizer"):
            if parameters.has(field):
                found.leave(parameters.place(field), field, "the loss is the mean over all images")
        if parameters.text("normalization") in ("NONE", "PRE_FIXED"):
            found.leave(parameters.place("normalization"), "normalization", "the loss is the mean over all images")


def _article(kind: str) -> str:
    return "a further one" if kind == "SoftmaxWithLoss" else f"a {kind}"


def label_smoothing(layers: Sequence[Block]) -> tuple[str, Span] | None:
    """Intel's loss_param { label_smoothing }, as written; None where there is none."""
    for layer in of_type(layers, "SoftmaxWithLoss"):
        inside = layer.block("loss_param")
        if inside is not None and "label_smoothing" in inside.entries:
            entry = inside.entries["label_smoothing"]
            return entry.values[0].text, entry.place
    return None


def note_other_network(first: Sequence[Block], other: Sequence[Block], file: str, found: Findings) -> None:
    """One network is trained in all stages; a stage whose net has other layers is listed once."""
    before, now = shapes(first), shapes(other)
    for a, b in zip(before, now, strict=False):
        if (a.name, a.type, a.sizes, a.bias) != (b.name, b.type, b.sizes, b.bias):
            why = f"another than in {file} ({a.name}), and stagerun has one network for all stages"
            found.leave(b.place, f"layer `{b.name}`", why)
            return
    if len(before) != len(now):
        place = now[-1].place if now else (before[-1].place if before else Span(file, 1, 1))
        found.leave(place, "net", f"{len(now)} layers with weights, and {len(before)} in {file}")


# -- `param { lr_mult decay_mult }` of layers: rules by kind of parameter, and by name where layers differ

# What the blobs of a layer are: the kind of each, and how stagerun's parameter ends.
BLOBS: dict[str, tuple[tuple[str, str], ...]] = {
    "Convolution": (("WEIGHT", "weight"), ("BIAS", "bias")),
    "InnerProduct": (("WEIGHT", "weight"), ("BIAS", "bias")),
    "Scale": (("NORM", "weight"), ("NORM", "bias")),
}
# A BatchNorm's first three blobs are statistics, which no solver moves; with Intel's there are scale and shift after them.
NORM_BLOBS = (("NORM", "weight"), ("NORM", "bias"))
PLAIN = ("1", "1")
SCALES = "param of Scale layers"


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A parameter of Caffe's: lr_mult and decay_mult as written."""

    kind: str
    layer: str
    end: str
    mult: tuple[str, str]
    place: Span


def multipliers(layers: Sequence[Block], model: str, last: str, found: Findings) -> Setting | None:
    """The rules, those for single layers first, since the first that fits counts. None where all multipliers are 1.

    `last` is the name of the net's last linear layer. Layers whose parameters can't be named are left out and listed.
    """
    parameters = [p for layer in layers for p in _parameters(layer, found)]
    special: list[Line] = []
    general: list[Line] = []
    for kind in dict.fromkeys(p.kind for p in parameters):
        of_kind = [p for p in parameters if p.kind == kind]
        usual = Counter(p.mult for p in of_kind).most_common(1)[0][0]
        if usual != PLAIN:
            place = next(p.place for p in of_kind if p.mult == usual)
            general.append(_rule(f"kind: {kind}", usual, place))
        for parameter in of_kind:
            if parameter.mult == usual:
                continue
            prefix = parameter_prefix(model, parameter.layer, last)
            if prefix:
                special.append(_rule(f"name: {quoted(f'{prefix}.{parameter.end}')}", parameter.mult, parameter.place))
            else:
                lr, decay = parameter.mult
                why = f"lr_mult {lr}, decay_mult {decay}, where other layers have {usual[0]} and {usual[1]}"
                todo = f'write `param {{ name: "..." lr_mult: {lr} decay_mult: {decay} }}` with the network\'s own name'
                found.leave(parameter.place, f"param of layer `{parameter.layer}` ({parameter.end})", why, todo)
    merged = [layer for layer in layers if (norm := layer.block("batch_norm_param")) and "filler" in norm.entries]
    moved = [p for p in parameters if p.kind == "NORM" and p.mult != PLAIN]
    if merged and moved and all(left.what != SCALES for left in found.left):
        why = "carried over, but Intel's MKL-DNN engine lost the multipliers of Scale layers, and decayed them as all weights"
        found.leave(moved[0].place, SCALES, why, "take the rule out to do the same")
    lines = (*special, *general)
    return Setting("param", lines) if lines else None


def _rule(which: str, mult: tuple[str, str], place: Span) -> Line:
    lr, decay = mult
    said = (f" lr_mult: {lr}" if lr != "1" else "") + (f" decay_mult: {decay}" if decay != "1" else "")
    # A rule that is for one layer may take back what one for its kind says.
    return Line(f"param {{ {which}{said or ' lr_mult: 1'} }}", place)


def _parameters(layer: Block, found: Findings) -> list[Multiplied]:
    kind, name = text_of(layer, "type"), text_of(layer, "name")
    specs = list(layer.blocks("param"))
    for spec in specs:
        if "name" in spec.entries:
            found.leave(spec.entries["name"].place, f"param of layer `{name}`", "stagerun shares no weights by name")
    blobs = BLOBS.get(kind, ())
    if kind == "BatchNorm" and len(specs) > 3:
        specs, blobs = specs[3:], NORM_BLOBS
    if not blobs:
        moved = [s for s in specs if _mult(s) != PLAIN]
        if moved and kind != "BatchNorm":
            why = f"multipliers of a {kind} layer, and stagerun doesn't know what its parameters are"
            found.leave(moved[0].place, f"param of layer `{name}`", why)
        return []
    place = layer.place
    result = []
    for number, (what, end) in enumerate(blobs[: 2 if _has_bias(layer, kind) else 1]):
        mult, where = (_mult(specs[number]), specs[number].place) if number < len(specs) else (PLAIN, place)
        result.append(Multiplied(what, name, end, mult, where))
    return result


def _has_bias(layer: Block, kind: str) -> bool:
    inside = {"Convolution": "convolution_param", "InnerProduct": "inner_product_param", "Scale": "scale_param"}
    return kind not in inside or View(layer).inside(inside[kind]).flag("bias_term")


def _mult(spec: Block) -> tuple[str, str]:
    """lr_mult and decay_mult, as written; 1.0 is 1."""
    values = []
    for name in ("lr_mult", "decay_mult"):
        number = View(spec).number(name)
        written = spec.entries[name].values[0].text if name in spec.entries else "1"
        values.append(str(int(number)) if number is not None and number == int(number) else written)
    return values[0], values[1]
