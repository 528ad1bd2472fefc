"""What --redo, --only and --until name, and what they may leave out. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stagerun.base.errors import Problem, RecipeError, Span, UsageError, listing, nearest
from stagerun.base.recipe import Schedule
from stagerun.language.stages import some
from stagerun.plan.counting import points_averaged
from stagerun.plan.planned import Plan, PlannedStage, State, label


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of stages, groups resolved. `chosen` are those that may be trained."""

    redo: frozenset[str]
    chosen: frozenset[str]


def choice(schedule: Schedule, redo: Collection[str], only: Collection[str], until: str | None) -> Choice:
    """Raises RecipeError with every name that no stage has, and every contradiction. The name of a stage that makes several
    stands for all of them."""
    everything = [stage.name for stage in schedule.stages]
    names = frozenset(everything)
    members = {name: [name] for name in everything}  # what each name stands for, in running order
    for stage in schedule.stages:
        if stage.group is not None and stage.group not in names:
            members.setdefault(stage.group, []).append(stage.name)
    problems = []
    asked = (("--redo", redo), ("--only", only), ("--until", [until] if until is not None else []))
    for option, given in asked:
        for name in given:
            wrong = _wrong(schedule, members, option, name)
            if wrong:
                problems.append(Problem(wrong[0], Span(option, 1, 1, len(name)), name, wrong[1]))
    if only and until is not None:
        text, hint = "--only and --until say different things", "leave one of them out; --only is repeatable"
        problems.append(Problem(text, Span("--until", 1, 1, len(until)), until, hint))
    if problems:
        raise RecipeError(problems)
    chosen = frozenset(member for name in only for member in members[name]) if only else frozenset(everything)
    if until is not None:
        chosen = frozenset(everything[: 1 + max(everything.index(name) for name in members[until])])
    return Choice(frozenset(member for name in redo for member in members[name]), chosen)


def require_starts(plan: Plan, chosen: Collection[str]) -> None:
    """UsageError for a stage that is to be trained, and starts from what is neither on disk nor to be trained."""
    by_name = {s.stage.name: s for s in plan.stages}
    again = {piece.stage.name for piece in plan.pieces}
    missing: dict[str, None] = {}  # in running order
    for planned in (*plan.pieces, *plan.stages):
        stage = planned.stage
        if planned.until is not None and stage.name not in chosen:
            missing[stage.name] = None
        if planned.state is State.FRESH and planned.start is None and stage.parent is not None:
            for name, iter in points_averaged(plan.schedule, stage) or ((stage.parent, stage.parent_iter),):
                if name not in again and (name, iter) not in plan.points:
                    missing |= dict.fromkeys(_not_chosen(by_name, name))
    fresh = [s.stage for s in plan.stages if s.state is State.FRESH and s.start is None]
    waiting = [stage for stage in fresh if missing and plan.ancestors(stage) & missing.keys()]
    if waiting:
        first, names = waiting[0], {stage.name for stage in waiting}
        alone = {s.group for s in plan.schedule.stages if s.enabled and s.name not in names}
        asked = dict.fromkeys(s.name if s.group in alone else s.group or s.name for s in waiting)
        words = " ".join(f"--only {name}" for name in (*missing, *asked))
        raise UsageError(
            f"stage `{first.name}` starts from `{label(first.parent or '', first.parent_iter)}`, where there is no snapshot "
            "that counts, and which is left out",
            f"`{words}` trains that first",
        )


def require_teachers(plan: Plan) -> None:
    """UsageError for a stage that is to be trained, and whose teacher is neither on disk nor to be trained."""
    by_name = {s.stage.name: s for s in plan.stages}
    for planned in plan.work:
        name, teacher = planned.stage.name, planned.stage.solver.teacher
        if teacher is not None and by_name[teacher].state is State.NOT_CHOSEN:
            raise UsageError(
                f"stage `{name}` is taught by `{teacher}`, which is not trained yet, and which is left out",
                f"`--only {teacher} --only {name}` trains that first",
            )


def _not_chosen(by_name: Mapping[str, PlannedStage], name: str) -> list[str]:
    """The stage and its ancestors up to one that is on disk or to be trained, the uppermost first."""
    found: list[str] = []
    above: str | None = name
    while above is not None and by_name[above].state is State.NOT_CHOSEN:
        found.insert(0, above)
        above = by_name[above].stage.parent
    return found


def _wrong(schedule: Schedule, members: Mapping[str, list[str]], option: str, name: str) -> tuple[str, str] | None:
    if name not in members:
        known = list(members)
        if name in {one.name for one in schedule.ensembles}:
            those = list(dict.fromkeys(stage for stage, _ in schedule.ensemble(name).points))
            return f"`{name}` is an ensemble, not a stage", f"{option} takes stages: its members are of {some(those)}"
        return f"no stage is named `{name}`", nearest(name, known) or f"the stages are {listing(known)}"
    if option in ("--only", "--until") and not any(schedule.stage(member).enabled for member in members[name]):
        hint = "write `enabled: true` in schedule.prototxt, at the stages it starts from as well"
        return f"stage `{name}` is not enabled", hint
    return None
