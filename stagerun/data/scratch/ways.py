"""Where the nodes of a job get their copies from: all from the source, or each a share of it, which it hands on. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.text import count, size

# The other nodes must be faster by so much: what was measured for a second or two is no more exact than that.
_CLEARLY = 1.2


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a node that needs a copy: bytes per second while all such nodes read at once, from the source and from another node."""

    host: str
    source: float
    nodes: float


@dataclass(frozen=True, slots=True)
class Way:
    from_nodes: bool
    why: str


def choose(rates: Sequence[Rates], had: int) -> Way:
    """The faster way. `had`: nodes that have a copy already, which can be read in the place of the source.

    The slowest node counts. From the source a byte costs each node 1 / s; from node to node n nodes each read an n-th of the bytes there
    and have the rest from the others at rate t: 1 / (n s) + (n - 1) / (n t), all of it from nodes that had it 1 / t. That is the cost
    with both one after the other, as where both share a network; it is less where they don't.
    """
    need = len(rates)
    slowest = min(rates, key=lambda one: one.source)
    source, nodes = slowest.source, min(one.nodes for one in rates)
    if source <= 0 and nodes <= 0:
        return Way(False, "neither the source nor another node has sent a byte so far; all nodes read from the source")
    share = 0.0 if had else 1 / need
    # Both by the byte, times both rates, any of which may be 0.
    by_source, by_nodes = nodes, share * nodes + (1 - share) * source
    if source <= 0:
        by_source, by_nodes = 1.0, 0.0
    found = f"{slowest.host} reads {size(source)}/s from the source, and a node at least {size(nodes)}/s from another"
    if not by_nodes * _CLEARLY < by_source:
        return Way(False, f"{found}: each of {count(need, 'node')} reads all of it from the source")
    if had:
        return Way(
            True, f"{found}: {count(need, 'node')} read it from {count(had, 'node')} that had it, and each other"
        )
    return Way(True, f"{found}: each of {count(need, 'node')} reads a part from the source, and hands it on")
