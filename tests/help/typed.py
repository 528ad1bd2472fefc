"""What a user's type checker sees of the library: scripts/dev check reads this file, and nothing runs it."""

from typing_extensions import assert_type

import stagerun


def user_code() -> None:
    schedule = stagerun.load("x", ["seed=2"])
    assert_type(stagerun.plan(schedule, redo="init").stages[0].stage.solver.base_lr, float)
    assert_type(list(stagerun.run("x")), list[stagerun.Event])
    assert_type(stagerun.Snapshot("x").model().training, bool)
    assert_type(str(stagerun.report("out")), str)
    stagerun.plan(3)  # type: ignore[arg-type]  # refused
