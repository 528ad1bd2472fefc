"""`stagerun.plan`: what a run would do, as a value."""

import os
from dataclasses import dataclass, fields

from stagerun.base.recipe import Schedule
from stagerun.base.text import count
from stagerun.command.shared import output_folder
from stagerun.plan import planned
from stagerun.plan.render import render_text
from stagerun.tools.library.common import Folder, Names, names_of, require_name, schedule_of
from stagerun.train.keeper import Selection
from stagerun.train.output import plan_of


@dataclass(frozen=True, slots=True, repr=False)
class Plan(planned.Plan):
    """What `run` would do. As text it is what `stagerun plan` prints."""

    def __str__(self) -> str:
        return render_text(self)

    def __repr__(self) -> str:
        stages = count(len(self.stages), "stage")
        return f"<Plan of {self.schedule.name}: {stages}, {self.left} to do>"


def plan(
    schedule: Schedule | Folder,
    out: Folder | None = None,
    *,
    overrides: Names = (),
    redo: Names = (),
    only: Names = (),
    until: str | None = None,
) -> Plan:
    """What `run` would do with the same arguments. Works where the data is not, and loads neither torch nor numpy.

    `out`: the output folder, by default out/NAME. RecipeError for mistakes in the files or a stage that there isn't.
    """
    require_name(until)
    found = schedule_of(schedule, overrides)
    folder = output_folder(found.name, None if out is None else os.fspath(out))
    made = plan_of(found, folder, Selection(names_of(redo), names_of(only), until))
    return Plan(**{field.name: getattr(made, field.name) for field in fields(made)})
