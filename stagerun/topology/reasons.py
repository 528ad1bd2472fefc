"""What is said of a plan: one sentence or none for each decision."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagerun.text import count
from stagerun.topology.machine import Core, Machine

if TYPE_CHECKING:
    from stagerun.topology.placing import Seat


def about_nodes(nodes: Sequence[Sequence[Core]], workers: int, slices: Sequence[Sequence[Core]]) -> str:
    on = [own[0].node for own in slices]
    shares = ", ".join(f"{on.count(node[0].node)} on node {node[0].node}" for node in nodes)
    return f"no worker crosses NUMA nodes: {shares}, {count(len(slices[0]), 'core')} each"


def about_quota(machine: Machine, most: int, size: int) -> list[str]:
    if machine.quota is None or size < most:
        return []
    return [f"a quota of {machine.quota:g} processors' worth of time pays for {count(most, 'core')} a worker"]


def about_threads(threads: int | None, computing: int) -> list[str]:
    if threads is None or threads == computing:
        return []
    return [f"{count(threads, 'thread')} as asked, on {count(computing, 'computing core')}"]


def about_memory(machine: Machine, seats: Sequence["Seat"]) -> list[str]:
    if any(seat.memory is not None for seat in seats):
        return [
            "memory comes from the worker's own node, and from another one when that is full: slower, but nobody is killed for it"
        ]
    if len(machine.nodes) > 1:
        return ["memory comes from wherever it is first used"]
    return []


def about_idle(idle: int, cores: int, workers: int) -> list[str]:
    if not idle:
        return []
    return [f"{idle} of {count(cores, 'core')} {'is' if idle == 1 else 'are'} left to others: all workers get as many"]
