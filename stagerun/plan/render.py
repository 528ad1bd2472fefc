"""A Plan as text, JSON and CSV. Pure."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import PurePath

from stagerun.base.errors import Problem
from stagerun.base.recipe import Determinism, Memory, Metric, Sampling, Schedule, Stage
from stagerun.base.shares import told
from stagerun.base.text import apart, between, columns, count, listed
from stagerun.base.units import epochs
from stagerun.base.weights import Kind, place_of
from stagerun.base.wings import wing
from stagerun.language.values import plain
from stagerun.plan.described import (
    augmentation,
    augmentation_changes,
    crop_size_ramp,
    described,
    joints,
    loss,
    pushes,
    replicas,
    solver_changes,
    starts_between,
)
from stagerun.plan.plan import Lost, Plan, PlannedStage, State
from stagerun.plan.planned import iterations_text, label
from stagerun.plan.transfer import network_lines
from stagerun.schedule import boundaries, learning_rate, make_knobs, synchronisations, warm_up_end

CSV_COLUMNS = ("stage", "iter", "epoch", "lr", "momentum", "weight_decay")


def stage_state(planned: PlannedStage) -> str:
    if planned.state is State.RESUME:
        return f"resume at {planned.iter}"
    return planned.state.value


def title(plan: Plan) -> str:
    """How much there is of what: the line above the table."""
    schedule, off = plan.schedule, sum(s.state is State.DISABLED for s in plan.stages)
    stages = count(len(plan.stages) - off, "stage")
    lengths = f"{stages}, {iterations_text(plan.least, plan.iterations)}, {_all_epochs(plan.stages)} epochs"
    images = " or ".join(str(source.images) for source in schedule.training_sets[:-1])
    images += " or " * bool(images) + count(schedule.training_sets[-1].images, "image")
    text = f"{schedule.name}: {lengths} of {images}"
    return f"{text}; {count(off, 'stage')} not enabled" if off else text


def _all_epochs(stages: Sequence[PlannedStage]) -> str:
    enabled = [s for s in stages if s.state is not State.DISABLED]
    least, most = (sum(_epochs(s.stage, s.length[end] - s.stage.begins) for s in enabled) for end in (0, 1))
    return between(least, most, ".2f")


def table_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Head, stages, pieces, total."""
    rows: list[tuple[str, ...]] = [
        ("stage", "from", "iterations", "epochs", "LR first -> last", "decay", "augmentation", "state")
    ]
    left_out = _left_out(plan)
    for planned in plan.stages:
        stage, solver, (least, most) = planned.stage, planned.stage.solver, planned.length
        if stage.name in left_out:
            continue
        rate = learning_rate(solver)
        rows.append(
            (
                stage.name,
                starts_from(stage),
                between(least - stage.begins, most - stage.begins),
                between(_epochs(stage, least - stage.begins), _epochs(stage, most - stage.begins), ".2f"),
                " -> ".join(apart([rate(stage.begins), rate(most - 1)])),
                f"{solver.weight_decay:g}",
                augmentation(solver),
                stage_state(planned),
            )
        )
    for group in dict.fromkeys(s.stage.group for s in plan.stages if s.stage.name in left_out):
        rows.append(_counted([s for s in plan.stages if s.stage.name in left_out and s.stage.group == group], plan))
    rows += [_piece(piece) for piece in plan.pieces]
    to_do = f"{between(plan.least_left, plan.iterations_left)} to do"
    rows.append(("total", "", between(plan.least, plan.iterations), _all_epochs(plan.stages), "", "", "", to_do))
    return rows


def _counted(stages: Sequence[PlannedStage], plan: Plan) -> tuple[str, ...]:
    """The row of those stages of a block that were not chosen."""
    group = stages[0].stage.group
    others = "other " * (len(stages) < sum(s.stage.group == group for s in plan.stages))
    least, most = (sum(s.length[end] - s.stage.begins for s in stages) for end in (0, 1))
    name = f"{len(stages)} {others}stages of {group}"
    return name, "", between(least, most), _all_epochs(stages), "", "", "", State.NOT_CHOSEN.value


def _left_out(plan: Plan) -> set[str]:
    """Stages of which nothing is to be said but that they were not chosen, where a block makes several: a sweep has hundreds."""
    at_work = {piece.stage.name for piece in plan.pieces} | {lost.stage for lost in plan.lost}
    silent = [s.stage for s in plan.stages if s.state is State.NOT_CHOSEN and not s.why and s.stage.group]
    groups = Counter(stage.group for stage in silent)
    return {stage.name for stage in silent if groups[stage.group] > 1} - at_work


def render_text(
    plan: Plan, remarks: Iterable[str] = (), beside: Iterable[str] = (), findings: Iterable[Problem] = ()
) -> str:
    """The table, the blocks `beside` it, then for each stage what to know about it, once for stages of which the same is to be said; the
    `findings` of `check`, without their lines; and `remarks`, which concern the whole: missing data, disk."""
    blocks = ["\n".join([title(plan), "", *columns(table_rows(plan))])]
    blocks += [text for text in beside if text]
    alike: dict[str, list[str]] = {}
    left_out = _left_out(plan)
    for group, stages in groupby(plan.stages, key=lambda planned: planned.stage.group or planned.stage.name):
        said = {p.stage.name: details(plan, p) for p in stages if p.stage.name not in left_out}
        for text, names in _once(said, group):
            alike.setdefault(text, []).extend(names)
    blocks += ["\n".join([listed(names), text]) for text, names in alike.items()]
    if last := [*(found.head for found in findings), *(f"note: {remark}" for remark in remarks)]:
        blocks.append("\n".join(last))
    return "\n\n".join(blocks)


def _once(said: Mapping[str, str], group: str) -> Iterator[tuple[str, list[str]]]:
    """What is to be said of the stages of a sweep: first what holds for all, then the rest of each. A line has those that are further in
    with it."""
    parts = {name: re.split(r"\n(?!    )", text) for name, text in said.items()}
    common = [part for part in next(iter(parts.values()), []) if all(part in others for others in parts.values())]
    if common:
        yield "\n".join(common), list(said) if len(said) < 4 else [f"all {len(said)} stages of {group}"]
    for name, own in parts.items():
        if rest := [part for part in own if part not in common]:
            yield "\n".join(rest), [name]


def _names(stages: Iterable[Stage]) -> list[str]:
    """Those of one block counted: `main`, `3 stages of collapse`."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        found.setdefault(stage.group or stage.name, []).append(stage.name)
    return [names[0] if len(names) == 1 else f"{len(names)} stages of {group}" for group, names in found.items()]


def going_on(plan: Plan, hours: str = "") -> str:
    """The part of the plan that matters when the same command is typed again: what is done and where training continues, and in how many
    `hours`. '' if nothing is on disk yet, or if there is more to say."""
    done = [s.stage.name for s in plan.stages if s.state is State.DONE]
    if plan.lost or not (done or any(s.state is State.RESUME for s in plan.stages)):
        return ""
    work = [f"{p.label} at {p.iter} of {p.last}" if p.iter else p.label for p in plan.work]
    said = [f"{', '.join(done)} done"] * bool(done)
    said += [f"goes on with {name}" for name in work[:1]] or ["evaluations to do"]
    said += [f"then {', '.join(work[1:])}"] * bool(work[1:])
    lines = [f"{plan.schedule.name}: {'; '.join(said)}"]
    lines.append(f"{plan.left} to do" + (f", {hours}" if hours else ""))
    for one in plan.stages:
        if one.again or one.changes or one.state in (State.STALE, State.NOT_CHOSEN):
            raised = map(str, one.changes if one.state is State.RESUME else ())  # it goes on all the same
            lines.append(f"{one.stage.name}: {', '.join([stage_state(one), *filter(None, [one.why]), *raised])}")
    return "\n".join(lines)


def _kept_at(schedule: Schedule, stage: Stage) -> Iterator[str]:
    """The iterations before its end that others start from, or that ensembles are made from, and which are; those for the same ones
    together."""
    found: dict[tuple[str, ...], list[int]] = {}
    for point in schedule.branch_points(stage.name):
        place = stage.name, point
        after = [s for s in schedule.stages if (s.parent, s.parent_iter) == place and s.average is None]
        averages = [f"ensemble {one.name}" for one in schedule.ensembles if place in one.points]
        found.setdefault((*_names(after), *averages), []).append(point)
    for names, points in found.items():
        places = ", ".join(map(str, points)) if len(points) < 6 else f"{points[0]}, {points[1]}, ... {points[-1]}"
        yield f"{places}, for {', '.join(names)}"


def starts_from(stage: Stage) -> str:
    """`main@7638`, `main`, `seed`, `lenet.caffemodel`, `lenet_iter_5000.solverstate`."""
    if stage.parent is None:
        return weights_name(stage) or "seed"
    return stage.starts_from


def weights_name(stage: Stage) -> str:
    """The file that its weights come from, without its folder; '' where there is none."""
    start = stage.solver.start
    if start is None:
        return ""
    return PurePath(start.file).name if place_of(start.file).kind is Kind.FILE else start.file


def _epochs(stage: Stage, iterations: int) -> float:
    return epochs(iterations, stage.data.train.images, stage.solver.batch_size)


def _piece(piece: PlannedStage) -> tuple[str, ...]:
    solver = piece.stage.solver
    rate = learning_rate(solver)
    return (
        piece.stage.name,
        label(piece.stage.name, piece.iter) if piece.iter else starts_from(piece.stage),
        str(piece.iterations_left),
        f"{_epochs(piece.stage, piece.iterations_left):.2f}",
        " -> ".join(apart([rate(piece.iter), rate(piece.last - 1)])),
        f"{solver.weight_decay:g}",
        augmentation(solver),
        f"again, for {', '.join(piece.children)}",
    )


def details(plan: Plan, planned: PlannedStage) -> str:
    """Return what to know about a stage, a line for each thing."""
    return "\n".join(f"  {line}" for line in _details(plan, planned))


def _details(plan: Plan, planned: PlannedStage) -> Iterator[str]:
    schedule, stage, solver, images = plan.schedule, planned.stage, planned.stage.solver, planned.stage.data.train
    warm_up = warm_up_end(solver)
    after = f" after {count(warm_up, 'iteration')} of warm-up" if warm_up else ""
    size = f"batch {solver.batch_size} = {solver.logical_workers} x {solver.device_batch_size}"
    yield f"{size}, {described(solver)}, {solver.lr_policy}{after}"
    if solver.compress is not None:
        yield f"gradients: {wing('wire.values.sending')(solver, images.images)}"
    if solver.asynchronous:
        yield from pushes(schedule, stage)
    elif solver.sync is not None:
        yield f"replicas: {replicas(solver)}"
    if solver.sampling is not Sampling.UNIFORM:
        yield f"sampling {told(solver, schedule.class_sizes_of(stage), images.images)}"
    if growing := crop_size_ramp(solver):
        yield growing
    if solver.lr_policy == "plateau":
        drops = len(solver.plateau_winsize)
        times = "once" if drops == 1 else f"up to {drops} times"
        low = learning_rate(solver, drops)(solver.max_iter - 1)
        yield f"LR drops {times}, down to {low:.4g}, when the loss stands still; shown is the rate before"
    yield from network_lines(schedule, stage)
    # Images that are not those of the stage before; of a first stage, not the schedule's.
    before = schedule.data if stage.parent is None else schedule.stage(stage.parent).data
    if not images.same(before.train):
        yield f"images: trained on {images.source}, {count(images.images, 'image')}, not {before.train.source}"
    if stage.data.val != before.val:
        sets = [f"{val.source}, {count(val.images, 'image')}" for val in stage.data.val]
        yield f"images: evaluated on {' and '.join(sets)}"
    proofs = f"a proof every {count(solver.audit.proof_iter, 'iteration')}" if solver.audit is not None else ""
    yield from filter(None, (loss(solver), proofs, _ends(planned)))
    if stage.parent is not None:
        parent = schedule.stage(stage.parent)
        yield f"carried over from {starts_from(stage)}: {carried_over(planned)}"
        yield from filter(None, [starts_between(schedule, stage)])
        for what, changes in (
            ("update", solver_changes(parent, stage)),
            ("augmentation", augmentation_changes(parent.solver.transform, solver.transform)),
        ):
            if changes:
                yield f"{what}: {', '.join(changes)}"
    yield from (f"saved and kept at {where}" for where in _kept_at(schedule, stage))
    if planned.why:
        yield f"{planned.state.value}: {planned.why}"
    yield from (f"  {change}" for change in planned.changes)
    for piece in plan.pieces:
        if piece.stage.name == stage.name:
            way = f"{piece.iter} to {piece.until}, for {', '.join(piece.children)}"
            yield f"again: {way}, because there is no snapshot there to start from"
    for lost in plan.lost:
        if lost.stage == stage.name:
            yield from _lost(schedule, lost)


def _lost(schedule: Schedule, lost: Lost) -> Iterator[str]:
    names = ", ".join(lost.children)
    where = "its end" if lost.end else label(lost.stage, lost.iter)
    yield f"lost: {where}, from which {names} came; trained again it has the same bits only in the same environment"
    if lost.like is None:
        yield f"  nothing that is left shows in which one; with other bits, {names} will be stale"
        return
    # The number of workers is part of it only where the bits depend on it.
    passed_over = ("workers",) if schedule.determinism is Determinism.ELASTIC else ()
    known = [f"{name} {value}" for name, value in sorted(lost.like.environment.items()) if name not in passed_over]
    yield f"  as of {lost.like.name}: {', '.join(known)}"
    if lost.unasked:
        yield f"  in another, `run` trains nothing until the command says what to do about {', '.join(lost.unasked)}"
    if lost.named:
        yield f"  with other bits, {', '.join(lost.named)} will be trained again, as was asked for"


def _ends(planned: PlannedStage) -> str:
    """Where the stage ends at the earliest and at the latest, or has ended; '' without `early_stop`."""
    solver, how = planned.stage.solver, planned.stage.solver.early_stop
    if how is None:
        return ""

    def at(iter: int) -> str:
        return f"{iter} ({_epochs(planned.stage, iter):.2f} epochs)"

    if planned.state is State.DONE and planned.iter < solver.max_iter:
        return f"ended at iteration {at(planned.iter)} by early_stop, of {at(solver.max_iter)}"
    unit = "" if how.metric is Metric.LOSS else " %"
    better = how.metric.value + (f" (by more than {how.min_delta:g}{unit})" if how.min_delta else "")
    waits = count(how.patience_iter, "iteration")
    if solver.earliest_end >= solver.max_iter:
        return f"early_stop never ends it: {waits} without a better {better} are too long for {at(solver.max_iter)}"
    return (
        f"ends after {waits} without a better {better}: at {at(solver.earliest_end)} at the earliest, "
        f"{at(solver.max_iter)} at the latest"
    )


def carried_over(planned: PlannedStage) -> str:
    """What the stage takes from its parent, in words."""
    solver = planned.stage.solver
    parts = ["weights", "BatchNorm statistics"]
    if planned.stage.average is not None:
        parts = ["averaged weights", "BatchNorm statistics taken anew"]
    parts.append("momentum" if solver.carry_momentum else "momentum from zero")
    if solver.compress is not None and solver.compress.memory is Memory.RESIDUAL:
        parts.append("residual from zero")
    place = f"image {planned.begins_at}" + (" at most" if planned.at_most else "")
    parts.append(f"data from {place}" if solver.carry_data else "data from the start")
    return ", ".join(parts)


def _known(**members: object) -> dict[str, object]:
    return {name: value for name, value in members.items() if value is not None}


def _stage_record(plan: Plan, planned: PlannedStage) -> dict[str, object]:
    schedule, stage, solver, least, most = plan.schedule, planned.stage, planned.stage.solver, *planned.length
    rate, sync, uniform = learning_rate(solver), solver.sync, solver.sampling is Sampling.UNIFORM
    images = stage.data.train.images
    together: dict[str, object] = {}
    if sync is not None and solver.asynchronous:
        together = {"boundaries": boundaries(solver, schedule.branch_points(stage.name))}
    elif sync is not None:
        together = {"synchronisations": synchronisations(solver)}
    return {
        "name": stage.name,
        "from": stage.parent,
        "from_iter": stage.parent_iter,
        **_known(average=stage.average),
        "group": stage.group,
        "iterations": most - stage.begins,
        "epochs": _epochs(stage, most - stage.begins),
        "first_lr": rate(stage.begins),
        "last_lr": rate(most - 1),
        "batch_size": solver.batch_size,
        "device_batch_size": solver.device_batch_size,
        "momentum": solver.momentum,
        "weight_decay": solver.weight_decay,
        **_known(compress_param=solver.compress and plain(solver.compress)),
        **(
            {"earliest_end": solver.earliest_end, "least_iterations": least - stage.begins} if solver.early_stop else {}
        ),
        **_known(
            loss=solver.loss and plain(solver.loss),
            sampling=None if uniform else told(solver, schedule.class_sizes_of(stage), images),
            audit_param=solver.audit and plain(solver.audit),
            sync_param=sync and plain(sync),
        ),
        **together,
        "augmentation": augmentation(solver),
        "carried_over": carried_over(planned) if stage.parent else None,
        "position": planned.begins_at,
        **_known(position_at_most=planned.at_most or None),
        "state": planned.state.value,
        "iter": planned.iter,
        "why": planned.why,
        "changes": [
            {"field": c.field, "old": c.old, "new": c.new, "place": str(c.span) if c.span else None}
            for c in planned.changes
        ],
        "joints": [asdict(joint) for joint in joints(schedule, stage)],
    }


def render_json(
    plan: Plan,
    remarks: Iterable[str] = (),
    beside: Mapping[str, object] | None = None,
    findings: Iterable[Problem] = (),
) -> str:
    """One object; numbers at full precision. `beside` are further members of it."""
    schedule = plan.schedule
    stops = any(planned.stage.solver.early_stop is not None for planned in plan.stages)
    whole = {
        "schedule": schedule.name,
        "images": schedule.training_sets[0].images,
        "iterations": plan.iterations,
        "iterations_left": plan.iterations_left,
        **({"least_iterations": plan.least, "least_iterations_left": plan.least_left} if stops else {}),
        "stages": [_stage_record(plan, planned) for planned in plan.stages],
        "again": [
            {"name": p.stage.name, "iter": p.iter, "until": p.until, "for": list(p.children)} for p in plan.pieces
        ],
        "lost": [
            {
                "name": lost.stage,
                "iter": lost.iter,
                "children": list(lost.children),
                "named": list(lost.named),
                "like": lost.like.name if lost.like else None,
                "environment": dict(lost.like.environment) if lost.like else None,
            }
            for lost in plan.lost
        ],
        "findings": [{"level": one.level.value, "message": one.message, "place": str(one.span)} for one in findings],
        "notes": list(remarks),
        **(beside or {}),
    }
    return json.dumps(whole, indent=2)


def csv_rows(plan: Plan) -> Iterator[str]:
    """CSV lines with CSV_COLUMNS: one per iteration, with the settings of the update that makes iter into iter + 1.

    `epoch` counts from the start of the schedule, along the stage's path and of its own images, before that update.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for planned in plan.stages:
        if planned.state is State.DISABLED:
            continue
        solver, name, images = planned.stage.solver, planned.stage.name, planned.stage.data.train.images
        knobs = make_knobs(solver)
        for iter in range(planned.stage.begins, planned.length[1]):
            k = knobs(iter)
            # A plan knows how many images were left out, but not where.
            skipped = planned.skipped if iter >= planned.iter else planned.skipped_before
            epoch = (planned.position + iter * solver.batch_size + skipped) / images
            writer.writerow((name, iter, repr(epoch), repr(k.lr), repr(k.momentum), repr(k.weight_decay)))
            if buffer.tell() > 1 << 16:
                yield buffer.getvalue()
                buffer.seek(0)
                buffer.truncate()
    yield buffer.getvalue()
