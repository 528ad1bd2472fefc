"""The proofs that a log holds, whether their chains are whole, and which stretches of training check a choice of them. Pure."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagerun.base.events import Event, Proof, StageStarted
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.schedule.audits import broken_link

Proofs = Mapping[str, Mapping[int, Proof]]  # by stage, then by iteration


def proofs_of(events: Iterable[Event]) -> tuple[Proofs, list[str]]:
    """Those on the way that each stage has come, and what contradicts itself. What was trained again after a kill or a rollback replaces what
    was there, which must be the same unless images were left out."""
    found: dict[str, dict[int, Proof]] = {}
    wrong: list[str] = []
    for event in events:
        if isinstance(event, StageStarted):
            its = found.setdefault(event.stage, {})
            begins = event.iter == event.begins
            for iter in [n for n in its if n > event.iter or begins]:
                del its[iter]
        elif isinstance(event, Proof):
            its = found.setdefault(event.stage, {})
            if event.iter in its and its[event.iter] != event:
                wrong.append(f"the log has two proofs of `{event.stage}` at iteration {event.iter} that differ")
            its[event.iter] = event
    return {stage: dict(sorted(its.items())) for stage, its in found.items() if its}, wrong


def broken_chains(schedule: Schedule, proofs: Proofs) -> list[str]:
    """One sentence for each stage whose proofs don't follow from one another, or from those of the stage that it starts from."""
    found = []
    for stage in schedule.stages:
        its = proofs.get(stage.name, {})
        before = ""
        if stage.parent is not None and stage.average is None:
            parent = proofs.get(stage.parent, {}).get(schedule.start_iter(stage))
            before = parent.chain if parent is not None else ""
        links = [(p.iter, p.state, p.chain) for p in its.values()]
        if links and (iter := broken_link(before, links)) is not None:
            found.append(f"the proof of `{stage.name}` at iteration {iter} does not follow from the one before it")
    return found


@dataclass(frozen=True, slots=True)
class Stretch:
    """Training of a stage from a snapshot on disk (None: from the stage's start) up to iteration `until`, by which the proofs at `iters` are
    checked, the chosen ones and those between."""

    stage: str
    base: SnapshotRef | None
    begins: int
    until: int
    iters: tuple[int, ...] = field(default=())

    @property
    def iterations(self) -> int:
        return self.until - self.begins


def stretches(
    schedule: Schedule, proofs: Proofs, snapshots: Sequence[SnapshotRef], number: int, seed: int
) -> list[Stretch]:
    """Those that check `number` proofs, drawn evenly from all that lie behind something to train from."""
    stages = {stage.name: stage for stage in schedule.stages if stage.enabled}
    places = [(name, n) for name in stages for n in proofs.get(name, {}) if n > stages[name].begins]
    drawn = random.Random(seed).sample(places, min(number, len(places)))
    found: dict[tuple[str, int], Stretch] = {}
    for name, iter in sorted(drawn):
        base = newest_before(snapshots, stages[name], iter)
        begins = base.iter if base is not None else stages[name].begins
        iters = tuple(n for n in proofs[name] if begins < n <= iter)
        found[name, begins] = Stretch(name, base, begins, iter, iters)  # the last drawn is the furthest
    return list(found.values())


def newest_before(snapshots: Sequence[SnapshotRef], stage: Stage, iter: int) -> SnapshotRef | None:
    """The stage's newest snapshot before an iteration."""
    own = [ref for ref in snapshots if ref.stage == stage.name and ref.iter < iter]
    return max(own, key=lambda ref: (ref.skipped, ref.iter, ref.attempt), default=None)
