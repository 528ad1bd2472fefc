"""Parameters of layers: how many outputs, weight and bias, and the fillers they start with."""

from stagerun.base import net
from stagerun.base.recipe import VarianceNorm
from stagerun.language.net.given import Dims, Given, NewBlob
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
    found = [NewBlob("weight", weight, filler_of(given, view, "weight_filler"))]
    if view.flag("bias_term") if bias is None else bias:
        found.append(NewBlob("bias", (outputs,), filler_of(given, view, "bias_filler")))
    return tuple(found)


def filler_of(given: Given, view: View, field: str, value: float = 0.0) -> net.Filler:
    """`value`: that of a filler that is not written."""
    written = view.inside(field)
    found = filler(written, "constant", value)
    if found.type not in FILLERS:
        given.wrong(written, "type", f"there is no filler `{found.type}`", f"known: {', '.join(FILLERS)}")
    return found


def filler(view: View, default: str = "constant", value: float = 0.0) -> net.Filler:
    """Of a FillerParameter that is written; of one that is not: `default`."""
    written = {name: view.number(name) for name in ("value", "min", "max", "mean", "std")}
    numbers = {name: number for name, number in written.items() if number is not None}
    if not view.block.entries:
        return net.Filler(type=default, value=value)
    norm = VarianceNorm(view.text("variance_norm"))
    return net.Filler(type=view.text("type") or "", variance_norm=norm, sparse=view.whole("sparse") or -1, **numbers)
