"""Where each worker of a machine computes (`--bind numa`): contiguous cores of one NUMA node, as Linux shows them in /sys."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stagerun.base.errors import UsageError
from stagerun.base.text import count
from stagerun.system.host import cpu_quota, lines

Core = tuple[int, ...]  # the CPUs (hardware threads) of one physical core, ascending


def nodes(allowed: frozenset[int], root: Path = Path("/")) -> dict[int, list[Core]]:
    """Return the cores of each NUMA node that have a CPU of `allowed`, with those CPUs alone. One node where /sys shows none."""
    system = root / "sys/devices/system"
    node_of = {
        cpu: node for node in _list(system / "node/online") for cpu in _list(system / f"node/node{node}/cpulist")
    }
    found: dict[int, set[Core]] = {}
    for cpu in allowed:
        siblings = _list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or [cpu]
        core = tuple(sorted(allowed.intersection(siblings) | {cpu}))
        found.setdefault(node_of.get(cpu, 0), set()).add(core)
    return {node: sorted(cores) for node, cores in sorted(found.items())}


def shares(found: Mapping[int, Sequence[Core]], workers: int) -> list[tuple[int, list[int]]]:
    """Return the node and the CPUs of each worker: workers are dealt out to the nodes in order, and share a node's cores evenly.

    UsageError where a worker would get no core.

    >>> shares({0: [(0, 4), (1, 5)], 1: [(2, 6), (3, 7)]}, 2)
    [(0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])]
    >>> shares({0: [(0,), (1,), (2,)]}, 2)
    [(0, [0]), (0, [1, 2])]
    """
    numbers = list(found)
    of_node: dict[int, list[int]] = {}
    for worker in range(workers):
        of_node.setdefault(numbers[worker * len(numbers) // workers], []).append(worker)
    dealt: list[tuple[int, list[int]]] = []
    for node, its in of_node.items():
        cores = found[node]
        if len(cores) < len(its):
            raise UsageError(
                f"--bind numa: {len(its)} workers for the {count(len(cores), 'core')} of NUMA node {node}",
                "take fewer workers, or --bind none",
            )
        for place in range(len(its)):
            mine = cores[place * len(cores) // len(its) : (place + 1) * len(cores) // len(its)]
            dealt.append((node, sorted(cpu for core in mine for cpu in core)))
    return dealt


def bind(cpus: Sequence[int], pid: int | None = None) -> None:
    """Put every thread of a process (default: this one), and those that they start, on these CPUs. OSError where the kernel refuses."""
    for task in os.listdir(f"/proc/{pid or 'self'}/task"):
        with suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task), cpus)


def default_workers(most: int | None = None) -> int:
    """Return the workers that a machine without GPUs has by default: one per NUMA node with at least half as many usable cores as
    the largest, no more than `most`; 1 where a quota is the limit."""
    allowed = frozenset(os.sched_getaffinity(0))
    quota = cpu_quota()
    if quota is not None and quota < len(allowed):
        return 1
    sizes = [len(cores) for cores in nodes(allowed).values()]
    large = sum(2 * size >= max(sizes) for size in sizes)
    return max(1, large if most is None else min(large, most))


def _list(file: Path) -> list[int]:
    """The numbers of a list such as `0-3,8`, as the kernel writes it; none where the file is missing."""
    found: list[int] = []
    for piece in (lines(file) or [""])[0].split(","):
        first, _, last = piece.strip().partition("-")
        if first.isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found
