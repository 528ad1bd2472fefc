"""--redo, --keep, --only and --until: the stages that they name, and what can't be done without the others. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stagerun.errors import Problem, RecipeError, Span, UsageError, listing, nearest
from stagerun.plan.planned import Plan, PlannedStage, State, label
from stagerun.recipe import Schedule


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of stages, groups resolved. `chosen` are those that may be trained."""

    redo: frozenset[str]
    keep: frozenset[str]
    chosen: frozenset[str]


def choice(
    schedule: Schedule, redo: Collection[str], keep: Collection[str], only: Collection[str], until: str | None
) -> Choice:
    """RecipeError with every name that is no stage's, and what contradicts itself. The name of a stage that makes several
    stands for all of them."""
    members = _members(schedule)
    problems = []
    asked = (("--redo", redo), ("--keep", keep), ("--only", only), ("--until", [until] if until is not None else []))
    for option, names in asked:
        for name in names:
            wrong = _wrong(schedule, members, option, name)
            if not wrong and option == "--redo" and not _resolved(members, keep).isdisjoint(members[name]):
                wrong = f"`{name}` is both in --redo and in --keep", ""
            if wrong:
                problems.append(Problem(wrong[0], Span(option, 1, 1, len(name)), name, wrong[1]))
    if only and until is not None:
        span = Span("--until", 1, 1, len(until))
        problems.append(
            Problem(
                "--only and --until say different things", span, until, "leave one of them out; --only is repeatable"
            )
        )
    if problems:
        raise RecipeError(problems)
    everything = [stage.name for stage in schedule.stages]
    chosen = _resolved(members, only) if only else frozenset(everything)
    if until is not None:
        chosen = frozenset(everything[: 1 + max(everything.index(name) for name in members[until])])
    return Choice(_resolved(members, redo), _resolved(members, keep), chosen)


def require_starts(plan: Plan, chosen: Collection[str]) -> None:
    """UsageError for a stage that is to be trained, and starts from what is neither on disk nor to be trained."""
    by_name = {s.stage.name: s for s in plan.stages}
    missing: dict[str, None] = {}  # in running order
    for planned in (*plan.pieces, *plan.stages):
        stage, above = planned.stage, planned.stage.parent
        if planned.until is not None and stage.name not in chosen:
            missing[stage.name] = None
        if planned.state is not State.FRESH or planned.start is not None or above is None:
            continue
        if not any(piece.stage.name == above for piece in plan.pieces):
            missing |= dict.fromkeys(_not_chosen(by_name, above))
    fresh = [s for s in plan.stages if s.state is State.FRESH and s.start is None]
    waiting = [s.stage for s in fresh if missing and _above(by_name, s) & missing.keys()]
    if waiting:
        first, alone = waiting[0], {s.group for s in plan.schedule.stages if s.enabled and s not in waiting}
        asked = dict.fromkeys(s.name if s.group in alone else s.group or s.name for s in waiting)
        words = " ".join(f"--only {name}" for name in (*missing, *asked))
        raise UsageError(
            f"stage `{first.name}` starts from `{label(first.parent or '', first.parent_iter)}`, of which there is no snapshot "
            "that counts, and which is left out",
            f"`{words}` trains {_what(plan, missing)} first",
        )


def _what(plan: Plan, missing: Collection[str]) -> str:
    """That which the stages named in `missing` are needed for: of those that are past it, no more than a stretch."""
    pieces = [piece for piece in plan.pieces if piece.stage.name in missing]
    if {piece.stage.name for piece in pieces} != set(missing):
        return "that"
    if len(pieces) == 1:
        (piece,) = pieces
        return f"that stretch of `{piece.stage.name}` alone, {piece.iter} to {piece.until},"
    stretches = ", ".join(f"{piece.iter} to {piece.until} of `{piece.stage.name}`" for piece in pieces)
    return f"those stretches alone, {stretches},"


def _not_chosen(by_name: Mapping[str, PlannedStage], name: str) -> list[str]:
    """The stage and its ancestors up to one that is on disk or to be trained, the uppermost first."""
    found: list[str] = []
    above: str | None = name
    while above is not None and by_name[above].state is State.NOT_CHOSEN:
        found.insert(0, above)
        above = by_name[above].stage.parent
    return found


def _above(by_name: Mapping[str, PlannedStage], planned: PlannedStage) -> set[str]:
    found: set[str] = set()
    name = planned.stage.parent
    while name is not None:
        found.add(name)
        name = by_name[name].stage.parent
    return found


def _members(schedule: Schedule) -> dict[str, list[str]]:
    """What each name stands for, in running order."""
    members: dict[str, list[str]] = {stage.name: [stage.name] for stage in schedule.stages}
    names = frozenset(members)
    for stage in schedule.stages:
        if stage.group is not None and stage.group not in names:
            members.setdefault(stage.group, []).append(stage.name)
    return members


def _resolved(members: Mapping[str, list[str]], names: Collection[str]) -> frozenset[str]:
    return frozenset(member for name in names for member in members.get(name, ()))


def _wrong(schedule: Schedule, members: Mapping[str, list[str]], option: str, name: str) -> tuple[str, str] | None:
    if name not in members:
        known = list(members)
        return f"no stage is named `{name}`", nearest(name, known) or f"the stages are {listing(known)}"
    if option in ("--only", "--until") and not any(schedule.stage(member).enabled for member in members[name]):
        hint = "write `enabled: true` in schedule.prototxt, at the stages it starts from as well"
        return f"stage `{name}` is not enabled", hint
    return None
