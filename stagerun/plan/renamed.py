"""Snapshots under the names that their stages have now. Pure.

A stage that several are made of names them after what they start from, so one more entry in `from` gives those that are trained
already other names; and a person may think of a better word. The name is none of what a snapshot depends on: what was trained under
a name that the schedule no longer has counts for the stage that it counts for by everything else, and is that stage's from then on.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from stagerun.plan.counting import Source, counts
from stagerun.plan.planned import State
from stagerun.recipe import Stage
from stagerun.snapshots import Inventory, SnapshotRef


def taken_over(stage: Stage, source: Source | None, inventory: Inventory, known: Collection[str]) -> Inventory:
    """The inventory in which `stage` has what counts for it of names that are not `known`: those of the schedule.

    To be asked in running order, which makes the first of several stages that could have the same snapshots their owner.
    A name that came to the stage's end is taken only where the stage has no end yet, its own first: of two stages that were
    trained alike each finds its own. What is not an end may come from several names, since a stage can be renamed in its midst, and
    twice. Where the snapshot that it came from is gone, what is older than all that is left of the parent came from another
    one.
    """
    if source is not None and not source.at and source.parent.state not in (State.DONE, State.RESUME):
        return inventory  # under a parent that is yet to be trained nothing tells one stage from another
    length = stage.solver.max_iter
    ended = any(ref.iter == length for ref in inventory.of(stage.name) if counts(ref, stage, source, inventory))
    since = source.since if source is not None and not source.at else 0
    taken: dict[str, str] = {}
    for refs in _of_others(inventory, known).values():
        fitting = [ref for ref in refs if counts(ref, stage, source, inventory) and ref.attempt >= since]
        ends = any(ref.iter == length for ref in fitting)
        if ends and ended:
            continue
        ended = ended or ends
        taken |= {ref.name: stage.name for ref in fitting}
    return under(inventory, taken)


def under(inventory: Inventory, names: Mapping[str, str]) -> Inventory:
    """The inventory with snapshots under other stages: by the snapshot's name the stage's."""
    if not names:
        return inventory

    def renamed(ref: SnapshotRef) -> SnapshotRef:
        if ref.name not in names or names[ref.name] == ref.stage:
            return ref
        return replace(ref, stage=names[ref.name], trained_as=ref.trained_as or ref.stage)

    return replace(inventory, snapshots=tuple(renamed(ref) for ref in inventory.snapshots))


def names_of(inventory: Inventory) -> dict[str, str]:
    """What `under` must be told to come from the inventory of a disk to this one."""
    return {ref.name: ref.stage for ref in inventory.snapshots if ref.trained_as}


def _of_others(inventory: Inventory, known: Collection[str]) -> dict[str, list[SnapshotRef]]:
    """By name, the one that was started first coming first."""
    found: dict[str, list[SnapshotRef]] = {}
    for ref in inventory.snapshots:  # oldest first
        if ref.stage not in known:
            found.setdefault(ref.stage, []).append(ref)
    return found
