"""A worker joins its job: it meets the others, reads the schedule as they do, and takes its cores."""

import os
from collections.abc import Callable, Sequence

import torch

from stagerun.base.errors import UsageError
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule
from stagerun.base.text import count
from stagerun.comm import PATIENT, TIMEOUT, Comm, SoloComm, TorchComm, gather_json
from stagerun.engine.device import choose_device
from stagerun.language import load
from stagerun.launch.stopping import StopRequest, aside
from stagerun.launch.watch.worker import Monitored
from stagerun.plan.choice import check_workers
from stagerun.system import numa
from stagerun.system.host import host_name
from stagerun.system.pulse import Section
from stagerun.system.world import World, default_threads
from stagerun.train.agreement import everyone, require_same_code

_ITERATION = "after this iteration"
# When a worker stops that is in a section.
_STOPS = {
    Section.START: "before training goes on",
    Section.COPY: "after this piece of the copy",
    Section.FIRST_ITERATION: _ITERATION,
    Section.ITERATION: _ITERATION,
    Section.EVALUATION: "after this batch of the evaluation",
    Section.SAVE: "after what is being written",  # a snapshot, the log
}
# Workers that are named one by one; of more, their number.
_FEW = 4


def join(
    world: World, threads: int | None, stop: StopRequest, watch: Monitored | None = None, patient: bool = False
) -> tuple[torch.device, Comm]:
    """Return this worker's device and the group of workers. From now on the caller must ask `stop` from time to time. `watch` gets to know
    the group, too. `patient`: the monitors see to time-outs, or the user wants none.

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
        text = _STOPS[comm.pulse.within]
        # An iteration that can't be finished in time is broken off.
        return f"in or {text}" if text == _ITERATION and stop.grace is not None else text

    stop.begin(when)
    return device, comm


def load_everywhere(
    folder: str, overrides: Sequence[str], comm: Comm, read: Callable[[str, Sequence[str]], Schedule] = load
) -> Schedule:
    """Return the schedule as this rank reads it. Collective: if one rank's files have a mistake, all ranks end."""
    require_same_code(comm)

    def read_here() -> Schedule:
        schedule = read(folder, overrides)
        check_workers(schedule, comm.size)
        return schedule

    return everyone(comm, read_here)


def place(world: World, comm: Comm, watch: Monitored | None = None) -> Note:
    """Bind this worker and its monitor as `--bind numa` says; return what rank 0 reports. Collective.

    A launcher that gave each worker of a host CPUs of its own (Open MPI, `srun --cpu-bind`) has bound them already. UsageError where a
    worker would get no core.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    others = gather_json(comm, [host_name(), sorted(allowed)])
    if any(host == host_name() and set(cpus) != allowed for host, cpus in others):
        return Note(text="--bind numa: the launcher has given each worker cores of its own")

    def bind() -> str:
        node, cpus = numa.shares(numa.nodes(allowed), world.local_size)[world.local_rank]
        try:
            numa.bind(cpus)
            if watch is not None:
                numa.bind(cpus, watch.pid)
        except OSError as error:
            raise UsageError(f"--bind numa: {error.strerror}", "take --bind none") from error
        return f"{count(len(cpus), 'CPU')} of NUMA node {node}"

    places = [f"rank {rank} to {where}" for rank, where in enumerate(gather_json(comm, everyone(comm, bind)))]
    if len(places) > _FEW:
        return Note(text=f"bound to cores: {count(len(places), 'worker')}, {places[0]}")
    return Note(text="bound to cores: " + "; ".join(places))
