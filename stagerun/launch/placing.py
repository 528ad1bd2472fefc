"""Which cores each worker of one machine gets. Pure: `stagerun.system.binding` carries it out.

A worker's *slice* is a number of whole cores, the same for all workers of a machine, since the slowest sets the pace of all. It
lies within one NUMA node, unless half of the cores or more would then be idle. Most of a slice *computes*, one thread per core;
the rest is *set apart* for communication, loading, saving and the monitor: a team of threads that computes waits at the end of
each loop for the one that was disturbed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.base.errors import UsageError
from stagerun.base.text import count
from stagerun.system.cores import Core, Machine, ranges
from stagerun.system.host import evenly

# One core of so many is set apart, the 2 of 24 of the published runs; no more than a group of gloo and a loader keep busy.
CORES_PER_APART, MOST_APART = 12, 4


@dataclass(frozen=True, slots=True)
class Seat:
    """What one worker gets. `compute`: CPUs of the threads that compute; `apart`: those of all its other threads; `cores`: of the
    whole slice, `cores_apart` of them set apart. `memory`: the node that its memory is to come from; None: no policy."""

    worker: int
    nodes: tuple[int, ...]
    cores: int
    cores_apart: int
    compute: frozenset[int]
    apart: frozenset[int]
    memory: int | None = None
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """`seats` by worker; empty: no one can be bound, and `why` says why. `threads`: of each worker, for computing. `idle`: usable cores
    that no worker gets. `why`: sentences."""

    seats: tuple[Seat, ...]
    threads: int
    idle: int
    why: tuple[str, ...]


def make_plan(machine: Machine, workers: int, comm_cores: int | None = None, threads: int | None = None) -> Plan:
    """The seats of `workers` (1 or more) on this machine. `comm_cores`: cores of each slice that are set apart, by default by rule;
    `threads`: of each worker, by default one per computing core. UsageError where `comm_cores` can't be had."""
    if machine.gpus:
        return _beside_gpus(machine, workers, comm_cores, threads)
    cores = machine.usable
    fast = [core for core in cores if not core.slow]
    mixed = workers <= len(fast) < len(cores) and len({core.node for core in cores}) == 1
    slices, why = _slices(machine, fast if mixed else cores, workers)
    if not slices:
        return _unbound(machine, workers, why)
    extra = _dealt([core for core in cores if core.slow], workers) if mixed else [[] for _ in slices]
    apart = _apart(comm_cores, slices, extra, workers, why)
    seats = tuple(
        _seat(machine, number, [*own, *slow], apart, threads)
        for number, (own, slow) in enumerate(zip(slices, extra, strict=True))
    )
    computing = min(_computing([*own, *slow], apart) for own, slow in zip(slices, extra, strict=True))
    if threads not in (None, computing):
        why.append(f"{count(threads, 'thread')} as asked, on {count(computing, 'computing core')}")
    why += _about_memory(machine, seats)
    idle = len(cores) - sum(seat.cores for seat in seats)
    why += _about_idle(idle, len(cores), workers)
    return Plan(seats, threads or computing, idle, tuple(why))


def _unbound(machine: Machine, workers: int, why: Sequence[str]) -> Plan:
    return Plan(
        (), evenly(len(machine.cpus & machine.allowed), machine.quota, workers), len(machine.usable), tuple(why)
    )


def _too_few(workers: int, cores: Sequence[Core]) -> str:
    return f"{count(workers, 'worker')} on {count(len(cores), 'core')}: no one is bound"


# -- slices


def _slices(machine: Machine, cores: Sequence[Core], workers: int) -> tuple[list[list[Core]], list[str]]:
    """The cores of each worker, and why; no slices where there are fewer cores than workers."""
    if workers > len(cores):
        return [], [_too_few(workers, cores)]
    nodes = _by_node(cores)
    most = _most(machine, workers)
    inside = max(k for k in range(1, len(cores) // workers + 1) if sum(len(n) // k for n in nodes) >= workers)
    why = []
    if len(nodes) > workers and 2 * inside * workers <= min(len(cores), most * workers):
        each = len(nodes) // workers
        groups = [[core for node in nodes[w * each : (w + 1) * each] for core in node] for w in range(workers)]
        size = min(most, *(len(group) for group in groups))
        if size > inside:
            why.append(
                f"{count(workers, 'worker')} on {len(nodes)} NUMA nodes: each gets cores of {each}, since half of all cores or more "
                f"would be idle else; {len(nodes)} workers would have a node each"
            )
            return [group[:size] for group in groups], [*why, *_about_quota(machine, most, size)]
    size = min(inside, most)
    slices = _spread([list(node) for node in nodes], workers, size)
    if len(nodes) > 1:
        on = [own[0].node for own in slices]
        shares = ", ".join(f"{on.count(node[0].node)} on node {node[0].node}" for node in nodes)
        why.append(f"no worker crosses NUMA nodes: {shares}, {count(size, 'core')} each")
    return slices, [*why, *_about_quota(machine, most, size)]


def _most(machine: Machine, workers: int) -> int:
    """Cores of a slice that the quota pays for."""
    return len(machine.cores) if machine.quota is None else max(1, int(machine.quota / workers))


def _spread(nodes: list[list[Core]], workers: int, size: int) -> list[list[Core]]:
    """Slices of `size` consecutive cores, each within a node, on as many nodes as can be; workers in the order of their nodes."""
    taken = [0] * len(nodes)
    for _ in range(workers):
        free = [(len(node) - size * n, -number) for number, (node, n) in enumerate(zip(nodes, taken, strict=True))]
        taken[-max(free)[1]] += 1
    return [node[i * size : (i + 1) * size] for node, n in zip(nodes, taken, strict=True) for i in range(n)]


def _by_node(cores: Sequence[Core]) -> list[list[Core]]:
    return [[c for c in cores if c.node == number] for number in dict.fromkeys(core.node for core in cores)]


def _dealt(cores: Sequence[Core], workers: int) -> list[list[Core]]:
    """The same number for each, in order."""
    each = len(cores) // workers
    return [list(cores[w * each : (w + 1) * each]) for w in range(workers)]


# -- one worker


def _apart(
    asked: int | None, slices: Sequence[Sequence[Core]], slow: Sequence[Sequence[Core]], workers: int, why: list[str]
) -> int:
    """Cores of each slice that are set apart, the slower ones among them."""
    size, slower = len(slices[0]), len(slow[0])
    if asked is not None:
        if asked >= size + slower:
            raise UsageError(
                f"--comm-cores {asked}: each of {count(workers, 'worker')} has {count(size + slower, 'core')} here",
                "at least one has to compute: fewer of these, or fewer workers",
            )
        why.append(
            f"{count(asked, 'core')} of each slice set apart, as asked" if asked else "no core is set apart, as asked"
        )
        return asked
    if slower:
        why.append(
            f"the slower cores are set apart, {slower} a worker: with both kinds computing, the faster ones would wait"
        )
        return slower
    apart = min(MOST_APART, size // CORES_PER_APART)
    small = (
        f"slices of {count(size, 'core')} are too small to set one apart (1 of {CORES_PER_APART}): what doesn't compute"
    )
    if apart:
        rule = f"1 of {CORES_PER_APART}, at most {MOST_APART}"
        why.append(
            f"{apart} of the {size} cores of each slice {'is' if apart == 1 else 'are'} set apart ({rule}), for communication, "
            "loading, saving and the monitor"
        )
    elif any(len(core.cpus) > 1 for one in slices for core in one):
        why.append(f"{small} has the cores' second hardware threads")
    else:
        why.append(f"{small} shares the cores")
    return apart


def _computing(cores: Sequence[Core], apart: int) -> int:
    return len(_split(cores, apart)[0])


def _split(cores: Sequence[Core], apart: int) -> tuple[list[Core], list[Core]]:
    """(computing, set apart). With two kinds the slower ones, which are last, never compute."""
    whole = list(cores)
    computing, rest = whole[: len(whole) - apart], whole[len(whole) - apart :]
    if any(not core.slow for core in computing):
        rest += [core for core in computing if core.slow]
        computing = [core for core in computing if not core.slow]
    return computing, rest


def _seat(machine: Machine, worker: int, cores: Sequence[Core], apart: int, threads: int | None) -> Seat:
    computing, rest = _split(cores, apart)
    compute = frozenset(core.cpus[0] for core in computing)
    seconds = frozenset(cpu for core in computing for cpu in core.cpus[1:])
    if threads is not None and threads > len(compute):
        compute, seconds = compute | seconds, frozenset()
    others = frozenset(cpu for core in rest for cpu in core.cpus) or seconds or compute
    nodes = tuple(sorted({core.node for core in cores}))
    memory = nodes[0] if len(nodes) == 1 and len(machine.nodes) > 1 else None
    return Seat(worker, nodes, len(cores), len(rest), compute, others, memory)


# -- with GPUs


def _beside_gpus(machine: Machine, workers: int, comm_cores: int | None, threads: int | None) -> Plan:
    """A worker per GPU, on cores of the GPU's node, all of them for all its threads: what computes is the GPU."""
    if workers > len(machine.gpus):
        raise UsageError(
            f"{count(workers, 'worker')} on a machine with {count(len(machine.gpus), 'GPU')}",
            "one worker per GPU; with CUDA_VISIBLE_DEVICES= set to nothing they train on the CPU",
        )
    if comm_cores:
        raise UsageError(
            f"--comm-cores {comm_cores}, on a machine with GPUs", "gradients go from GPU to GPU: leave it out"
        )
    cores, why = list(machine.usable), list[str]()
    if workers > len(cores):
        return _unbound(machine, workers, [_too_few(workers, cores)])
    at: dict[int | None, list[int]] = {}
    for gpu in machine.gpus[:workers]:
        near = gpu.node if any(core.node == gpu.node for core in cores) else None
        at.setdefault(near, []).append(gpu.number)
    if None in at:
        # Whoever has no near cores takes of all: so everyone does, or two would get the same ones.
        why.append(f"no usable cores are known to be near GPU {ranges(at[None])}: the cores are shared out in order")
        at = {None: list(range(workers))}
    pools: dict[int | None, list[Core]] = {n: [c for c in cores if n is None or c.node == n] for n in at}
    size = min(_most(machine, workers), *(len(pools[node]) // len(gpus) for node, gpus in at.items()))
    if size < 1:
        return _unbound(machine, workers, [*why, "fewer cores than GPUs on a node: no one is bound"])
    seats = []
    for node, gpus in at.items():
        each = len(pools[node]) // len(gpus)
        for i, number in enumerate(gpus):
            own = pools[node][i * each : i * each + size]
            cpus = frozenset(cpu for core in own for cpu in core.cpus)
            nodes = tuple(sorted({core.node for core in own}))
            memory = nodes[0] if len(nodes) == 1 and len(machine.nodes) > 1 else None
            seats.append(Seat(number, nodes, size, 0, cpus, cpus, memory, number))
    seats.sort(key=lambda seat: seat.worker)
    if None not in at:
        why.append(
            "one worker per GPU, on cores of the NUMA node that the GPU is attached to; all its threads share them"
        )
    why += [*_about_quota(machine, _most(machine, workers), size), *_about_memory(machine, seats)]
    idle = len(cores) - size * workers
    # As many as hardware threads: they decode images, which gains by SMT, and compute next to nothing.
    return Plan(
        tuple(seats),
        threads or min(len(seat.compute) for seat in seats),
        idle,
        (*why, *_about_idle(idle, len(cores), workers)),
    )


# -- why: one sentence or none for each decision


def _about_quota(machine: Machine, most: int, size: int) -> list[str]:
    if machine.quota is None or size < most:
        return []
    return [f"a quota of {machine.quota:g} processors' worth of time pays for {count(most, 'core')} a worker"]


def _about_memory(machine: Machine, seats: Sequence["Seat"]) -> list[str]:
    if any(seat.memory is not None for seat in seats):
        return [
            "memory comes from the worker's own node, and from another one when that is full: slower, but nothing is killed for it"
        ]
    if len(machine.nodes) > 1:
        return ["memory comes from wherever it is first used"]
    return []


def _about_idle(idle: int, cores: int, workers: int) -> list[str]:
    if not idle:
        return []
    return [f"{idle} of {count(cores, 'core')} {'is' if idle == 1 else 'are'} left to others: all workers get as many"]
