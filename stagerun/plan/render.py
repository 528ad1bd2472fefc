"""A Plan as text, JSON and CSV. Pure."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from stagerun.plan.hazards import joints, notes, solver_changes
from stagerun.plan.images import augmentation, augmentation_changes
from stagerun.plan.plan import Plan, PlannedStage, State
from stagerun.plan.update import described
from stagerun.schedule import learning_rate, make_knobs
from stagerun.text import columns
from stagerun.units import epochs

CSV_COLUMNS = ("stage", "iter", "epoch", "lr", "momentum", "weight_decay")


def stage_state(planned: PlannedStage) -> str:
    if planned.state is State.RESUME:
        return f"resume at {planned.iter}"
    return planned.state.value + (" (kept)" if planned.kept else "")


def render_text(plan: Plan, remarks: Iterable[str] = ()) -> str:
    """The table, then for each stage what to know about it. `remarks` concern the whole: missing data, time, disk."""
    schedule = plan.schedule
    images = schedule.data.train.images
    total_epochs = sum(epochs(s.stage.solver.max_iter, images, s.stage.solver.batch_size) for s in plan.stages)
    rows = [("stage", "from", "iterations", "epochs", "LR first -> last", "decay", "augmentation", "state")]
    for planned in plan.stages:
        stage, solver = planned.stage, planned.stage.solver
        rate = learning_rate(solver)
        rows.append(
            (
                stage.name,
                stage.parent or "seed",
                str(solver.max_iter),
                f"{epochs(solver.max_iter, images, solver.batch_size):.2f}",
                f"{rate(0):.4g} -> {rate(solver.max_iter - 1):.4g}",
                f"{solver.weight_decay:g}",
                augmentation(solver),
                stage_state(planned),
            )
        )
    rows.append(("total", "", str(plan.iterations), f"{total_epochs:.2f}", "", "", "", f"{plan.iterations_left} to do"))
    title = f"{schedule.name}: {len(plan.stages)} stages, {plan.iterations} iterations, {total_epochs:.2f} epochs of {images} images"
    blocks = ["\n".join([title, "", *columns(rows)])]
    blocks += [text for planned in plan.stages if (text := _details(plan, planned))]
    remarks = list(remarks)
    if remarks:
        blocks.append("\n".join(f"note: {remark}" for remark in remarks))
    return "\n\n".join(blocks)


def _details(plan: Plan, planned: PlannedStage) -> str:
    stage, solver = planned.stage, planned.stage.solver
    lines = [
        f"  batch {solver.batch_size} = {solver.logical_workers} x {solver.device_batch_size}, {described(solver)}, "
        f"{solver.lr_policy}" + (f" after {solver.warmup_iter} iterations of warm-up" if solver.warmup_iter else "")
    ]
    if stage.parent is not None:
        lines.append(f"  carried over from {stage.parent}: {carried_over(planned)}")
        if update := solver_changes(plan.schedule.stage(stage.parent), stage):
            lines.append("  update: " + ", ".join(update))
        changes = augmentation_changes(plan.schedule.stage(stage.parent).solver.transform, solver.transform)
        if changes:
            lines.append("  augmentation: " + ", ".join(changes))
    if planned.why:
        lines.append(f"  {planned.state.value}: {planned.why}")
    lines += [f"    {change}" for change in planned.changes]
    lines += [f"  note: {text}" for text in notes(plan.schedule, stage)]
    return "\n".join([stage.name, *lines])


def carried_over(planned: PlannedStage) -> str:
    """What the stage takes from its parent, in words."""
    solver = planned.stage.solver
    return ", ".join(
        [
            "weights",
            "BatchNorm statistics",
            "momentum" if solver.carry_momentum else "momentum from zero",
            f"data from image {planned.position}" if solver.carry_data else "data from the start",
        ]
    )


def render_json(plan: Plan, remarks: Iterable[str] = ()) -> str:
    """One object; numbers at full precision."""
    schedule = plan.schedule
    stages = []
    for planned in plan.stages:
        stage, solver = planned.stage, planned.stage.solver
        rate = learning_rate(solver)
        stages.append(
            {
                "name": stage.name,
                "from": stage.parent,
                "iterations": solver.max_iter,
                "epochs": epochs(solver.max_iter, schedule.data.train.images, solver.batch_size),
                "first_lr": rate(0),
                "last_lr": rate(solver.max_iter - 1),
                "batch_size": solver.batch_size,
                "device_batch_size": solver.device_batch_size,
                "momentum": solver.momentum,
                "weight_decay": solver.weight_decay,
                "augmentation": augmentation(solver),
                "carried_over": carried_over(planned) if stage.parent else None,
                "position": planned.position,
                "state": planned.state.value,
                "iter": planned.iter,
                "why": planned.why,
                "changes": [
                    {"field": c.field, "old": c.old, "new": c.new, "place": str(c.span) if c.span else None}
                    for c in planned.changes
                ],
                "joints": [asdict(joint) for joint in joints(schedule, stage)],
                "notes": notes(schedule, stage),
            }
        )
    whole = {
        "schedule": schedule.name,
        "images": schedule.data.train.images,
        "iterations": plan.iterations,
        "iterations_left": plan.iterations_left,
        "stages": stages,
        "notes": list(remarks),
    }
    return json.dumps(whole, indent=2)


def csv_rows(plan: Plan) -> Iterator[str]:
    """CSV lines with CSV_COLUMNS: one per iteration, with the settings of the update that makes iter into iter + 1.

    `epoch` counts from the start of the schedule, along the stage's path, before that update.
    """
    images = plan.schedule.data.train.images
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for planned in plan.stages:
        solver, name = planned.stage.solver, planned.stage.name
        knobs = make_knobs(solver)
        for iter in range(solver.max_iter):
            k = knobs(iter)
            epoch = (planned.position + iter * solver.batch_size) / images
            writer.writerow((name, iter, repr(epoch), repr(k.lr), repr(k.momentum), repr(k.weight_decay)))
            if buffer.tell() > 1 << 16:
                yield buffer.getvalue()
                buffer.seek(0)
                buffer.truncate()
    yield buffer.getvalue()
