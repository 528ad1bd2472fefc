"""How a stage's gradients are compressed, in a few words. Pure."""

from stagerun.base.compression import settings_of
from stagerun.base.recipe import Compression, CompressionRule, Memory, Method, ParamKind, Scope, Solver
from stagerun.base.text import count
from stagerun.base.units import epochs


def sending(solver: Solver, images: int) -> str:
    """How a stage's gradients reach other workers, where that is not as they are at every iteration: `TOP_K 1 %, layer-wise`; else ''."""
    if solver.sync is not None:
        return f"{count(solver.sync.replicas, 'replica')} by {solver.sync.method.value}"
    return compression(solver.compress, solver, images) if solver.compress is not None else ""


def compression(compress: Compression, solver: Solver, images: int) -> str:
    """How the gradients are made smaller: `TOP_K 1 %, layer-wise, with a residual, from epoch 2`."""
    parts = [method_text(compress.method, compress)]
    if compress.method is Method.AUTO:
        chosen = ", ".join(method_text(method, compress) for method in compress.allow)
        parts = [f"AUTO of {chosen} or dense"]
    if compress.method is not Method.NONE:
        parts.append("layer-wise" if compress.scope is Scope.LAYERWISE else "entire model")
    parts += ["with a residual"] if compress.memory is Memory.RESIDUAL else []
    parts += [f"from epoch {epochs(compress.start_iter, images, solver.batch_size):g}"] if compress.start_iter else []
    parts += [f"{_pattern(rule)}: {method_text(rule.method, rule)}" for rule in compress.param]
    parts += ["two runs may choose differently"] if compress.method is Method.AUTO else []
    return ", ".join(parts)


def _pattern(rule: CompressionRule) -> str:
    return rule.name if rule.kind is ParamKind.ANY else f"{rule.kind.value} {rule.name}"


# How the settings of a compression method are written after its name.
_SETTINGS = {
    "ratio": lambda value: f"{100 * value:g} %",
    "threshold": lambda value: f"at {value:g}",
    "qstates": lambda value: f"of {value} states",
    "rank": lambda value: f"of rank {value}",
}


def method_text(method: Method, stated: Compression | CompressionRule) -> str:
    """A method with its settings; `NONE` as people say it."""
    if method is Method.NONE:
        return "dense"
    found = settings_of(method, stated)
    return " ".join([method.value, *(_SETTINGS[name](value) for name, value in found.items() if value is not None)])
