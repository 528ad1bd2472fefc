"""`--plot FILE.svg` of `plan` and `diff`: the picture of a schedule, or of two."""

import os
from pathlib import Path
from typing import Annotated

import click

from stagerun.base.errors import StorageError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.command.ending import tell
from stagerun.command.options import option
from stagerun.drawing.picture import Picture, Unit, make_picture
from stagerun.drawing.scale import make_scale
from stagerun.drawing.svg import require_svg
from stagerun.plan import Plan
from stagerun.plan.hours import Hours, spent
from stagerun.system.files import writing
from stagerun.tools.plan.hours import HINT
from stagerun.train.hours import find_hours

PlotFile = Annotated[str | None, option("--plot FILE.svg", "Also draw it.")]
Scale = Annotated[
    str | None,
    option(
        "--scale",
        "With --plot: of the learning rate.  [default: log where it falls far for long]",
        type=click.Choice(("log", "linear")),
    ),
]


def check(file: str | None, x: str | None, scale: str | None) -> None:
    """UsageError and StorageError for what is wrong whatever the schedule is."""
    if file is None:
        if x or scale:
            raise UsageError(f"{'--x' if x else '--scale'} is for a picture", "add --plot FILE.svg, or leave it out")
        return
    require_svg(file)
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        raise StorageError(
            f"can't write {file}: there is no folder {folder}", "make it first, or give --plot another file"
        )


def write(file: str, picture: Picture, x: str | None, scale: str | None) -> None:
    """`x` and `scale` are those options. StorageError and PermissionDenied for the file."""
    from stagerun.tools.view.chart import file as drawn

    log = None if scale is None else scale == "log"
    data = drawn(picture, Unit(x or "epochs"), make_scale(picture, log))
    with writing(file, "give --plot another file"):
        Path(file).write_bytes(data)
    tell(f"written to {file}")


def over_hours(plan: Plan, out: Path, images_per_second: float | None) -> Picture:
    """UsageError where the hours of a stage are unknown."""
    schedule = plan.schedule
    hours = find_hours(plan, out, images_per_second)
    if hours is None:
        raise UsageError("--x hours needs to know how fast training is, and nothing was measured here", HINT)
    if unknown := [stage.name for stage in schedule.stages if stage.name not in hours.speeds]:
        raise UsageError(f"--x hours: stage {', '.join(unknown)} {hours.unknown}", HINT)

    return make_picture(schedule, lambda stage, iter: _seconds_at(schedule, hours, stage, iter))


def _seconds_at(schedule: Schedule, hours: Hours, name: str, iter: int) -> float:
    """Seconds from the seed to `iter` updates of a stage, along its path of ancestors and in one process life. The ancestors' evaluations and
    snapshots are in it."""
    stage, speed, before = schedule.stage(name), hours.speeds[name], hours.opening
    if stage.parent is not None:
        parent, end = schedule.stage(stage.parent), schedule.start_iter(stage)
        before = _seconds_at(schedule, hours, parent.name, end)
        if end == parent.solver.max_iter:
            before += hours.speeds[parent.name].written + hours.speeds[parent.name].test
    return before + speed.start + spent(schedule, stage, speed, 0, iter).total
