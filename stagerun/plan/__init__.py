"""Schedule + what is saved -> Plan: what will run, and why; hours and disk of it. Pure: no torch, no disk, no clock.

`plan` decides by stage, `counting` which snapshots count and why others don't. `choice` is what a command asks for, `hours` what it takes,
`render` what is shown.

Called, it is the library's function: `stagerun.plan("solvers/mine")`. Importing a folder puts it where a function of that name would be.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from stagerun.plan.counting import changed_fields
from stagerun.plan.plan import Memory, make_plan, require_fresh
from stagerun.plan.planned import Plan, PlannedStage, State

__all__ = ["Memory", "Plan", "PlannedStage", "State", "changed_fields", "make_plan", "require_fresh"]


class _Folder(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("stagerun.tools.library.plan").plan(*args, **options)


sys.modules[__name__].__class__ = _Folder
