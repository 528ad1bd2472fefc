"""Schedule + what is saved -> Plan: what will run, and why; hours, disk and hazards of it. Pure: no torch, no disk, no clock.

`plan` decides by stage, `counting` what a change makes stale, `hours` and `estimate` what it costs, `hazards` what looks dangerous.
"""

from stagerun.plan.plan import Change, Lost, Plan, PlannedStage, State, changed_fields, make_plan, require_fresh

__all__ = ["Change", "Lost", "Plan", "PlannedStage", "State", "changed_fields", "make_plan", "require_fresh"]
