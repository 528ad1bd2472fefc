"""The plan of a run before it holds its folder."""

from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.plan import Plan, make_plan, require_fresh
from stagerun.plan.plan import choice
from stagerun.train.options import RunOptions
from stagerun.train.output import DISK
from stagerun.train.results import relied_on

# Larger snapshots are looked at by the worker alone, which knows how large the network makes them: who forges one may claim any size.
_LOOKED_AT_BYTES = 16 * 10**9


def whole_plan(schedule: Schedule, out: Path, options: RunOptions) -> tuple[Plan, Inventory]:
    """Return the plan, and what it was made of: snapshots that read back otherwise than they were written don't count, as for the workers. The
    folder can be written then, and no lock says that it is held. A run on another host, of which only a lease is seen, is waited for by
    the worker."""
    choice(schedule, *options.selection)  # a mistake in a name comes before a folder that is held
    store.prepare(DISK, out)
    with store.Lock(out, optional=True):
        found = store.inventory(DISK, out)
        plan = make_plan(schedule, found, *options.selection)
        while harmed := [
            ref for ref in relied_on(plan) if ref.bytes <= _LOOKED_AT_BYTES and store.is_harmed(DISK, out, ref.name)
        ]:
            whole = tuple(ref for ref in found.snapshots if ref not in harmed)
            found = replace(found, snapshots=whole, damaged=(*found.damaged, *(ref.name for ref in harmed)))
            plan = make_plan(schedule, found, *options.selection)
    require_fresh(plan)
    return plan, found
