"""Who hangs, who is slow: judged from what is known of each rank. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.text import duration, listed
from stagerun.system.pulse import Limits, Section

# Between two looks of a monitor, and two words to the others; in a large job a rank speaks more seldom.
TICK_S, RANKS_PER_TICK = 0.2, 100
_QUIET_S, _QUIET_TICKS = 2.0, 3
_MOST_NAMED = 4
_NO_TIME = 1e-9  # a slowest step that asks for no patience
_STATES = {
    "T": "is stopped (state T)",
    "t": "is held by a debugger (state t)",
    "D": "waits for a disk or a file server (state D), where no signal reaches it",
    "Z": "has ended (state Z)",
}
_HINT = "run the same command again: it goes on from the newest snapshot"


def tick(size: int) -> float:
    """Seconds, in a job of `size` ranks."""
    return max(TICK_S, TICK_S * size / RANKS_PER_TICK)


def quiet(size: int) -> float:
    """A host whose monitor has said nothing for so many seconds may be cut off: what it said last is old."""
    return max(_QUIET_S, _QUIET_TICKS * tick(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of a rank. Lengths of time are in seconds."""

    rank: int
    host: str
    pid: int
    section: Section
    stage: str = ""
    iter: int = 0
    idle: float = 0.0  # since there last was progress; of one that waits for others, since it began to
    waiting: bool = False
    printing: bool = False
    compiled: bool = False
    slowest: float = 0.0  # step of late in this section
    state: str = ""  # /proc's letter
    stopped: float = 0.0  # how long it has been T
    silence: float = 0.0  # since its monitor was last heard
    ended: float = 0.0  # since its worker ended, or was about to; 0: it lives
    batches: int = 0  # of training, in this process life
    busy: float = 0.0  # that they took, without waiting for others

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True, slots=True)
class Guilty:
    """Why a rank is to blame, in words, and whether its monitor can still be asked for its stack."""

    seen: Seen
    text: str
    reached: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job hangs. No one is `guilty` where all wait for each other; `text` says it then."""

    guilty: tuple[Guilty, ...]
    text: str = ""
    section: Section | None = Section.ITERATION  # whose time-out may have been too short

    def message(self, stacks: Mapping[int, str]) -> str:
        """For the user. `stacks`: by rank, '' where there is none."""
        lines = [self.text] if self.text else [guilty.text for guilty in self.guilty[:_MOST_NAMED]]
        if (more := len(self.guilty) - _MOST_NAMED) > 0:
            lines.append(f"and {more} more")
        for guilty in self.guilty[:_MOST_NAMED]:
            if stack := stacks.get(guilty.seen.rank, ""):
                whose = f"of rank {guilty.seen.rank}" if len(self.guilty) > 1 else "of this rank"
                lines.append(f"  the Python stack {whose}, the newest call first:")
                lines += [f"    {line}" for line in stack.splitlines()]
                break  # they mostly hang in the same place
        longer = f"; --timeout {self.section.value}=TIME gives it longer" if self.section is not None else ""
        lines.append(f"  hint: {_HINT}{longer}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Ending:
    """What the worker is to say and to end with."""

    text: str
    guilty: bool  # itself


def ending(rank: int, verdict: Verdict, stacks: dict[int, str]) -> Ending:
    return Ending(verdict.message(stacks), any(guilty.seen.rank == rank for guilty in verdict.guilty))


def judge(seen: Sequence[Seen], size: int, limits: Limits) -> Verdict | None:
    """None while all is well. `seen` are the ranks that are watched, of `size` in the job.

    A rank that waits for others is not to blame, unless its process is stopped.
    """
    living = [one for one in seen if not one.ended]
    guilty = [found for one in living if (found := _blame(one, limits, quiet(size))) is not None]
    if guilty:
        alone = _cut_off(living, guilty)
        return (
            Verdict((), alone, guilty[0].seen.section)
            if alone
            else Verdict(tuple(guilty), section=guilty[0].seen.section)
        )
    heard = all(one.waiting and one.silence < quiet(size) and one.state != "T" for one in living)
    if size == 1 or not living or not heard:
        return None
    # Whoever came last began to wait last; all that are watched have waited for the network, or for one that isn't, since then.
    last = min(living, key=lambda one: one.idle)
    limit = max(limits.of(one.section, one.slowest, one.compiled) for one in living)
    if len(living) < len(seen):
        return _wait_for_ended(last, living, [one for one in seen if one.ended], limits)
    if len(living) < size:
        # A rank of which nothing is known may be at something that takes it long; so no one is hasty here.
        limit = max(limit, limits.longest)
        missing = set(range(size)) - {one.rank for one in living}
        return _wait_for_unwatched(last, living, sorted(missing), limit) if last.idle >= limit else None
    if last.idle < limit:
        return None
    hosts = list(dict.fromkeys(one.host for one in seen))
    where = f"the network between {_names(hosts)}" if len(hosts) > 1 else f"the network device of {hosts[0]}"
    text = (
        f"all {len(living)} ranks have waited for each other for {seconds(last.idle)} (time-out {seconds(limit)}) {_place(last)}: "
        f"{where} does not carry what they send"
    )
    return Verdict((), text, last.section)


def _wait_for_ended(last: Seen, living: Sequence[Seen], ended: Sequence[Seen], limits: Limits) -> Verdict | None:
    """A collective that lacks a rank never ends. Gloo's ranks notice that at once, and end by themselves; NCCL's don't."""
    limit = max(limits.of(Section.ITERATION, one.slowest or _NO_TIME) for one in living)
    waited = min(last.idle, max(one.ended for one in ended))
    if waited < limit:
        return None
    text = (
        f"has ended, and the others have waited for it for {seconds(waited)} (time-out {seconds(limit)}) {_place(last)}"
    )
    return Verdict(tuple(Guilty(one, f"{one.name} {text}", reached=False) for one in ended), section=None)


def _wait_for_unwatched(last: Seen, living: Sequence[Seen], unwatched: Sequence[int], limit: float) -> Verdict:
    names = _names([f"rank {rank}" for rank in unwatched])
    text = (
        f"{_names([one.name for one in living])} waited for {seconds(last.idle)} (time-out {seconds(limit)}) {_place(last)} for others, of "
        f"which some are not watched: {names}"
    )
    return Verdict((), text, last.section)


def _blame(one: Seen, limits: Limits, quiet_s: float) -> Guilty | None:
    own = limits.of(one.section, one.slowest, one.compiled)
    # Nothing that goes well stops a process or silences a host, whatever the section is.
    short = min(own, limits.of(Section.ITERATION, one.slowest or _NO_TIME))
    if one.silence >= quiet_s:
        if one.silence < short:
            return None
        text = f"{one.name} can't be reached for {seconds(one.silence)} (time-out {seconds(short)}): its host, or the network to it, is down"
        return Guilty(one, f"{text}; it was {_place(one)}", reached=False)
    if one.state == "T" and one.stopped >= short:
        return Guilty(one, _still(one, max(one.stopped, 0.0 if one.waiting else one.idle), short), reached=True)
    idle = one.idle + one.silence
    if not one.waiting and not one.printing and one.state != "T" and idle >= own:
        return Guilty(one, _still(one, idle, own), reached=True)
    return None


def _cut_off(living: Sequence[Seen], guilty: Sequence[Guilty]) -> str:
    """Where one host hears nothing of any of several others, it is rather the one that is cut off; '' elsewhere."""
    silent = {one.seen.host for one in guilty if not one.reached}
    heard = [one for one in living if one.host not in silent]
    if len(silent) < 2 or len({one.host for one in heard}) != 1 or any(one.reached for one in guilty):
        return ""
    least = min(one.seen.silence for one in guilty)
    return (
        f"{heard[0].host} hears nothing of the other {len(silent)} hosts for {seconds(least)}: it is cut off from them, or the network "
        f"between all of them is down; it was {_place(heard[0])}"
    )


def _still(one: Seen, idle: float, limit: float) -> str:
    text = f"{one.name} has not moved for {seconds(idle)} (time-out {seconds(limit)}) {_place(one)}"
    return f"{text}; process {one.pid} {_STATES[one.state]}" if one.state in _STATES else text


def _place(one: Seen) -> str:
    place = f"in section {one.section.value}"
    return f"{place}, `{one.stage}` at iteration {one.iter}" if one.stage else place


def seconds(value: float) -> str:
    """Tenths where they matter."""
    return f"{value:.1f} s" if value < 10 and value != round(value) else duration(value)


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - _MOST_NAMED
    return listed([*hosts[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


# -- stragglers

# A rank is slow above so many times the median, over at least so many device batches of each rank, and so many seconds of the slowest:
# a moment's work of something else on the machine says nothing.
SLOW, WINDOW, WINDOW_S = 1.5, 50, 5.0
# It is reported again when it has become that much slower still.
_AGAIN = 1.5


@dataclass(frozen=True, slots=True)
class Compared:
    """What the stragglers are found from: each rank's counters at the last look, and how slow those are that were reported."""

    counters: Mapping[int, tuple[int, float]]  # by rank: batches, busy seconds
    reported: Mapping[int, float]
    spoiled: bool = False  # what came since then: the job was suspended


def stragglers(compared: Compared, seen: Sequence[Seen]) -> tuple[Compared, list[str]]:
    """The next Compared, and what to report.

    Compared are the seconds that a device batch takes each rank, without waiting for others: so it doesn't matter that some ranks
    have one logical worker more. The median is the lower one: of two ranks the faster. A host, one of several, whose ranks are all slow
    is named as one, with the mean over its ranks.
    """
    fresh, before = {one.rank: (one.batches, one.busy) for one in seen if not one.ended}, compared.counters
    if len(fresh) < 2 or set(fresh) - set(before):
        return replace(compared, counters=fresh), []
    grown = {rank: (batches - before[rank][0], busy - before[rank][1]) for rank, (batches, busy) in fresh.items()}
    if any(batches < WINDOW for batches, _ in grown.values()) or max(busy for _, busy in grown.values()) < WINDOW_S:
        return compared, []
    if compared.spoiled:
        return Compared(fresh, compared.reported), []
    times = {rank: busy / batches for rank, (batches, busy) in grown.items()}
    median = sorted(times.values())[(len(times) - 1) // 2]
    reported, news = dict(compared.reported), set[int]()
    for rank, time in times.items():
        ratio = time / median if median > 0 else 1.0
        if ratio <= SLOW:
            reported.pop(rank, None)
        elif ratio > reported.get(rank, 0.0) * _AGAIN:
            reported[rank] = ratio
            news.add(rank)
    living = [one for one in seen if not one.ended]
    return Compared(fresh, reported), _slow_texts(living, times, median, set(reported), news)


def _slow_texts(
    living: Sequence[Seen], times: Mapping[int, float], median: float, slow: set[int], news: set[int]
) -> list[str]:
    """A text for each host or rank that is `slow` and has something new."""
    ranks: dict[str, list[int]] = {}
    for one in living:
        ranks.setdefault(one.host, []).append(one.rank)
    texts = []
    for host, here in ranks.items():
        whole = len(ranks) > 1 and set(here) <= slow
        for group in [here] if whole else [[rank] for rank in here if rank in slow]:
            if not news & set(group):
                continue
            mean = sum(times[rank] for rank in group) / len(group)
            numbers = f"rank {group[0]}" if len(group) == 1 else f"each of its {len(group)} ranks"
            who = (
                f"{host} is slow: a device batch takes {numbers}"
                if whole
                else f"{numbers} on {host} is slow: a device batch takes it"
            )
            texts.append(
                f"{who} {mean:.3g} s, {mean / median:.1f} x the median of all {len(times)}; the others wait for it"
            )
    return texts
