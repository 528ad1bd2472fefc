"""The proofs that a log holds, whether their chains are whole, and how each stage came to where it is. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stagerun.base.events import Event, NotFinite, Proof, RunStarted, SnapshotWritten, StageStarted
from stagerun.base.recipe import Schedule
from stagerun.plan import PlannedStage, State
from stagerun.schedule.audits import broken_link


@dataclass(frozen=True, slots=True)
class Return:
    """`on_nan: ROLLBACK`: the update after `iter` updates failed, and training went on from `back_to` with other images."""

    iter: int
    back_to: int


@dataclass(slots=True)
class Way:
    """How a stage came to where it is, without what it gave up. `lives`: from which iteration on which process life trained it; `returns`:
    by number, as far as they led here. What lies behind `back_to` of one was trained after it."""

    proofs: dict[int, Proof] = field(default_factory=dict)
    lives: list[tuple[int, RunStarted]] = field(default_factory=list)
    returns: dict[int, Return] = field(default_factory=dict)

    def number(self, iter: int) -> int:
        """How often the stage had gone back when it trained this iteration."""
        return max((number for number, one in self.returns.items() if one.back_to < iter), default=0)

    def between(self, number: int, iter: int) -> dict[int, Return]:
        """What led to an iteration since the stage had gone back `number` times."""
        return {n: one for n, one in self.returns.items() if number < n <= self.number(iter)}

    def leads(self, iter: int, number: int, until: int) -> bool:
        """Whether the way to `until` comes by `iter` when the stage has gone back `number` times."""
        return number <= self.number(until) and all(iter <= one.back_to for one in self.between(number, until).values())

    def gave_up(self, iter: int, number: int) -> bool:
        """Whether a later return left the state at `iter` behind."""
        return any(n > number and one.back_to < iter <= one.iter for n, one in self.returns.items())


class _Reading:
    """A way while the log is read, and what is known of its snapshots. `returning`: a failure was the last that is known of this life."""

    def __init__(self) -> None:
        self.way, self.returning = Way(), False
        self.written: dict[str, int] = {}  # snapshot: how often the stage had gone back by then

    def goes_on(self, event: StageStarted, life: RunStarted | None) -> None:
        way, anew = self.way, event.iter == event.begins
        if not self.returning:  # but from a snapshot that a kill, or workers that differed, left
            number = -1 if anew else self.written.get(event.start, max(way.returns, default=0))
            kept = {n: one for n, one in way.returns.items() if n <= number and one.back_to < event.iter}
            way.returns = kept
        self.returning = False
        way.proofs = {n: proof for n, proof in way.proofs.items() if n <= event.iter and not anew}
        way.lives = [(n, other) for n, other in way.lives if n < event.iter]
        if life is not None:
            way.lives.append((event.iter, life))

    def failed(self, event: NotFinite) -> None:
        if event.back_to is not None and event.until is None:
            self.way.returns = {n: one for n, one in self.way.returns.items() if n < event.number}
            self.way.returns[event.number] = Return(event.iter, event.back_to)
            self.returning = True


def ways_of(events: Iterable[Event]) -> tuple[dict[str, Way], list[str]]:
    """The way of each stage that has proofs, and what contradicts itself. What was trained again after a kill or a rollback replaces what
    was there, which must be the same unless images were left out."""
    found: dict[str, _Reading] = {}
    wrong: list[str] = []
    life: RunStarted | None = None
    for event in events:
        if isinstance(event, RunStarted):
            life = event
            for one in found.values():
                one.returning = False
        if not isinstance(event, StageStarted | NotFinite | SnapshotWritten | Proof):
            continue
        its = found.setdefault(event.stage, _Reading())
        match event:
            case StageStarted():
                its.goes_on(event, life)
            case NotFinite():
                its.failed(event)
            case SnapshotWritten():
                its.written[event.name] = max(its.way.returns, default=0)
            case Proof():
                if its.way.proofs.get(event.iter, event) != event:
                    wrong.append(f"the log has two proofs of `{event.stage}` at iteration {event.iter} that differ")
                its.way.proofs[event.iter] = event
    ways = {stage: its.way for stage, its in found.items() if its.way.proofs}
    for stage, way in ways.items():
        way.proofs = dict(sorted(way.proofs.items()))
        if not way.lives:
            wrong.append(f"the log has proofs of `{stage}`, and no run that trained it")
    return ways, wrong


def broken_chains(schedule: Schedule, ways: Mapping[str, Way]) -> list[str]:
    """One sentence for each stage whose proofs don't follow from one another, or from those of the stage that it starts from."""
    found = []
    for stage in schedule.stages:
        its = ways.get(stage.name, Way()).proofs
        before = ""
        if stage.parent is not None and stage.average is None:
            # The last before: `early_stop` may have ended the parent, or it had passed there when the stage was written.
            links = ways.get(stage.parent, Way()).proofs.values()
            before = next((p.chain for p in reversed(links) if p.iter <= schedule.start_iter(stage)), "")
        own = [(p.iter, p.state, p.chain) for p in its.values()]
        if own and (iter := broken_link(before, own)) is not None:
            found.append(f"the proof of `{stage.name}` at iteration {iter} does not follow from the one before it")
    return found


def missing(planned: PlannedStage, way: Way | None) -> list[int]:
    """The iterations of what is trained that lack the proof that a run writes. Those at its snapshots are left to the snapshots."""
    audit, begins = planned.stage.solver.audit, planned.stage.begins
    if audit is None or not audit.proof_iter or planned.state not in (State.DONE, State.RESUME):
        return []
    every = audit.proof_iter
    due = {begins, *range((begins // every + 1) * every, planned.iter + 1, every)}
    if planned.state is State.DONE:
        due.add(planned.iter)
    return sorted(due - (way.proofs.keys() if way is not None else set()))
