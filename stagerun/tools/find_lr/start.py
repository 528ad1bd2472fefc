"""Where a stage starts, whatever there is of the stage itself. No torch."""

from dataclasses import replace

from stagerun.base.errors import UsageError
from stagerun.plan import Plan, PlannedStage, State, make_plan
from stagerun.plan.planned import label


def start_of(plan: Plan, name: str, out: str) -> PlannedStage:
    """The stage as it would start now, whatever there is of it. UsageError where what it starts from isn't there."""
    others = tuple(ref for ref in plan.inventory.snapshots if ref.stage != name)
    again = make_plan(plan.schedule, replace(plan.inventory, snapshots=others))
    planned = next(planned for planned in again.stages if planned.stage.name == name)
    stage = planned.stage
    if stage.parent is not None and (planned.start is None or planned.state is not State.FRESH):
        raise UsageError(
            f"stage `{name}` starts from `{label(stage.parent, stage.parent_iter)}`, of which there is no snapshot that counts in {out}",
            f"train it first, with `stagerun run DIR --until {stage.parent}`, or name another --out",
        )
    return planned
