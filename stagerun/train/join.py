"""A worker joins its job: it meets the others, reads the schedule as they do, and finds its cores.

The cores come after the others and before it computes. A rank alone can't know what its affinity means: that of all workers of its host,
who are to share it out, or what its launcher has given to it alone (Open MPI, `srun --cpu-bind`). All of them together see it. Nothing is
lost by that: threads are moved one by one, and the team that computes begins with the first computation.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from stagerun.base.errors import UsageError
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule
from stagerun.base.text import count
from stagerun.comm import PATIENT, TIMEOUT, Comm, SoloComm, TorchComm, gather_json
from stagerun.engine.device import choose_device
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.placing import Seat
from stagerun.launch.sharing import Found, Share, Wish, share
from stagerun.launch.watch.worker import Monitored
from stagerun.launch.worker_count import check_workers
from stagerun.system import binding
from stagerun.system.cores import ranges, read
from stagerun.system.host import host_name
from stagerun.system.process import boot_id
from stagerun.system.pulse import Section
from stagerun.system.world import World, default_threads, given_threads, torchrun_chose
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
_TAKEN = "taken"


def join(
    world: World, threads: int | None, stop: StopRequest, watch: Monitored | None = None, patient: bool = False
) -> tuple[torch.device, Comm]:
    """This worker's device and the others. With this the job has started: whoever goes on asks `stop` from time to time. `watch`
    then knows the others, too. `patient`: time-outs are the monitors' affair, or the user wants none.

    UsageError with more workers than GPUs, PeerError if the others don't come.
    """
    torch.set_num_threads(threads or default_threads(world.local_size))
    device = choose_device(world, exact=True)
    pulse = watch.pulse if watch is not None else None
    comm: Comm = SoloComm(pulse)
    if world.size > 1:
        with stop.watched():
            comm = TorchComm(world, device, pulse, PATIENT if patient else TIMEOUT)
            if watch is not None:
                watch.meet(comm)

    def when() -> str:
        text = _STOPS[comm.pulse.within]
        # An iteration that can't be finished in time is broken off.
        return f"in or {text}" if text == _ITERATION and stop.grace is not None else text

    stop.begin(when)
    return device, comm


def load_everywhere(
    folder: str, overrides: Sequence[str], comm: Comm, read: Callable[[str, Sequence[str]], Schedule] = load
) -> Schedule:
    """The schedule as this rank reads it. Collective: where one rank's files have a mistake, no rank waits for it."""
    require_same_code(comm)

    def read_here() -> Schedule:
        schedule = read(folder, overrides)
        check_workers(schedule, comm.size)
        return schedule

    return everyone(comm, read_here)


def place(world: World, device: torch.device, comm: Comm, wish: Wish, watch: Monitored | None = None) -> Note | None:
    """Binds this worker and its monitor where `wish` and the machine say so, and then sets the number of its threads; what rank 0 reports
    of that, None where no worker is bound because none needs to be. Collective, unless alone.

    UsageError where --bind cores or --comm-cores can't be had.
    """
    if wish.bound is False or (wish.bound is None and comm.size == 1):
        return None
    boot = boot_id()  # two hosts may have one name, and two containers of one machine different ones
    here = Found(f"{host_name()} {boot}", world.local_rank, tuple(sorted(os.sched_getaffinity(0))), boot)
    ranks = [Found(**{**each, "allowed": tuple(each["allowed"])}) for each in gather_json(comm, asdict(here))]
    given = gather_json(comm, wish.threads or given_threads())
    # The environment of one host may say something else than that of another: one number for all.
    threads = min(filter(None, given), default=None)
    mine = everyone(comm, lambda: _share(device, ranks, comm.rank, wish, threads))
    shares = gather_json(comm, _words(mine))
    if not all(each["bind"] for each in shares) and wish.bound is None:
        return None  # all or none: all have the same number of threads
    # The slowest sets the pace: no worker has more threads than the smallest slice has cores. So the same bits come from any host, too.
    threads = threads or min(each["threads"] for each in shares)
    torch.set_num_threads(threads)
    assert mine.seat is not None
    outcomes = gather_json(comm, _bind(mine.seat, wish, watch, comm.size > 1))
    about = _about_threads(threads, given, shares, wish.threads is None and torchrun_chose())
    return _note(ranks, shares, outcomes, about, wish)


def _share(device: torch.device, ranks: Sequence[Found], rank: int, wish: Wish, threads: int | None) -> Share:
    machine = read(Path("/"), os.environ)
    if device.type != "cuda":
        machine = replace(machine, gpus=())
    found = share(machine, ranks, rank, os.environ, wish.comm_cores, threads)
    if wish.bound and found.seat is None:
        raise UsageError(f"--bind cores can't be had: {found.choice.why}", "fewer workers, more cores, or --bind none")
    return found


def _bind(seat: Seat, wish: Wish, watch: Monitored | None, group: bool) -> str:
    """What went wrong; '' for nothing. `group`: there are threads of a process group."""
    free = binding.claim(seat)
    if not free and wish.bound is None:
        return _TAKEN
    try:
        binding.bind(seat)
    except OSError as error:
        return str(error.strerror)
    if group:
        binding.bind_communication()
    if watch is not None:
        binding.bind_process(watch.pid)
    return "" if free else _TAKEN


def _about_threads(
    threads: int, given: Sequence[int | None], shares: Sequence[dict[str, Any]], torchrun: bool
) -> tuple[str, bool]:
    """The words about them, and whether the user should mend it. `torchrun`: may have chosen them."""
    text = f"{count(threads, 'thread')} each"
    if len(set(given)) > 1:
        return f"{text}, though OMP_NUM_THREADS isn't the same everywhere: --threads is", True
    cores = min(each["cores"] for each in shares)
    if torchrun and threads < cores:
        return f"{text}, as torchrun says where no one does: `--threads {cores}` has all these cores compute", True
    return text, False


def _note(
    ranks: Sequence[Found],
    shares: Sequence[dict[str, Any]],
    outcomes: Sequence[str],
    about_threads: tuple[str, bool],
    wish: Wish,
) -> Note:
    hosts = list(dict.fromkeys(found.host for found in ranks))
    first = [r for r in range(len(ranks)) if ranks[r].host == hosts[0]]
    text = f"bound to cores ({'as asked' if wish.bound else shares[0]['why']}): "
    if len(hosts) == 1 and len(first) <= _FEW:
        text += "; ".join(f"worker {r} to {_cpus(shares[r])}" for r in first)
    else:
        text += f"{count(len(ranks), 'worker')} on {count(len(hosts), 'host')}, worker 0 to {_cpus(shares[0])}"
    text += ", within what the launcher gave to each" * shares[0]["alone"] + f"; {about_threads[0]}"
    failed = {r: outcome for r, outcome in enumerate(outcomes) if outcome}
    if not failed:
        return Note(text=text, warning=about_threads[1])
    taken = ranges(r for r, outcome in failed.items() if outcome == _TAKEN)
    if taken and wish.bound is None:
        text += f"; not rank {taken}: other workers of stagerun on that host have said that they are bound there"
    elif taken:
        text += f"; other workers of stagerun are bound where rank {taken} is: both are slower for it"
    for rank, outcome in failed.items():
        text += f"; not rank {rank}: {outcome}" * (outcome != _TAKEN)
    return Note(text=text, warning=True)


def _cpus(words: dict[str, Any]) -> str:
    nodes = f" of node {words['nodes']}" if words["nodes"] else ""
    rest = "" if words["apart"] == words["compute"] else f", the rest of it to {words['apart']}"
    return f"{'CPU' if words['compute'].isdecimal() else 'CPUs'} {words['compute']}{nodes}{rest}"


def _words(mine: Share) -> dict[str, Any]:
    """What the others get to know. `nodes`: '' on a machine with one."""
    seat = mine.seat
    return {
        "bind": mine.choice.bind and seat is not None,
        "why": mine.choice.why,
        "threads": mine.plan.threads,
        "cores": len(seat.compute) if seat is not None else 0,
        "alone": mine.alone,
        "nodes": ranges(seat.nodes) if seat is not None and (seat.memory is not None or len(seat.nodes) > 1) else "",
        "compute": ranges(seat.compute) if seat is not None else "",
        "apart": ranges(seat.apart) if seat is not None else "",
    }
