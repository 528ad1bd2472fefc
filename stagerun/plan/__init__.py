"""Schedule + inventory -> Plan: what will run, and why. No torch, no disk."""

from stagerun.plan.plan import Change, Lost, Plan, PlannedStage, State, changed_fields, make_plan, require_fresh

__all__ = ["Change", "Lost", "Plan", "PlannedStage", "State", "changed_fields", "make_plan", "require_fresh"]
