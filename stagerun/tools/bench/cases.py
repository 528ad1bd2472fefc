"""What `bench compression` compares: a stage's gradients as they are, and by each of some methods. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stagerun.base.compression import METHODS, default_memory
from stagerun.base.errors import UsageError, nearest
from stagerun.base.recipe import Memory, Method, Schedule, Scope, Stage

# Those that one can choose neither a scope nor a memory for: nothing is lost, or it is chosen for the user.
_WHOLE = (Method.NONE, Method.LOSSLESS, Method.AUTO)
_OTHER = {Memory.NONE: Memory.RESIDUAL, Memory.RESIDUAL: Memory.NONE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One entry of `--methods`. `settings`: `ratio: 0.1`, as a `compress_param` has them; '' for the defaults."""

    method: Method
    settings: str = ""

    @property
    def text(self) -> str:
        return f"{self.method.value} {self.settings}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`method` with its settings, `scope` and `memory` are what a table shows; the last two are '' where there is no choice."""

    method: str
    scope: str = ""
    memory: str = ""

    @property
    def folder(self) -> str:
        """`top_k-ratio-0.1-layerwise-residual`, `dense`."""
        words = "-".join(part for part in (self.method, self.scope, self.memory) if part)
        return re.sub(r"[^a-z0-9_.]+", "-", words.lower()).strip("-")

    @property
    def text(self) -> str:
        """What `compress_param` holds."""
        if self == DENSE:
            return "method: NONE"
        scope = f" scope: {self.scope}" if self.scope else ""
        memory = f" memory: {self.memory}" if self.memory else ""
        return f"method: {self.method}{scope}{memory}"


DENSE = Case(method="dense")


def wanted(words: str) -> tuple[Wanted, ...]:
    """The entries of `TOP_K,TOP_K ratio: 0.1,SIGN`. ValueError for what is not a method.

    >>> [one.text for one in wanted("TOP_K ratio: 0.1, SIGN")]
    ['TOP_K ratio: 0.1', 'SIGN']
    """
    names = [method.value for method in Method]
    found = []
    for entry in words.split(","):
        name, _, settings = " ".join(entry.split()).partition(" ")
        if name not in names:
            hint = nearest(name, names) or f"the methods are {', '.join(names)}"
            raise ValueError(f"`{name}` is not a method: {hint}")
        found.append(Wanted(method=Method(name), settings=settings))
    return tuple(dict.fromkeys(found))


def cases(methods: Iterable[Wanted], scopes: bool, memory: bool) -> list[Case]:
    """Dense, then each method; with `scopes` in both scopes, with `memory` with and without one, as far as there is a choice."""
    return list(dict.fromkeys([DENSE, *(case for one in methods for case in _cases(one, scopes, memory))]))


def _cases(one: Wanted, scopes: bool, memory: bool) -> Iterator[Case]:
    if one.method in _WHOLE:
        yield DENSE if one.method is Method.NONE else Case(method=one.text)
        return
    first = default_memory(one.method, as_released="as_released: true" in one.settings)
    # A vector of all parameters is not the matrix that POWER_SGD wants.
    both = scopes and one.method is not Method.POWER_SGD
    for scope in (Scope.LAYERWISE, Scope.ENTIRE_MODEL) if both else (Scope.LAYERWISE,):
        for kept in (first, _OTHER[first]) if memory and not METHODS[one.method].exact else (first,):
            yield Case(method=one.text, scope=scope.value, memory=kept.value)


def path(schedule: Schedule, name: str | None) -> list[Stage]:
    """The stage, by default the last enabled one that no other starts from, and those before it, the first one first. UsageError."""
    enabled = {stage.name: stage for stage in schedule.stages if stage.enabled}
    parents = {stage.parent for stage in enabled.values()}
    leaves = [stage for stage in enabled if stage not in parents]
    if name is None and not leaves:
        raise UsageError(f"no stage of {schedule.name} is enabled", "take `enabled: false` out of one of them")
    chosen = leaves[-1] if name is None else name
    if chosen not in enabled:
        raise UsageError(
            f"--stage {chosen}: no stage of {schedule.name} that is enabled has this name", nearest(chosen, enabled)
        )
    found: list[Stage] = []
    step: str | None = chosen
    while step is not None:
        found.insert(0, enabled[step])
        step = enabled[step].parent
    return found


def overrides(stages: Sequence[Stage], case: Case, seed: int) -> tuple[str, ...]:
    """What `--set` takes for one run."""
    return f"seed={seed}", *(f"{stage.name}.compress_param={{{case.text}}}" for stage in stages)
