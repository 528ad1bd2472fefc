"""Schedule + what is saved -> Plan: what will run, and why; hours and disk of it. Pure: no torch, no disk, no clock.

`plan` decides by stage, `counting` which snapshots count, and `stale` says why others don't. `choice` is what --redo, --only and --until name,
`pieces` what is trained once more, `hours` and `estimate` what all this costs.

Called, it is the library's function: `stagerun.plan("solvers/mine")`. Importing a folder puts it where a function of that name would be.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from stagerun.plan.plan import (
    Change,
    Lost,
    Plan,
    PlannedStage,
    Planner,
    State,
    changed_fields,
    make_plan,
    require_fresh,
)

__all__ = ["Change", "Lost", "Plan", "PlannedStage", "Planner", "State", "changed_fields", "make_plan", "require_fresh"]


class _Folder(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("stagerun.tools.library.plan").plan(*args, **options)


sys.modules[__name__].__class__ = _Folder
