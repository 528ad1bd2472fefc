"""`stagerun rehearse`: start workers with a cut-down schedule, measure, and leave nothing but the figures.

A mode says what is trained, and measures it in the workers: every stage (`stages`), one stage with several numbers of workers or at growing
rates (`trials`), or the hosts (`hosts`). `frame.Session` is one worker of a measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from stagerun.base.errors import UsageError, nearest
from stagerun.base.recipe import Schedule
from stagerun.command.options import arguments, command, flag, given, option
from stagerun.command.shared import (
    DeviceBatch,
    FiniteRange,
    Folder,
    Json,
    Nproc,
    Out,
    Overrides,
    Synthetic,
    Threads,
    limits,
    output_folder,
)
from stagerun.language import load
from stagerun.launch.hosts import on_hosts
from stagerun.launch.options import HostOptions, chosen_hosts, devices
from stagerun.launch.start import Orders, joined, start, work
from stagerun.plan.choice import check_short, choice
from stagerun.system import signals
from stagerun.system.image_sets import with_imports
from stagerun.train.command import read_before_torch

FIND_LR = "Learning rate"
ITERATIONS = 5  # of a turn with one number of workers
ROUNDS = 3  # of turns
WARM_UP = 3  # iterations of a turn before that, as of `train.hooks.profile`
SWEEP, SHORTEST_SWEEP = 100, 10  # iterations


@dataclass(frozen=True, slots=True)
class RehearseOptions:
    folder: Folder
    overrides: Overrides = ()
    out: Out = None
    only: tuple[str, ...] = option(
        "--only STAGE", "Rehearse this stage, and what it starts from or is taught by, alone. Repeatable.", default=()
    )
    iters: int | None = option(
        "--iters N", "Iterations per stage, 2 or more.  [default: 5, or as many as take the first stage 5 s]", least=2
    )
    device_batch: DeviceBatch = None
    workers: str | None = option("--workers 1,2,4", "Instead: time one stage with each number of workers in turn.")
    synthetic: Synthetic = False
    find_lr: str | None = option(
        "--find-lr STAGE", "Instead: train from this stage's start at growing rates, and suggest one.", title=FIND_LR
    )
    first_rate: float = option(
        "--first-rate RATE", "The first rate.", type=FiniteRange(1e-12, 1e6), title=FIND_LR, default=1e-7
    )
    last_rate: float = option(
        "--last-rate RATE", "The last rate.", type=FiniteRange(1e-12, 1e6), title=FIND_LR, default=10.0
    )
    nproc: Nproc = None
    threads: Threads = None
    as_json: Json = False
    on_hosts: bool = flag("--on-hosts", "The command that --hosts starts on each host.", hidden=True)

    def output(self, schedule: Schedule) -> Path:
        return output_folder(schedule.name, self.out)

    @property
    def counts(self) -> list[int]:
        """Numbers of --workers. UsageError."""
        words = (self.workers or "1").split(",")
        counts = sorted({int(word) for word in words if word.isdecimal() and int(word)})
        if list(map(str, counts)) != words:
            raise UsageError(f"--workers {self.workers}", "write growing numbers, such as 1,2,4")
        return counts


class Mode(NamedTuple):
    """`measure`, `MODULE.FUNCTION`, runs in the workers. `part` cuts the schedule down to what is trained; UsageError. `refused` are options that
    mean nothing in the mode."""

    name: str
    measure: str
    part: Callable[[RehearseOptions, Schedule], Schedule]
    refused: str


def _every_stage(options: RehearseOptions, schedule: Schedule) -> Schedule:
    from stagerun.tools.rehearse.schedule import part_of

    return part_of(schedule, choice(schedule, (), options.only, None).chosen) if options.only else schedule


def one_stage(options: RehearseOptions, schedule: Schedule) -> Schedule:
    """Cut to one stage from the seed, at a rate of nearly 0: whatever its weights are, they stay finite."""
    from stagerun.tools.rehearse.schedule import alone

    name = _enabled(schedule, "--only", *options.only)
    seeded = replace(schedule.stage(name), parent=None, parent_iter=None, average=None)
    return alone(replace(schedule, stages=(seeded,)), name, WARM_UP + (options.iters or ITERATIONS), 1e-9, 1.0)


def _swept(options: RehearseOptions, schedule: Schedule) -> Schedule:
    from stagerun.tools.rehearse.schedule import alone

    first, last, iterations = options.first_rate, options.last_rate, options.iters or SWEEP
    if last <= first:
        raise UsageError(f"--last-rate {last:g} is not above --first-rate {first:g}", "rates grow in a sweep")
    if iterations < SHORTEST_SWEEP:
        raise UsageError(f"--iters {iterations}: a sweep has {SHORTEST_SWEEP} or more")
    name = _enabled(schedule, "--find-lr", options.find_lr or "")
    if (ensemble := schedule.stage(name).average) is not None:
        text = f"--find-lr {name}: the stage starts from the average of ensemble `{ensemble}`"
        raise UsageError(text, f"try the rate on a copy of the stage that starts from a member of `{ensemble}`")
    if schedule.stage(name).solver.solverstate is not None:
        text = f"--find-lr {name}: the stage begins with a `solverstate`"
        raise UsageError(text, "try the rate on a copy of the stage that begins with `weights`")
    return alone(schedule, name, iterations, first, (last / first) ** (1 / (iterations - 1)))


def _enabled(schedule: Schedule, option: str, *names: str) -> str:
    """Return the first name, else the first stage. UsageError."""
    enabled = [stage.name for stage in schedule.stages if stage.enabled]
    for name in names:
        if name not in enabled:
            text = f"{option} {name}: no stage of {schedule.name} that is enabled has this name"
            raise UsageError(text, nearest(name, enabled))
    if len(names) > 1 or not enabled:
        raise UsageError(f"{option} names {len(names)} stages, and one of {schedule.name} is measured", "name one")
    return (*names, *enabled)[0]


_RATES = " --first-rate --last-rate"
_STAGES = Mode("a rehearsal of all stages", "stages.rehearse", _every_stage, _RATES)
_WORKERS = Mode("--workers", "trials.compare", one_stage, "--device-batch --nproc" + _RATES)
_RATE = Mode("--find-lr", "trials.find_lr", _swept, "--only --synthetic --device-batch --workers")
_HOSTS = Mode(
    "--hosts", "hosts.compare", lambda options, schedule: schedule,
    "--only --iters --device-batch --workers --synthetic --find-lr" + _RATES,
)  # fmt: skip


def _mode(options: RehearseOptions, hosts: bool) -> Mode:
    mode = _HOSTS if hosts else _RATE if options.find_lr is not None else _WORKERS if options.workers else _STAGES
    if wrong := sorted(set(given(options)).intersection(mode.refused.split())):
        raise UsageError(f"{wrong[0]} with {mode.name}", "leave one out")
    return mode


@command(grouped=True)
def rehearse(options: RehearseOptions, reach: HostOptions) -> int:
    """Train every stage for a few iterations, and estimate what the real run will take.

    Everything is done as in `run`, in a folder that is removed afterwards: data and transforms of each stage, carry-over, snapshots,
    evaluation. Then comes the time per stage, disk and memory, and what would run out. One device batch is run per worker and iteration;
    the rest of a real iteration is extrapolated, and so are stages of the same kind. `plan` shows the estimate from then on.

    With --workers, whole iterations of one stage (the first, or `--only STAGE`) are timed with each number in turn,
    three rounds of `--iters` (5). The table has images/s, efficiency, and the shares of computing, communicating and
    waiting for data. All workers start at once: on this machine, or by a launcher that starts as many as the largest number.

    --hosts says instead which host is missing, slow or different: code, schedule and images as `run` compares them, then machines, links,
    and a training step on made-up images on each host alone. It leaves nothing behind, and ends with 0 where the hosts are ready, else with a
    code: 64 other code, 65 images missing or not the same, 69 a host or link is missing or slow, 78 another schedule.

    --find-lr sweeps the rate over --iters iterations, 100 by default, of the stage's weights, batch, images, momentum and decay, without
    replicas, teacher and compression by AUTO. What the stage starts from must be in OUT; nothing is saved. steepest is where the smoothed
    loss falls fastest over the logarithm of the rate; minimum/10 a tenth of the rate at which it is lowest (arXiv:1506.01186). The sweep
    ends where the smoothed loss is 4 times its lowest.
    """
    hosts = chosen_hosts(reach) is not None
    mode = _mode(options, hosts or options.on_hosts)
    words = options if not hosts else replace(options, on_hosts=True, folder=reach.folder_on_host(options.folder))
    watched = limits(()) if mode is _HOSTS else None
    orders = Orders(("rehearse", *arguments(words)), options.threads, saves=False, limits=watched)

    def job(world: Any, stop: Any, watch: Any) -> int:
        read = read_before_torch(options.folder, options.overrides, options.threads, load)
        from stagerun.tools.rehearse.frame import Session, worker
        from stagerun.train.worker import join

        joined = join(world, options.threads, stop, watch, patient=watch is not None)
        return worker(Session(options, mode, world, stop, *joined, read))

    if options.on_hosts or (not hosts and joined(options.nproc)):
        return work(job, orders)
    schedule = load(options.folder, options.overrides)
    if hosts:
        return on_hosts(orders, options.folder, schedule, reach, options.nproc)
    nproc = options.nproc or (max(options.counts) if mode is _WORKERS else devices(schedule))
    part = check(options, mode, schedule, nproc)
    if not options.synthetic:
        with signals.held():
            from stagerun.data.loaders import preflight

        preflight(part)
    return start(job, orders, nproc)


def check(options: RehearseOptions, mode: Mode, schedule: Schedule, workers: int) -> Schedule:
    """Return what is trained. RecipeError, UsageError, DataError. Another launcher may have started the workers: each checks, too."""
    part = with_imports(mode.part(options, schedule), options.output(schedule))
    check_short(part, max(workers, *options.counts), options.device_batch, options.synthetic, "rehearses")
    return part
