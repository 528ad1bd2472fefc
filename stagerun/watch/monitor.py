"""The monitor: a small process beside each worker that sees when it hangs. `python -m stagerun.watch.monitor SETUP`.

It is a process of its own, since a worker that holds Python's lock, or is stopped, could not look at itself. The monitors of
a job talk to that of rank 0, which judges; one that rank 0's can't be reached from judges by itself. What they decide, their
workers say, and end; a worker that can't is killed.
"""

import errno
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from stagerun.pulse import Limits, Section
from stagerun.watch.judge import QUIET_S, Pace, Seen, Verdict, judge, stragglers
from stagerun.watch.lines import LONGEST, Closed, Lines
from stagerun.watch.process import Worker, die_with_parent, log_failure

# Between two looks, and two words to the other monitors; in a large job a rank speaks more seldom.
TICK_S, RANKS_PER_TICK = 0.2, 100
# Longer without a look, and this process was stopped itself, with its worker (Ctrl-Z), or had no processor: it can't blame others.
_ASLEEP_S = 2.0
_HELLO_BYTES, _MOST_STRANGERS = 512, 64
_RETRY_S = 2.0
# Who hasn't come to rank 0's monitor after so long is told.
_COME_S = 60.0
# How long to wait for the stacks of other hosts' ranks.
_STACKS_S = 0.5
# A worker has so long to answer that it will say why it ends; then so long to end, a snapshot included.
_ANSWER_S, _END_S = 0.4, 15.0
# How long its line for the log may take it then, and how long the monitor's own.
_LINE_S, _LOG_S = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker tells its monitor at the start. The last three are file descriptors."""

    rank: int
    size: int
    pid: int
    thread: int  # the one that trains
    host: str
    address: str  # where rank 0's monitor listens
    limits: dict[str, float]
    pulse: int
    stack: int
    link: int


class Peer:
    """Another rank's monitor, as rank 0's knows it. `seen` is as it was when it was `heard`."""

    def __init__(self, lines: Lines, rank: int, now: float) -> None:
        self.lines, self.rank, self.heard = lines, rank, now
        self.seen: Seen | None = None

    def now(self, now: float) -> Seen | None:
        return replace(self.seen, silence=now - self.heard) if self.seen is not None else None


class Monitor:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.limits = Limits({Section(name): value for name, value in setup.limits.items()})
        self.worker = Worker(setup.rank, setup.pid, setup.thread, setup.pulse, setup.stack)
        self.link = Lines(socket.socket(fileno=setup.link))
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.link, selectors.EVENT_READ, self._from_worker)
        now = time.monotonic()
        self.tick_s = max(TICK_S, TICK_S * setup.size / RANKS_PER_TICK)
        self.looked, self.awake = now, now  # last look; since when nothing kept this process from looking
        self.stopped_since: float | None = None
        self.done = False
        self.log = ""
        # Rank 0's:
        self.listener: socket.socket | None = None
        self.token = ""
        self.met = 0.0
        self.strangers: list[Lines] = []
        self.peers: dict[int, Peer] = {}
        self.ever: set[int] = {setup.rank}
        self.missed_told = False
        self.pace = Pace({}, {})
        self.verdict: Verdict | None = None
        self.stacks: dict[int, str] = {}
        self.conclude_at = 0.0
        # The others':
        self.hub: Lines | None = None
        self.hub_at: dict[str, Any] | None = None  # where it is to be met
        self.hub_host = ""
        self.hub_heard = now
        self.hub_place: dict[str, Any] = {"section": Section.START}
        self.connected = False
        self.retry_at = 0.0
        # The end:
        self.text = ""
        self.answered = 0.0  # when
        self.ending_since = 0.0
        self.log_thread: threading.Thread | None = None

    def run(self) -> None:
        if self.setup.rank == 0 and self.setup.size > 1:
            self._listen()
        while not self.done:
            due = self.looked + (self.tick_s if not self.text else 0.05)
            for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
                key.data(key.fileobj)
            if time.monotonic() >= due:
                self._tick()
        if self.log_thread is not None:
            self.log_thread.join(_LOG_S)

    # -- the worker

    def _from_worker(self, link: Lines) -> None:
        try:
            messages = link.receive()
        except Closed:  # it has ended, one way or another
            self.done = True
            return
        for message in messages:
            match message:
                case {"bye": True}:
                    self._farewell()
                    self.done = True
                case {"log": str(path)}:
                    self.log = path
                case {"answered": True}:
                    self.answered = time.monotonic()
                case {"meet": dict(place)}:
                    self.token, self.met = place["token"], time.monotonic()
                    if self.setup.rank != 0:
                        self.hub_at, self.hub_host = place, place["name"]

    def _look(self, now: float) -> Seen:
        beat, state = self.worker.beat(), self.worker.state()
        if state != "T":
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        began = max(beat.since if beat.waiting else beat.moved, self.awake)
        return Seen(
            rank=self.setup.rank,
            host=self.setup.host,
            pid=self.setup.pid,
            section=beat.section,
            stage=beat.stage,
            iter=beat.iter,
            idle=max(0.0, now - began),
            waiting=beat.waiting,
            compiled=beat.compiled,
            slowest=beat.slowest,
            state=state,
            stopped=now - self.stopped_since if self.stopped_since is not None else 0.0,
            batches=beat.batches,
            busy=beat.busy,
        )

    # -- looking and judging

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self.looked > _ASLEEP_S + self.tick_s:
            self._woke(now)
        self.looked = now
        if self.text:
            self._see_to_the_end(now)
            return
        own = self._look(now)
        if own.state == "Z":  # its peers notice by themselves, and its launcher
            return
        if self.setup.rank == 0:
            self._judge_all(own, now)
        else:
            self._judge_by_itself(own, now)

    def _woke(self, now: float) -> None:
        self.awake, self.hub_heard = now, now
        self.stopped_since = None
        for peer in self.peers.values():
            peer.heard = now

    def _judge_all(self, own: Seen, now: float) -> None:
        for peer in self.peers.values():
            peer.lines.send({"here": {"section": own.section.value, "stage": own.stage, "iter": own.iter}})
        if self.verdict is not None:
            wanted = {guilty.seen.rank for guilty in self.verdict.guilty if guilty.reached}
            if wanted <= set(self.stacks) or now >= self.conclude_at:
                self._conclude()
            return
        seen = [own, *(found for peer in self.peers.values() if (found := peer.now(now)) is not None)]
        self.verdict = judge(seen, self.setup.size, self.limits)
        if self.verdict is not None:
            self._ask_for_stacks(now)
            return
        self.pace, slow = stragglers(self.pace, seen)
        for text in slow:
            self.link.send({"news": text})
        if self.met and not self.missed_told and now > self.met + _COME_S:
            self.missed_told = True
            if missing := sorted(set(range(self.setup.size)) - self.ever):
                self._unwatched(missing, "its monitor does not reach rank 0's", "their monitors do not reach rank 0's")

    def _judge_by_itself(self, own: Seen, now: float) -> None:
        if not self.connected and self.hub_at is not None and now >= self.retry_at:
            self._connect(now)
        if self.hub is not None and self.connected:
            record = asdict(own)
            self.hub.send({"seen": {**record, "section": own.section.value}})
            silence = now - self.hub_heard
            hub = Seen(rank=0, host=self.hub_host, pid=0, slowest=own.slowest, silence=silence, **self.hub_place)
            verdict = judge([hub, own] if silence >= QUIET_S else [hub], self.setup.size, self.limits)
        else:
            verdict = judge([own], self.setup.size, self.limits)
        if verdict is not None:
            stack = "" if verdict.guilty[0].seen.rank != own.rank else self.worker.stack()
            self._end(verdict.message({own.rank: stack}))

    def _ask_for_stacks(self, now: float) -> None:
        assert self.verdict is not None
        self.conclude_at = now + _STACKS_S
        for guilty in self.verdict.guilty:
            if guilty.reached and guilty.seen.rank in self.peers:
                self.peers[guilty.seen.rank].lines.send({"stack": True})
        for guilty in self.verdict.guilty:
            if guilty.seen.rank == 0:
                self.stacks[0] = self.worker.stack()

    def _conclude(self) -> None:
        assert self.verdict is not None
        text = self.verdict.message(self.stacks)
        for peer in self.peers.values():
            peer.lines.send({"end": text})
        self._end(text)

    def _unwatched(self, ranks: list[int], one: str, several: str) -> None:
        names = ", ".join(map(str, ranks))
        whose = (
            f"rank {names} is not watched: {one}" if len(ranks) == 1 else f"ranks {names} are not watched: {several}"
        )
        self.link.send({"news": f"{whose}; a hang there is noticed late"})

    # -- rank 0's: the others come

    def _listen(self) -> None:
        family, own = socket.AF_INET, ""
        with suppress(OSError):
            family, *_, place = socket.getaddrinfo(self.setup.address, 0, type=socket.SOCK_STREAM)[0]
            own = str(place[0])
        for bound in (own, ""):  # its own address; all, where the others reach it by one that isn't its own
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
                listener.bind((bound, 0))
                break
            except OSError:
                continue
        else:
            return
        listener.listen(1024)
        listener.setblocking(False)
        self.listener = listener
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.link.send({"port": listener.getsockname()[1], "address": bound or self.setup.address})

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
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
        """Who knows the token that the ranks have told each other is one of this job."""
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
        lines.longest = LONGEST
        if rank in self.peers:  # it lost its connection and has come again
            self.selector.unregister(self.peers[rank].lines)
            self.peers[rank].lines.close()
        peer = self.peers[rank] = Peer(lines, rank, now)
        self.ever.add(rank)
        self.selector.modify(lines, selectors.EVENT_READ, lambda _: self._from_peer(peer))
        self._heard(peer, messages[1:])

    def _from_peer(self, peer: Peer) -> None:
        try:
            self._heard(peer, peer.lines.receive())
        except (Closed, ValueError, TypeError, KeyError):
            self._lose(peer)

    def _heard(self, peer: Peer, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            peer.heard = time.monotonic()
            match message:
                case {"bye": True}:
                    self._lose(peer)
                    return
                case {"seen": dict(seen)}:
                    peer.seen = Seen(**{**seen, "section": Section(seen["section"])})
                case {"stack": str(stack)}:
                    self.stacks[peer.rank] = stack

    def _lose(self, peer: Peer) -> None:
        """It has ended, and so has its worker, or does by what it meets: the others notice that at once, without us."""
        if self.peers.get(peer.rank) is peer:
            del self.peers[peer.rank]
            self.selector.unregister(peer.lines)
            peer.lines.close()

    # -- the others': to rank 0's

    def _connect(self, now: float) -> None:
        assert self.hub_at is not None
        self.retry_at = now + _RETRY_S
        self._leave_hub()
        connection = socket.socket(socket.AddressFamily(self.hub_at["family"]), socket.SOCK_STREAM)
        connection.setblocking(False)
        if connection.connect_ex(tuple(self.hub_at["address"])) not in (0, errno.EINPROGRESS):
            connection.close()
            return
        self.hub = Lines(connection)
        self.selector.register(self.hub, selectors.EVENT_WRITE, self._connected)

    def _connected(self, hub: Lines) -> None:
        if hub.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._leave_hub()
            return
        self.selector.modify(hub, selectors.EVENT_READ, self._from_hub)
        self.connected, self.hub_heard = True, time.monotonic()
        hub.send({"token": self.token, "rank": self.setup.rank})

    def _leave_hub(self) -> None:
        if self.hub is not None:
            self.selector.unregister(self.hub)
            self.hub.close()
        self.hub, self.connected = None, False

    def _from_hub(self, hub: Lines) -> None:
        try:
            messages = hub.receive()
        except Closed:  # rank 0 has ended, or its monitor; from now on this one looks at its own worker alone
            self._leave_hub()
            self.hub_at = None
            return
        for message in messages:
            self.hub_heard = time.monotonic()
            match message:
                case {"here": dict(place)}:
                    self.hub_place = {**place, "section": Section(place["section"])}
                case {"stack": True}:
                    hub.send({"stack": self.worker.stack()})
                case {"end": str(text)}:
                    self._end(text)

    def _farewell(self) -> None:
        for peer in self.peers.values():
            peer.lines.send({"bye": True})
        if self.hub is not None and self.connected:
            self.hub.send({"bye": True})

    # -- the end

    def _end(self, text: str) -> None:
        """Has the worker say it and end."""
        if self.text:
            return
        die_with_parent(False)  # there may be more to do when the worker is gone
        self.text, self.ending_since = text, time.monotonic()
        self.link.send({"end": text})

    def _see_to_the_end(self, now: float) -> None:
        if not self.answered and now > self.ending_since + _ANSWER_S:
            self.answered = now
            self.worker.speak_for(self.text)
        # A worker that has answered adds nothing more to the log, once it has ended the line that it is at.
        if self.log and self.answered and now > self.answered + _LINE_S:
            self.log_thread = log_failure(self.log, self.text)
            self.log = ""
        if now > self.ending_since + _END_S:
            self.worker.kill()
            self.done = True


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, whose end ends this one, too
    setup = Setup(**json.loads(sys.argv[1]))
    die_with_parent(True)
    if os.getppid() != setup.pid:
        return
    Monitor(setup).run()


if __name__ == "__main__":
    main()
