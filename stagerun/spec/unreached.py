"""`--set solver.FIELD=VALUE` that no stage has anything of, since each says something else of the field. Pure."""

from collections.abc import Mapping, Sequence

from stagerun.errors import Span
from stagerun.spec.layers import PARTNER, SET
from stagerun.spec.override import Override
from stagerun.spec.problems import Problems
from stagerun.spec.tree import Block


def check(changes: Sequence[Override], stages: Mapping[str, Block], problems: Problems) -> None:
    """Reports each of the changes for all stages that reaches none. `stages` are their settings, merged, with durations as they
    are written. Where a stage's settings are not known for a mistake in them, it may be the one that is reached.
    """
    for change in changes:
        path, place = _path(change), change.leaf.place
        if not path or path[0] == "clear":
            continue
        field = path[0]
        if all(_passes_by(block, field, place) for block in stages.values()) and stages:
            _report(path, place, stages, problems)


def _path(change: Override) -> tuple[str, ...]:
    """From Solver to the field; empty where the change is not one of a field of Solver for all stages, as `solver={...}`."""
    if change.stage is not None or change.path[:1] != ("solver",) or not change.leaf.entries:
        return ()  # a value out of its range, which is reported as such, is no entry
    (name,) = change.leaf.entries
    return (*change.path[1:], name)


def _passes_by(block: Block, field: str, place: Span) -> bool:
    """Whether nothing in the block comes from the argument at `place`, which changes the field or something in it."""
    if block.broken or field in block.doubtful:
        return False
    entry = block.entries.get(field)
    if entry is None:
        return True
    inside = [inner for value in block.blocks(field) for _, inner in value.walk()]
    return not any((e.name.path, e.name.line) == (SET, place.line) for e in (entry, *inside))


def _report(path: Sequence[str], place: Span, stages: Mapping[str, Block], problems: Problems) -> None:
    field, name = path[0], ".".join(path)
    written = all(field in b.entries or PARTNER.get(field) in b.entries for b in stages.values())
    own = "its own" if len(path) == 1 else f"its own `{field}`"
    says = f"sets {own}" if written else f"sets {own}, or clears it"
    first = next(iter(stages))
    problems.add(place, f"`solver.{name}` reaches no stage: each {says}", f"name the stage: `{first}.{name}=...`")
