"""stagerun: a staged training schedule as a folder of solver files, run as one job.

As a library (`stagerun help library`): `load`, `plan`, `run`, `report` and `Snapshot`. A name's module is imported at the first use of the
name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagerun.base.errors import StagerunError
    from stagerun.base.events import Event
    from stagerun.base.recipe import Schedule
    from stagerun.language import load
    from stagerun.look.report import Report, report
    from stagerun.tools.library import Plan, Snapshot, plan
    from stagerun.tools.running import Run, run

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
    "Plan": "stagerun.tools.library",
    "Report": "stagerun.look.report",
    "Run": "stagerun.tools.running",
    "Schedule": "stagerun.base.recipe",
    "Snapshot": "stagerun.tools.library",
    "StagerunError": "stagerun.base.errors",
    "load": "stagerun.language",
    "report": "stagerun.look.report",
    "run": "stagerun.tools.running",
}


def __getattr__(name: str) -> object:
    if name == "plan":  # the package of that name, which is callable
        return import_module("stagerun.plan")
    if name not in _HOMES:
        raise AttributeError(f"module 'stagerun' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
