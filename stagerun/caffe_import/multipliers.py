"""`param { lr_mult decay_mult }` of layers -> rules by kind of parameter, and by name where layers differ. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.lines import Line, Setting
from stagerun.caffe_import.nets import text_of
from stagerun.caffe_import.networks import parameter_prefix
from stagerun.errors import Span
from stagerun.spec.tree import Block, quoted
from stagerun.spec.view import View

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
