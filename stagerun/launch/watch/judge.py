"""Who hangs, who is slow: judged from what is known of each rank. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.base.errors import AGAIN
from stagerun.base.text import duration, listed
from stagerun.system.pulse import Beat, Limits, Section

# Between two looks of a monitor, and two words to the others; in a large job a rank speaks more seldom.
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
    """A host whose monitor has said nothing for so many seconds may be cut off: what it said last is old."""
    return max(_QUIET_S, _QUIET_TICKS * tick(size))


@dataclass(slots=True, kw_only=True)
class Seen(Beat):
    """What is known of a rank: its last beat, whose `moved` and `since` are by its own host's clock, and more. Lengths of time in seconds."""

    rank: int
    host: str
    pid: int
    idle: float = 0.0  # since there last was progress; of one that waits for others, since it began to
    state: str = ""  # /proc's letter
    stopped: float = 0.0  # how long it has been T
    silence: float = 0.0  # since its monitor was last heard
    ended: float = 0.0  # since its worker ended, or was about to; 0: it lives
    worded: bool = True  # the worker knew that it ended
    stack: str | None = None  # once its own monitor has blamed it

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def place(self) -> str:
        """Another rank may have gone on since its monitor was last heard."""
        place, at = f"in section {self.section.value}", "at or after" if self.silence else "at"
        return f"{place}, `{self.stage}` {at} iteration {self.iter}" if self.stage else place


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job hangs. No one is `guilty` where all wait for each other; `lines` say why. `section`: whose time-out may have been too short."""

    guilty: tuple[Seen, ...]
    lines: tuple[str, ...]
    section: Section | None = None

    def message(self) -> str:
        """For the user, with the first stack that is known: they mostly hang in the same place."""
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
    """None while all is well. `seen` are the ranks that are watched, of `size` in the job.

    A rank that waits for others is not to blame, unless its process is stopped.
    """
    living, ended = [one for one in seen if not one.ended], [one for one in seen if one.ended]
    heard = [one for one in living if one.silence < quiet(size)]
    all_wait = bool(heard) and all(one.waiting and one.state != "T" for one in heard)
    # While the job goes on, silence says nothing: a monitor may have been killed.
    waited = min(one.idle for one in heard) if all_wait else 0.0
    blamed = [(one, text) for one in living if (text := blame(one, size, limits, waited))]
    if blamed:
        guilty, texts = zip(*blamed, strict=True)
        return Verdict(guilty, texts, guilty[0].section)
    if size == 1 or not all_wait or len(heard) < len(living):
        return None
    # Whoever came last began to wait last; all that are watched have waited for the network, or for one that isn't, since then.
    last = min(living, key=lambda one: one.idle)
    if ended:
        # A collective that lacks a rank never ends. Gloo's ranks notice that at once, and end by themselves; NCCL's don't.
        limit = max(limits.of(Section.ITERATION, one.slowest or _NO_TIME) for one in living)
        waited = min(last.idle, max(one.ended for one in ended))
        text = f"has ended, and the others have waited for it for {_over(waited, limit)} {last.place}"
        return Verdict(tuple(ended), tuple(f"{one.name} {text}" for one in ended)) if waited >= limit else None
    limit = max(limits.of(one.section, one.slowest, one.compiled) for one in living)
    missing = sorted(set(range(size)) - {one.rank for one in living})
    if missing:
        # A rank of which nothing is known may be at something that takes it long; so no one is hasty here.
        limit = max(limit, limits.longest)
    since = f"{_over(last.idle, limit)} {last.place}"
    if missing:
        whom = f"others, of which some are not watched: {listed([f'rank {rank}' for rank in missing], _NAMED)}"
        text = f"{listed([one.name for one in living], _NAMED)} waited for {since} for {whom}"
    else:
        hosts = list(dict.fromkeys(one.host for one in seen))
        where = (
            f"the network between {listed(hosts, _NAMED)}" if len(hosts) > 1 else f"the network device of {hosts[0]}"
        )
        text = f"all {size} ranks have waited for each other for {since}: {where} does not carry what they send"
    return Verdict((), (text,), last.section) if last.idle >= limit else None


def blame(one: Seen, size: int, limits: Limits, waited: float = 0.0) -> str:
    """Why a rank is to blame; '' if it isn't. `waited`: how long all that are heard have waited for others."""
    limit = limits.of(one.section, one.slowest, one.compiled)
    # Nothing that goes well stops a process or silences a host, whatever the section is.
    short = min(limit, limits.of(Section.ITERATION, one.slowest or _NO_TIME))
    if one.silence >= quiet(size):
        text = f"{one.name} can't be reached for {_over(one.silence, short)}: its host, or the network to it, is down"
        return f"{text}; it was {one.place}" if min(one.silence, waited) >= short else ""
    idle = one.idle + one.silence
    if one.state == "T":
        idle, limit = (max(one.stopped, 0.0 if one.waiting else one.idle) if one.stopped >= short else 0.0), short
    elif one.waiting or one.printing:
        return ""
    if idle < limit:
        return ""
    text = f"{one.name} has not moved for {_over(idle, limit)} {one.place}"
    return f"{text}; process {one.pid} {_STATES[one.state]}" if one.state in _STATES else text


def _over(value: float, limit: float) -> str:
    return f"{_seconds(value)} (time-out {_seconds(limit)})"


def _seconds(value: float) -> str:
    """Tenths where they matter."""
    return f"{value:.1f} s" if value < 10 and value != round(value) else duration(value)


# A rank is slow above so many times the median, over at least so many device batches of each rank, and so many seconds of the slowest:
# a moment's work of something else on the machine says nothing.
SLOW, WINDOW, WINDOW_S = 1.5, 50, 5.0


class Pace:
    """Finds stragglers, by the seconds that a device batch takes each rank without waiting for others: it doesn't matter that some ranks
    have one logical worker more. The median is the lower one: of two ranks the faster."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, float]] = {}  # by rank: batches, busy seconds
        self._reported: set[int] = set()

    def restart(self) -> None:
        """The job was suspended: what came since the last look says nothing."""
        self._before = {}

    def look(self, seen: Sequence[Seen]) -> list[str]:
        """What to report: a rank that has become slow."""
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
