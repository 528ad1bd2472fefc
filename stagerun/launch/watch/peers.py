"""What monitors say to each other. Those of all other ranks connect to rank 0's, which so knows of all, and judges; another one judges by
itself where it does not hear rank 0's."""

import errno
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from stagerun.launch.watch.judge import Seen, quiet
from stagerun.system.lines import LONGEST, Closed, Lines, Message
from stagerun.system.pulse import Section

_HELLO_BYTES, _MOST_STRANGERS = 512, 64
_FULL_S = 0.05
_RETRY_S = 2.0


class Peer:
    """Another rank's monitor. `seen` is as it was when it was `heard`."""

    def __init__(self, rank: int, host: str = "") -> None:
        self.rank, self.host = rank, host
        self.lines: Lines | None = None
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
        if self.seen is None or (self.left is None and self.lines is None):
            return None
        if self.left is not None:
            return replace(self.seen, ended=max(now - self.left, 1e-9))
        return replace(self.seen, silence=now - self.heard)


class Peers:
    """The monitors that this one talks to: on rank 0 all others, on another rank that of rank 0."""

    def __init__(
        self, rank: int, size: int, selector: selectors.BaseSelector, end: Callable[[str], None], listener: int = -1
    ) -> None:
        """`end`: how the worker is ended when rank 0's monitor says so. `listener`: on rank 0, the descriptor of a socket that listens."""
        self.rank, self.size, self.selector, self._end = rank, size, selector, end
        self.place: Message = {}  # where rank 0's is to be met, and the token by which the ranks know each other
        self._retry_at = 0.0
        self._trying: Lines | None = None
        self.peers: dict[int, Peer] = {}
        self._strangers: list[Lines] = []  # connections that have not said who they are: the oldest go, beyond so many
        if listener >= 0:
            listening = socket.socket(fileno=listener)
            listening.setblocking(False)
            selector.register(listening, selectors.EVENT_READ, self._accept)

    def meet(self, place: Message) -> None:
        self.place = place
        if self.rank:
            self.peers[0] = Peer(0, place["name"])

    # -- what is known

    def judged(self, now: float) -> bool:
        """Whether rank 0's monitor judges, and lives."""
        hub = self.peers.get(0)
        return hub is not None and hub.lines is not None and now - hub.heard < quiet(self.size)

    def seen(self, now: float) -> list[Seen]:
        return [found for peer in self.peers.values() if (found := peer.now(now)) is not None]

    def gone(self, now: float) -> list[str]:
        """The ranks that ended, or fell silent, without a word: not those that ended as they missed another."""
        return [
            peer.name
            for _, peer in sorted(self.peers.items())
            if not peer.worded or peer.lost or (peer.lines and now - peer.heard >= quiet(self.size))
        ]

    def woke(self, now: float) -> None:
        """This process, or the machine, was stopped for a while."""
        for peer in self.peers.values():
            peer.heard = now

    # -- what is said

    def speak(self, own: Seen, now: float) -> None:
        if self.rank and self.place and now >= self._retry_at:
            self._connect(now)
        self.send({"seen": {**asdict(own), "section": own.section.value}})

    def send(self, message: Message) -> None:
        for peer in self.peers.values():
            if peer.lines is not None:
                peer.lines.send(message)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no more descriptors, say: it is asked again at once, and that must not keep a processor busy
            time.sleep(_FULL_S)
            return
        lines = Lines(connection, _HELLO_BYTES)
        self.selector.register(lines, selectors.EVENT_READ, self._greeted)
        self._strangers.append(lines)
        if len(self._strangers) > _MOST_STRANGERS + self.size:
            self._close(self._strangers.pop(0))

    def _greeted(self, lines: Lines) -> None:
        """Who knows the token that the ranks have shared is one of this job. One that comes before the token is known here is
        sent away, and comes again."""
        import hmac  # takes longer than all the rest; only rank 0's needs it

        try:
            messages = lines.receive()
        except Closed:
            messages = [{}]
        if not messages:
            return
        self._strangers.remove(lines)
        token, rank = messages[0].get("token"), messages[0].get("rank")
        known = isinstance(token, str) and token.isascii() and hmac.compare_digest(token, self.place.get("token", ""))
        if not known or not token or not isinstance(rank, int) or not 0 < rank < self.size:
            self._close(lines)
            return
        lines.reader.longest = LONGEST
        if (before := self.peers.get(rank)) is not None and before.lines is not None:  # it lost its connection
            self._close(before.lines)
        peer = self.peers[rank] = Peer(rank)
        self._listen_to(peer, lines)
        for message in messages[1:]:
            self._heard(peer, message)

    def _connect(self, now: float) -> None:
        hub = self.peers[0]
        if hub.lines is not None or hub.left is not None:
            return
        self._retry_at = now + _RETRY_S
        if self._trying is not None:
            self._close(self._trying)
            self._trying = None
        connection = socket.socket(socket.AddressFamily(self.place["family"]), socket.SOCK_STREAM)
        connection.setblocking(False)
        if connection.connect_ex(tuple(self.place["address"])) in (0, errno.EINPROGRESS):
            self._trying = Lines(connection)
            self.selector.register(self._trying, selectors.EVENT_WRITE, self._connected)
        else:
            connection.close()

    def _connected(self, lines: Lines) -> None:
        self._trying = None
        if lines.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._close(lines)
            return
        self._listen_to(self.peers[0], lines)
        lines.send({"token": self.place["token"], "rank": self.rank})

    def _listen_to(self, peer: Peer, lines: Lines) -> None:
        peer.lines, peer.heard = lines, time.monotonic()
        self.selector.modify(lines, selectors.EVENT_READ, lambda _: self._from(peer))

    def _from(self, peer: Peer) -> None:
        assert peer.lines is not None
        try:
            for message in peer.lines.receive():
                self._heard(peer, message)
        except (Closed, ValueError, TypeError, KeyError):
            # Only the monitor, or the connection. It may come again; of its worker nothing is known any more.
            self._close(peer.lines)
            peer.lines = None
            if self.rank == 0 or peer.seen is not None:  # rank 0's may not have known the token yet
                peer.lost = True

    def _heard(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.heard, peer.lost = time.monotonic(), False
        match message:
            case {"seen": dict(seen)}:
                peer.seen = Seen(**{**seen, "section": Section(seen["section"])})
            case {"end": str(text)} if peer.rank == 0:
                self._end(text)
            case {"bye": True} if peer.lines is not None:
                peer.left, peer.worded = peer.heard, message.get("worded") is not False
                self._close(peer.lines)
                peer.lines = None

    def _close(self, lines: Lines) -> None:
        with suppress(KeyError):
            self.selector.unregister(lines)
        lines.close()
