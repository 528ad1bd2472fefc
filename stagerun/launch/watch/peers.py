"""What monitors say to each other: JSON objects, one a line. Those of all other ranks connect to rank 0's, which so knows of all, and judges;
another one judges by itself where it does not hear rank 0's."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stagerun.launch.watch.judge import Seen, quiet
from stagerun.system.typed import json_line

Message = dict[str, Any]

# A line holds a rank's state or a stack; a longer one ends the conversation. What can't leave since the other side is cut off is kept up to
# this many bytes, and the rest left out.
LONGEST = 64 * 1024
_HELLO_S, _RETRY_S = 5.0, 2.0


@dataclass(frozen=True, slots=True)
class Hello:
    """A monitor's first line."""

    token: str
    rank: int


class Peer:
    """Another rank's monitor. `seen` is as it was when it was `heard`."""

    def __init__(self, rank: int, host: str = "") -> None:
        self.rank, self.host = rank, host
        self.writer: asyncio.StreamWriter | None = None
        self.heard = time.monotonic()
        self.seen: Seen | None = None
        self.left: float | None = None  # when it said that its worker has ended, or is about to
        self.worded = True  # and whether the worker knew
        self.lost = False  # the connection ended without a word

    @property
    def name(self) -> str:
        host = self.seen.host if self.seen is not None else self.host
        return f"rank {self.rank} on {host}" if host else f"rank {self.rank}"

    def now(self, now: float) -> Seen | None:
        """None if unknown."""
        if self.seen is None or (self.left is None and self.writer is None):
            return None
        if self.left is not None:
            return replace(self.seen, ended=max(now - self.left, 1e-9))
        return replace(self.seen, silence=now - self.heard)


class Peers:
    """The monitors that this one talks to: on rank 0 all others, on another rank that of rank 0."""

    def __init__(self, rank: int, size: int, end: Callable[[str], None]) -> None:
        """`end`: how the worker is ended when rank 0's monitor says so."""
        self.rank, self.size, self._end = rank, size, end
        self.place: Message = {}  # where rank 0's is to be met, and the token by which the ranks know each other
        self.peers: dict[int, Peer] = {}
        self._tasks: list[object] = []  # asyncio forgets what nobody holds

    async def listen(self, listener: socket.socket) -> None:
        """Hear the other ranks' monitors, on rank 0."""
        self._tasks.append(await asyncio.start_server(self._greet, sock=listener, limit=LONGEST))

    def meet(self, place: Message) -> None:
        self.place = place
        if self.rank and not self.peers:
            self.peers[0] = Peer(0, place["name"])
            self._tasks.append(asyncio.create_task(self._connect(self.peers[0])))

    # -- what is known

    def judged(self, now: float) -> bool:
        """Whether rank 0's monitor judges, and lives."""
        hub = self.peers.get(0)
        return hub is not None and hub.writer is not None and now - hub.heard < quiet(self.size)

    def seen(self, now: float) -> list[Seen]:
        return [found for peer in self.peers.values() if (found := peer.now(now)) is not None]

    def gone(self, now: float) -> list[str]:
        """The ranks that ended, or fell silent, without a word: not those that ended as they missed another."""
        return [
            peer.name
            for _, peer in sorted(self.peers.items())
            if not peer.worded or peer.lost or (peer.writer and now - peer.heard >= quiet(self.size))
        ]

    def woke(self, now: float) -> None:
        """This process, or the machine, was stopped for a while."""
        for peer in self.peers.values():
            peer.heard = now

    # -- what is said

    def speak(self, own: Seen) -> None:
        self.send({"seen": own})

    def send(self, message: Message) -> None:
        """Never waits for the other side."""
        for peer in self.peers.values():
            if peer.writer is not None and peer.writer.transport.get_write_buffer_size() < LONGEST:
                peer.writer.write(json_line(message))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Who knows the token that the ranks have shared is one of this job. One that comes before the token is known here is
        sent away, and comes again."""
        import hmac  # takes longer than all the rest; only rank 0's needs it

        with suppress(OSError, ValueError, asyncio.TimeoutError):
            hello = msgspec.json.decode(await asyncio.wait_for(reader.readline(), _HELLO_S), type=Hello)
            token = self.place.get("token", "")
            if token and hmac.compare_digest(hello.token.encode(), token.encode()) and 0 < hello.rank < self.size:
                before = self.peers.get(hello.rank)
                if before is not None and before.writer is not None:  # it lost its connection
                    before.writer.close()
                self.peers[hello.rank] = Peer(hello.rank)
                await self._hear(self.peers[hello.rank], reader, writer)
        writer.close()

    async def _connect(self, hub: Peer) -> None:
        """Stay connected to rank 0's monitor until it says that its worker has ended."""
        while hub.left is None:
            connection = socket.socket(socket.AddressFamily(self.place["family"]))
            connection.setblocking(False)
            with suppress(OSError, asyncio.TimeoutError):
                reach = asyncio.get_running_loop().sock_connect(connection, tuple(self.place["address"]))
                await asyncio.wait_for(reach, _RETRY_S)
                reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST)
                writer.write(json_line(Hello(self.place["token"], self.rank)))
                await self._hear(hub, reader, writer)
            connection.close()
            await asyncio.sleep(_RETRY_S)

    async def _hear(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what a monitor says, to its end."""
        peer.writer, peer.heard = writer, time.monotonic()
        try:
            while peer.left is None and (text := await reader.readline()):
                self._heard(peer, json.loads(text))
        except (OSError, ValueError, RecursionError):  # gone, or not to be understood
            pass
        finally:
            # Of its worker nothing is known any more, but what it said at its end. It may come again.
            writer.close()
            peer.writer = None
            if self.rank == 0 or peer.seen is not None:  # rank 0's may not have known the token yet
                peer.lost = peer.left is None

    def _heard(self, peer: Peer, message: Message) -> None:
        peer.heard, peer.lost = time.monotonic(), False
        match message:
            case {"seen": dict(seen)}:
                peer.seen = msgspec.convert(seen, Seen)
            case {"end": str(text)} if peer.rank == 0:
                self._end(text)
            case {"bye": True}:
                peer.left, peer.worded = peer.heard, message.get("worded") is not False
