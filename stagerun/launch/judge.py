"""Ranks that hang or are slow, judged from each rank's last record, and the datagrams by which monitors exchange the records.

Each monitor sends its worker's record to rank 0's monitor, which judges and answers all. A lost datagram doesn't matter: the next one follows
at once, and a link that was cut needs no new connection. A monitor that doesn't hear rank 0's judges alone.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from stagerun.base.errors import AGAIN
from stagerun.base.text import duration, listed
from stagerun.system.pulse import Beat, Limits, Section
from stagerun.system.typed import decode, json_line

# Between two polls of a monitor, and two of its datagrams; longer in a large job.
TICK_S, RANKS_PER_TICK = 0.2, 100
_QUIET_S, _QUIET_TICKS = 2.0, 3
_NAMED = 4
_NO_TIME = 1e-9  # a slowest step that asks for no patience
_STATES = {
    "T": "is stopped (state T)",
    "t": "is held by a debugger (state t)",
    "D": "waits for a disk or a file server (state D), where no signal reaches it",
    "Z": "has ended (state Z)",
}


def tick(size: int) -> float:
    """Seconds, in a job of `size` ranks."""
    return max(TICK_S, TICK_S * size / RANKS_PER_TICK)


def quiet(size: int) -> float:
    """Return the seconds of silence after which a host may be cut off, and its last record is old."""
    return max(_QUIET_S, _QUIET_TICKS * tick(size))


@dataclass(slots=True, kw_only=True)
class Seen(Beat):
    """A rank's record: its last beat, whose `moved` and `since` are by its host's clock, and more. Durations in seconds."""

    rank: int
    host: str
    pid: int
    idle: float = 0.0  # since the last progress, or since it began to wait for others
    state: str = ""  # /proc's letter
    stopped: float = 0.0  # how long it has been T
    silence: float = 0.0  # since its monitor was last heard
    ended: float = 0.0  # since its worker ended; 0 while it lives
    worded: bool = True  # the worker announced its end
    stack: str | None = None  # once its monitor has blamed it

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def position(self) -> str:
        """Describe the position; a silent rank may have moved on."""
        position, at = f"in section {self.section.value}", "at or after" if self.silence else "at"
        return f"{position}, `{self.stage}` {at} iteration {self.iter}" if self.stage else position


@dataclass(frozen=True, slots=True)
class Verdict:
    """A job that hangs. `guilty` is empty if all wait for each other; `lines` explain. `section`: the one whose time-out may be too short."""

    guilty: tuple[Seen, ...]
    lines: tuple[str, ...]
    section: Section | None = None

    def message(self) -> str:
        """Return the message, with the first stack: ranks mostly hang in the same call."""
        lines = list(self.lines[:_NAMED])
        if more := self.lines[_NAMED:]:
            lines.append(f"and {len(more)} more")
        if stacks := [one for one in self.guilty[:_NAMED] if one.stack]:
            whose = f"of rank {stacks[0].rank}" if len(self.guilty) > 1 else "of this rank"
            lines.append(f"  the Python stack {whose}, the newest call first:")
            lines += [f"    {line}" for line in (stacks[0].stack or "").splitlines()]
        longer = f"; --timeout {self.section.value}=TIME gives it longer" if self.section is not None else ""
        return "\n".join([*lines, f"  hint: {AGAIN}{longer}"])


def judge(seen: Sequence[Seen], size: int, limits: Limits) -> Verdict | None:
    """Return None while all is well. `seen`: the watched ranks, of `size` in the job.

    A rank that waits for others is not to blame, unless its process is stopped.
    """
    living, ended = [one for one in seen if not one.ended], [one for one in seen if one.ended]
    heard = [one for one in living if one.silence < quiet(size)]
    all_wait = bool(heard) and all(one.waiting and one.state != "T" for one in heard)
    # In a job that progresses, a silent rank's monitor may have been killed.
    waited = min(one.idle for one in heard) if all_wait else 0.0
    blamed = [(one, text) for one in living if (text := blame(one, size, limits, waited))]
    if blamed:
        guilty, texts = zip(*blamed, strict=True)
        return Verdict(guilty, texts, guilty[0].section)
    if size == 1 or not all_wait or len(heard) < len(living):
        return None
    # The last rank to wait marks when all watched ranks began to wait for the network, or for an unwatched rank.
    last = min(living, key=lambda one: one.idle)
    if ended:
        # A collective that lacks a rank never ends. Gloo's ranks notice that at once and end; NCCL's don't.
        limit = max(limits.of(Section.ITERATION, one.slowest or _NO_TIME) for one in living)
        waited = min(last.idle, max(one.ended for one in ended))
        text = f"has ended, and the others have waited for it for {_over(waited, limit)} {last.position}"
        return Verdict(tuple(ended), tuple(f"{one.name} {text}" for one in ended)) if waited >= limit else None
    limit = max(limits.of(one.section, one.slowest, one.compiled) for one in living)
    missing = sorted(set(range(size)) - {one.rank for one in living})
    if missing:
        # An unwatched rank may be in a long section: be patient.
        limit = max(limit, limits.longest)
    since = f"{_over(last.idle, limit)} {last.position}"
    if missing:
        whom = f"others, some of them without a monitor: {listed([f'rank {rank}' for rank in missing], _NAMED)}"
        text = f"{listed([one.name for one in living], _NAMED)} waited for {since} for {whom}"
    else:
        hosts = list(dict.fromkeys(one.host for one in seen))
        where = (
            f"the network between {listed(hosts, _NAMED)}" if len(hosts) > 1 else f"the network device of {hosts[0]}"
        )
        text = f"all {size} ranks have waited for each other for {since}: {where} does not carry what they send"
    return Verdict((), (text,), last.section) if last.idle >= limit else None


def blame(one: Seen, size: int, limits: Limits, waited: float = 0.0) -> str:
    """Return why a rank is to blame, or ''. `waited`: how long all ranks that answer have waited for others."""
    limit = limits.of(one.section, one.slowest, one.compiled)
    # No section excuses a stopped process or a silent host.
    short = min(limit, limits.of(Section.ITERATION, one.slowest or _NO_TIME))
    if one.silence >= quiet(size):
        text = f"{one.name} can't be reached for {_over(one.silence, short)}: its host, or the network to it, is down"
        return f"{text}; it was {one.position}" if min(one.silence, waited) >= short else ""
    idle = one.idle + one.silence
    if one.state == "T":
        idle, limit = (max(one.stopped, 0.0 if one.waiting else one.idle) if one.stopped >= short else 0.0), short
    elif one.waiting or one.printing:
        return ""
    if idle < limit:
        return ""
    text = f"{one.name} has not moved for {_over(idle, limit)} {one.position}"
    return f"{text}; process {one.pid} {_STATES[one.state]}" if one.state in _STATES else text


def _over(value: float, limit: float) -> str:
    return f"{_seconds(value)} (time-out {_seconds(limit)})"


def _seconds(value: float) -> str:
    """Format seconds, with tenths where they matter."""
    return f"{value:.1f} s" if value < 10 and value != round(value) else duration(value)


# A rank is slow above SLOW times the median, over at least WINDOW device batches of each rank and WINDOW_S seconds of the slowest, so that a
# moment of other work on the machine doesn't count.
SLOW, WINDOW, WINDOW_S = 1.5, 50, 5.0


class Pace:
    """Finds stragglers by each rank's seconds per device batch without waiting, so that one logical worker more doesn't matter. The median is
    the lower one: of two ranks the faster."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, float]] = {}  # by rank: batches, busy seconds
        self._reported: set[int] = set()

    def restart(self) -> None:
        """Discard the times of a suspended job."""
        self._before = {}

    def look(self, seen: Sequence[Seen]) -> list[str]:
        """Return reports of ranks that have become slow."""
        living = [one for one in seen if not one.ended]
        now, before = {one.rank: (one.batches, one.busy) for one in living}, self._before
        if len(now) < 2 or set(now) - set(before):
            self._before = now
            return []
        grown = {rank: (batches - before[rank][0], busy - before[rank][1]) for rank, (batches, busy) in now.items()}
        if any(batches < WINDOW for batches, _ in grown.values()) or max(busy for _, busy in grown.values()) < WINDOW_S:
            return []
        self._before = now
        times = {rank: busy / batches for rank, (batches, busy) in grown.items()}
        median = sorted(times.values())[(len(times) - 1) // 2]
        slow = {rank for rank, time in times.items() if time > SLOW * median > 0}
        news, self._reported = slow - self._reported, slow
        return [
            f"{one.name} is slow: a device batch takes it {times[one.rank]:.3g} s, {times[one.rank] / median:.1f} x the median of all "
            f"{len(times)}; the others wait for it"
            for one in living
            if one.rank in news
        ]


LONGEST = 64 * 1024  # bytes of a datagram


@dataclass(frozen=True, slots=True)
class Word:
    """A datagram. `token`: the job's secret. `seen`: the sender's worker. `end`: why the job ends, by rank 0's monitor."""

    token: str
    seen: Seen
    end: str = ""


class Peers:
    """The monitors that this one talks to: all others on rank 0, rank 0's on another rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.socket: socket.socket | None = None
        self._token = ""
        self._addresses: dict[int, Any] = {}
        self._heard: dict[int, tuple[float, Seen]] = {}  # time and record

    def meet(self, token: str, link: socket.socket) -> None:
        """Start to talk; on other ranks the link is connected to rank 0's."""
        self._token, self.socket = token, link
        link.setblocking(False)
        if self.rank:
            self._addresses[0] = link.getpeername()

    def speak(self, seen: Seen, end: str = "") -> None:
        """Send without waiting for the receiver."""
        word = json_line(Word(self._token, seen, end))
        for address in self._addresses.values():
            with suppress(OSError):
                self.socket.sendto(word, address)  # type: ignore[union-attr]

    def hear(self, now: float) -> str:
        """Read the datagrams. Return why rank 0's monitor ends the job, or ''."""
        end = ""
        with suppress(OSError):  # no more datagrams, or the receiver of the last one is gone
            while True:
                data, address = self.socket.recvfrom(LONGEST)  # type: ignore[union-attr]
                word = None
                with suppress(ValueError):
                    word = decode(Word, data)
                if (
                    word is None or not self._token or word.token != self._token
                ):  # a stranger's, or before the ranks have met
                    continue
                rank = word.seen.rank
                if self.rank == 0 and 0 < rank < self.size:
                    self._addresses[rank] = address
                elif self.rank and rank == 0:
                    end = end or word.end
                else:
                    continue
                if rank not in self._heard or not self._heard[rank][1].ended:  # a late datagram of an ended rank
                    self._heard[rank] = now, word.seen
        return end

    def seen(self, now: float) -> list[Seen]:
        """Return the records of the other watched ranks."""
        records = []
        for heard, seen in self._heard.values():
            age = now - heard
            records.append(replace(seen, ended=seen.ended + age) if seen.ended else replace(seen, silence=age))
        return records

    def gone(self, now: float) -> list[str]:
        """Return the names of ranks that vanished: they ended unannounced or fell silent."""
        ranks = sorted(self.seen(now), key=lambda one: one.rank)
        return [one.name for one in ranks if not one.worded or one.silence >= quiet(self.size)]

    def judged(self, now: float) -> bool:
        """Return whether rank 0's monitor judges, and its worker lives."""
        return any(one.rank == 0 and not one.ended and one.silence < quiet(self.size) for one in self.seen(now))

    def woke(self, now: float) -> None:
        """Reset the silences after this process, or the machine, was stopped."""
        self._heard = {rank: (now, seen) for rank, (_, seen) in self._heard.items()}
