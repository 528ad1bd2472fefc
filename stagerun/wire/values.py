"""What is known of each compression method without torch: which settings it reads, with their defaults, and what it keeps.

A method is a row here, and an operator in `wire.messages.BUILT`. Pure, stdlib only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stagerun.base.recipe import Compression, CompressionRule, Memory, Method, ParamKind, Scope, Solver
from stagerun.base.text import count
from stagerun.base.units import epochs

Setting = float | int | None
SETTINGS = ("ratio", "threshold", "qstates", "rank")  # by their names in Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """`reads` has the default of each setting that the method reads; None: the operator finds one for each tensor.

    `memory` is the default. `exact`: nothing is lost, so that there is nothing to remember.
    """

    reads: Mapping[str, Setting] = field(default_factory=dict)
    memory: Memory = Memory.NONE
    exact: bool = False


METHODS: dict[Method, Known] = {
    Method.NONE: Known(exact=True),
    Method.TOP_K: Known(reads={"ratio": 0.01}, memory=Memory.RESIDUAL),
    Method.RANDOM_K: Known(reads={"ratio": 0.01}, memory=Memory.RESIDUAL),
    Method.THRESHOLD: Known(reads={"threshold": 0.001}, memory=Memory.RESIDUAL),
    Method.TERNGRAD: Known(),
    Method.QSGD: Known(reads={"qstates": 255}),
    Method.POWER_SGD: Known(reads={"rank": 4}, memory=Memory.RESIDUAL),
    Method.BF16: Known(),
    Method.AUTO: Known(memory=Memory.RESIDUAL),
}
# What AUTO chooses among where `allow` is not written.
ALLOWED = (Method.TOP_K, Method.QSGD, Method.BF16)


def settings_read(method: Method, allow: Sequence[Method] = ()) -> Mapping[str, Setting]:
    """The settings that a method reads, and their defaults. AUTO reads those of the methods that it may choose: None for one of which
    they have different defaults."""
    if method is not Method.AUTO:
        return METHODS[method].reads
    found: dict[str, Setting] = {}
    for one in allow or ALLOWED:
        for name, default in METHODS[one].reads.items():
            found[name] = default if found.get(name, default) == default else None
    return found


def settings_of(
    method: Method, *stated: Compression | CompressionRule, allow: Sequence[Method] = ()
) -> dict[str, Setting]:
    """The settings that a method reads, each from the first of `stated` that has it, else the method's default."""
    found = {}
    for name, default in settings_read(method, allow).items():
        values = (getattr(one, name) for one in stated)
        found[name] = next((value for value in values if value is not None), default)
    return found


# By parameter, and "*" for all others, what AUTO chose: as snapshots and OUT/choices have it.
Choice = Mapping[str, str]


def applied(how: Compression, choice: Choice) -> Compression:
    """AUTO with what it chose in its place; what `param` says of some parameters stays before it. ValueError for what is not a choice
    that `how` allows. Each method has its own default memory, unless `how` has none: with a residual QSGD may diverge."""
    methods = {name: Method(value) for name, value in choice.items()}
    if "*" not in methods or not set(methods.values()) <= {Method.NONE, *how.allow}:
        raise ValueError("not a choice among the methods that `compress_param` allows")
    rules = [
        CompressionRule(name=name, method=method, **_settings(method, how))
        for name, method in methods.items()
        if name != "*"
    ]
    rest = methods["*"]
    unset: dict[str, Any] = dict.fromkeys(SETTINGS)
    return replace(how, method=rest, allow=(), param=(*how.param, *rules), **unset | _settings(rest, how))


def _settings(method: Method, how: Compression) -> dict[str, Any]:
    memory = METHODS[method].memory if how.memory is Memory.RESIDUAL else Memory.NONE
    return {**settings_of(method, how), "memory": memory}


# -- in words


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
