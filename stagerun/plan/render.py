"""A Plan as text, JSON and CSV. Pure."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import PurePath

from stagerun.base.errors import Problem
from stagerun.base.recipe import EMA, IGNORED, DecayFrom, Memory, Metric, Sampling, Schedule, Stage
from stagerun.base.text import apart, between, columns, count, listed
from stagerun.base.units import epochs, sampling_text
from stagerun.base.weights import Kind, place_of
from stagerun.base.wings import wing
from stagerun.language.values import plain
from stagerun.plan.described import (
    augmentation,
    carried_changes,
    described,
    evaluation,
    joints,
    loss,
    network_lines,
    replicas,
)
from stagerun.plan.planned import Lost, Plan, PlannedStage, State, iterations_text, label
from stagerun.schedule import boundaries, learning_rate, make_knobs, synchronisations, warm_up_end

# -- the table


def title(plan: Plan) -> str:
    """Return the line above the table: the numbers of stages, iterations, epochs and images."""
    lengths = f"{iterations_text(plan.least, plan.iterations)}, {_extent(plan.enabled)[1]} epochs"
    *others, last = (source.images for source in plan.schedule.training_sets)
    images = " or ".join([*map(str, others), count(last, "image")])
    text = f"{plan.schedule.name}: {count(len(plan.enabled), 'stage')}, {lengths} of {images}"
    off = len(plan.stages) - len(plan.enabled)
    return f"{text}; {count(off, 'stage')} not enabled" if off else text


def _extent(stages: Iterable[PlannedStage]) -> tuple[str, str]:
    """Return the least and most iterations and epochs; of a piece from its first iteration on."""
    spans = [(s.stage, s.length, s.stage.begins if s.until is None else s.iter) for s in stages]
    least, most = (sum(length[n] - begin for _, length, begin in spans) for n in (0, 1))
    shortest, longest = (sum(_epochs_of(stage, length[n] - begin) for stage, length, begin in spans) for n in (0, 1))
    return between(least, most), between(shortest, longest, ".2f")


def _epochs_of(stage: Stage, iterations: int) -> float:
    return epochs(iterations, stage.data.train.images, stage.solver.batch_size)


def table_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return the rows of the table: head, stages, pieces, total."""
    head = ("stage", "from", "iterations", "epochs", "LR first -> last", "decay", "augmentation", "state")
    to_do = f"{between(plan.least_left, plan.iterations_left)} to do"
    total = ("total", "", *_extent(plan.enabled), "", "", "", to_do)
    return [head, *map(_row, (*plan.stages, *plan.pieces)), total]


def _row(planned: PlannedStage) -> tuple[str, ...]:
    stage, solver, begins, start = planned.stage, planned.stage.solver, planned.stage.begins, starts_from(planned.stage)
    rate, state = learning_rate(solver), state_text(planned)
    if planned.until is not None:
        begins, state = planned.iter, f"again, for {', '.join(planned.children)}"
        start = label(stage.name, begins) if begins else start
    return (
        stage.name,
        start,
        *_extent([planned]),
        " -> ".join(apart([rate(begins), rate(planned.length[1] - 1)])),
        f"{solver.weight_decay:g}",
        augmentation(solver),
        state,
    )


def state_text(planned: PlannedStage) -> str:
    return f"resume at {planned.iter}" if planned.state is State.RESUME else planned.state.value


def starts_from(stage: Stage) -> str:
    """Return `main@7638`, `main`, `seed`, `lenet.caffemodel`, `lenet_iter_5000.solverstate`."""
    return (weights_name(stage) or "seed") if stage.parent is None else stage.starts_from


def weights_name(stage: Stage) -> str:
    """Return the name of the file with a stage's first weights, without its folder; '' without a file."""
    start = stage.solver.start
    if start is None:
        return ""
    return PurePath(start.file).name if place_of(start.file).kind is Kind.FILE else start.file


# -- as text


def render_text(
    plan: Plan, remarks: Iterable[str] = (), extra: Iterable[str] = (), findings: Iterable[Problem] = ()
) -> str:
    """Return the table, the `extra` blocks, the details of each stage, once for stages with the same details, the `findings` of `check`
    without their lines, and `remarks` about the whole: missing data, disk."""
    blocks = ["\n".join([title(plan), "", *columns(table_rows(plan))]), *filter(None, extra)]
    alike: dict[str, list[str]] = {}
    for group, stages in groupby(plan.stages, key=lambda planned: planned.stage.group or planned.name):
        for text, names in _once({p.name: details(plan, p) for p in stages}, group):
            alike.setdefault(text, []).extend(names)
    blocks += ["\n".join([listed(names), text]) for text, names in alike.items()]
    if last := [*(found.head for found in findings), *(f"note: {remark}" for remark in remarks)]:
        blocks.append("\n".join(last))
    return "\n\n".join(blocks)


def _once(texts: Mapping[str, str], group: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the details of a sweep's stages: first the common lines, then the rest of each; with the lines indented
    below."""
    parts = {name: re.split(r"\n(?!    )", text) for name, text in texts.items()}
    inside = [set(part) for part in parts.values()]
    common = [part for part in next(iter(parts.values())) if all(part in others for others in inside)]
    if common:
        yield "\n".join(common), list(texts) if len(texts) < 4 else [f"all {len(texts)} stages of {group}"]
    for name, lines in parts.items():
        if rest := [part for part in lines if part not in common]:
            yield "\n".join(rest), [name]


def resuming(plan: Plan, hours: str = "") -> str:
    """Return the short plan for a repeated command: the stages done, where training continues, and the `hours` left; '' if nothing is on
    disk yet, or if the full plan is needed."""
    done = [s.name for s in plan.stages if s.state is State.DONE]
    if plan.lost or not (done or any(s.state is State.RESUME for s in plan.stages)):
        return ""
    work = [f"{p.label} at {p.iter} of {p.last}" if p.iter else p.label for p in plan.work]
    parts = [f"{', '.join(done)} done"] if done else []
    verb = "resumes" if plan.work and plan.work[0].iter else "starts"
    parts.append(f"{verb} {work[0]}" if work else "evaluations to do")
    parts += [f"then {', '.join(work[1:])}"] if work[1:] else []
    lines = [f"{plan.schedule.name}: {'; '.join(parts)}", f"{plan.left} to do" + (f", {hours}" if hours else "")]
    for one in plan.stages:
        if one.again or one.changes or one.state in (State.STALE, State.NOT_CHOSEN):
            raised = map(str, one.changes if one.state is State.RESUME else ())  # it resumes in spite of them
            lines.append(f"{one.name}: {', '.join([state_text(one), *filter(None, [one.why]), *raised])}")
    return "\n".join(lines)


def details(plan: Plan, planned: PlannedStage) -> str:
    """Return the details of a stage, one per line."""
    return "\n".join(f"  {line}" for line in _details(plan, planned))


def _details(plan: Plan, planned: PlannedStage) -> Iterator[str]:
    schedule, stage, solver, images = plan.schedule, planned.stage, planned.stage.solver, planned.stage.data.train
    warm_up = warm_up_end(solver)
    after = f" after {count(warm_up, 'iteration')} of warm-up" if warm_up else ""
    if warm_up and solver.lr_policy not in ("fixed", "plateau"):
        after += f", counted from {'its end' if solver.decay_from is DecayFrom.WARMUP_END else 'iteration 0'}"
    size = f"batch {solver.batch_size} = {solver.logical_workers} x {solver.device_batch_size}"
    yield f"{size}, {described(solver)}, {solver.lr_policy}{after}"
    if solver.compress is not None:
        yield f"gradients: {wing('wire.rules.sending')(solver, images.images)}"
    yield from replicas(schedule, stage)
    if solver.sampling is not Sampling.UNIFORM:
        yield f"sampling {sampling_text(solver, schedule.class_sizes_of(stage), images.images)}"
    if ramp := solver.transform.crop_size_ramp:
        when = f"epochs {ramp.start_epoch:g} to {ramp.end_epoch:g} of the stage"
        yield f"images {ramp.start_size} -> {solver.transform.crop_size} pixels, {when}"
    if solver.lr_policy == "plateau":
        drops = len(solver.plateau_winsize)
        times = "once" if drops == 1 else f"up to {drops} times"
        low = learning_rate(solver, drops)(solver.max_iter - 1)
        yield f"LR drops {times}, down to {low:.4g}, when the loss stops improving; the table shows the rate before"
    yield from network_lines(schedule, stage)
    # Images that differ from the parent's; for a first stage, from the schedule's.
    before = schedule.data if stage.parent is None else schedule.stage(stage.parent).data
    if not images.same(before.train):
        yield f"images: trained on {images.source}, {count(images.images, 'image')}, not {before.train.source}"
    if stage.data.val != before.val:
        sets = [f"{val.source}, {count(val.images, 'image')}" for val in stage.data.val]
        yield f"images: evaluated on {' and '.join(sets)}"
    proofs = f"a proof every {count(solver.audit.proof_iter, 'iteration')}" if solver.audit is not None else ""
    tested = evaluation(stage)
    if stage.parent is not None and tested == evaluation(schedule.stage(stage.parent)):
        tested = ""
    yield from filter(None, (loss(solver), tested, proofs, _ends(planned)))
    if stage.parent is not None:
        yield f"carried over from {starts_from(stage)}: {carried_over(planned)}"
        yield from carried_changes(schedule, stage)
    yield from (f"saved and kept at {where}" for where in _kept_at(schedule, stage))
    if best := schedule.best_of(stage.name):
        end = planned.end
        at = "iteration not known yet" if end is None else f"iteration {end.best or end.iter}"
        yield f"saved at each evaluation, and kept at the best, {at}, for {', '.join(best)}"
    if planned.why:
        yield f"{planned.state.value}: {planned.why}"
    yield from (f"  {change}" for change in planned.changes)
    for piece in plan.pieces:
        if piece.name == stage.name:
            yield f"again: {piece.iter} to {piece.until}, for {', '.join(piece.children)}, whose start has no snapshot"
    for lost in plan.lost:
        if lost.stage == stage.name:
            yield from _lost(schedule, lost)


def _ends(planned: PlannedStage) -> str:
    """Return the earliest and the latest end of the stage, or its end; '' without `early_stop`."""
    solver, how = planned.stage.solver, planned.stage.solver.early_stop
    if how is None:
        return ""
    iters = (planned.iter, solver.earliest_end, solver.max_iter)
    now, earliest, latest = (f"{iter} ({_epochs_of(planned.stage, iter):.2f} epochs)" for iter in iters)
    if planned.state is State.DONE and planned.iter < solver.max_iter:
        return f"ended at iteration {now} by early_stop, of {latest}"
    unit = "" if how.metric is Metric.LOSS else " %"
    better = how.metric.value + (f" (by more than {how.min_delta:g}{unit})" if how.min_delta else "")
    waits = f"{count(how.patience_iter, 'iteration')} without a better {better}"
    if solver.earliest_end >= solver.max_iter:
        return f"early_stop can't end it: {waits} is too long for {latest}"
    return f"ends after {waits}: at {earliest} at the earliest, {latest} at the latest"


def carried_over(planned: PlannedStage) -> str:
    """Return the state that the stage inherits from its parent, in words."""
    solver = planned.stage.solver
    parts = ["weights", "BatchNorm statistics"]
    if planned.stage.average is not None:
        parts = ["averaged weights", "BatchNorm statistics recomputed"]
    if planned.stage.parent_at == EMA:
        parts[0] = "averaged weights"
    parts.append("momentum" if solver.carry_momentum else "momentum from zero")
    if solver.compress is not None and solver.compress.memory is Memory.RESIDUAL:
        parts.append("residual from zero")
    first = f"image {planned.begins_at}{' at most' if planned.at_most else ''}" if solver.carry_data else "the start"
    return ", ".join([*parts, f"data from {first}"])


def _kept_at(schedule: Schedule, stage: Stage) -> Iterator[str]:
    """Yield the iterations before the stage's end that other stages or ensembles need, grouped by these."""
    needed: dict[tuple[str, ...], list[int]] = {}
    for point in schedule.branch_points(stage.name):
        blocks: dict[str, list[str]] = {}  # stages of one block are counted: `main`, `3 stages of collapse`
        for one in schedule.stages:
            if (one.parent, one.parent_iter) == (stage.name, point) and one.average is None:
                blocks.setdefault(one.group or one.name, []).append(one.name)
        names = [made[0] if len(made) == 1 else f"{len(made)} stages of {group}" for group, made in blocks.items()]
        names += [f"ensemble {one.name}" for one in schedule.ensembles if (stage.name, point) in one.points]
        needed.setdefault(tuple(names), []).append(point)
    for users, points in needed.items():
        iters = ", ".join(map(str, points)) if len(points) < 6 else f"{points[0]}, {points[1]}, ... {points[-1]}"
        yield f"{iters}, for {', '.join(users)}"


def _lost(schedule: Schedule, lost: Lost) -> Iterator[str]:
    names = ", ".join(lost.children)
    where = "its end" if lost.end else label(lost.stage, lost.iter)
    yield f"lost: {where}, the start of {names}; retraining reproduces its bits only in the same environment"
    if lost.like is None:
        yield f"  no remaining snapshot shows that environment; with other bits, {names} will be stale"
        return
    ignored = IGNORED[schedule.determinism]
    facts = [f"{name} {value}" for name, value in sorted(lost.like.environment.items()) if name not in ignored]
    yield f"  as of {lost.like.name}: {', '.join(facts)}"
    if lost.unasked:
        yield f"  in another, `run` trains nothing until the command has an option for {', '.join(lost.unasked)}"
    if lost.named:
        yield f"  with other bits, {', '.join(lost.named)} will be retrained, as `--redo` asks"


# -- as JSON and CSV


def _stage_record(plan: Plan, planned: PlannedStage) -> dict[str, object]:
    schedule, stage, solver, (least, most) = plan.schedule, planned.stage, planned.stage.solver, planned.length
    rate, sync, begins, stops = learning_rate(solver), solver.sync, stage.begins, solver.early_stop is not None
    uniform, met = solver.sampling is Sampling.UNIFORM, sync is not None and not solver.asynchronous
    record = {
        "name": stage.name,
        "from": stage.parent,
        "from_iter": stage.parent_iter,
        "from_at": stage.parent_at,
        "average": stage.average,
        "group": stage.group,
        "iterations": most - begins,
        "epochs": _epochs_of(stage, most - begins),
        "first_lr": rate(begins),
        "last_lr": rate(most - 1),
        "batch_size": solver.batch_size,
        "device_batch_size": solver.device_batch_size,
        "momentum": solver.momentum,
        "weight_decay": solver.weight_decay,
        "compress_param": plain(solver.compress),
        "earliest_end": solver.earliest_end if stops else None,
        "least_iterations": least - begins if stops else None,
        "loss": plain(solver.loss),
        "sampling": None if uniform else sampling_text(solver, schedule.class_sizes_of(stage), stage.data.train.images),
        "audit_param": plain(solver.audit),
        "sync_param": plain(sync),
        "boundaries": boundaries(solver, schedule.branch_points(stage.name)) if solver.asynchronous else None,
        "synchronisations": synchronisations(solver) if met else None,
        "augmentation": augmentation(solver),
        "carried_over": stage.parent and carried_over(planned),
        "position": planned.begins_at,
        "position_at_most": planned.at_most or None,
        "state": planned.state.value,
        "iter": planned.iter,
        "why": planned.why,
        "changes": [
            {"field": c.field, "old": c.old, "new": c.new, "place": c.span and str(c.span)} for c in planned.changes
        ],
        "joints": [joint._asdict() for joint in joints(schedule, stage)],
    }
    always = ("from", "from_iter", "group", "carried_over")
    return {name: value for name, value in record.items() if value is not None or name in always}


def render_json(
    plan: Plan, remarks: Iterable[str] = (), extra: Mapping[str, object] | None = None, findings: Iterable[Problem] = ()
) -> str:
    """Return one JSON object, with numbers at full precision. `extra`: further members."""
    schedule = plan.schedule
    stops = any(planned.stage.solver.early_stop is not None for planned in plan.stages)
    whole = {
        "schedule": schedule.name,
        "images": schedule.training_sets[0].images,
        "iterations": plan.iterations,
        "iterations_left": plan.iterations_left,
        **({"least_iterations": plan.least, "least_iterations_left": plan.least_left} if stops else {}),
        "stages": [_stage_record(plan, planned) for planned in plan.stages],
        "again": [{"name": p.name, "iter": p.iter, "until": p.until, "for": list(p.children)} for p in plan.pieces],
        "lost": [
            {
                "name": lost.stage,
                "iter": lost.iter,
                "children": list(lost.children),
                "named": list(lost.named),
                "like": lost.like and lost.like.name,
                "environment": lost.like and dict(lost.like.environment),
            }
            for lost in plan.lost
        ],
        "findings": [{"level": one.level.value, "message": one.message, "place": str(one.span)} for one in findings],
        "notes": list(remarks),
        **(extra or {}),
    }
    return json.dumps(whole, indent=2)


def csv_rows(plan: Plan) -> Iterator[str]:
    """Yield CSV lines, one per iteration, with the settings of the update from iter to iter + 1. `epoch` counts from
    the start of the schedule, along the stage's path and over its images, before that update."""
    yield "stage,iter,epoch,lr,momentum,weight_decay\n"
    for planned in plan.enabled:
        stage, solver = planned.stage, planned.stage.solver
        knobs = make_knobs(solver)
        for iter in range(stage.begins, planned.length[1]):
            # A plan has the number of images that were left out, but not their positions.
            skipped = planned.skipped if iter >= planned.iter else planned.skipped_before
            epoch = (planned.position + iter * solver.batch_size + skipped) / stage.data.train.images
            k = knobs(iter)
            yield f"{stage.name},{iter},{epoch},{k.lr},{k.momentum},{k.weight_decay}\n"
