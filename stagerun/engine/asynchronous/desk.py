"""What a replica asks server 0's process for, and what it is answered: `Hub` and `Replay` answer it there, `RemoteDesk` over the network."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration to compute. `claim`: its number in a record, -1 without one. `own_from`: what the replica has asked for before this
    iteration is no longer its own, unless it is the one to compute. `floor`: pushes of claims below it were applied, or are void."""

    iteration: int
    claim: int = -1
    own_from: int = 0
    floor: int = 0


@dataclass(frozen=True, slots=True)
class LegEnd:
    """The leg is over after `iter` iterations. `gone`: the ranks that are no longer there. `stopped`: someone asked for it. `wrong`: what
    isn't finite, '' if training goes on."""

    iter: int
    gone: tuple[int, ...] = ()
    stopped: bool = False
    wrong: str = ""
    skips: int = 0
    skips_in_all: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """An iteration that counts. `wrong`: why it has no push; `lr`, `seconds` of the replica's computing, `staleness` at server 0."""

    iteration: int
    replica: int
    loss: float
    seconds: float
    staleness: int = 0
    wrong: str = ""


class InOrder:
    """Pushes in the order of their claims, whichever is over first: so a run and its replay tell the same losses in the same order."""

    def __init__(self, claims: Iterable[int] = ()) -> None:
        self._coming, self._early = iter(claims), dict[int, Done | None]()
        self._next = next(self._coming, -1)

    def over(self, claim: int, done: Done | None) -> Iterator[Done]:
        """Those that need not wait for another any more. `done` is None for a push that doesn't count."""
        self._early[claim] = done
        while self._next in self._early:
            if (found := self._early.pop(self._next)) is not None:
                yield found
            self._next = next(self._coming, -1)


class Desk(Protocol):
    """What a replica asks for, here or over the network."""

    def ask(self, replica: int) -> int | None:
        """The next iteration that its loader is to read; None at the stage's end."""

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        """Waits for what the replica is to do now. `stop`: it asks all to stop."""

    def claim(self, replica: int, seen: Sequence[int], computed: Done) -> int:
        """Waits for its turn to push: the number of its claim, or -1: it came too late, and is to begin another. `seen`: the versions that it
        has pulled, by server. `computed`: what there is to say of it if its push is applied."""

    def done(self, replica: int, done: Done) -> None:
        """All servers have its push; or it has none, since something isn't finite."""
