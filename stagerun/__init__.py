"""stagerun: a staged training schedule as a folder of solver files, run as one job.

As a library (`stagerun help library`): `load`, `plan`, `run`, `report` and `Snapshot`. Importing it loads nothing else: a name's module is
imported when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagerun.base.errors import StagerunError
    from stagerun.base.events import Event
    from stagerun.base.recipe import Schedule
    from stagerun.language import load
    from stagerun.tools.library.plan import Plan, plan
    from stagerun.tools.library.report import Report, report
    from stagerun.tools.library.run import Run, run
    from stagerun.tools.library.snapshot import Snapshot

__version__ = "0.1.0"

__all__ = [
    "Event",
    "Plan",
    "Report",
    "Run",
    "Schedule",
    "Snapshot",
    "StagerunError",
    "load",
    "plan",
    "report",
    "run",
]

_HOMES = {
    "Event": "stagerun.base.events",
    "Plan": "stagerun.tools.library.plan",
    "Report": "stagerun.tools.library.report",
    "Run": "stagerun.tools.library.run",
    "Schedule": "stagerun.base.recipe",
    "Snapshot": "stagerun.tools.library.snapshot",
    "StagerunError": "stagerun.base.errors",
    "load": "stagerun.language",
    "report": "stagerun.tools.library.report",
    "run": "stagerun.tools.library.run",
}


def __getattr__(name: str) -> object:
    if name == "plan":  # the folder of that name, which can be called
        return import_module("stagerun.plan")
    if name not in _HOMES:
        raise AttributeError(f"module 'stagerun' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
