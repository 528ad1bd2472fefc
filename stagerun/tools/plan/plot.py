"""`--plot FILE.svg` of `plan` and `diff`: the picture of a schedule, or of two."""

import os
from pathlib import Path
from typing import Annotated

import click

from stagerun.base.errors import StorageError, UsageError
from stagerun.command.ending import tell
from stagerun.command.options import option
from stagerun.drawing.picture import Picture, Unit, make_picture
from stagerun.drawing.scale import make_scale
from stagerun.drawing.svg import require_svg
from stagerun.plan import Plan
from stagerun.plan.hours import seconds_at
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
    unknown = [stage.name for stage in schedule.stages if stage.name not in hours.speeds]
    if unknown:
        raise UsageError(f"--x hours: stage {', '.join(unknown)} {hours.unknown}", HINT)

    def seconds(stage: str, iter: int) -> float:
        found = seconds_at(schedule, hours, stage, iter)
        assert found is not None  # every speed is known
        return found

    return make_picture(schedule, seconds)
