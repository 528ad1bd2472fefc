"""What the ranks settle while images are copied: which nodes hand on blocks to each other, and whether that is faster than the source.

All of it goes with the table that the ranks add up anyway (`stagerun.train.copying`). Rank 0 says what phase comes next, and since all
see the same table, all enter it, and know the same members, at the same meeting.
"""

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

from stagerun.base.errors import DataError, PeerError
from stagerun.base.events import Note
from stagerun.base.recipe import ScratchFrom
from stagerun.comm import Comm, gather_json
from stagerun.data.scratch import Original
from stagerun.data.scratch.layout import blocks_in
from stagerun.data.scratch.serving import Place, Server, own_place
from stagerun.data.scratch.sharing import MEASURED_S, Exchange, Member, Phase, Rates, choose

# Of the table: phase (of rank 0), ready, needs and has (a bit for each LMDB), 1 + bytes/s from another node, bytes/s from the source,
# whether it has read all of its share there
COLUMNS = 7
# Who is not ready after so long, since another run on its node makes the copy, say, reads from the source.
_GATHER_S = 2.0
_SOURCE_S, _SOURCE_MOST_S = 2.0, 10.0
_UNLIKE = "the images have another path or time of change"
# A node's share of fewer blocks is copied before anything is measured.
_LEAST_BLOCKS = 2


class HandingOn:
    """For all ranks of a job. `exchange` is None on a rank that is not the first of its node: it waits until that one is done."""

    def __init__(
        self,
        comm: Comm,
        originals: Sequence[Original],
        way: ScratchFrom,
        hosts: Sequence[str],
        stop: Callable[[], bool],
    ) -> None:
        """Collective."""
        self.rank, self.leaders = comm.rank, [n for n, host in enumerate(hosts) if host not in hosts[:n]]
        self.leader = hosts.index(hosts[comm.rank])
        self.exchange: Exchange | None = None
        self._names = [original.name for original in originals]
        self._small = sum(blocks_in(o.size) for o in originals) < _LEAST_BLOCKS * len(self.leaders)
        self._forced = way is ScratchFrom.NODES
        self._hosts, self._places = list(hosts), dict[int, Place]()
        self._missing, self._unlike = list[str](), list[str]()  # hosts without an address, and with other images
        self._members: list[int] = []  # who takes part, once that is settled
        self._phase, self._next = Phase.GATHER, Phase.GATHER
        self._since, self._ready_at = time.monotonic(), 0.0
        self._begun, self._done0, self._done_before, self._source = 0.0, 0, -1, 0
        self._listen(comm, stop)

    def _listen(self, comm: Comm, stop: Callable[[], bool]) -> None:
        token = comm.broadcast_bytes(secrets.token_hex(16).encode() if comm.rank == 0 else None).decode()
        mine: dict[str, object] = {}
        server: Server | None = None
        if self.leader == comm.rank:
            try:
                family, bound, address = own_place(os.environ.get("MASTER_ADDR", ""), comm.rank == 0)
                server = Server(family, bound, token)
                mine = {"family": family, "address": address, "port": server.port, "names": self._names}
            except OSError:  # it has no address that others know: it reads from the source
                pass
        said = gather_json(comm, mine)
        # A copy's name has the path and time of its LMDB in it: who has these otherwise, as a file server that trains as well, could be
        # asked for nothing.
        names = Counter(tuple(place["names"]) for place in said if place)
        for rank, place in enumerate(said):
            if place and tuple(place["names"]) == names.most_common(1)[0][0]:
                self._places[rank] = Place(self._hosts[rank], place["family"], place["address"], place["port"])
            elif rank in self.leaders:
                (self._unlike if place else self._missing).append(self._hosts[rank])
        if server is not None:
            self.exchange = Exchange(server, token, stop)

    def row(self, done: int) -> list[int]:
        """What this rank tells the others. `done` bytes are copied."""
        exchange = self.exchange
        ready = int(exchange is not None and exchange.ready)  # first: who is ready has said what it needs
        if exchange is None:
            return [self._next, *[0] * (COLUMNS - 1)]
        through = self._phase is Phase.SOURCE and not exchange.own_left and done == self._done_before
        if self._phase is Phase.SOURCE and not through:
            self._source = int((done - self._done0) / (time.monotonic() - self._begun))
        self._done_before = done
        bits = [
            sum(1 << n for n, name in enumerate(self._names) if name in said) for said in (exchange.needs, exchange.has)
        ]
        measured = 1 + int(exchange.rate) if exchange.measured else 0
        return [
            self._next,
            ready,
            *(bits if ready else (0, 0)),
            measured,
            self._source,
            int(through and self._source > 0),
        ]

    def meet(self, rows: Sequence[Sequence[int]], done: int) -> Note | None:
        """The next phase, if there is one. `rows` by rank, the same for all. A note on rank 0."""
        phase = Phase(rows[0][0])
        if self._phase is Phase.GATHER and phase is not Phase.GATHER:
            self._begin(rows)
        if phase is not self._phase:
            self._phase, self._since = phase, time.monotonic()
            if phase is Phase.SOURCE:
                self._begun, self._done0 = time.monotonic(), done
            if self.exchange is not None:
                self.exchange.enter(phase)
        return self._lead(rows) if self.rank == 0 else None

    def settled(self) -> bool:
        return self._phase in (Phase.FROM_SOURCE, Phase.SHARED)

    def trouble(self) -> list[str]:
        """What went wrong between this node and others, once each."""
        found = self.exchange.trouble if self.exchange is not None else []
        texts, found[:] = list(found), []
        if self.exchange is not None and self.exchange.needs and self.rank not in self._places:
            texts.append(f"{_UNLIKE} here than on other nodes: they are read from the source")
        return texts

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.server.close()

    def judge(self, comm: Comm) -> bool:
        """Whether the copy that some node had is damaged, as others have found; there it is suspect now. Collective."""
        found = [self._members[m] for m in sorted(self.exchange.damaged)] if self.exchange is not None else []
        damaged = {rank for ranks in gather_json(comm, found) for rank in ranks}
        if self.exchange is not None and self.rank in damaged:
            self.exchange.suspect()
        return bool(damaged)

    def _ready(self, rows: Sequence[Sequence[int]]) -> list[int]:
        return [rank for rank in self.leaders if rank in self._places and rows[rank][1]]

    def _begin(self, rows: Sequence[Sequence[int]]) -> None:
        """Who is ready takes part. Who comes later reads from the source, and is waited for by no one."""
        self._members = self._ready(rows)
        if self.exchange is None:
            return

        def names(bits: int) -> frozenset[str]:
            return frozenset(name for n, name in enumerate(self._names) if bits >> n & 1)

        found = [Member(self._places[rank], names(rows[rank][2]), names(rows[rank][3])) for rank in self._members]
        self.exchange.begin(found, self._members.index(self.rank) if self.rank in self._members else None)

    def _lead(self, rows: Sequence[Sequence[int]]) -> Note | None:
        """What rank 0 announces at the next meeting."""
        if self._next is not self._phase:
            return None
        members, now = self._ready(rows) if self._phase is Phase.GATHER else self._members, time.monotonic()
        needing = [rank for rank in members if rows[rank][2]]
        match self._phase:
            case Phase.GATHER:
                return self._gather(members, needing, now)
            case Phase.NODES if all(rows[rank][4] for rank in needing) or now > self._since + 3 * MEASURED_S:
                self._next = Phase.SOURCE
            case Phase.SOURCE if now > self._since + _SOURCE_S or all(rows[rank][6] for rank in needing):
                if not all(rows[rank][5] for rank in needing) and now < self._since + _SOURCE_MOST_S:
                    return None
                rates = [Rates(self._hosts[rank], rows[rank][5], max(0, rows[rank][4] - 1)) for rank in needing]
                wanted = reduce(or_, (rows[rank][2] for rank in needing))
                way = choose(rates, sum(1 for rank in members if not wanted & ~rows[rank][3]))
                self._next = Phase.SHARED if way.from_nodes else Phase.FROM_SOURCE
                return Note(text=way.why)
        return None

    def _gather(self, members: Sequence[int], needing: Sequence[int], now: float) -> Note | None:
        if members and not self._ready_at:
            self._ready_at = now
        if len(members) < len(self._places) and (not self._ready_at or now < self._ready_at + _GATHER_S):
            return None
        if len(members) < 2 or not needing or (self._small and not self._forced):
            self._next = Phase.FROM_SOURCE
        else:
            self._next = Phase.SHARED if self._forced else Phase.NODES
        return None

    def require(self) -> None:
        """PeerError, DataError, where it must be from node to node and can't be."""
        if self._forced and self._missing:
            raise PeerError(
                f"{', '.join(self._missing)}: no address that the other nodes could read images from",
                "see that MASTER_ADDR is one that all nodes know, or leave out `scratch_from`",
            )
        if self._forced and self._unlike:
            raise DataError(
                f"{', '.join(self._unlike)}: {_UNLIKE} than on the other nodes, which so can't hand them on",
                "give them one path and one time on all nodes (`cp -p`, `rsync -t`), or leave out `scratch_from`",
            )
