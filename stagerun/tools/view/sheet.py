"""Some of the images of a stage as its network gets them, for the page."""

from stagerun.base.errors import StagerunError
from stagerun.tools.view.looking import Looker

NUMBER, SIZE = 18, 128


def contact_sheet(looker: Looker, stage: str) -> bytes | str:
    """A PNG, or why there is none."""
    from stagerun.tools.data.contact_sheet import png, sheet
    from stagerun.tools.data.show import ShowOptions, shown_of

    if looker.before is None or stage not in looker.before.stages or not looker.asked.folders:
        return "no such stage, or no folder of its schedule"
    try:
        options = ShowOptions(
            folder=looker.asked.folders[0], overrides=looker.asked.overrides, stage=stage, number=NUMBER, size=SIZE
        )
        found = shown_of(options)
        return png(sheet(found.tiles, found.heading, SIZE))
    except StagerunError as error:
        return error.render()
