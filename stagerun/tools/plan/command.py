"""`stagerun plan`: what `run` would do."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click

from stagerun.base.errors import UsageError, listing
from stagerun.base.recipe import Determinism, Method, Schedule, Stage
from stagerun.base.snapshots import passed_over
from stagerun.base.text import count, size
from stagerun.command.ending import show
from stagerun.command.options import command, flag, given, option
from stagerun.command.shared import (
    FASTEST,
    SLOWEST,
    Bandwidth,
    Duration,
    FiniteRange,
    Json,
    Latency,
    PlannedOptions,
    PlotFile,
    Scale,
    output_folder,
)
from stagerun.language import load, look_at_classes, look_at_folders
from stagerun.language.layers import LMDB
from stagerun.plan import Plan, State
from stagerun.plan.coding import Sending, render_sending, sending_record
from stagerun.plan.counting import other_set
from stagerun.plan.estimate import averages_on_disk, snapshots_on_disk
from stagerun.plan.prediction import Job, Link
from stagerun.plan.render import csv_rows, render_json, render_text
from stagerun.store import Damaged, LocalDisk, inspect, local_kind, lost_with
from stagerun.system import signals
from stagerun.system.files import writing
from stagerun.system.image_folder import is_class_folder
from stagerun.system.imports import is_there
from stagerun.tools.plan.check import field_in, missing_data, missing_weights, named_sources
from stagerun.train import results
from stagerun.train.choices import of_choice, read_chosen
from stagerun.train.hours import Beside, beside
from stagerun.train.keeper import Selection
from stagerun.train.output import plan_of
from stagerun.train.progress import CODE, RECIPE, WEIGHTS
from stagerun.train.results import read_figures

# Options of the plan as text, which --watch doesn't show.
_OF_TEXT = ("--json", "--csv", "--budget", "--redo", "--keep", "--only", "--until")


@dataclass(frozen=True, slots=True)
class PlanOptions(PlannedOptions):
    as_json: Json = False
    images_per_second: float | None = option(
        "--images-per-second N",
        "Speed of training of the whole job, for the hours; with --workers, of one worker alone.  [default: as the last run or "
        "rehearsal here]",
        type=FiniteRange(SLOWEST, FASTEST),
    )
    workers: int | None = option("--workers N", "Predict the speed of N workers over --link.", least=1)
    link: float | None = option(
        "--link RATE",
        "What an all-reduce reaches on each host's link, about 0.8 of its nominal rate: 8Gbit/s, say. Shows what compressed gradients "
        "save on it, for 2 workers by default.",
        type=Bandwidth(),
    )
    latency: float | None = option(
        "--latency TIME", "With --link: of one message, 50us, say.  [default: 0]", type=Latency()
    )
    allocation: float | None = option(
        "--budget TIME", "Where an allocation of 4h, 90m or 2d would end.", type=Duration()
    )
    csv_file: str | None = option("--csv FILE", "Write one row per iteration: lr, momentum, weight decay.")
    plot_file: PlotFile = None
    weights: bool = flag(
        "--weights", "Which tensors each stage takes from elsewhere, draws anew and freezes. Reads the files' headers."
    )
    x: str | None = option(
        "--x",
        "With --plot: what the x axis counts.  [default: epochs]",
        type=click.Choice(("iterations", "epochs", "images", "hours")),
    )
    scale: Scale = None
    watched: bool = flag("--watch", "With --plot: draw again whenever a file is saved. Ctrl-C ends.")


_NAMED = 12  # stages that a note names, of hundreds


@command()
def plan(options: PlanOptions) -> None:
    """Shows what `run` would do: stages, epochs, learning rate, joints, and what is done already.

    Works where the data is not.
    """
    picture = None
    if options.plot_file is not None or options.x or options.scale or options.watched:
        from stagerun.tools.plan import plot

        picture = plot.asked(
            file=options.plot_file,
            x=options.x,
            scale=options.scale,
            watched=options.watched,
            others=[flag for flag in _OF_TEXT if flag in given(options)],
            folder=options.folder,
            overrides=options.overrides,
            out=options.out,
            images_per_second=options.images_per_second,
        )
        if options.watched:
            plot.watch(picture)
            return
    schedule = load(options.folder, options.overrides)
    target = output_folder(schedule.name, options.out)
    planned = plan_of(schedule, target, Selection(options.redo, options.keep, options.only, options.until))
    sent = sent_of(planned, target, options)
    job = job_of(planned, target, options) if not sent or speed_known(target, options) else None
    if options.csv_file is not None:
        with writing(options.csv_file), open(options.csv_file, "w", encoding="utf-8") as file:
            file.writelines(csv_rows(planned))
    notes = [
        *remarks(planned),
        *disk_remark(planned, target),
        *results_remark(planned, target),
        *choices_remark(planned, target),
        *place_remark(target, several_hosts=options.link is not None),
    ]
    more = beside(planned, target, options.images_per_second, options.allocation, job)
    if sent:
        more = with_sendings(more, sent, options)
    if options.weights:
        more = with_weights(more, planned)
    text = render_json(planned, notes, more.record) if options.as_json else render_text(planned, notes, more.blocks)
    show(text)
    if picture is not None:
        plot.plot(picture, planned.schedule)


def remarks(plan: Plan) -> list[str]:
    """One sentence each: what is missing here, damaged or forbidden."""
    found = [f"snapshot {name} is damaged and is passed over" for name in plan.inventory.damaged]
    found += [passed_over(name) for name in plan.inventory.forbidden]
    found += missing_data(plan.schedule)
    found += missing_weights(s.stage for s in plan.stages if s.state in (State.FRESH, State.STALE))
    for stage, field, source in named_sources(plan.schedule):
        origin = stage.origins.get(f"{field}.images")
        if origin is not None and origin.layer == LMDB:
            field = field_in(plan.schedule, stage, field)
            place = "counted in" if is_class_folder(source.path) else "read from LMDB"
            found.append(f"{field}.images: {source.images}, {place} {source.path}")
    refused = (*look_at_folders(plan.schedule), *look_at_classes(plan.schedule))
    found += [f"{p.message} ({p.span}): `run` will refuse this; {p.hint}" for p in refused]
    found += import_remarks(plan.schedule)
    found += [
        f"snapshots of `{name}` count for no stage of this schedule, and are left alone" for name in plan.unclaimed
    ]
    if not plan.schedule.validation_sets:
        found.append("no data.val: nothing will be evaluated")
    unsaved = [s.stage.name for s in plan.stages if not s.stage.solver.snapshot and s.state is not State.DISABLED]
    if unsaved:
        more = len(unsaved) - _NAMED
        where = ", ".join(unsaved) if more <= 0 else f"{', '.join(unsaved[:_NAMED])} and {count(more, 'more stage')}"
        found.append(f"no snapshot inside {where}: a kill there costs the stage from its start (`snapshot`)")
    return found


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


def import_remarks(schedule: Schedule) -> list[str]:
    """What `run` makes of folders of images."""
    return [
        f"{path}: {count(made.images, 'image')} of {len(made.classes)} classes; "
        + (f"imported to {made.lmdb}" if is_there(made) else f"`run` imports them to {made.lmdb}")
        for path, made in schedule.imports.items()
    ]


def results_remark(plan: Plan, out: Path) -> list[str]:
    """What is trained and still to be evaluated: without a result, or with one of other validation images than lie there now."""
    found = {s.stage.name: results.read_result(out, s.end) for s in results.unfinished(plan, out) if s.end is not None}
    missing = [name for name, result in found.items() if result is None]
    missing = [name for name in missing if plan.schedule.stage(name).data.val]
    results_of = [(plan.schedule.stage(name), result) for name, result in found.items() if result is not None]
    other = [stage.name for stage, result in results_of if other_set(plan.schedule, stage, result.tested_set)]
    remarks = []
    if missing:
        remarks.append(f"trained but not evaluated: {listing(missing, 'and')}; `run` evaluates")
    if other:
        were = "was" if len(other) == 1 else "were"
        remarks.append(
            f"data.val: the images are not those that {listing(other, 'and')} {were} evaluated on; `run` evaluates again"
        )
    return remarks


def choices_remark(plan: Plan, out: Path) -> list[str]:
    """What `method: AUTO` of `compress_param` has chosen, of stages that have started."""
    found = [read_chosen(out, s.stage) for s in plan.stages if s.state is not State.DISABLED and _auto(s.stage)]
    return [
        f"`{one.stage}`: AUTO chose for {count(one.workers, 'worker')}: {of_choice(one.choice)}" for one in found if one
    ]


def _auto(stage: Stage) -> bool:
    return stage.solver.compress is not None and stage.solver.compress.method is Method.AUTO


def place_remark(out: Path, several_hosts: bool, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What it means for a job of several hosts that OUT lies on a file system of this one alone. `several_hosts`: the command says so;
    else a Slurm allocation of several nodes, which it is called in, does."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if not several_hosts and not (nodes.isascii() and nodes.isdigit() and int(nodes) > 1):
        return []
    kind = local_kind(out)
    return [lost_with(out, kind, "")] if kind else []


# -- plan --workers N --link RATE


# Where stages compress and --workers is not given: the fewest that send anything.
_FEWEST = 2


def sent_of(plan: Plan, out: Path, options: PlanOptions) -> list[Sending]:
    """What stages that compress or have replicas send over --link; none where no one asked. RecipeError for more workers than there is
    work for."""
    from stagerun.tools.plan.gradients import sendings, sends_less

    if options.link is None or options.workers == 1 or not any(map(sends_less, plan.schedule.stages)):
        return []
    from stagerun.launch.worker_count import check_workers

    workers = options.workers or _FEWEST
    check_workers(plan.schedule, workers)
    return sendings(plan.schedule, out, workers, Link(options.link, options.latency or 0.0))


def speed_known(out: Path, options: PlanOptions) -> bool:
    """Whether there is a prediction of speed, too: with --workers, where one worker's is known."""
    return options.workers is not None and (options.images_per_second is not None or read_figures(out) is not None)


def with_weights(more: Beside, plan: Plan) -> Beside:
    """RecipeError with all that is wrong with the weights that stages are given."""
    with signals.held():
        from stagerun.train.given import tables

    found = tables(plan) or ["weights: each stage goes on with those of the stage before, or starts from the seed"]
    return replace(more, blocks=(*more.blocks, *found), record={**more.record, "weights": found})


def with_sendings(more: Beside, sent: list[Sending], options: PlanOptions) -> Beside:
    assert options.link is not None
    text = render_sending(sent, options.workers or _FEWEST, Link(options.link, options.latency or 0.0))
    return replace(more, blocks=(text, *more.blocks), record={**more.record, "gradients": sending_record(sent)})


def job_of(plan: Plan, out: Path, options: PlanOptions) -> Job | None:
    """What is to be predicted; None where no one asked. UsageError; RecipeError for more workers than there is work for."""
    workers, bandwidth, latency, rate = options.workers, options.link, options.latency, options.images_per_second
    if workers is None and bandwidth is None:
        if latency is not None:
            raise UsageError("--latency without --link", "write --workers 128 --link 10Gbit/s --latency 50us")
        return None
    if workers is None or bandwidth is None:
        missing = "--workers" if workers is None else "--link"
        raise UsageError(
            f"a prediction needs {missing}, too",
            "write --workers 128 --link 10Gbit/s, and --latency 50us where it is known",
        )
    from stagerun.launch.worker_count import check_workers

    check_workers(plan.schedule, workers)
    figures = read_figures(out)
    if rate is None and figures is None:
        raise UsageError(
            "--workers needs to know how fast one worker is, and nothing was rehearsed here",
            "`stagerun rehearse` it here, or give --images-per-second N, of one worker alone",
        )
    return Job(
        workers=workers,
        link=Link(bandwidth, latency or 0.0),
        pieces=_pieces(plan.schedule),
        elastic=plan.schedule.determinism is Determinism.ELASTIC,
        not_plain=any(s.solver.compress or s.solver.sync for s in plan.schedule.stages),
        images_per_second=rate,
        figures=figures,
    )


def _pieces(schedule: Schedule) -> dict[str, tuple[float, ...]]:
    """By stage, bytes of what an iteration sends, in that order: the tail with BatchNorm's statistics, then the gradients in chunks."""
    with signals.held():
        import torch

        from stagerun.comm import pieces_of
        from stagerun.engine.device import dtype_of
        from stagerun.engine.parameters import trained_parameters
        from stagerun.models import build
        from stagerun.tools.plan.gradients import require_known

    found = {}
    for stage in schedule.stages:
        require_known(stage)
        with torch.device("meta"):
            network = build(stage.model)
        network.to(dtype_of(stage.solver.precision))
        trained_parameters(
            network, stage.solver.param, stage.solver.freeze
        )  # freezes the others, which then have no gradients
        found[stage.name] = tuple(map(float, pieces_of(network)))
    return found
