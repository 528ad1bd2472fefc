"""What monitors say to each other. Rank 0's is the hub: the others connect to it, so it knows of all ranks, and judges. A spoke is the
monitor of another rank: it reports to the hub, and judges by itself where it can't reach the hub."""

import errno
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from stagerun.launch.watch.judge import Compared, Ending, Seen, Verdict, ending, judge, quiet, stragglers
from stagerun.launch.watch.process import Setup
from stagerun.system.host import open_files
from stagerun.system.lines import LONGEST, Closed, Lines
from stagerun.system.pulse import Limits, Section

_HELLO_BYTES, _MOST_STRANGERS = 512, 64
# A rank that hasn't come after so long is reported; so is one that has lost its connection and hasn't come again.
_COME_S, _AGAIN_S = 60.0, 10.0
# How long to wait for the stacks of other hosts' ranks.
_STACKS_S = 0.5
_FULL_S = 0.05
_RETRY_S = 2.0  # until a spoke tries again to connect
_MOST_FILES = 1 << 20


class Peer:
    """Another rank's monitor. `seen` is as it was when it was `heard`."""

    def __init__(self, lines: Lines, rank: int, now: float) -> None:
        self.lines, self.rank, self.heard = lines, rank, now
        self.seen: Seen | None = None
        self.left: float | None = None  # when it said that its worker has ended, or is about to
        self.worded = True  # and whether the worker knew

    def now(self, now: float) -> Seen | None:
        if self.seen is None:
            return None
        if self.left is not None:
            return replace(self.seen, ended=max(now - self.left, 1e-9))
        return replace(self.seen, silence=now - self.heard)


class Hub:
    """Rank 0's side."""

    def __init__(
        self,
        setup: Setup,
        limits: Limits,
        selector: selectors.BaseSelector,
        tell: Callable[[dict[str, Any]], None],
        stack: Callable[[], str],
    ) -> None:
        """`tell`: its own worker. `stack`: that one's."""
        self.setup, self.limits, self.selector, self.tell, self.stack = setup, limits, selector, tell, stack
        self.token = ""
        self.met = 0.0
        self.strangers: list[Lines] = []
        self.peers: dict[int, Peer] = {}
        self.ever: set[int] = {setup.rank}
        self.lost: dict[int, float] = {}  # without a word, since when
        self.names: dict[int, str] = {}
        self.missed_told = False
        self.compared = Compared({}, {})
        self.verdict: Verdict | None = None
        self.stacks: dict[int, str] = {}
        self.conclude_at = 0.0

    # -- judging

    def judge(self, own: Seen, now: float) -> Ending | None:
        """What the job ends with, once that is known; the others hear it, too."""
        here = {"section": own.section.value, "stage": own.stage, "iter": own.iter}
        for peer in self._there():
            peer.lines.send({"here": here})
        if self.verdict is not None:
            wanted = {guilty.seen.rank for guilty in self.verdict.guilty if guilty.reached}
            return self._conclude() if wanted <= set(self.stacks) or now >= self.conclude_at else None
        seen = [own, *(found for peer in self.peers.values() if (found := peer.now(now)) is not None)]
        self.verdict = judge(seen, self.setup.size, self.limits)
        if self.verdict is not None:
            self._ask_for_stacks(now)
            return None
        self.compared, slow = stragglers(self.compared, seen)
        for text in slow:
            self.tell({"news": text})
        self._tell_of_missing(now)
        return None

    def woke(self, now: float) -> None:
        self.compared = replace(self.compared, spoiled=True)
        self.lost = dict.fromkeys(self.lost, now)
        for peer in self.peers.values():
            peer.heard = now

    def _there(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.left is None]

    def _ask_for_stacks(self, now: float) -> None:
        assert self.verdict is not None
        self.conclude_at = now + _STACKS_S
        blamed = {guilty.seen.rank for guilty in self.verdict.guilty if guilty.reached}
        for peer in self._there():
            if peer.rank in blamed:
                peer.lines.send({"stack": True})
        if 0 in blamed:
            self.stacks[0] = self.stack()

    def _conclude(self) -> Ending:
        assert self.verdict is not None
        end = ending(0, self.verdict, self.stacks)
        for peer in self._there():
            peer.lines.send({"end": end.text})
        return end

    def _tell_of_missing(self, now: float) -> None:
        if self.met and not self.missed_told and now > self.met + _COME_S:
            self.missed_told = True
            if missing := sorted(set(range(self.setup.size)) - self.ever):
                self._unwatched(missing, "its monitor does not reach rank 0's", "their monitors do not reach rank 0's")
        if gone := sorted(rank for rank, since in self.lost.items() if now > since + _AGAIN_S):
            self.lost = {rank: since for rank, since in self.lost.items() if rank not in gone}
            self._unwatched(gone, "its monitor is gone", "their monitors are gone", " any more")

    def _unwatched(self, ranks: list[int], one: str, several: str, more: str = "") -> None:
        names, single = ", ".join(map(str, ranks)), len(ranks) == 1
        whose = (
            f"rank {names} is not watched{more}: {one}" if single else f"ranks {names} are not watched{more}: {several}"
        )
        self.tell({"news": f"{whose}; a hang there is noticed late"})

    # -- the others come

    def listen(self) -> None:
        open_files(_MOST_FILES)  # a connection for each rank
        family, own = socket.AF_INET, ""
        with suppress(OSError):
            family, *_, place = socket.getaddrinfo(self.setup.address, 0, type=socket.SOCK_STREAM)[0]
            own = str(place[0])
        # Its own address; all, where the others reach it by one that isn't its own. Debian has a host's own name mean 127.0.1.1 there:
        # no other host reaches that, but the name, there, is the right one.
        loops = (own.startswith("127.") or own == "::1") and not self.setup.one_host
        for bound in (own, "") if not loops else ("",):
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind((bound, 0))
                break
            except OSError:
                listener.close()
        else:
            return
        listener.listen(1024)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        port = listener.getsockname()[1]
        self.tell({"port": port, "address": bound or self.setup.address, "family": int(family)})

    def meet(self, token: str) -> None:
        """What the others know themselves by."""
        self.token, self.met = token, time.monotonic()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no more descriptors, say: it is asked again at once, and that must not keep a processor busy
            time.sleep(_FULL_S)
            return
        lines = Lines(connection, _HELLO_BYTES)
        self.strangers.append(lines)
        self.selector.register(lines, selectors.EVENT_READ, self._from_stranger)
        if len(self.strangers) > _MOST_STRANGERS + self.setup.size:
            self._forget(self.strangers[0])

    def _forget(self, lines: Lines) -> None:
        self.selector.unregister(lines)
        if lines in self.strangers:
            self.strangers.remove(lines)
        lines.close()

    def _from_stranger(self, lines: Lines) -> None:
        """Who knows the token that the ranks have shared is one of this job. One that comes before the token is known here is
        sent away, and comes again."""
        try:
            messages = lines.receive()
        except Closed:
            self._forget(lines)
            return
        if not messages:
            return
        import hmac  # takes longer than all the rest; only rank 0's needs it

        hello, now = messages[0], time.monotonic()
        token, rank = hello.get("token"), hello.get("rank")
        known = isinstance(token, str) and token.isascii() and self.token and hmac.compare_digest(token, self.token)
        if not known or not isinstance(rank, int) or not 0 < rank < self.setup.size:
            self._forget(lines)
            return
        self.strangers.remove(lines)
        lines.reader.longest = LONGEST
        if rank in self.peers and self.peers[rank].left is None:  # it lost its connection and has come again
            self._close(self.peers[rank])
        peer = self.peers[rank] = Peer(lines, rank, now)
        self.ever.add(rank)
        self.lost.pop(rank, None)
        self.selector.modify(lines, selectors.EVENT_READ, lambda _: self._from_peer(peer))
        self._heard(peer, messages[1:])

    def _from_peer(self, peer: Peer) -> None:
        try:
            self._heard(peer, peer.lines.receive())
        except (Closed, ValueError, TypeError, KeyError):
            # Only the monitor, or the connection. It may come again; of its worker nothing is known any more.
            self._close(peer)
            del self.peers[peer.rank]
            self.lost[peer.rank] = time.monotonic()

    def _heard(self, peer: Peer, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            peer.heard = time.monotonic()
            match message:
                case {"bye": True}:
                    peer.left, peer.worded = peer.heard, message.get("worded") is not False
                    self._close(peer)
                    return
                case {"seen": dict(seen)}:
                    peer.seen = Seen(**{**seen, "section": Section(seen["section"])})
                    self.names[peer.rank] = peer.seen.name
                case {"stack": str(stack)}:
                    self.stacks[peer.rank] = stack

    def _close(self, peer: Peer) -> None:
        self.selector.unregister(peer.lines)
        peer.lines.close()

    def gone(self, now: float) -> list[str]:
        """The ranks that ended, or fell silent, without a word: not those that ended as they missed another."""
        killed = [peer.rank for peer in self.peers.values() if peer.left is not None and not peer.worded]
        silent = [peer.rank for peer in self._there() if now - peer.heard >= quiet(self.setup.size)]
        return [self.names.get(rank, f"rank {rank}") for rank in sorted({*self.lost, *killed, *silent})]

    def farewell(self, worded: bool = True) -> None:
        for peer in self._there():
            peer.lines.send({"bye": True, "worded": worded})


class Spoke:
    """The side of another rank."""

    def __init__(
        self,
        setup: Setup,
        limits: Limits,
        selector: selectors.BaseSelector,
        end: Callable[[Ending], None],
        stack: Callable[[], str],
    ) -> None:
        """`end`: how its worker is ended. `stack`: that one's."""
        self.setup, self.limits, self.selector, self.end, self.stack = setup, limits, selector, end, stack
        self.hub: Lines | None = None
        self.hub_at: dict[str, Any] | None = None  # where it is to be met
        self.hub_host = ""
        self.hub_heard = time.monotonic()
        self.hub_left: float | None = None  # when it said that its worker has ended, or is about to
        self.hub_known = False  # it has said something
        self.hub_gone = False  # without a word
        self.hub_place: dict[str, Any] = {"section": Section.START}
        self.connected = False
        self.retry_at = 0.0

    def meet(self, place: dict[str, Any]) -> None:
        self.hub_at, self.hub_host = place, place["name"]

    def judge(self, own: Seen, now: float) -> Ending | None:
        if not self.connected and self.hub_at is not None and now >= self.retry_at:
            self._connect(now)
        if self.hub is not None and self.connected:
            self.hub.send({"seen": {**asdict(own), "section": own.section.value}})
            silence = now - self.hub_heard
            hub = self._hub(own, silence=silence)
            verdict = judge([hub, own] if silence >= quiet(self.setup.size) else [hub], self.setup.size, self.limits)
        elif self.hub_left is not None:
            hub = self._hub(own, ended=max(now - self.hub_left, 1e-9))
            verdict = judge([hub, own], self.setup.size, self.limits)
        else:
            verdict = judge([own], self.setup.size, self.limits)
        if verdict is None:
            return None
        blamed = any(guilty.seen.rank == own.rank for guilty in verdict.guilty)
        return ending(own.rank, verdict, {own.rank: self.stack()} if blamed else {})

    def _hub(self, own: Seen, silence: float = 0.0, ended: float = 0.0) -> Seen:
        return Seen(
            rank=0, host=self.hub_host, pid=0, slowest=own.slowest, silence=silence, ended=ended, **self.hub_place
        )

    def woke(self, now: float) -> None:
        self.hub_heard = now

    def _connect(self, now: float) -> None:
        assert self.hub_at is not None
        self.retry_at = now + _RETRY_S
        self._leave()
        connection = socket.socket(socket.AddressFamily(self.hub_at["family"]), socket.SOCK_STREAM)
        connection.setblocking(False)
        if connection.connect_ex(tuple(self.hub_at["address"])) not in (0, errno.EINPROGRESS):
            connection.close()
            return
        self.hub = Lines(connection)
        self.selector.register(self.hub, selectors.EVENT_WRITE, self._connected)

    def _connected(self, hub: Lines) -> None:
        assert self.hub_at is not None
        if hub.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._leave()
            return
        self.selector.modify(hub, selectors.EVENT_READ, self._from_hub)
        self.connected, self.hub_heard = True, time.monotonic()
        hub.send({"token": self.hub_at["token"], "rank": self.setup.rank})

    def _leave(self) -> None:
        if self.hub is not None:
            self.selector.unregister(self.hub)
            self.hub.close()
        self.hub, self.connected = None, False

    def _from_hub(self, hub: Lines) -> None:
        try:
            messages = hub.receive()
        except Closed:
            # It knows no token yet; or the connection was lost; or it is gone, which asking again shows. Meanwhile this monitor looks
            # at its own worker alone.
            self.hub_gone = self.hub_known
            self._leave()
            return
        for message in messages:
            self.hub_heard = time.monotonic()
            self.hub_known, self.hub_gone = True, False
            match message:
                case {"here": dict(place)}:
                    self.hub_place = {**place, "section": Section(place["section"])}
                case {"stack": True}:
                    hub.send({"stack": self.stack()})
                case {"end": str(text)}:
                    self.end(Ending(text, guilty=False))
                case {"bye": True}:
                    self.hub_gone = message.get("worded") is False
                    self.hub_left, self.hub_at = self.hub_heard, None
                    self._leave()
                    return

    def gone(self, now: float) -> list[str]:
        """Rank 0, if it has ended, or fallen silent, without a word: of the others this monitor knows nothing."""
        silent = self.connected and now - self.hub_heard >= quiet(self.setup.size)
        return [f"rank 0 on {self.hub_host}"] if self.hub_gone or silent else []

    def farewell(self, worded: bool = True) -> None:
        if self.hub is not None and self.connected:
            self.hub.send({"bye": True, "worded": worded})
