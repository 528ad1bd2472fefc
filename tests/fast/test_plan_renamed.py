"""Stages under other names, at random: nothing is trained twice; `test_plan_cases` shows what is taken for what."""

import random

import pytest
from facade import SnapshotRef
from test_plan_trees import SCHEDULE, inventory, schedule, snapshot

from stagerun.plan import State, make_plan


@pytest.mark.slow
def test_renamed_between_all_steps_nothing_is_trained_twice():
    """Any stages get new names, or old ones again, before each life, which ends anywhere."""
    drawn = random.Random(1)
    for _ in range(20):
        refs: list[SnapshotRef] = []
        trained = 0
        for attempt in range(1, 200):
            text = SCHEDULE.replace('"main" }', '"main" solver: "main.prototxt" }')
            for name in ("main", "a", "b", "deep", "end"):
                tag = drawn.choice(["", "", "2", "3"])
                for mark in ('"', "@"):
                    text = text.replace(f'"{name}{mark}', f'"{name}{tag}{mark}')
            now = schedule(text)
            step = make_plan(now, inventory(refs)).next
            if step is None:
                break
            stage, to = step.stage, drawn.randint(step.iter + 1, step.last)
            came_from = "" if step.start is None else step.start.parent if step.state is State.RESUME else step.start.id
            for iter in sorted({*now.branch_points(stage.name), to}):
                if step.iter < iter <= to:
                    refs.append(snapshot(now, stage.name, iter, came_from, attempt))
            trained += to - step.iter
        assert (trained, make_plan(now, inventory(refs)).iterations) == (40, 40)
