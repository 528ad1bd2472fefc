"""Where the nodes of a job get their copies from: all from the source, or each a share of it, which it hands on. Pure."""

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.text import count
from stagerun.base.text import size as size_text
from stagerun.data.scratch.layout import CopyStopped, Original, blocks_in, suspect
from stagerun.data.scratch.serving import Lost, Neighbour, Place, Server

# -- Where the nodes of a job get their copies from: all from the source, or each a share of it, which it hands on.

# The other nodes must be faster by so much: what was measured for a second or two isn't more exact than that.
_CLEARLY = 1.2


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second that a node gets from the source and from another node, while all nodes that need a copy read at once."""

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
    found = f"{slowest.host} reads {size_text(source)}/s from the source, and a node at least {size_text(nodes)}/s from another"
    if not by_nodes * _CLEARLY < by_source:
        return Way(False, f"{found}: each of {count(need, 'node')} reads all of it from the source")
    if had:
        return Way(
            True, f"{found}: {count(need, 'node')} read it from {count(had, 'node')} that had it, and each other"
        )
    return Way(True, f"{found}: each of {count(need, 'node')} reads a part from the source, and hands it on")


MEASURED_S = 1.0  # how long the way between two nodes is tried
_PAUSE_S = 0.05
_ASKED_AT_ONCE = 8
_TRIES = 2
# A node that has copied nothing for so long is left out. Each of its threads asks a file server, which all nodes ask, for 4 MB.
_STILL_S = 60.0
# After so long any block is asked for.
_HUNGRY_S = 1.0


class Phase(enum.IntEnum):
    """What the nodes that take part do, all at the same time. The ranks agree on it."""

    GATHER = 0  # who needs what, who has what
    NODES = 1  # the ways between them are measured
    SOURCE = 2  # each reads from the source, which is measured
    FROM_SOURCE = 3  # so it goes on
    SHARED = 4  # or from node to node


@dataclass(frozen=True, slots=True)
class Member:
    place: Place
    needs: frozenset[str]  # names of the copies that it makes
    has: frozenset[str]  # that it had before


@dataclass(frozen=True, slots=True)
class Block:
    """A block to be copied: from the source, or, where there is `read`, from another node, which says that it has this `digest`."""

    number: int
    member: int = -1
    digest: str = ""
    read: Callable[[memoryview], int] | None = None
    bytes: int = 0


class Exchange:
    """This node's part, for all its copies. The thread that copies uses `offer` and `share`; the one that meets the other ranks uses
    the rest."""

    def __init__(self, server: Server, token: str, stop: Callable[[], bool]) -> None:
        self.server, self.token, self.stop = server, token, stop
        self.ready = False  # `needs` and `has` are known
        self.needs: frozenset[str] = frozenset()
        self.has: frozenset[str] = frozenset()
        self.rate = 0.0  # bytes per second from the next node, once it is `measured`
        self.measured = False
        self.phase = Phase.GATHER
        self.members: Sequence[Member] = ()
        self.me: int | None = None  # among them
        self.handed = 0  # bytes that came from other nodes
        self.damaged: set[int] = set()  # members that had a copy, and gave other bytes than its digests say
        self.own_left = 0  # blocks that it is to read from the source for all, and has not started
        self.trouble: list[str] = []
        self.changed = threading.Condition()
        self._had: list[Path] = []

    def offer(self, needs: Sequence[Original], has: Mapping[str, tuple[Path, int, Mapping[int, str]]]) -> None:
        """What this node is about to copy, and what it has: folder, size and digests by name. OSError."""
        for name, (folder, size, digests) in has.items():
            self.server.shelve(name, folder, size, digests)
        self._had = [folder for folder, _, _ in has.values()]
        with self.changed:
            self.needs, self.has = frozenset(one.name for one in needs), frozenset(has)
            self.ready = True

    def begin(self, members: Sequence[Member], me: int | None) -> None:
        """Who takes part; this node too, unless it came too late. Before any other phase than GATHER."""
        self.members, self.me = members, me

    def enter(self, phase: Phase) -> None:
        with self.changed:
            self.phase = phase
            self.changed.notify_all()

    def suspect(self) -> None:
        """Another node has found that a copy, which this one had, gives other bytes than were read from the source."""
        for folder in self._had:
            suspect(folder)

    def neighbour(self, member: Member) -> Neighbour:
        return Neighbour(member.place, self.token, self.stop)

    def measure(self) -> None:
        """How fast bytes come from the next node that takes part, while all do the same."""
        if self.me is not None and len(self.members) > 1:
            neighbour = self.neighbour(self.members[(self.me + 1) % len(self.members)])
            with suppress(Lost):  # rate 0
                self.rate = neighbour.measure(MEASURED_S)
            neighbour.close()
        self.measured = True

    def lost(self, host: str, why: str) -> None:
        with self.changed:
            text = f"{why} {host}: its part of the images is read from the source"
            if text not in self.trouble:
                self.trouble.append(text)


class Share:
    """The blocks of one copy, in the order in which this node's threads are to copy them."""

    def __init__(self, exchange: Exchange, original: Original, folder: Path, known: Sequence[int]) -> None:
        """`known`: those that are there already, as an interrupted copy said. OSError."""
        self._exchange, self._original = exchange, original
        self._known = deque(known)
        self._rest = set(range(blocks_in(original.size))) - set(known)
        self._lock = threading.Lock()
        self._split = False
        self._own: deque[int] = deque()
        self._theirs: dict[int, deque[int]] = {}  # by member: what it reads from the source
        self._peers: list[int] = []  # that can be asked
        self._failed: dict[int, int] = {}
        self._asking: set[int] = set()
        self._neighbours: dict[tuple[int, int], Neighbour] = {}  # by thread and member
        self._turn: dict[int, int] = {}  # by thread
        self._hungry: dict[int, float] = {}  # by thread: seconds since a block came from another node
        self._moved: dict[int, tuple[int, float]] = {}  # by member: bytes it had copied, and since when no more
        exchange.server.shelve(original.name, folder, original.size)

    def take(self, stream: int, stop: Callable[[], bool]) -> Block | None:
        """The next block for this thread, one of 0, 1, 2 ...; None when there is none left for it. CopyStopped, when `stop` says so."""
        exchange = self._exchange
        while True:
            if stop():
                raise CopyStopped
            phase = exchange.phase
            if phase is Phase.NODES and stream == 0 and not exchange.measured:
                exchange.measure()
                continue
            if phase in (Phase.GATHER, Phase.NODES):
                with exchange.changed:
                    exchange.changed.wait(_PAUSE_S)
                continue
            with self._lock:
                self._settle()
                if phase is not Phase.SOURCE and self._known:
                    return Block(self._known.popleft())
            hungry = self._hungry.get(stream, 0.0)
            # Half of the threads see to the shares of the others first. What is left of its own is done by all, if there is nothing else.
            from_nodes = phase is Phase.SHARED and (stream % 2 == 1 or hungry > 0 or not self._own)
            if from_nodes and (block := self._from_nodes(stream, hungry)) is not None:
                return block
            with self._lock:
                number = self._from_source(phase)
                if number is not None:
                    return Block(number)
                if not self._rest and not self._asking:
                    return Block(self._known.popleft()) if self._known else None
            with exchange.changed:
                exchange.changed.wait(_PAUSE_S)
            self._hungry[stream] = hungry + _PAUSE_S

    def done(self, number: int, digest: str) -> None:
        """It is on this node's disk, and was compared."""
        self._exchange.server.put(self._original.name, number, digest)

    def moved(self, count: int) -> None:
        """So many bytes were copied, or found to be there."""
        self._exchange.server.moved += count

    def came(self, block: Block) -> None:
        with self._lock:
            self._exchange.handed += block.bytes

    def failed(self, block: Block, why: str) -> None:
        """It is copied from the source instead, and that node asked no more."""
        with self._lock:
            self._leave(block.member)
        self._exchange.lost(self._exchange.members[block.member].place.host, why)

    def wrong(self, block: Block) -> None:
        """`failed`, since it has other bytes than it should. On a node that made its copy now they were right on its disk a moment ago; the
        copy that one had may be as old as its disk."""
        if self._original.name in self._exchange.members[block.member].has:
            self._exchange.damaged.add(block.member)
        self.failed(block, "other bytes than were read from the source come from")

    def close(self) -> None:
        for neighbour in self._neighbours.values():
            neighbour.close()

    def _settle(self) -> None:
        """Once it is known who takes part: which of them reads what. Every n-th block from the source each."""
        if self._split:
            return
        self._split = True
        exchange, name = self._exchange, self._original.name
        members = exchange.members if exchange.me is not None else ()
        self._peers = [m for m, one in enumerate(members) if m != exchange.me and name in one.needs | one.has]
        needing = [m for m, one in enumerate(members) if name in one.needs]
        for number in sorted(self._rest):
            owner = needing[number % len(needing)] if needing else exchange.me
            if owner == exchange.me or owner is None:
                self._own.append(number)
            else:
                self._theirs.setdefault(owner, deque()).append(number)
        exchange.own_left = len(self._own)

    def _from_source(self, phase: Phase) -> int | None:
        """Under the lock."""
        number: int | None
        if phase is Phase.FROM_SOURCE or (phase is Phase.SHARED and not self._peers):
            number = self._own[0] if self._own else max(self._rest - self._asking, default=None)
        elif phase is Phase.SHARED and self._had():
            number = None
        else:
            number = self._own[0] if self._own else None
        if number is not None:
            self._taken(number)
        return number

    def _had(self) -> bool:
        return any(self._original.name in self._exchange.members[m].has for m in self._peers)

    def _taken(self, number: int) -> None:
        self._rest.discard(number)
        for queue in (self._own, *self._theirs.values()):
            if number in queue:
                queue.remove(number)
        self._exchange.own_left = len(self._own)

    def _from_nodes(self, stream: int, hungry: float) -> Block | None:
        """Asks all that can be asked once."""
        with self._lock:
            peers = list(self._peers)
        me = self._exchange.me or 0
        after = self._turn.get(stream, me + stream)
        for member in sorted(peers, key=lambda m: (m - after - 1) % len(self._exchange.members)):
            with self._lock:
                want = self._wanted(member, hungry)
                self._asking.update(want)
            if not want:
                continue
            block = None
            try:
                block = self._ask(stream, member, want)
            finally:
                with self._lock:
                    self._asking.difference_update(want)
                    if block is not None:
                        self._taken(block.number)
            if block is not None:
                self._turn[stream], self._hungry[stream] = member, 0.0
                return block
        return None

    def _wanted(self, member: int, hungry: float) -> list[int]:
        """Under the lock: what to ask this one for. One that had the copy for this node's share, as it would the source; one that makes
        its own for that one's; and for anything, where nothing else comes."""
        had = self._original.name in self._exchange.members[member].has
        first = [n for n in (self._own if had else self._theirs.get(member, ())) if n not in self._asking]
        others = sorted(self._rest - self._asking - set(first)) if hungry >= _HUNGRY_S else []
        return [*first, *others][:_ASKED_AT_ONCE]

    def _ask(self, stream: int, member: int, want: Sequence[int]) -> Block | None:
        one = self._exchange.members[member]
        neighbour = self._neighbours.get((stream, member))
        if neighbour is None:
            neighbour = self._neighbours[stream, member] = self._exchange.neighbour(one)
        try:
            offered = neighbour.ask(self._original.name, want)
        except Lost:
            with self._lock:
                self._failed[member] = self._failed.get(member, 0) + 1
                gone = self._failed[member] >= _TRIES
                if gone:
                    self._leave(member)
            if gone:
                self._exchange.lost(one.place.host, "nothing comes any more from")
            return None
        if isinstance(offered, int):
            if self._original.name in one.has:  # all of it, or so it said: what isn't there won't come
                with self._lock:
                    self._leave(member)
                self._exchange.lost(one.place.host, "no copy is found any more on")
            else:
                self._look(member, offered)
            return None
        number, digest, count = offered
        return Block(number, member, digest, neighbour.read, count)

    def _look(self, member: int, copied: int) -> None:
        """It has nothing for this node yet: is that since it gets none itself?"""
        now = time.monotonic()
        with self._lock:
            before, since = self._moved.get(member, (-1, now))
            self._moved[member] = copied, now if copied != before else since
            still = bool(self._theirs.get(member)) and now > since + _STILL_S and copied == before
            if still:
                self._leave(member)
        if still:
            self._exchange.lost(self._exchange.members[member].place.host, "for a minute nothing has come to")

    def _leave(self, member: int) -> None:
        """Under the lock."""
        if member in self._peers:
            self._peers.remove(member)
        self._own.extend(n for n in self._theirs.pop(member, ()) if n in self._rest)
