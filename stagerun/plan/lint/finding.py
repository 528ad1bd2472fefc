"""What a rule finds. Values."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stagerun.errors import Span
from stagerun.recipe import Schedule, Stage


@dataclass(frozen=True, slots=True)
class Finding:
    id: str
    message: str
    span: Span
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """`purpose`: what a file that the rule finds nothing in is spared, one line."""

    find: Callable[[Schedule], Iterable[Finding]]
    purpose: str


def place_of(stage: Stage, *fields: str) -> Span:
    """Where the first of these fields of Solver that is written stands; where none is, the stage's own line."""
    for field in fields:
        origin = stage.origins.get(f"solver.{field}")
        if origin is not None and origin.span is not None:
            return origin.span
    return stage.span
