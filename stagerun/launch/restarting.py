"""One life of a job on several hosts: its workers are started through the agents and watched to their end; and what comes after it:
the end, or another life, and on which hosts. No torch."""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from stagerun.base.errors import WORTH_ANOTHER_START, ExitCode
from stagerun.base.text import count, listed
from stagerun.launch.folder import Report
from stagerun.launch.local import too_late, verdict
from stagerun.launch.remote import Message, Remote
from stagerun.launch.sparing import lost_text, patience
from stagerun.launch.start import Orders
from stagerun.system import signals

RELEASED_S = 10.0
AGAIN = "run the same command again: it goes on from the newest snapshot"


@dataclass(frozen=True, slots=True)
class Policy:
    """`hosts`: all, in the order of ranks. `least`: hosts that must be there. `restarts`: so many failures are answered with another
    life."""

    hosts: tuple[str, ...]
    least: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A life. `code`, `text`: the verdict over all its workers. `hosts`: those that had some. `lost`: of these, what became of them.
    `asked`: a person or a scheduler wants the end. `answering`: hosts that can be started now, of all. `sees_out`: those that saw what
    rank 0's host writes when the life began. `releasing`: workers of an earlier life may still save. `slept`: seconds that the launcher
    was stopped for, where the hosts took it for gone. `restarts`: how many there were before."""

    code: int
    text: str
    hosts: tuple[str, ...]
    lost: tuple[str, ...] = ()
    asked: bool = False
    answering: tuple[str, ...] = ()
    sees_out: frozenset[str] = frozenset()
    releasing: bool = False
    slept: float = 0.0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Again:
    """Another life on `hosts`, in `wait` seconds. `failure`: one of those that are counted. `says`: to the user."""

    hosts: tuple[str, ...]
    failure: bool
    says: str
    wait: float = 0.0


def decide(ended: Ended, policy: Policy) -> Finish | Again:
    """Worth another life: workers that were killed or lost each other (69), or held other weights (80: what came of a bit that flipped
    was not saved), and a stop that was made to take a host in (75). What a person has to mend is not, nor is a full disk."""
    if ended.asked or ended.code == ExitCode.DONE:
        return Finish(ended.code, ended.text)
    if ended.code == ExitCode.SAVED and not ended.lost:
        came = [name for name in ended.answering if name not in ended.hosts]
        if not came:  # someone stopped the workers of a host there
            return Finish(ended.code, ended.text)
        several = len(came) > 1
        says = f"{listed(came)} answer{'' if several else 's'} again: going on with {'them' if several else 'it'}"
        return Again(_ordered(ended, policy), False, says)
    if ended.code == ExitCode.IN_USE and ended.releasing:
        says = f"{_first_line(ended.text)}; it may be what the last life has left, and saves: next try in {RELEASED_S:.0f} s"
        return Again(_ordered(ended, policy), False, says, RELEASED_S)
    if ended.code not in WORTH_ANOTHER_START or ended.code == ExitCode.STORAGE:
        return Finish(ended.code, ended.text)
    gone = [name for name in ended.lost if name not in ended.answering]
    left = _ordered(ended, policy)
    head = ended.hosts[0]
    why = f"{listed(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else _first_line(ended.text)
    if head in gone and not left:
        return Finish(
            _saved_or_gone(ended),
            f"{why}: the output folder is there, and no other host sees it\n  hint: {AGAIN} when {head} is back",
        )
    if gone and len(left) < policy.least:
        more = "" if policy.least < len(policy.hosts) else "; with --min-nodes it would go on with fewer hosts"
        needed = f"{count(len(left), 'host')} left of at least {policy.least}"
        return Finish(_saved_or_gone(ended), f"{why}: {needed}\n  hint: {AGAIN}{more}")
    if ended.slept:
        says = f"the launcher was stopped for {ended.slept:.0f} s, so the hosts have saved and ended: going on with {listed(left)}"
        return Again(left, False, says)
    if ended.restarts >= policy.restarts:
        done = (
            f"and {count(policy.restarts, 'restart')} {'was' if policy.restarts == 1 else 'were'} made before"
            if policy.restarts
            else ""
        )
        return Finish(ended.code, f"{ended.text}\n{done}".strip() if done else ended.text)
    return Again(
        left, True, f"{why}; going on with {listed(left)}, restart {ended.restarts + 1} of at most {policy.restarts}"
    )


def _ordered(ended: Ended, policy: Policy) -> tuple[str, ...]:
    """Hosts for another life. The first has rank 0, and reads and writes the output folder: the one that did before, or one that has seen
    it do so and was there ever since. Who was away may have come back without that file system, and would begin anew."""
    there = [name for name in policy.hosts if name in ended.answering]
    head = ended.hosts[0]
    fit = [name for name in there if name in ended.sees_out and name not in ended.lost]
    first = head if head in there else fit[0] if fit else None
    return (first, *(name for name in there if name != first)) if first is not None else ()


def _saved_or_gone(ended: Ended) -> int:
    return ended.code if ended.code == ExitCode.SAVED else int(ExitCode.PEER)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


_LOOK_S = 0.25
_END_S, _MARGIN_S = 2.0, 60.0
# The signal that stands for a stop which only the launcher wants.
_OWN_STOP = signal.SIGUSR1


class Asking:
    """The stop signals that came to this process, from `install` on."""

    def __init__(self) -> None:
        self.numbers: list[signal.Signals] = []

    def install(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self.numbers.append(signal.Signals(number))

        for number in signals.stop_signals():
            signal.signal(number, note)

    def __bool__(self) -> bool:
        return bool(self.numbers)

    @property
    def impatient(self) -> bool:
        """Someone at the keyboard means it."""
        return self.numbers.count(signal.SIGINT) > 1


@dataclass
class LifeEnd:
    code: int
    text: str
    lost: dict[str, str] = field(default_factory=dict)  # host, how
    last_heard: float = 0.0  # of a lost one, of time.monotonic(); 0: none was lost
    slept: float = 0.0  # seconds that this process was stopped for, where that is why hosts are lost


class Lived:
    """`workers`: by host, in the order of ranks. `endpoint` and `job` as of `local.Node`."""

    def __init__(
        self,
        remote: Remote,
        workers: Mapping[str, int],
        endpoint: str,
        job: str,
        orders: Orders,
        asking: Asking,
        say: Callable[[str], None],
    ) -> None:
        self._remote, self._workers, self._orders, self._asking, self._say = remote, workers, orders, asking, say
        self._waiting = set(workers)
        self._reports: list[Report] = []
        self._deaths: dict[int, int] = {}
        self._failed: dict[str, tuple[int, str]] = {}
        self._lost: dict[str, str] = {}
        self._last_heard = self._slept = 0.0
        self._late = False
        self._spared: list[tuple[float, str]] = []  # of workers that the others go on without: when to say what
        self._stopped = 0.0  # when the workers were asked to stop
        self._trouble = 0.0  # when something went wrong
        self._hosts: dict[int, str] = {}  # by rank
        first = 0
        for index, (name, nproc) in enumerate(workers.items()):
            node = {"index": index, "count": len(workers), "first": first, "endpoint": endpoint, "job": job}
            remote.send(
                name, "go", command=list(orders.command), nproc=nproc, threads=orders.threads,
                grace=orders.grace, saves=orders.saves, node=node,
            )  # fmt: skip
            self._hosts |= dict.fromkeys(range(first, first + nproc), name)
            first += nproc

    def to_its_end(self, come: Callable[[], str]) -> LifeEnd:
        """`come`: says which host answers that is to be taken in, and '' as a rule; then all is saved and stopped."""
        while self._waiting:
            for message in self._remote.receive(_LOOK_S):
                self._heard(message)
            if self._asking.impatient:
                return self._at_once()
            if self._asking and not self._stopped:
                self._stop(self._asking.numbers[0])
            elif not self._stopped and not self._trouble and (text := come()):
                self._say(text)
                self._stop(_OWN_STOP)
            self._tell_of_spared(time.monotonic())
            self._end_late()
        if any(one.rank == 0 and one.code == ExitCode.DONE for one in self._reports):
            self._tell_of_spared(math.inf)
        code, text = self._verdict()
        return LifeEnd(code, text, self._lost, self._last_heard, self._slept)

    def _tell_of_spared(self, now: float) -> None:
        """Where it is the others' end, too, that says why."""
        due = [] if self._trouble else [text for at, text in self._spared if at <= now]
        for text in due:
            self._say(text)
        self._spared = [(at, text) for at, text in self._spared if text not in due]

    def _at_once(self) -> LifeEnd:
        """All workers are killed; rank 0 may have saved all by then, and be about to say so."""
        for name in self._waiting:
            self._remote.send(name, "end")
        last = time.monotonic() + _END_S
        while self._waiting and time.monotonic() < last:
            for message in self._remote.receive(_LOOK_S):
                self._heard(message)
        first = [one for one in self._reports if one.rank == 0]
        if first and first[0].code in (ExitCode.DONE, ExitCode.SAVED):
            return LifeEnd(first[0].code, first[0].text)
        return LifeEnd(ExitCode.INTERRUPTED, "ended without saving")

    def _stop(self, number: signal.Signals) -> None:
        self._stopped = time.monotonic()
        for name in self._waiting:
            self._remote.send(name, "stop", signal=int(number))

    def _heard(self, message: Message) -> None:
        words, host = message.words, message.host
        if host not in self._workers:
            return
        match message.kind:
            case "ended":
                self._waiting.discard(host)
                self._reports += [Report(*one) for one in words["reports"]]
                self._deaths |= dict(words["deaths"])
                self._late |= bool(words["late"])
                self._tell_over(words["reports"])
                bad = any(r[1] not in (ExitCode.DONE, ExitCode.SAVED) for r in words["reports"])
                if bad or words["deaths"]:
                    self._trouble = self._trouble or time.monotonic()
            case "spared":
                due = time.monotonic() + patience(words["code"])
                self._spared.append((due, lost_text(words["rank"], words["code"], words["text"], host)))
            case "failed":
                self._waiting.discard(host)
                self._failed[host] = (words["code"], f"{host}: {words['text']}")
                self._tell_gone(self._failed[host][1])
            case "lost" if host in self._waiting:
                self._waiting.discard(host)
                ranks = [rank for rank, name in self._hosts.items() if name == host]
                text = f"{words['text']} (rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))})"
                if self._remote.spared(host).issuperset(ranks):
                    self._say(f"warning: {text}; the others go on without it")
                    return
                self._lost[host] = words["text"]
                self._slept = max(self._slept, self._remote.slept)
                self._last_heard = max(self._last_heard, self._remote.heard(host))
                self._say(text)
                self._tell_gone(f"{text}\n  hint: {AGAIN}")

    def _tell_over(self, reports: Sequence[tuple[int, int, str]]) -> None:
        """Rank 0 has ended well: a worker that it went on without, and that is stopped, needs no one any more."""
        if any(rank == 0 and code == ExitCode.DONE for rank, code, _ in reports):
            for name in self._waiting:
                self._remote.send(name, "over")

    def _tell_gone(self, text: str) -> None:
        """The others would wait for it."""
        self._trouble = self._trouble or time.monotonic()
        for name in self._waiting:
            self._remote.send(name, "gone", text=text, watched=self._orders.limits is not None)

    def _end_late(self) -> None:
        """Hosts that are still busy when all time is over. Their agents kill what is late, after a stop and after a worker's end; this is
        for an agent that doesn't come to it."""
        began = self._stopped or self._trouble
        if began and time.monotonic() > began + self._orders.grace + _MARGIN_S:
            for name in sorted(self._waiting):
                self._remote.send(name, "end")
                self._failed[name] = (ExitCode.PEER, f"{name}: its workers had not ended in time, and were killed")
            self._waiting.clear()

    def _verdict(self) -> tuple[int, str]:
        reports = sorted(self._reports, key=lambda one: one.rank)
        if not reports and not self._deaths and (self._lost or self._failed):
            code, text = next(iter(self._failed.values()), (int(ExitCode.PEER), ""))
            return code, text or f"{next(iter(self._lost.values()))}\n  hint: {AGAIN}"
        code, text = verdict(reports, self._deaths, bool(self._stopped), self._orders.stopped, self._hosts)
        if code == ExitCode.PEER and self._late:
            return code, too_late((self._asking.numbers or [_OWN_STOP])[0], self._orders.grace)
        if code == ExitCode.PEER and self._failed:
            return next(iter(self._failed.values()))
        return code, text
