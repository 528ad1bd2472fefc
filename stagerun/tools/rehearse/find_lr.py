"""`stagerun rehearse --find-lr STAGE`: the loss over rates that grow from a stage's start."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun.base.errors import ExitCode, UsageError, listing, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count
from stagerun.command.ending import say, tell
from stagerun.command.shared import output_folder
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.options import devices
from stagerun.launch.start import Job, joined, start, work
from stagerun.launch.watch.worker import Monitored
from stagerun.plan import Plan, PlannedStage, State, make_plan
from stagerun.plan.choice import check_workers
from stagerun.plan.planned import label
from stagerun.schedule import make_knobs
from stagerun.system import signals
from stagerun.system.imports import with_imports
from stagerun.system.world import World
from stagerun.tools.rehearse.sweep import Sweep, rate, shown, suggestion, swept, warnings
from stagerun.tools.status.output import plan_of

if TYPE_CHECKING:
    from stagerun.tools.rehearse.command import RehearseOptions

ROWS = 12  # of the table
ITERATIONS = 100
LEAST = 10


def find_lr(options: "RehearseOptions") -> int:
    """Start the workers, or be one."""

    def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
        return _find(options, world, stop)

    return work(job, options.orders) if joined(options.nproc) else _start(options, job)


def _start(options: "RehearseOptions", job: Job) -> int:
    schedule = load(options.folder, options.overrides)
    schedule = with_imports(schedule, _out(options, schedule))
    _check(options, schedule)
    _begin(options, schedule)
    cut, _ = swept(schedule, _stage(options), _iterations(options))
    nproc = options.nproc or devices(cut)
    check_workers(cut, nproc)
    with signals.held():
        from stagerun.data.preflight import preflight

    preflight(cut)
    return start(job, options.orders, nproc)


def _check(options: "RehearseOptions", schedule: Schedule) -> None:
    """What each worker finds by itself, too, where another launcher has started it. UsageError."""
    if options.last_rate <= options.first_rate:
        raise UsageError(
            f"--last-rate {options.last_rate:g} is not above --first-rate {options.first_rate:g}",
            "rates grow in a sweep",
        )
    if _iterations(options) < LEAST:
        raise UsageError(f"--iters {options.iters}: a sweep has {LEAST} or more")
    if options.only or options.until or options.synthetic or options.device_batch or options.workers:
        raise UsageError(
            "--find-lr goes with --first-rate, --last-rate, --iters, --nproc, --threads, --set, --out and --json alone"
        )
    names = [stage.name for stage in schedule.stages if stage.enabled]
    if _stage(options) not in names:
        raise UsageError(
            f"{_stage(options)}: no stage of {schedule.name} that is enabled has this name",
            nearest(_stage(options), names) or f"there are {listing(names, 'and')}",
        )
    if (ensemble := schedule.stage(_stage(options)).average) is not None:
        text = f"--find-lr {_stage(options)}: the stage starts from the average of ensemble `{ensemble}`"
        raise UsageError(text, f"try the rate on a copy of the stage that starts from a member of `{ensemble}`")


def _begin(options: "RehearseOptions", schedule: Schedule) -> PlannedStage:
    """UsageError where what the stage starts from isn't there."""
    out = _out(options, schedule)
    return start_of(plan_of(schedule, out), _stage(options), str(out))


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


def _stage(options: "RehearseOptions") -> str:
    assert options.find_lr is not None
    return options.find_lr


def _iterations(options: "RehearseOptions") -> int:
    return options.iters or ITERATIONS


def _out(options: "RehearseOptions", schedule: Schedule) -> Path:
    return output_folder(schedule.name, options.out)


# -- a worker


def _find(options: "RehearseOptions", world: World, stop: StopRequest) -> int:
    from stagerun.tools.rehearse.sweep_run import sweep
    from stagerun.train.agreement import everyone
    from stagerun.train.context import Context
    from stagerun.train.join import join, load_everywhere

    device, comm = join(world, options.threads, stop)
    schedule = load_everywhere(options.folder, options.overrides, comm)
    schedule = with_imports(schedule, _out(options, schedule))
    everyone(comm, lambda: _check(options, schedule))
    iterations = _iterations(options)
    cut, left_out = swept(schedule, _stage(options), iterations)
    everyone(comm, lambda: check_workers(cut, comm.size))
    quiet = options.as_json or comm.rank > 0
    size = cut.stages[0].solver.batch_size
    if not quiet:
        say(
            f"{schedule.name}, stage {_stage(options)}: {count(iterations, 'iteration')} of {size} images, rate "
            f"{options.first_rate:g} to {options.last_rate:g}, {count(comm.size, 'worker')} on {device}"
        )
        for text in left_out:
            say(f"note: without {text}")
    points, began, ended = sweep(
        schedule,
        Context(cut, str(_out(options, schedule)), comm, world, device, None, stop),
        lambda: _begin(options, schedule),
        lambda i: rate(i, options.first_rate, options.last_rate, iterations),
        _watch(quiet, iterations),
    )
    if comm.rank == 0:
        found = Sweep(
            schedule=schedule.name, stage=_stage(options), start=began, batch_size=size, iterations=iterations,
            points=tuple(points), ended=ended,
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


def _tell(options: "RehearseOptions", schedule: Schedule, found: Sweep) -> None:
    """Rank 0 only."""
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


def _text(found: Sweep, schedule: Schedule) -> str:
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
    return "\n".join(["", f"from {found.start}", "", *columns(rows), "", *said, *notes])


def _rate(value: float | None) -> str:
    return f"{value:<8.3g}" if value is not None else "not known"
