"""`stagerun plan`: what `run` would do."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click

from stagerun.base.errors import Problems, RecipeError, UsageError, listing
from stagerun.base.recipe import Method, Schedule
from stagerun.base.snapshots import passed_over
from stagerun.base.text import count, size
from stagerun.base.wings import require_wing, wing
from stagerun.command.ending import show
from stagerun.command.options import argument, command, flag, option
from stagerun.command.shared import FASTEST, SLOWEST, Duration, FiniteRange, Json, PlannedOptions, output_folder
from stagerun.drawing.picture import make_picture
from stagerun.language import load, look_at_classes, look_at_folders
from stagerun.language.layers import LMDB
from stagerun.plan import Plan, State
from stagerun.plan.ensembles import other_set
from stagerun.plan.rehearsal import averages_on_disk, snapshots_on_disk
from stagerun.plan.render import csv_rows, render_json, render_text
from stagerun.store import Damaged, LocalDisk, inspect, local_kind, lost_with
from stagerun.system import signals
from stagerun.system.files import writing
from stagerun.system.image_folder import is_class_folder
from stagerun.system.imports import is_there
from stagerun.tools.lint import lint
from stagerun.tools.plan import plot
from stagerun.tools.plan.check import field_in, missing_data, missing_weights, named_sources
from stagerun.tools.plan.hours import Beside, beside
from stagerun.tools.status.output import plan_of
from stagerun.train import results
from stagerun.train.keeper import Selection
from stagerun.train.progress import CODE, RECIPE, WEIGHTS


@dataclass(frozen=True, slots=True)
class PlanOptions(PlannedOptions):
    folder: str = argument("[DIR]", default="")
    as_json: Json = False
    why: str | None = option(
        "--why STAGE.FIELD",
        "Instead: where a setting came from, what it replaced and what it means. STAGE: all its fields; FIELD: that of every stage, or of "
        "the schedule.",
    )
    net: str | None = option(
        "--net FILE", "Instead, without DIR: the layers of a Caffe net, their shapes, parameters and cost."
    )
    size: str | None = option("--size N|HxW|CxHxW", "Of the images of --net.  [default: what the net says]")
    images_per_second: float | None = option(
        "--images-per-second N",
        "Speed of training of the whole job, for the hours.  [default: as the last run or rehearsal here]",
        type=FiniteRange(SLOWEST, FASTEST),
    )
    allocation: float | None = option(
        "--budget TIME", "Where an allocation of 4h, 90m or 2d would end.", type=Duration()
    )
    csv_file: str | None = option("--csv FILE", "Write one row per iteration: lr, momentum, weight decay.")
    plot_file: plot.PlotFile = None
    weights: bool = flag(
        "--weights", "Which tensors each stage takes from elsewhere, draws anew and freezes. Reads the files' headers."
    )
    x: str | None = option(
        "--x",
        "With --plot: what the x axis counts.  [default: epochs]",
        type=click.Choice(("iterations", "epochs", "images", "hours")),
    )
    scale: plot.Scale = None


@command()
def plan(options: PlanOptions) -> None:
    """Shows what `run` would do: stages, epochs, learning rate, joints, and what is done already.

    Works where the data is not. --why explains one setting of DIR; --net reads a net prototxt of Caffe's by itself.
    """
    if options.net is not None:
        if options.folder:
            raise UsageError(f"--net {options.net}, and {options.folder} besides", "leave one of them out")
        return show(require_wing("caffe.table.net_text")(options.net, options.size))
    if not options.folder:
        raise click.UsageError("Missing argument 'DIR'.")
    if options.size is not None:
        raise UsageError("--size without --net", "the size of a schedule's images is in its `transform_param`")
    if options.why is not None:
        from stagerun.tools.plan.why import explained

        return show(explained(load(options.folder, options.overrides), options.why, options.overrides))
    plot.check(options.plot_file, options.x, options.scale)
    schedule = load(options.folder, options.overrides)
    target = output_folder(schedule.name, options.out)
    planned = plan_of(schedule, target, Selection(options.redo, options.only, options.until))
    if options.csv_file is not None:
        with writing(options.csv_file), open(options.csv_file, "w", encoding="utf-8") as file:
            file.writelines(csv_rows(planned))
    notes = [
        *remarks(planned),
        *disk_remark(planned, target),
        *results_remark(planned, target),
        *choices_remark(planned, target),
        *place_remark(target),
    ]
    findings = lint(schedule)
    more = beside(planned, target, options.images_per_second, options.allocation)
    if options.weights:
        more = with_weights(more, planned)
    # Refused, if at all, before anything is printed.
    over_hours = plot.over_hours(planned, target, options.images_per_second) if options.x == "hours" else None
    if options.as_json:
        show(render_json(planned, notes, more.record, findings))
    else:
        show(render_text(planned, notes, more.blocks, findings))
    if options.plot_file is not None:
        plot.write(options.plot_file, over_hours or make_picture(schedule), options.x, options.scale)


def remarks(plan: Plan) -> Iterator[str]:
    """One sentence each: what is missing here, damaged or forbidden."""
    yield from (f"snapshot {name} is damaged and is passed over" for name in plan.inventory.damaged)
    yield from map(passed_over, plan.inventory.forbidden)
    yield from missing_data(plan.schedule)
    yield from missing_weights(s.stage for s in plan.stages if s.state in (State.FRESH, State.STALE))
    for stage, field, source in named_sources(plan.schedule):
        origin = stage.origins.get(f"{field}.images")
        if origin is not None and origin.layer == LMDB:
            field = field_in(plan.schedule, stage, field)
            place = "counted in" if is_class_folder(source.path) else "read from LMDB"
            yield f"{field}.images: {source.images}, {place} {source.path}"
    refused = (*look_at_folders(plan.schedule), *look_at_classes(plan.schedule))
    yield from (f"{p.message} ({p.span}): `run` will refuse this; {p.hint}" for p in refused)
    yield from import_remarks(plan.schedule)
    for name in plan.unclaimed:
        yield f"snapshots of `{name}` count for no stage of this schedule, and are left alone"


def disk_remark(plan: Plan, out: Path) -> list[str]:
    """What snapshots and averages will take; [] before there is a snapshot to know it by. StorageError, PermissionDenied."""
    refs = [ref for s in plan.stages for ref in (s.start, s.end) if ref is not None]
    if not refs:
        return []
    largest = max(refs, key=lambda ref: ref.bytes)
    whole = snapshots_on_disk(plan.schedule) * largest.bytes
    text = f"snapshots take {size(largest.bytes)} each, at most {size(whole)} in all"
    if averages := averages_on_disk(plan.schedule):
        each = largest.bytes
        with suppress(Damaged):  # gone meanwhile, beside a living run: then it is known what an average takes at most
            files = inspect(LocalDisk(), out, largest.name).files
            each = sum(files[name].size for name in (WEIGHTS, RECIPE, CODE) if name in files)
        text += f"; {count(averages, 'average')} of weights {size(averages * each)} more"
    return [text]


def import_remarks(schedule: Schedule) -> Iterator[str]:
    """What `run` makes of folders of images."""
    for path, made in schedule.imports.items():
        does = "imported" if is_there(made) else "`run` imports them"
        yield f"{path}: {count(made.images, 'image')} of {len(made.classes)} classes; {does} to {made.lmdb}"


def results_remark(plan: Plan, out: Path) -> Iterator[str]:
    """What is trained and still to be evaluated: without a result, or with one of other validation images than lie there now."""
    missing, other = list[str](), list[str]()
    for planned in results.unfinished(plan, out):
        stage, result = planned.stage, results.read_result(out, planned.end) if planned.end is not None else None
        if result is None:
            missing += [stage.name] if stage.data.val else []
        elif other_set(plan.schedule, stage, result.tested_set):
            other.append(stage.name)
    if missing:
        yield f"trained but not evaluated: {listing(missing, 'and')}; `run` evaluates"
    if other:
        were = "was" if len(other) == 1 else "were"
        yield f"data.val: the images are not those that {listing(other, 'and')} {were} evaluated on; `run` evaluates again"


def choices_remark(plan: Plan, out: Path) -> list[str]:
    """What `method: AUTO` of `compress_param` has chosen, of stages that have started."""
    started = [s.stage for s in plan.enabled if (how := s.stage.solver.compress) and how.method is Method.AUTO]
    found = [wing("wire.choices.read_chosen")(out, stage) for stage in started]
    return [f"`{one.stage}`: AUTO chose for {count(one.workers, 'worker')}: {one.words}" for one in found if one]


def place_remark(out: Path) -> list[str]:
    """What it means for a job of several hosts that OUT lies on a file system of this one alone: where the command runs in a Slurm
    allocation of several nodes."""
    kind = local_kind(out) if os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1" else ""
    return [lost_with(out, kind, "")] if kind else []


def with_weights(more: Beside, plan: Plan) -> Beside:
    """With where the weights come from, of each stage that takes some from elsewhere, has another network than the stage before, or freezes
    some. RecipeError with all that is wrong with them."""
    with signals.held():
        from stagerun.models.skeleton import without_memory
        from stagerun.train.starting_weights import is_given, look_into, table_of

    problems, found = Problems(plan.schedule.files), list[str]()
    for stage in plan.schedule.stages:
        wanted = is_given(plan.schedule, stage) or stage.solver.freeze
        if wanted and (made := look_into(plan.schedule, stage, problems)) is not None:
            found.append(table_of(made, stage, without_memory(stage.model)))
    if problems:
        raise RecipeError(problems.all())
    found = found or ["weights: each stage goes on with those of the stage before, or starts from the seed"]
    return replace(more, blocks=(*more.blocks, *found), record={**more.record, "weights": found})
