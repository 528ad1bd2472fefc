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
from stagerun.base.recipe import Determinism, Memory, Metric, Sampling, Schedule, Stage, Sync
from stagerun.base.shares import told
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import apart, between, columns, count, listed
from stagerun.base.units import epochs
from stagerun.base.weights import Kind, place_of
from stagerun.language.values import plain
from stagerun.plan.described import augmentation, augmentation_changes, crop_size_ramp, described, loss, solver_changes
from stagerun.plan.gradients import compression
from stagerun.plan.joints import joints
from stagerun.plan.meeting import pushes, replicas, starts_between
from stagerun.plan.plan import Lost, Plan, PlannedStage, State
from stagerun.plan.planned import iterations_text, label
from stagerun.plan.weights_table import network_lines
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
    states = State.STALE, State.NOT_CHOSEN
    notable = (s for s in plan.stages if s.again or s.changes or s.state in states)
    lines += [f"{s.stage.name}: {', '.join([stage_state(s), *([s.why] * bool(s.why)), *_raised(s)])}" for s in notable]
    return "\n".join(lines)


def _raised(planned: PlannedStage) -> Iterator[str]:
    """What was changed in a stage that goes on all the same."""
    yield from map(str, planned.changes if planned.state is State.RESUME else ())


def _kept_at(schedule: Schedule, stage: Stage) -> Iterator[str]:
    """The iterations before its end that others start from, or that ensembles are made from, and which are; those for the same ones
    together."""
    found: dict[tuple[str, ...], list[int]] = {}
    for point in schedule.branch_points(stage.name):
        found.setdefault(_needing(schedule, stage.name, point), []).append(point)
    for names, points in found.items():
        places = ", ".join(map(str, points)) if len(points) < 6 else f"{points[0]}, {points[1]}, ... {points[-1]}"
        yield f"{places}, for {', '.join(names)}"


def _needing(schedule: Schedule, stage: str, iter: int) -> tuple[str, ...]:
    """What starts from an iteration of a stage before its end, or has it as a member, in words."""
    after = [s for s in schedule.stages if (s.parent, s.parent_iter) == (stage, iter) and s.average is None]
    averages = [f"ensemble {one.name}" for one in schedule.ensembles if (stage, iter) in one.points]
    return (*_names(after), *averages)


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
    stage, solver = planned.stage, planned.stage.solver
    warm_up = warm_up_end(solver)
    lines = [
        f"  batch {solver.batch_size} = {solver.logical_workers} x {solver.device_batch_size}, {described(solver)}, "
        f"{solver.lr_policy}" + (f" after {count(warm_up, 'iteration')} of warm-up" if warm_up else "")
    ]
    if solver.compress is not None:
        what = "gradients" if solver.sync is None else "gradients, and changes of replicas"
        lines.append(f"  {what}: {compression(solver.compress, solver, stage.data.train.images)}")
    if solver.asynchronous:
        lines += [f"  {line}" for line in pushes(plan.schedule, stage)]
    elif solver.sync is not None:
        lines.append(f"  replicas: {replicas(solver)}")
    if solver.sampling is not Sampling.UNIFORM:
        lines.append(f"  sampling {told(solver, plan.schedule.class_sizes_of(stage), stage.data.train.images)}")
    if growing := crop_size_ramp(solver):
        lines.append(f"  {growing}")
    if solver.lr_policy == "plateau":
        drops = len(solver.plateau_winsize)
        times = "once" if drops == 1 else f"up to {drops} times"
        low = learning_rate(solver, drops)(solver.max_iter - 1)
        lines.append(f"  LR drops {times}, down to {low:.4g}, when the loss stands still; shown is the rate before")
    lines += [f"  {line}" for line in network_lines(plan.schedule, stage)]
    lines += [f"  images: {text}" for text in _other_images(plan.schedule, planned)]
    proofs = f"a proof every {count(solver.audit.proof_iter, 'iteration')}" if solver.audit is not None else ""
    lines += [f"  {line}" for line in (loss(solver), proofs, _ends(planned)) if line]
    if stage.parent is not None:
        lines.append(f"  carried over from {starts_from(stage)}: {carried_over(planned)}")
        if between := starts_between(plan.schedule, stage):
            lines.append(f"  {between}")
        if update := solver_changes(plan.schedule.stage(stage.parent), stage):
            lines.append("  update: " + ", ".join(update))
        changes = augmentation_changes(plan.schedule.stage(stage.parent).solver.transform, solver.transform)
        if changes:
            lines.append("  augmentation: " + ", ".join(changes))
    lines += [f"  saved and kept at {where}" for where in _kept_at(plan.schedule, stage)]
    if planned.why:
        lines.append(f"  {planned.state.value}: {planned.why}")
    lines += [f"    {change}" for change in planned.changes]
    lines += [
        f"  again: {p.iter} to {p.until}, for {', '.join(p.children)}, because there is no snapshot there to start from"
        for p in plan.pieces
        if p.stage.name == stage.name
    ]
    lines += [line for lost in plan.lost if lost.stage == stage.name for line in _lost(plan.schedule, lost)]
    return "\n".join(lines)


def _other_images(schedule: Schedule, planned: PlannedStage) -> Iterator[str]:
    """Which images a stage has that are not those of the one before; of a first stage, that are not the schedule's."""
    stage = planned.stage
    before = schedule.data if stage.parent is None else schedule.stage(stage.parent).data
    if not stage.data.train.same(before.train):
        train = stage.data.train
        yield f"trained on {train.source}, {count(train.images, 'image')}, not {before.train.source}"
    if stage.data.val != before.val:
        sets = [f"{val.source}, {count(val.images, 'image')}" for val in stage.data.val]
        yield f"evaluated on {' and '.join(sets)}"


def _lost(schedule: Schedule, lost: Lost) -> Iterator[str]:
    names = ", ".join(lost.children)
    where = "its end" if lost.end else label(lost.stage, lost.iter)
    yield f"  lost: {where}, from which {names} came; trained again it has the same bits only in the same environment"
    if lost.like is None:
        yield f"    nothing that is left shows in which one; with other bits, {names} will be stale"
        return
    yield f"    as of {lost.like.name}: {_environment(schedule, lost.like)}"
    if lost.unasked:
        yield f"    in another, `run` trains nothing until the command says what to do about {', '.join(lost.unasked)}"
    if lost.named:
        yield f"    with other bits, {', '.join(lost.named)} will be trained again, as was asked for"


def _environment(schedule: Schedule, ref: SnapshotRef) -> str:
    """What the bits depend on besides the recipe; with ELASTIC, the number of workers isn't in it."""
    passed_over = ("workers",) if schedule.determinism is Determinism.ELASTIC else ()
    return ", ".join(f"{name} {value}" for name, value in sorted(ref.environment.items()) if name not in passed_over)


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


def _meeting(sync: Sync, schedule: Schedule, stage: Stage) -> dict[str, object]:
    solver = stage.solver
    if solver.asynchronous:
        return {"sync_param": plain(sync), "boundaries": boundaries(solver, schedule.branch_points(stage.name))}
    return {"sync_param": plain(sync), "synchronisations": synchronisations(solver)}


def render_json(
    plan: Plan,
    remarks: Iterable[str] = (),
    beside: Mapping[str, object] | None = None,
    findings: Iterable[Problem] = (),
) -> str:
    """One object; numbers at full precision. `beside` are further members of it."""
    schedule = plan.schedule
    stages = []
    for planned in plan.stages:
        stage, solver = planned.stage, planned.stage.solver
        rate = learning_rate(solver)
        stages.append(
            {
                "name": stage.name,
                "from": stage.parent,
                "from_iter": stage.parent_iter,
                **({} if stage.average is None else {"average": stage.average}),
                "group": stage.group,
                "iterations": planned.length[1] - stage.begins,
                "epochs": _epochs(stage, planned.length[1] - stage.begins),
                "first_lr": rate(stage.begins),
                "last_lr": rate(planned.length[1] - 1),
                "batch_size": solver.batch_size,
                "device_batch_size": solver.device_batch_size,
                "momentum": solver.momentum,
                "weight_decay": solver.weight_decay,
                **({} if solver.compress is None else {"compress_param": plain(solver.compress)}),
                **(
                    {}
                    if solver.early_stop is None
                    else {"earliest_end": solver.earliest_end, "least_iterations": planned.length[0] - stage.begins}
                ),
                **({} if solver.loss is None else {"loss": plain(solver.loss)}),
                **(
                    {}
                    if solver.sampling is Sampling.UNIFORM
                    else {"sampling": told(solver, schedule.class_sizes_of(stage), stage.data.train.images)}
                ),
                **({} if solver.audit is None else {"audit_param": plain(solver.audit)}),
                **({} if solver.sync is None else _meeting(solver.sync, schedule, stage)),
                "augmentation": augmentation(solver),
                "carried_over": carried_over(planned) if stage.parent else None,
                "position": planned.begins_at,
                **({"position_at_most": True} if planned.at_most else {}),
                "state": planned.state.value,
                "iter": planned.iter,
                "why": planned.why,
                "changes": [
                    {"field": c.field, "old": c.old, "new": c.new, "place": str(c.span) if c.span else None}
                    for c in planned.changes
                ],
                "joints": [asdict(joint) for joint in joints(schedule, stage)],
            }
        )
    stops = any(planned.stage.solver.early_stop is not None for planned in plan.stages)
    whole = {
        "schedule": schedule.name,
        "images": schedule.training_sets[0].images,
        "iterations": plan.iterations,
        "iterations_left": plan.iterations_left,
        **({"least_iterations": plan.least, "least_iterations_left": plan.least_left} if stops else {}),
        "stages": stages,
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
