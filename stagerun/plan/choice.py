"""Options of a command: the stages of --redo, --only and --until, and the number of workers, checked against the schedule. Pure, except for
a check that LMDBs exist."""

import os
from collections.abc import Collection
from typing import NamedTuple

from stagerun.base.errors import DataError, Problem, RecipeError, Span, UsageError, listing, nearest
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.text import count
from stagerun.language.stages import some
from stagerun.plan.planned import Plan, State, options, points_averaged


class Choice(NamedTuple):
    """Names of stages, groups resolved. `chosen`: the stages that may be trained."""

    redo: frozenset[str]
    chosen: frozenset[str]


def choice(schedule: Schedule, redo: Collection[str], only: Collection[str], until: str | None) -> Choice:
    """Resolve names of stages, and of blocks that make several. RecipeError with every unknown name."""
    everything = [stage.name for stage in schedule.stages]
    members = {name: [name] for name in everything}  # the stages of each name, in running order
    for stage in schedule.stages:
        if stage.group is not None and stage.group not in everything:
            members.setdefault(stage.group, []).append(stage.name)
    named = [*(("--redo", name) for name in redo), *(("--only", name) for name in only)]
    named += [("--until", until)] if until is not None else []
    wrong = [(option, name, *why) for option, name in named if (why := _wrong(schedule, members, option, name))]
    if wrong:
        raise RecipeError(Problem(text, Span(o, 1, 1, len(name)), name, hint) for o, name, text, hint in wrong)
    chosen = {member for name in only or everything for member in members[name]}
    if until is not None:
        chosen &= {*everything[: 1 + everything.index(members[until][-1])]}
    return Choice(frozenset(member for name in redo for member in members[name]), frozenset(chosen))


def _wrong(schedule: Schedule, members: dict[str, list[str]], option: str, name: str) -> tuple[str, str] | None:
    if name not in members:
        names = list(members)
        if name in {one.name for one in schedule.ensembles}:
            stages = list(dict.fromkeys(stage for stage, _ in schedule.ensemble(name).points))
            hint = f"{option} takes stages: its members are from {some(stages)}"
            return f"`{name}` is an ensemble, not a stage", hint
        return f"no stage is named `{name}`", nearest(name, names) or f"the stages are {listing(names)}"
    if option in ("--only", "--until") and not any(schedule.stage(member).enabled for member in members[name]):
        hint = "write `enabled: true` in schedule.prototxt, at the stages it starts from as well"
        return f"stage `{name}` is not enabled", hint
    return None


def require_starts(plan: Plan, chosen: Collection[str]) -> None:
    """Raise UsageError for a stage to train whose start or teacher is neither on disk nor chosen."""
    left_out = {s.name for s in plan.stages if s.state is State.NOT_CHOSEN}
    again = {piece.name for piece in plan.pieces}
    missing = dict.fromkeys(p.name for p in plan.pieces if p.name not in chosen)  # in running order
    fresh = [s for s in (*plan.pieces, *plan.stages) if s.state is State.FRESH and s.start is None]
    for stage in (one.stage for one in fresh):
        for name, iter in points_averaged(plan.schedule, stage) or ((stage.parent, stage.parent_iter),):
            above = None if name in again or (name, iter) in plan.points else name
            path: list[str] = []
            while above is not None and above in left_out:
                path.insert(0, above)
                above = plan.schedule.stage(above).parent
            missing |= dict.fromkeys(path)
    waiting = [s.stage for s in fresh if s.until is None and plan.ancestors(s.stage) & missing.keys()]
    if waiting:
        first = waiting[0]
        words = " ".join([*(f"--only {name}" for name in missing), *options("--only", plan.schedule, waiting)])
        start = first.parent if first.average else first.starts_from
        text = f"stage `{first.name}` starts from `{start}`, which is left out and has no snapshot that counts"
        raise UsageError(text, f"`{words}` trains that first")
    for planned in plan.work:
        name, teacher = planned.name, planned.stage.solver.teacher
        if teacher in left_out:
            text = f"stage `{name}` is taught by `{teacher}`, which is left out and not trained yet"
            raise UsageError(text, f"`--only {teacher} --only {name}` trains that first")


# -- workers


def most_workers(schedule: Schedule) -> int | None:
    """Return the number of device batches in the smallest batch, which limits the workers; None if no stage is enabled."""
    return min((stage.solver.most_workers for stage in schedule.stages if stage.enabled), default=None)


def check_workers(schedule: Schedule, nproc: int) -> None:
    """Raise RecipeError for batches with fewer device batches than workers, each at its first stage, and for `ASYNC` with fewer replicas."""
    small: dict[tuple[int, int], list[Stage]] = {}
    problems = []
    for stage in schedule.stages:
        solver = stage.solver
        if not stage.enabled or nproc <= solver.most_workers:
            continue
        if solver.asynchronous:
            most = solver.most_workers
            text = f"{nproc} workers are too many for stage {stage.name}: `method: ASYNC` has {count(most, 'replica')}"
            hint = f"use at most {count(most, 'worker')}, or write `replicas: {nproc}`, which changes the training"
            problems.append(Problem(text, stage.written("solver.sync_param.replicas") or stage.span, hint=hint))
        else:
            small.setdefault((solver.batch_size, solver.device_batch_size), []).append(stage)
    for (batch, part), stages in small.items():
        most, names = batch // part, listing([stage.name for stage in stages], "and")
        kind, unit = "stages" if len(stages) > 1 else "stage", "device batches" if most > 1 else "device batch"
        text = f"{nproc} workers are too many for {kind} {names}: batch_size {batch} holds {most} {unit} of {part}"
        span = stages[0].written("solver.device_batch_size", "solver.batch_size") or stages[0].span
        hint = f"use at most {count(most, 'worker')}, or a smaller device_batch_size"
        problems.append(Problem(text, span, hint=hint))
    if problems:
        raise RecipeError(problems)


def check_short(schedule: Schedule, workers: int, device_batch: int | None, synthetic: bool, does: str) -> None:
    """Raise RecipeError or DataError if the schedule can't be run cut short. `does`: the command's verb, for a hint."""
    if most_workers(schedule) is None:
        raise UsageError(f"no stage of {schedule.name} is enabled", "take `enabled: false` out of one of them")
    check_workers(schedule, workers)
    largest = max(stage.solver.device_batch_size for stage in schedule.stages)
    if device_batch is not None and device_batch > largest:
        hint = "it is for a machine where the real one does not fit; leave it out"
        raise UsageError(
            f"--device-batch {device_batch} is more than the schedule's device_batch_size of {largest}", hint
        )
    missing = [source.path for source in schedule.sources if not synthetic and not os.path.exists(source.path)]
    if missing:
        text = "\n".join(f"{path}: this machine has no such LMDB" for path in missing)
        raise DataError(text, f"`--synthetic` {does} with made-up images of the same kind")
