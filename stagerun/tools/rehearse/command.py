"""`stagerun rehearse`: runs the schedule cut down, shows what the whole would take, and leaves that for `plan`; or a scaling table."""

import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stagerun import store
from stagerun.base.errors import DataError, ExitCode, UsageError, nearest
from stagerun.base.events import EnsembleTested, Event, Note, Stopped, Tested, TestedBeside
from stagerun.base.events import StageStarted as Started
from stagerun.base.recipe import Ensemble, Schedule, Stage
from stagerun.base.snapshots import Inventory
from stagerun.base.text import count, duration
from stagerun.command.ending import say, tell
from stagerun.command.options import arguments, command, flag, given, option
from stagerun.command.shared import (
    DeviceBatch,
    FiniteRange,
    Folder,
    Json,
    Nproc,
    Overrides,
    Synthetic,
    Threads,
    output_folder,
)
from stagerun.language import load
from stagerun.language.stages import some
from stagerun.launch import StopRequest
from stagerun.launch.options import HostOptions, chosen_hosts, devices
from stagerun.launch.start import Job, Orders, joined, start, work
from stagerun.launch.watch.worker import Monitored
from stagerun.plan import make_plan
from stagerun.plan.choice import check_short, choice
from stagerun.plan.ensembles import ensembles_left, plan_ensembles
from stagerun.plan.planned import points_averaged
from stagerun.plan.rehearsal import Figures, speeds_of
from stagerun.system import signals
from stagerun.system.host import whole_memory
from stagerun.system.imports import with_imports
from stagerun.system.lmdb_file import data_file
from stagerun.system.world import World
from stagerun.tools.rehearse.estimate import Room, StageTime, caveats, estimate, needs, render_needs, render_times
from stagerun.tools.rehearse.throw_away import claim
from stagerun.train.results import figures_file

if TYPE_CHECKING:
    from stagerun.comm import Comm

THROW_AWAY = ".rehearsal"
FIND_LR = "Learning rate"


class Workers(click.ParamType):  # generic in a newer click alone
    """`8`, or growing numbers: `1,2,4`."""

    name = "workers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a number, or a list of numbers: write 8, or 1,2,4.", param, ctx)
        if min(counts) < 1 or list(counts) != sorted(set(counts)):
            self.fail(f"{value!r}: write a number, or growing numbers from 1 on, such as 1,2,4.", param, ctx)
        return counts


_RATES = 1e-7, 10.0  # of --find-lr


@dataclass(frozen=True, slots=True)
class RehearseOptions:
    folder: Folder
    overrides: Overrides = ()
    out: str | None = option("--out FOLDER", "Output folder of the run to come.  [default: ./out/NAME]")
    only: tuple[str, ...] = option(
        "--only STAGE", "Rehearse this stage, and what it starts from or is taught by, alone. Repeatable.", default=()
    )
    until: str | None = option("--until STAGE", "Rehearse up to this stage, it included, and nothing after it.")
    iters: int | None = option(
        "--iters N", "Iterations per stage, 2 or more.  [default: 5, or as many as take the first stage 5 s]", least=2
    )
    device_batch: DeviceBatch = None
    workers: tuple[int, ...] | None = option(
        "--workers N",
        "Estimate for a job of N workers.  [default: as many as rehearse]  `1,2,4` measures instead: a stage trains with each number "
        "in turn.",
        type=Workers(),
        word=lambda counts: ",".join(map(str, counts)),
    )
    synthetic: Synthetic = False
    find_lr: str | None = option(
        "--find-lr STAGE", "Instead: train from this stage's start at growing rates, and suggest one.", title=FIND_LR
    )
    first_rate: float = option(
        "--first-rate RATE", "The first rate.", type=FiniteRange(1e-12, 1e6), title=FIND_LR, default=_RATES[0]
    )
    last_rate: float = option(
        "--last-rate RATE", "The last rate.", type=FiniteRange(1e-12, 1e6), title=FIND_LR, default=_RATES[1]
    )
    nproc: Nproc = None
    threads: Threads = None
    as_json: Json = False
    on_hosts: bool = flag("--on-hosts", "What --hosts starts on each.", hidden=True)

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        return ["rehearse", *arguments(self)]

    @property
    def orders(self) -> Orders:
        return Orders(tuple(self.arguments()), self.threads, saves=False)

    @property
    def compares(self) -> bool:
        """Whether numbers of workers are compared, instead of stages rehearsed."""
        return self.workers is not None and len(self.workers) > 1

    def measured_stage(self, schedule: Schedule) -> str:
        """The stage whose speed is compared. UsageError."""
        if others := {"--out", "--until", "--device-batch", "--nproc"} & set(given(self)):
            raise UsageError(f"{min(others)} with --workers {','.join(map(str, self.workers or ()))}", "leave one out")
        enabled = [stage.name for stage in schedule.stages if stage.enabled]
        names = self.only or enabled[:1]
        if len(names) > 1:
            raise UsageError("--workers 1,2,4 measures one stage, and --only names several", "name one")
        if names and names[0] not in enabled:
            text = f"--only {names[0]}: no stage of {schedule.name} that is enabled has this name"
            raise UsageError(text, nearest(names[0], enabled))
        return names[0] if names else ""

    def part(self, schedule: Schedule) -> Schedule:
        """RecipeError for names that no stage has."""
        if not self.only and self.until is None:
            return schedule
        return part_of(schedule, choice(schedule, (), self.only, self.until).chosen)


@command(grouped=True)
def rehearse(options: RehearseOptions, reach: HostOptions) -> int:
    """Goes through the whole schedule with a few iterations per stage, and estimates what the real run will take.

    Everything is done as in `run`, in a folder that is thrown away: data and transforms of each stage, carry-over,
    snapshots, a stop and a resume, evaluation. Then comes the time per stage, disk and memory, and what would run out.
    One device batch is run per worker and iteration; the rest of a real iteration is extrapolated. `plan` shows the estimate
    from then on.

    With several numbers of workers, whole iterations of one stage (the first, or that of `--only`) are timed with each number in turn,
    three rounds of `--iters` (5). The table has images/s, efficiency, and the shares of computing, communicating and
    waiting for data. All workers start at once: on this machine, or by a launcher that starts as many as the largest number.

    --hosts, with what the run has beside it, says instead which host is missing, slow or different: versions, code, schedule, images, folders,
    links, and a training step on made-up images, on each host alone and on all together. It leaves nothing behind, and ends with 0 where the
    hosts are ready, else with the code of the first of these: 64 other versions or code, 65 images missing or not the same, 69 a host or link
    is missing or slow, 74 no room or no such folder, 77 a folder may not be written, 78 another schedule.

    --find-lr sweeps the rate over --iters iterations, 100 by default, of the stage's own weights, batch, images, momentum and decay. What it
    starts from must be in OUT; nothing is saved. steepest is where the smoothed loss falls fastest over the logarithm of the rate; minimum/10
    a tenth of the rate at which it is lowest (arXiv:1506.01186). The sweep ends where the smoothed loss is 4 times its lowest.
    """
    if chosen_hosts(reach) is not None or options.on_hosts:
        from stagerun.tools.rehearse.hosts import check_hosts

        return check_hosts(options, reach)
    if options.find_lr is not None:
        from stagerun.tools.rehearse.find_lr import find_lr

        return find_lr(options)
    if (options.first_rate, options.last_rate) != _RATES:
        raise UsageError("--first-rate and --last-rate are for --find-lr", "name a stage: `--find-lr STAGE`")

    def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
        return _compare(options, world, stop) if options.compares else _rehearse(options, world, stop)

    return work(job, options.orders) if joined(options.nproc) else _start(options, job)


def _start(options: RehearseOptions, job: Job) -> int:
    schedule = load(options.folder, options.overrides)
    if options.compares:
        options.measured_stage(schedule)
    else:
        schedule = options.part(schedule)
    schedule = with_imports(schedule, output_folder(schedule.name, options.out))
    nproc = options.nproc or (max(options.workers or ()) if options.compares else devices(schedule))
    _check(options, schedule, nproc)
    if not options.synthetic:
        with signals.held():
            from stagerun.data.preflight import preflight

        preflight(schedule)
    return start(job, options.orders, nproc)


def _check(options: RehearseOptions, schedule: Schedule, workers: int) -> None:
    """What each worker finds by itself, too, where another launcher has started it. RecipeError, DataError."""
    most = max(workers, *(options.workers or (1,)))
    does = "measures" if options.compares else "rehearses"
    check_short(schedule, most, options.device_batch, options.synthetic, does)


# -- a worker


def _rehearse(options: RehearseOptions, world: World, stop: StopRequest) -> int:
    from stagerun.tools.rehearse import measure as runner
    from stagerun.train.agreement import everyone, rank0
    from stagerun.train.join import join, load_everywhere

    device, comm = join(world, options.threads, stop)
    schedule = load_everywhere(options.folder, options.overrides, comm)
    whole = schedule
    schedule = everyone(comm, lambda: options.part(whole))
    everyone(comm, lambda: _check(options, schedule, comm.size))
    out = output_folder(schedule.name, options.out)
    schedule = with_imports(schedule, out)
    asked = runner.Rehearsal(options.iters, options.device_batch, options.synthetic)
    if comm.rank == 0 and not options.as_json:
        say(
            f"rehearsing {schedule.name}: {count(sum(s.enabled for s in schedule.stages), 'stage')}, "
            f"{count(comm.size, 'worker')} on {device}"
        )
    with ExitStack() as stack:
        rank0(comm, lambda: str(claim(out / THROW_AWAY, "out", stack)))
        figures = runner.rehearse(
            schedule, asked, out / THROW_AWAY / "out", comm, world, device, stop, _watcher(options.as_json)
        )
    if figures is not None:
        rank0(comm, lambda: _tell(options, whole, schedule, out, figures, comm))
    elif comm.rank == 0:
        tell("interrupted: a rehearsal keeps nothing")
    comm.close()
    return ExitCode.DONE if figures is not None else ExitCode.INTERRUPTED


def _compare(options: RehearseOptions, world: World, stop: StopRequest) -> int:
    from stagerun.tools.rehearse import scaling
    from stagerun.train.agreement import everyone
    from stagerun.train.join import join, load_everywhere

    device, comm = join(world, options.threads, stop)
    schedule = load_everywhere(options.folder, options.overrides, comm)
    name = everyone(comm, lambda: options.measured_stage(schedule))
    everyone(comm, lambda: _check(options, schedule, 1))
    schedule = with_imports(schedule, output_folder(schedule.name, None))
    watch = (lambda line: None) if options.as_json else say
    counts = options.workers or ()
    if comm.rank == 0:
        watch(f"{schedule.name}, stage {name}: {', '.join(map(str, counts))} workers on {device}")
    iterations = options.iters or 5
    found = scaling.measure(schedule, name, counts, iterations, options.synthetic, comm, world, device, stop, watch)
    if comm.rank == 0 and found is None:
        tell("interrupted: nothing is kept")
    elif comm.rank == 0 and found is not None:
        rows, notes = found
        record = {"schedule": schedule.name, "stage": name, "rows": [asdict(row) for row in rows], "notes": notes}
        say(json.dumps(record, indent=2) if options.as_json else "\n" + scaling.render(rows, notes))
    comm.close()
    return ExitCode.INTERRUPTED if found is None else ExitCode.DONE


def _watcher(quiet: bool) -> Callable[[Event], None]:
    tested: set[str] = set()  # a line for the first evaluation of each stage; the table has the time of all

    def watch(event: Event) -> None:
        match event:
            case Started():
                say(f"  {event.stage}: iterations {event.iter} to {event.max_iter}, from {event.start}")
            case Tested() | TestedBeside() if event.stage not in tested:
                tested.add(event.stage)
                say(f"  {event.stage}: evaluated {event.images} images in {duration(event.seconds)}")
            case EnsembleTested():
                of = count(len(event.members), "stage")
                say(f"  ensemble {event.name}: {of} evaluated on {event.images} images in {duration(event.seconds)}")
            case Stopped():
                say(f"  {event.stage}: stopped and saved after {event.iter}, to be resumed")
            case Note(warning=True):
                say(f"  warning: {event.text}")

    return (lambda event: None) if quiet else watch


def _tell(
    options: RehearseOptions, whole: Schedule, schedule: Schedule, out: Path, figures: Figures, comm: "Comm"
) -> None:
    """Rank 0 only: shows the table, and leaves the figures for `plan`. `schedule`: the part that was rehearsed. StorageError,
    PermissionDenied."""
    store.write_atomic(store.LocalDisk(), figures_file(out), json.dumps(asdict(figures)).encode())
    workers = options.workers[0] if options.workers else comm.size
    plan = make_plan(schedule, Inventory())
    times = estimate(plan, figures, workers)
    together = ensembles_left(schedule, plan_ensembles(plan, {}), speeds_of(schedule, figures, workers))
    found = needs(plan, figures, room(schedule, out))
    there = {stage.name for stage in schedule.stages}
    left_out = [stage for stage in whole.stages if stage.enabled and stage.name not in there]
    if options.as_json:
        record = {
            "figures": asdict(figures),
            "workers": workers,
            "stages": [_time_record(name, time) for name, time in times.items()],
            "ensembles": {name: time.total if time else None for name, time in together.items()},
            "needs": [asdict(need) for need in found],
            "caveats": caveats(plan, figures, workers),
            "left_out": [stage.name for stage in left_out],
        }
        say(json.dumps(record, indent=2))
        return
    say(
        f"\nestimate for {count(workers, 'worker')}, from {figures.workers} on {figures.host} ({figures.device}, "
        f"{count(figures.threads, 'thread')} each, torch {figures.torch})\n"
    )
    say(render_times(plan, times) + "\n")
    if together:
        say("".join(f"{name}: {duration(t.total) if t else '?'} of evaluation more\n" for name, t in together.items()))
    say(render_needs(found) + "\n")
    for text in [*_without(whole, left_out, figures), *caveats(plan, figures, workers)]:
        say(f"note: {text}")


def _without(whole: Schedule, left_out: list[Stage], figures: Figures) -> list[str]:
    """What --only or --until leaves out, and what `plan` knows of that all the same; [] where that is nothing."""
    if not left_out:
        return []
    known = speeds_of(whole, figures, figures.workers)
    same = sum(stage.name in known for stage in left_out)
    then = "`plan` estimates them, too" if same else "`plan` has no time for them"
    which = f"{'all' if same == len(left_out) else same or 'none'} of a kind that was rehearsed"
    return [f"left out: {some([stage.name for stage in left_out])}; {which}: {then}"]


def _time_record(name: str, time: StageTime | None) -> dict[str, object]:
    return {"stage": name} if time is None else asdict(time) | {"in_all": time.total}


def room(schedule: Schedule, out: Path) -> Room:
    """What there is on this machine, `out` existing."""
    scratch = schedule.data.scratch
    data_bytes = None
    with suppress(OSError, DataError):
        data_bytes = sum(data_file(schedule.lmdb(s)).stat().st_size for s in schedule.sources)
    return Room(
        out=str(out),
        out_free=shutil.disk_usage(out).free,
        memory=whole_memory(),
        gpu_memory=_gpu_memory(),
        scratch=scratch,
        scratch_free=shutil.disk_usage(scratch).free if scratch and os.path.isdir(scratch) else None,
        data_bytes=data_bytes,
        scratch_reserve=round(schedule.data.scratch_reserve * 10**9),
    )


def _gpu_memory() -> int | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def part_of(schedule: Schedule, names: Collection[str]) -> Schedule:
    """The stages with these names, those that they start from and are taught by, and the ensembles that these start from; of the others
    those that one of the names is a member of, if all members are there."""
    needed: set[str] = set()
    for stage in reversed(schedule.stages):  # children before what they need
        if stage.name in names or stage.name in needed:
            averaged = [name for name, _ in points_averaged(schedule, stage)]
            needed |= {name for name in (stage.name, stage.parent, stage.solver.teacher, *averaged) if name is not None}
    stages = tuple(stage for stage in schedule.stages if stage.name in needed)
    averages = {stage.average for stage in stages}

    def wanted(ensemble: Ensemble) -> bool:
        of = {name for name, _ in ensemble.points}
        return ensemble.name in averages or (needed >= of and not of.isdisjoint(names))

    return replace(schedule, stages=stages, ensembles=tuple(filter(wanted, schedule.ensembles)))
