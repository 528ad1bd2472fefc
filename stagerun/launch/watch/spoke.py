"""The other ranks' side of the monitors: it reports to rank 0's what it sees, and judges by itself where that one can't be reached."""

import errno
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from stagerun.launch.watch.judge import Ending, Seen, ending, judge, quiet
from stagerun.launch.watch.process import Setup
from stagerun.system.lines import Closed, Lines
from stagerun.system.pulse import Limits, Section

_RETRY_S = 2.0


class Spoke:
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
