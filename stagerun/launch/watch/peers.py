"""What monitors tell each other, in datagrams: each tells rank 0's monitor what it sees of its worker, and rank 0's tells all others.

A lost datagram doesn't matter, since the next one follows at once, and a link that was cut for a while needs no new connection. Rank 0's monitor
hears of all ranks and judges; a monitor that doesn't hear it judges by itself.
"""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stagerun.launch.watch.judge import Seen, quiet
from stagerun.system.typed import json_line

LONGEST = 64 * 1024  # bytes of a datagram


@dataclass(frozen=True, slots=True)
class Word:
    """A datagram. `token`: known to the ranks of this job alone. `seen`: the sender's worker. `end`: why the job ends, by rank 0's monitor."""

    token: str
    seen: Seen
    end: str = ""


class Peers:
    """The monitors that this one talks to: on rank 0 all others, on another rank that of rank 0."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.socket: socket.socket | None = None
        self._token = ""
        self._addresses: dict[int, Any] = {}
        self._heard: dict[int, tuple[float, Seen]] = {}  # when, and what

    def meet(self, token: str, own: socket.socket) -> None:
        """`own` is connected to rank 0's, on other ranks."""
        self._token, self.socket = token, own
        own.setblocking(False)
        if self.rank:
            self._addresses[0] = own.getpeername()

    def speak(self, seen: Seen, end: str = "") -> None:
        """Never waits for the other side."""
        word = json_line(Word(self._token, seen, end))
        for address in self._addresses.values():
            with suppress(OSError):
                self.socket.sendto(word, address)  # type: ignore[union-attr]

    def hear(self, now: float) -> str:
        """Take what has come. Return why rank 0's monitor ends the job, '' if it doesn't."""
        end = ""
        with suppress(OSError):  # no more has come; or nobody listens where the last word went
            while True:
                data, address = self.socket.recvfrom(LONGEST)  # type: ignore[union-attr]
                word = _read(data, self._token)
                if word is None:
                    continue
                rank = word.seen.rank
                if self.rank == 0 and 0 < rank < self.size:
                    self._addresses[rank] = address
                elif self.rank and rank == 0:
                    end = end or word.end
                else:
                    continue
                if rank not in self._heard or not self._heard[rank][1].ended:  # else an earlier one has come late
                    self._heard[rank] = now, word.seen
        return end

    def seen(self, now: float) -> list[Seen]:
        """The other ranks that are watched, as far as this monitor hears of them."""
        found = []
        for heard, seen in self._heard.values():
            age = now - heard
            found.append(replace(seen, ended=seen.ended + age) if seen.ended else replace(seen, silence=age))
        return found

    def gone(self, now: float) -> list[str]:
        """The ranks that ended or fell silent without a word, by name: not those that ended as they missed another."""
        ranks = sorted(self.seen(now), key=lambda one: one.rank)
        return [one.name for one in ranks if not one.worded or one.silence >= quiet(self.size)]

    def judged(self, now: float) -> bool:
        """Whether rank 0's monitor judges, and its worker lives."""
        return any(one.rank == 0 and not one.ended and one.silence < quiet(self.size) for one in self.seen(now))

    def woke(self, now: float) -> None:
        """This process, or the machine, was stopped for a while: silence meanwhile says nothing."""
        self._heard = {rank: (now, seen) for rank, (_, seen) in self._heard.items()}


def _read(data: bytes, token: str) -> Word | None:
    """None for a stranger's datagram, or before the ranks have met."""
    with suppress(ValueError, RecursionError):
        word = msgspec.convert(json.loads(data), Word)
        return word if token and word.token == token else None
    return None
