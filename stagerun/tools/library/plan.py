"""`stagerun.plan`: what a run would do, as a value."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.text import count
from stagerun.command.shared import output_folder
from stagerun.language import load
from stagerun.plan import planned
from stagerun.plan.render import render_text
from stagerun.tools.status.output import plan_of
from stagerun.train.keeper import Selection

# -- what functions of the library take in several forms

Folder = str | os.PathLike[str]
Names = str | Sequence[str]


def names_of(given: Names) -> tuple[str, ...]:
    """One name, or several. UsageError for anything else."""
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if all(isinstance(name, str) for name in names):
        return names
    raise UsageError(f"{given!r} is neither a text nor several", 'write "NAME", or ["NAME", "NAME"]')


def require_name(until: str | None) -> None:
    """UsageError where `until` isn't one name."""
    if until is not None and not isinstance(until, str):
        raise UsageError(f"until={until!r}: one stage's name is wanted", "`only` takes several names")


def schedule_of(given: Schedule | Folder, overrides: Names) -> Schedule:
    """A schedule, or that of a folder with `overrides`. RecipeError; UsageError for overrides of what is loaded."""
    if not isinstance(given, Schedule):
        return load(os.fspath(given), names_of(overrides))
    if overrides:
        raise UsageError(
            "`overrides` belong to a schedule's folder, and this is a schedule that is loaded",
            "give them to `stagerun.load`",
        )
    return given


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
