"""Some of the images of a stage as its network gets them. Read when they are asked for."""

import os

from stagerun.base.errors import StagerunError
from stagerun.command.shared import output_folder
from stagerun.system.imports import is_there, with_imports
from stagerun.tools.view.before import Before
from stagerun.tools.view.looking import Asked

NUMBER, SIZE = 24, 112


def refusal(asked: Asked, before: Before | None, name: str) -> str:
    """Why a stage has no sheet; '' if it has one. The page writes no file, and runs no code that a schedule names."""
    if before is None or name not in before.stages or before.compared is not None or not asked.folders:
        return "images can be shown where the page is about one schedule's folder"
    stage = before.schedule.stage(name)
    if stage.solver.transform.python is not None:
        return (
            f"its transform runs Python: `stagerun data show {asked.folders[0]} --stage {name}` shows what comes of it"
        )
    made = with_imports(before.schedule, output_folder(before.schedule.name, None)).imports.get(stage.data.train.path)
    if made is not None and not is_there(made):
        return "its images are a folder that has not been imported yet, which `run` does"
    if made is None and not os.path.exists(stage.data.train.path):  # False, too, where that may not be asked
        return f"there is no LMDB at {stage.data.train.path} on this machine"
    return ""


def contact_sheet(asked: Asked, before: Before | None, name: str) -> bytes | str:
    """A PNG, or why there is none."""
    if said := refusal(asked, before, name):
        return said
    from stagerun.tools.data.contact_sheet import png, sheet
    from stagerun.tools.data.show import ShowOptions, shown_of

    options = ShowOptions(folder=asked.folders[0], overrides=asked.overrides, stage=name, number=NUMBER, size=SIZE)
    try:
        found = shown_of(options)
        return png(sheet(found.tiles, found.heading, SIZE))
    except StagerunError as error:
        return error.render()
