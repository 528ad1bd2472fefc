"""What comes after a life of a job on several hosts: its end, or another life, and on which hosts. Pure."""

from dataclasses import dataclass

from stagerun.errors import WORTH_ANOTHER_START, ExitCode
from stagerun.text import count, listed

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
        if not came:  # somebody stopped the workers of a host there
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
