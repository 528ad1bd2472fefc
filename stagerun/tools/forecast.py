"""`stagerun plan`: what `run` would do; below its table what is missing, ensembles, how long everything takes, and where an allocation ends."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

from stagerun.base.errors import UsageError, listing
from stagerun.base.recipe import Method
from stagerun.base.snapshots import passed_over
from stagerun.base.text import count, duration, size
from stagerun.base.wings import require_wing, wing
from stagerun.command.ending import show
from stagerun.command.options import argument, command, flag, option
from stagerun.command.shared import FASTEST, SLOWEST, Duration, FiniteRange, Json, PlannedOptions, output_folder
from stagerun.language import load, look_at_classes, look_at_folders
from stagerun.language.layers import LMDB
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.ensembles import ensembles_record, ensembles_text, other_set
from stagerun.plan.hours import Hours, Speed, hours_record, of_part, render_hours, spent, stage_left
from stagerun.plan.rehearsal import snapshots_on_disk
from stagerun.plan.render import csv_rows, render_json, render_text
from stagerun.system.files import writing
from stagerun.system.image_sets import is_there
from stagerun.tools.check import missing_data, missing_weights, named_sources, weights_tables
from stagerun.tools.lint import lint
from stagerun.tools.output import plan_of
from stagerun.train.hours import as_running, find_hours, left_together
from stagerun.train.keeper import Selection
from stagerun.train.results import planned_ensembles, read_result, unfinished

HINT = "give --images-per-second N, `stagerun rehearse` it here, or wait until a stage is trained"


@dataclass(frozen=True, slots=True)
class PlanOptions(PlannedOptions):
    folder: str = argument("[DIR]", default="")
    as_json: Json = False
    why: str | None = option(
        "--why STAGE.FIELD",
        "Instead: where a setting comes from, what it replaced and what it means. STAGE: all its fields; FIELD: in every stage, or of the "
        "schedule.",
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
    plot_file: str | None = option("--plot FILE.svg", "Also draw it.")
    weights: bool = flag(
        "--weights",
        "Which tensors each stage takes from elsewhere, draws at random and freezes. Reads the files' headers.",
    )


@command("plan")
def plan_command(options: PlanOptions) -> None:
    """Shows what `run` would do: stages, epochs, learning rate, joints, and what is done already.

    Works where the data is not. --why explains one setting of DIR; --net shows a net prototxt of Caffe's.
    """
    if options.net is not None:
        if options.folder:
            raise UsageError(f"--net {options.net}, and {options.folder} too", "leave one of them out")
        return show(require_wing("caffe.table.net_text")(options.net, options.size))
    if not options.folder:
        raise click.UsageError("Missing argument 'DIR'.")
    if options.size is not None:
        raise UsageError("--size without --net", "the size of a schedule's images is in its `transform_param`")
    schedule = load(options.folder, options.overrides)
    if options.why is not None:
        from stagerun.tools.why import explained

        return show(explained(schedule, options.why, options.overrides))
    out = output_folder(schedule.name, options.out)
    planned = plan_of(schedule, out, Selection(options.redo, options.only, options.until))
    if options.csv_file is not None:
        with writing(options.csv_file), open(options.csv_file, "w", encoding="utf-8") as file:
            file.writelines(csv_rows(planned))
    blocks, record = hours_blocks(planned, out, options.images_per_second, options.allocation)
    if options.weights:
        tables = weights_tables(schedule)
        blocks, record = [*blocks, *tables], {**record, "weights": tables}
    findings, lines = lint(schedule), list(notes(planned, out))
    if options.plot_file is not None:  # refused, if at all, before anything is printed
        picture = require_wing("look.picture.make_picture")(schedule)
        require_wing("look.chart.write_plot")(options.plot_file, picture)
    if options.as_json:
        show(render_json(planned, lines, record, findings))
    else:
        show(render_text(planned, lines, blocks, findings))


# -- below the table


def notes(plan: Plan, out: Path) -> Iterator[str]:
    """Return what is missing here, damaged or forbidden, what goes to disk, and what is still to be evaluated, a sentence each. StorageError,
    PermissionDenied."""
    schedule = plan.schedule
    yield from (f"snapshot {name} is damaged and is passed over" for name in plan.inventory.damaged)
    yield from map(passed_over, plan.inventory.forbidden)
    yield from missing_data(schedule)
    yield from missing_weights(s.stage for s in plan.stages if s.state in (State.FRESH, State.STALE))
    for stage, field, source in named_sources(schedule):
        origin = stage.origins.get(f"{field.removeprefix(f'{stage.name}.')}.images")
        if origin is not None and origin.layer == LMDB:
            yield f"{field}.images: {source.images}, counted in {source.path}"
    for problem in (*look_at_folders(schedule), *look_at_classes(schedule)):
        yield f"{problem.message} ({problem.span}): `run` will refuse this; {problem.hint}"
    for path, made in schedule.imports.items():
        how = "imported" if is_there(made) else "`run` imports them"
        yield f"{path}: {count(made.images, 'image')} of {len(made.classes)} classes; {how} to {made.lmdb}"
    for name in plan.unclaimed:
        yield f"snapshots of `{name}` count for no stage of this schedule, and are left alone"
    if sizes := [ref.bytes for s in plan.stages for ref in (s.start, s.end) if ref is not None]:
        whole = snapshots_on_disk(schedule) * max(sizes)
        yield f"snapshots take {size(max(sizes))} each, at most {size(whole)} in all"
    yield from _evaluations(plan, out)
    for stage in (planned.stage for planned in plan.enabled):
        if stage.solver.compress is not None and stage.solver.compress.method is Method.AUTO:
            chosen = wing("wire.rules.read_chosen")(out, stage)
            if chosen:
                yield f"`{stage.name}`: AUTO chose for {count(chosen.workers, 'worker')}: {chosen.words}"


def _evaluations(plan: Plan, out: Path) -> Iterator[str]:
    """Name the trained stages without a result, and stages whose result is of other validation images."""
    missing, other = list[str](), list[str]()
    for planned in unfinished(plan, out):
        stage, end = planned.stage, planned.end
        result = read_result(out, end) if end is not None else None
        if result is None:
            missing += [stage.name] if stage.data.val else []
        elif other_set(plan.schedule, stage, result.tested_set):
            other.append(stage.name)
    if missing:
        yield f"trained but not evaluated: {listing(missing, 'and')}; `run` evaluates"
    if other:
        were = "was" if len(other) == 1 else "were"
        yield f"data.val: {listing(other, 'and')} {were} evaluated on other images; `run` evaluates again"


def hours_blocks(
    plan: Plan, out: Path, images_per_second: float | None = None, allocation: float | None = None
) -> tuple[list[str], dict[str, object]]:
    """Return blocks of text, and the same as members of JSON: at that speed, in images per second of the whole job, or else as measured
    here; `allocation` in seconds. UsageError for an allocation where a speed is unknown; StorageError, PermissionDenied for an
    unreadable log."""
    hours, ensembles = find_hours(plan, out, images_per_second), planned_ensembles(plan, out)
    blocks, record = [ensembles_text(ensembles)], dict[str, object](ensembles=ensembles_record(ensembles))
    if hours is None:
        if allocation is not None:
            raise UsageError("--budget needs to know how fast training is, and nothing was measured here", HINT)
        return blocks, record
    if images_per_second is None and allocation is None:
        plan, hours = as_running(plan, hours, out)
    together = left_together(plan, hours, out)
    blocks.append(render_hours(plan, hours, together))
    record["time"] = hours_record(plan, hours, together)
    if allocation is not None:
        if unknown := [planned.label for planned in plan.work if planned.name not in hours.speeds]:
            raise UsageError(f"--budget: stage {', '.join(unknown)} {hours.unknown}", HINT)
        ends = budget(plan, hours, allocation, sum(time.total for time in together.values() if time is not None))
        blocks.append(render_budget(ends))
        record["budget"] = ends._asdict()
    return blocks, record


class Budget(NamedTuple):
    """End of an allocation of `seconds`, started now. `total`: seconds for everything; `done`: everything fits.

    Otherwise a stop at the end of the allocation saves `iter` of the `last` updates of `stage`; it is being evaluated where these are equal,
    and the ensembles where `stage` is ''. `finished`: stages that are done by then.
    """

    seconds: float
    total: float
    done: bool
    finished: tuple[str, ...]
    stage: str = ""
    iter: int = 0
    last: int = 0


def budget(plan: Plan, hours: Hours, seconds: float, ensembles: float = 0.0) -> Budget:
    """Return where an allocation ends. `hours` must have the speeds of all stages with something to train; `ensembles`: seconds of their
    evaluation, after everything else."""
    total = ensembles + sum(stage_left(plan.schedule, p, hours.speeds[p.name]).total for p in plan.work)
    total += hours.opening if total else 0.0
    room, finished = seconds - hours.opening, tuple[str, ...]()
    for planned in plan.work:
        speed, reached, last = of_part(planned, hours.speeds[planned.name]), planned.iter, planned.last

        def takes(iter: int, planned: PlannedStage = planned, speed: Speed = speed) -> float:
            return spent(plan.schedule, planned.stage, speed, planned.iter, iter).total

        room -= speed.start
        if room >= 0 and reached < last:
            # A snapshot counts when it is on disk.
            fitting = bisect_right(range(reached, last + 1), room - speed.written, key=takes) - 1
            reached += max(0, fitting)
            room -= takes(last) + speed.written
        room -= speed.test
        if room < 0:
            return Budget(seconds, total, False, finished, planned.label, reached, last)
        finished += (planned.label,)
    return Budget(seconds, total, not total or room >= ensembles, finished)


def render_budget(end: Budget) -> str:
    if not end.total:
        return "nothing is left to do in an allocation"
    length = duration(end.seconds)
    if end.done:
        return f"an allocation of {length} is enough: all is done after {duration(end.total)}"
    done = f", after {', '.join(end.finished)}" if end.finished else ""
    if end.iter == end.last:
        return (
            f"an allocation of {length} ends in the evaluation of {end.stage or 'the ensembles'}{done}\n"
            "  training is saved; the same command evaluates again"
        )
    return (
        f"an allocation of {length} ends in {end.stage}, at iteration {end.iter} of {end.last}{done}\n"
        "  stopped in time (SIGTERM, SIGUSR1), it saves that iteration; the same command resumes"
    )
