"""`stagerun find-lr`: starts the workers, or is one, and shows the loss over the rate."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagerun.base.errors import ExitCode, UsageError, listing, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count
from stagerun.command.ending import say, tell
from stagerun.command.options import argument, arguments, command, option
from stagerun.command.shared import (
    FiniteRange,
    Folder,
    Json,
    Nproc,
    Out,
    Overrides,
    Threads,
    output_folder,
    require_picture,
)
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.start import Job, Orders, joined, start, work
from stagerun.launch.watch.worker import Monitored
from stagerun.launch.worker_count import check_workers, devices
from stagerun.plan import Plan, PlannedStage, State, make_plan
from stagerun.plan.ensembles import EnsembleState
from stagerun.plan.planned import label
from stagerun.schedule import make_knobs
from stagerun.store import inventory
from stagerun.store.layout import averages_folder
from stagerun.system import signals
from stagerun.system.files import writing
from stagerun.system.imports import with_imports
from stagerun.system.world import World, rank_said
from stagerun.tools.find_lr.sweep import Sweep, shown, suggestion, swept, warnings
from stagerun.train.output import DISK, plan_of
from stagerun.train.results import planned_ensembles

ROWS = 12  # of the table


@dataclass(frozen=True, slots=True)
class FindOptions:
    folder: Folder
    stage: str = argument("STAGE")
    overrides: Overrides = ()
    out: Out = None
    start: float = option("--start RATE", "The first rate.", type=FiniteRange(1e-12, 1e6), default=1e-7)
    end: float = option("--end RATE", "The last rate.", type=FiniteRange(1e-12, 1e6), default=10.0)
    iterations: int = option("--iterations N", "Of the stage's whole batches.", least=10, default=100)
    nproc: Nproc = None
    threads: Threads = None
    as_json: Json = False
    plot: str | None = option("--plot FILE", "Also draw it into FILE (.svg, .png; pip install 'stagerun[plots]').")

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        return ["find-lr", *arguments(self)]

    @property
    def orders(self) -> Orders:
        return Orders(tuple(self.arguments()), self.threads, saves=False)


@command("find-lr")
def find_lr(options: FindOptions) -> int:
    """Trains from a stage's start at rates that grow exponentially, and shows where the loss falls and where it diverges.

    The stage's own weights, batch, images, transform, momentum and decay are used. A stage that starts from another, or from an average,
    needs that in OUT. Nothing is saved, in OUT or in the files: the rates are suggestions.

    steepest is where the smoothed loss falls fastest over the logarithm of the rate; minimum/10 is a tenth of the rate at which it is
    lowest (arXiv:1506.01186, as fastai has them). The sweep ends where the smoothed loss is 4 times its lowest. Ctrl-C shows what is there.
    """

    def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
        return _find(options, world, stop)

    return work(job, options.orders) if joined(options.nproc) else _start(options, job)


def _start(options: FindOptions, job: Job) -> int:
    schedule = load(options.folder, options.overrides)
    schedule = with_imports(schedule, _out(options, schedule))
    _check(options, schedule)
    _begin(options, schedule)
    cut, _ = swept(schedule, options.stage, options.iterations)
    nproc = options.nproc or devices(cut)
    check_workers(cut, nproc)
    with signals.held():
        from stagerun.data.preflight import preflight

    preflight(cut)
    return start(job, options.orders, nproc)


def _check(options: FindOptions, schedule: Schedule) -> None:
    """What each worker finds by itself, too, where another launcher has started it. UsageError."""
    if options.end <= options.start:
        raise UsageError(f"--end {options.end:g} is not above --start {options.start:g}", "rates grow in a sweep")
    names = [stage.name for stage in schedule.stages if stage.enabled]
    if options.stage not in names:
        raise UsageError(
            f"{options.stage}: no stage of {schedule.name} that is enabled has this name",
            nearest(options.stage, names) or f"there are {listing(names, 'and')}",
        )
    if options.plot is not None and rank_said() == 0:
        require_picture(options.plot)


def _begin(options: FindOptions, schedule: Schedule) -> PlannedStage:
    """UsageError where what the stage starts from isn't there."""
    out = _out(options, schedule)
    plan = plan_of(schedule, out)
    name = schedule.stage(options.stage).average
    made = [e.ensemble.name for e in planned_ensembles(plan, out) if e.state is EnsembleState.DONE]
    if name is not None and not (name in made and inventory(DISK, averages_folder(out) / name).snapshots):
        last = [stage.name for stage in schedule.stages if stage.name in dict(schedule.ensemble(name).points)][-1]
        raise UsageError(
            f"stage `{options.stage}` starts from ensemble `{name}`, and {out} has no average of its members as they are now",
            f"`stagerun run DIR --until {last}` trains and averages them; or name another --out",
        )
    return start_of(plan, options.stage, str(out))


def start_of(plan: Plan, name: str, out: str) -> PlannedStage:
    """The stage as it would start now, whatever there is of it. UsageError where what it starts from isn't there."""
    others = tuple(ref for ref in plan.inventory.snapshots if ref.stage != name)
    again = make_plan(plan.schedule, replace(plan.inventory, snapshots=others))
    planned = next(planned for planned in again.stages if planned.stage.name == name)
    stage = planned.stage
    if stage.parent is not None and (planned.start is None or planned.state is not State.FRESH):
        raise UsageError(
            f"stage `{name}` starts from `{label(stage.parent, stage.parent_iter)}`, and {out} has no usable snapshot of that",
            f"train it first, with `stagerun run DIR --until {stage.parent}`, or name another --out",
        )
    return planned


def _out(options: FindOptions, schedule: Schedule) -> Path:
    return output_folder(schedule.name, options.out)


# -- a worker


def _find(options: FindOptions, world: World, stop: StopRequest) -> int:
    from stagerun.tools.find_lr.measure import Asked, sweep
    from stagerun.train.agreement import everyone
    from stagerun.train.join import join, load_everywhere

    device, comm = join(world, options.threads, stop)
    schedule = load_everywhere(options.folder, options.overrides, comm)
    schedule = with_imports(schedule, _out(options, schedule))
    everyone(comm, lambda: _check(options, schedule))
    cut, left_out = swept(schedule, options.stage, options.iterations)
    everyone(comm, lambda: check_workers(cut, comm.size))
    quiet = options.as_json or comm.rank > 0
    asked = Asked(options.start, options.end, options.iterations)
    if not quiet:
        size = cut.stages[0].solver.batch_size
        said = f"{schedule.name}, stage {options.stage}: {count(options.iterations, 'iteration')} of {size} images, "
        say(f"{said}rate {options.start:g} to {options.end:g}, {count(comm.size, 'worker')} on {device}")
        for text in left_out:
            say(f"note: without {text}")
    points, began, ended = sweep(
        schedule, cut, lambda: _begin(options, schedule), str(_out(options, schedule)), asked, comm, world, device, stop,
        _watch(quiet, options.iterations),
    )  # fmt: skip
    if comm.rank == 0:
        found = Sweep(
            schedule=schedule.name, stage=options.stage, start=began, batch_size=cut.stages[0].solver.batch_size,
            iterations=options.iterations, points=tuple(points), ended=ended,
        )  # fmt: skip
        _tell(options, schedule, found)
    comm.close()
    return ExitCode.INTERRUPTED if stop() else ExitCode.DONE


def _watch(quiet: bool, iterations: int) -> Callable[[int, float, float], None]:
    every = max(1, iterations // 10)

    def watch(iter: int, lr: float, smoothed: float) -> None:
        if not quiet and iter % every == 0:
            say(f"  iteration {iter}: rate {lr:.3g}, smoothed loss {smoothed:.4f}")

    return watch


def _tell(options: FindOptions, schedule: Schedule, found: Sweep) -> None:
    """Rank 0 only. UsageError without matplotlib; StorageError, PermissionDenied for the file."""
    best = suggestion(found)
    if options.as_json:
        say(
            json.dumps(
                {**asdict(found), "steepest": best.steepest, "minimum_tenth": best.tenth, "notes": warnings(found)},
                indent=2,
            )
        )
    elif not found.points:
        tell(f"no iteration was done: {found.ended}")
    else:
        say(_text(found, schedule))
    if options.plot is not None and found.points:
        from stagerun.tools.find_lr.picture import picture

        drawn = picture(found, png=options.plot.endswith(".png"))
        with writing(options.plot):
            Path(options.plot).write_bytes(drawn)


def _text(found: Sweep, schedule: Schedule) -> str:
    from stagerun.tools.find_lr.picture import in_terminal

    best = suggestion(found)
    rows = [("rate", "loss", "smoothed")]
    rows += [(f"{p.lr:.3g}", f"{p.loss:.4f}", f"{p.smoothed:.4f}") for p in shown(found.points, ROWS)]
    solver = schedule.stage(found.stage).solver
    knobs = make_knobs(solver)
    highest = max(knobs(i).lr for i in range(solver.max_iter))
    said = [
        f"steepest:    {_rate(best.steepest)}  the smoothed loss falls fastest",
        f"minimum/10:  {_rate(best.tenth)}  a tenth of the rate at which it is lowest",
        f"now:         {highest:<8.3g}  the highest rate of stage {found.stage}",
    ]
    notes = [f"note: {text}" for text in warnings(found)]
    picture = in_terminal(found, shutil.get_terminal_size((80, 24)).columns)
    return "\n".join(["", f"from {found.start}", "", *columns(rows), "", *picture, "", *said, *notes])


def _rate(value: float | None) -> str:
    return f"{value:<8.3g}" if value is not None else "not known"
