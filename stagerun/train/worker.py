"""A worker of `stagerun run`: it joins the others, reads the schedule as they do, and runs it."""

from collections.abc import Callable

import torch

from stagerun.base.errors import UsageError
from stagerun.base.events import Event
from stagerun.base.recipe import Determinism, Schedule
from stagerun.comm import PATIENT, TIMEOUT, Comm, SoloComm, TorchComm
from stagerun.engine.device import choose_device
from stagerun.launch import StopRequest
from stagerun.launch.stopping import aside
from stagerun.launch.watched import Monitored
from stagerun.plan.choice import check_workers
from stagerun.system.pulse import Section
from stagerun.system.world import World, default_threads
from stagerun.train.agreement import bind_cores, everyone, require_same_code
from stagerun.train.context import Context, Stopping
from stagerun.train.options import Cut, RunOptions
from stagerun.train.sinks import exit_code, logged_run


def join(
    world: World, threads: int | None, stop: StopRequest, watch: Monitored | None = None, patient: bool = False
) -> tuple[torch.device, Comm]:
    """Return this worker's device and the group of workers. From now on the caller must poll `stop`. `watch` learns the group, too.
    `patient`: the monitors check time-outs, or the user wants none.

    UsageError with more workers than GPUs, PeerError if the others don't come.
    """
    torch.set_num_threads(threads or default_threads(world.local_size))
    device = choose_device(world, exact=True)
    pulse = watch.pulse if watch is not None else None
    comm: Comm = SoloComm(pulse)
    if world.size > 1:

        def meet() -> Comm:
            comm = TorchComm(world, device, pulse, PATIENT if patient else TIMEOUT)
            if watch is not None:
                watch.meet(comm)
            return comm

        comm = aside(meet)

    def when() -> str:
        if comm.pulse.within not in (Section.FIRST_ITERATION, Section.ITERATION):
            return "at the next safe point"
        # An iteration that can't be finished in time is broken off.
        return "in or after this iteration" if stop.grace is not None else "after this iteration"

    stop.begin(when)
    return device, comm


def load_everywhere(comm: Comm, device: torch.device, read: Callable[[], Schedule]) -> Schedule:
    """Return the schedule as this rank reads it. Collective: if one rank's files have a mistake, all ranks end."""
    require_same_code(comm)

    def read_here() -> Schedule:
        schedule = read()
        check_workers(schedule, comm.size)
        if schedule.determinism is Determinism.PORTABLE and device.type != "cpu":
            raise UsageError(
                "`determinism: PORTABLE` is for CPUs", "CUDA_VISIBLE_DEVICES= hides the GPUs; or take ELASTIC"
            )
        return schedule

    return everyone(comm, read_here)


def train(
    options: RunOptions,
    world: World,
    stop: StopRequest,
    watch: Monitored | None,
    read: Callable[[], Schedule],
    cut: Cut | None = None,
) -> int:
    """Join the other workers, `read` the schedule as they do, and run it; return the exit code. `cut` makes the run short, for a trial."""
    device, comm = join(world, options.threads, stop, watch, patient=True)
    schedule = load_everywhere(comm, device, read)
    placed = bind_cores(world, comm, watch) if options.bind == "numa" else None
    limit_reached = False
    context = Context(
        schedule if cut is None else cut.schedule(schedule),
        "",
        comm,
        world,
        device,
        None,
        lambda: limit_reached or stop(),
        stopping=Stopping(stop.left),
        watch=watch,
        final_test_iter=None if cut is None else cut.final_test_iter,
        settle=stop.settle,
        placed=placed,
    )
    last: Event | None = None
    for last in logged_run(options, context):
        limit_reached = cut is not None and cut.until(last)
    comm.close()
    return exit_code(None, last)
