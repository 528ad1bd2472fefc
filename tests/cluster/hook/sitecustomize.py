"""On the path of a worker, before anything else.

HELD_IN=SECTION=FILE: when it comes to that section (SAVE: for the second time), it waits until the others are there, too, makes FILE, and
holds on for some seconds, so that something may happen. DAWDLES=MILLISECONDS: each device batch takes it longer by so much.
"""

import os
import pathlib
import time

_OTHERS_S, _SECONDS = 2.0, 4.0


def _hold(section: str, file: str) -> None:
    from stagerun.system.pulse import Pulse, Section

    enter, left = Pulse.enter, [2 if Section(section) is Section.SAVE else 1]

    def held(self: Pulse, entered: Section) -> None:
        enter(self, entered)
        if entered is Section(section):
            left[0] -= 1
            if left[0] == 0:
                time.sleep(_OTHERS_S)
                pathlib.Path(file).touch()
                time.sleep(_SECONDS)

    Pulse.enter = held


def _dawdle(seconds: float) -> None:
    from stagerun.system.pulse import Pulse

    beat = Pulse.beat

    def late(self: Pulse) -> None:
        time.sleep(seconds)
        beat(self)

    Pulse.beat = late


if "RANK" in os.environ and "HELD_IN" in os.environ:
    _hold(*os.environ["HELD_IN"].split("=", 1))
if "RANK" in os.environ and "DAWDLES" in os.environ:
    _dawdle(int(os.environ["DAWDLES"]) / 1000)
