"""What is known of each compression method without torch: which settings it reads, with their defaults, and what it keeps.

A method is a row here, and an operator in `comm.compression`. Pure, stdlib only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stagerun.base.recipe import Compression, CompressionRule, Memory, Method

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
# Fields that take a method, and those they don't take.
REFUSED = {
    "CompressionParameter.allow": (Method.NONE, Method.AUTO),
    "CompressionRule.method": (Method.AUTO,),
}
# What AUTO chooses among where `allow` is not written.
ALLOWED = (Method.TOP_K, Method.QSGD, Method.BF16)


def methods_of(how: Compression) -> set[Method]:
    """That of all parameters, and those of its rules."""
    return {how.method, *(rule.method for rule in how.param)}


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
