"""A worker finds its cores: after it has met the others, before it computes.

Not sooner, since a rank alone can't know what its affinity means: that of all workers of its host, who are to share it out, or what
its launcher has given to it alone (Open MPI, `srun --cpu-bind`). All of them together see it. Nothing is lost by that: threads are
moved one by one, and the team that computes begins with the first computation.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagerun import binding
from stagerun.cli.shared_options import AUTO, CORES, NONE
from stagerun.errors import UsageError
from stagerun.events import Note
from stagerun.text import count
from stagerun.topology import Found, Seat, Share, ranges, read, share
from stagerun.watch.worker import Monitored
from stagerun.world import World, boot_id, given_threads, torchrun_chose

if TYPE_CHECKING:
    import torch

    from stagerun.comm import Comm

# Workers that are told one by one; of more, how many there are.
_FEW = 4
_TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Wish:
    """`bind`: one of BIND. `threads`: of a worker; None: OMP_NUM_THREADS says it, or the plan does."""

    bind: str = AUTO
    comm_cores: int | None = None
    threads: int | None = None


def place(
    world: World, device: "torch.device", comm: "Comm", wish: Wish, watch: Monitored | None = None
) -> Note | None:
    """Binds this worker and its monitor where `wish` and the machine say so, and then sets the number of its threads; what rank 0 tells
    of that, None where nobody is bound because nobody needs to be. Collective, unless alone.

    UsageError where --bind cores or --comm-cores can't be had.
    """
    import torch

    from stagerun.comm import gather_json
    from stagerun.runner.together import everyone

    if wish.bind == NONE or (wish.bind == AUTO and comm.size == 1):
        return None
    boot = boot_id()  # two hosts may have one name, and two containers of one machine different ones
    here = Found(f"{socket.gethostname()} {boot}", world.local_rank, tuple(sorted(os.sched_getaffinity(0))), boot)
    ranks = [Found(**{**each, "allowed": tuple(each["allowed"])}) for each in gather_json(comm, asdict(here))]
    given = gather_json(comm, wish.threads or given_threads())
    # The environment of one host may say something else than that of another: one number for all.
    threads = min(filter(None, given), default=None)
    found: list[Share] = []
    everyone(comm, lambda: found.append(_share(device, ranks, comm.rank, wish, threads)))
    mine = found[0]
    shares = gather_json(comm, _words(mine))
    if not all(each["bind"] for each in shares) and wish.bind == AUTO:
        return None  # all or nobody: all have the same number of threads
    # The slowest sets the pace: nobody has more threads than the smallest slice has cores. So the same bits come from any host, too.
    threads = threads or min(each["threads"] for each in shares)
    torch.set_num_threads(threads)
    assert mine.seat is not None
    outcomes = gather_json(comm, _bind(mine.seat, wish, watch, comm.size > 1))
    about = _about_threads(threads, given, shares, wish.threads is None and torchrun_chose())
    return _told(ranks, shares, outcomes, about, wish)


def _share(device: "torch.device", ranks: Sequence[Found], rank: int, wish: Wish, threads: int | None) -> Share:
    machine = read(Path("/"), os.environ)
    if device.type != "cuda":
        machine = replace(machine, gpus=())
    found = share(machine, ranks, rank, os.environ, wish.comm_cores, threads)
    if wish.bind == CORES and found.seat is None:
        raise UsageError(f"--bind cores can't be had: {found.choice.why}", "fewer workers, more cores, or --bind none")
    return found


def _bind(seat: Seat, wish: Wish, watch: Monitored | None, group: bool) -> str:
    """What went wrong; '' for nothing. `group`: there are threads of a process group."""
    free = binding.claim(seat)
    if not free and wish.bind == AUTO:
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
    """What is said of them, and whether the user should mend it. `torchrun`: may have chosen them."""
    text = f"{count(threads, 'thread')} each"
    if len(set(given)) > 1:
        return f"{text}, though OMP_NUM_THREADS isn't the same everywhere: --threads is", True
    cores = min(each["cores"] for each in shares)
    if torchrun and threads < cores:
        return f"{text}, as torchrun says where nobody does: `--threads {cores}` has all these cores compute", True
    return text, False


def _told(
    ranks: Sequence[Found],
    shares: Sequence[dict[str, Any]],
    outcomes: Sequence[str],
    about_threads: tuple[str, bool],
    wish: Wish,
) -> Note:
    hosts = list(dict.fromkeys(found.host for found in ranks))
    first = [r for r in range(len(ranks)) if ranks[r].host == hosts[0]]
    text = f"bound to cores ({'as asked' if wish.bind == CORES else shares[0]['why']}): "
    if len(hosts) == 1 and len(first) <= _FEW:
        text += "; ".join(f"worker {r} to {_cpus(shares[r])}" for r in first)
    else:
        text += f"{count(len(ranks), 'worker')} on {count(len(hosts), 'host')}, worker 0 to {_cpus(shares[0])}"
    text += ", within what the launcher gave to each" * shares[0]["alone"] + f"; {about_threads[0]}"
    failed = {r: outcome for r, outcome in enumerate(outcomes) if outcome}
    if not failed:
        return Note(text=text, warning=about_threads[1])
    taken = ranges(r for r, outcome in failed.items() if outcome == _TAKEN)
    if taken and wish.bind == AUTO:
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
    """What the others are told. `nodes`: '' on a machine with one."""
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
