"""Parameters of layers: how many outputs, weight and bias, and the fillers they start with."""

from stagerun.base import net
from stagerun.base.recipe import VarianceNorm
from stagerun.language.lexer import shown
from stagerun.language.net.given import Dims, Given, NewBlob, text
from stagerun.language.view import View

FILLERS = ("constant", "gaussian", "uniform", "xavier", "msra", "positive_unitball", "bilinear")


def outputs_of(given: Given, view: View) -> int | None:
    count = view.whole("num_output")
    if not count:
        given.wrong(view, "num_output", "`num_output` must be at least 1", "say how many outputs the layer has")
        return None
    return count


def weights_of(given: Given, view: View, weight: Dims, outputs: int, bias: bool | None = None) -> tuple[NewBlob, ...]:
    """The weight, and the bias where the layer has one."""
    found = [NewBlob("weight", weight, filler_of(given, view, "weight_filler", weight))]
    if view.flag("bias_term") if bias is None else bias:
        found.append(NewBlob("bias", (outputs,), filler_of(given, view, "bias_filler", (outputs,))))
    return tuple(found)


def filler_of(given: Given, view: View, field: str, dims: Dims, value: float = 0.0) -> net.Filler:
    """`dims`: of what is filled. `value`: that of a filler that is not written. One that is written and empty is Caffe's constant 0."""
    if not view.has(field):
        return net.Filler(value=value)
    written = view.inside(field)
    kind = written.text("type") or ""
    if kind not in FILLERS:
        known = f"known: {', '.join(FILLERS)}"
        if kind == "gabor":
            known = f"Intel's Caffe alone has it, and its formula isn't known here: take `gaussian`, or one of {', '.join(FILLERS)}"
        given.wrong(written, "type", f"there is no filler `{shown(kind)}`", known)
    numbers = {name: given.number(written, name) for name in ("value", "min", "max", "mean", "std")}
    if kind == "gaussian":
        given.require(written, "std", numbers["std"], numbers["std"] >= 0, "at least 0", "it is a standard deviation")
    if kind == "uniform":
        high = f"at most `max: {numbers['max']:g}`"
        given.require(written, "min", numbers["min"], numbers["min"] <= numbers["max"], high, "values are between them")
    if kind == "bilinear" and (len(dims) != 4 or dims[2] != dims[3]):
        message = f"`bilinear` fills maps of squares, and these weights are {text(dims)}"
        given.wrong(written, "type", message, "as in Caffe the kernel is as high as it is wide")
    norm, sparse = VarianceNorm(written.text("variance_norm")), written.whole("sparse")
    return net.Filler(type=kind, variance_norm=norm, sparse=-1 if sparse is None else sparse, **numbers)
