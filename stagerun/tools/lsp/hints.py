"""What a line comes to, shown beside it: epochs for iterations, and the rate at a stage's ends. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.base.errors import Span
from stagerun.base.recipe import Schedule, Stage
from stagerun.language.values import leaves, shown
from stagerun.schedule import learning_rate


@dataclass(frozen=True, slots=True)
class Beside:
    span: Span
    text: str


def beside(schedule: Schedule, path: str) -> list[Beside]:
    """In one file. Where stages that share a line come to different things, nothing stands beside it."""
    found: dict[Span, set[str]] = {}
    for stage in schedule.stages:
        for one in _of_stage(stage):
            if one.span.path == path:
                found.setdefault(one.span, set()).add(one.text)
    return [Beside(span, *texts) for span, texts in sorted(found.items()) if len(texts) == 1]


def _of_stage(stage: Stage) -> Iterator[Beside]:
    rate, last = learning_rate(stage.solver), stage.solver.max_iter - 1
    ends = f"{rate(0):.4g} -> {rate(last):.4g}"
    yield Beside(stage.span, f"{stage.solver.max_iter} iterations, {ends}")
    if (policy := stage.written("solver.lr_policy")) is not None:
        yield Beside(policy, ends)
    for key, value in leaves(stage.solver, "solver"):
        origin = stage.origins.get(key)
        if origin is None or origin.span is None or key.endswith("knot"):
            continue
        said, written = shown(key, value, stage)
        if written:
            yield Beside(origin.span, f"= {value} iterations" if " epochs" in said else f"= {said}")
        elif " = " in said and said.endswith(" epochs"):
            yield Beside(origin.span, "= " + said.partition(" = ")[2].replace(".00 ", " "))
