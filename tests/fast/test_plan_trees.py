"""Trees of stages: whatever is lost, the plan leads to the end; `test_plan_cases` shows the steps."""

import itertools
import random
from collections.abc import Iterable
from functools import partial

import made_schedules
import pytest
from facade import Inventory, Schedule, SnapshotRef

from stagerun.language import read
from stagerun.plan import State, make_plan

SCHEDULE = """
name: "tree"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } base_lr: 0.1 lr_policy: "fixed" }
stage { name: "main" }
stage { name: "a" solver: "cut.prototxt" from: "main@5" }
stage { name: "b" solver: "cut.prototxt" from: "main@12" sweep { name: "x" } sweep { name: "y" solver { base_lr: 0.2 } } }
stage { name: "deep" from: "a@2" solver: "cut.prototxt" }
stage { name: "end" from: "main" solver: "cut.prototxt" }
"""


def schedule(shared: str = SCHEDULE) -> Schedule:
    texts = {"schedule": shared, "main": "max_iter: 20 snapshot: 3\n", "cut": "max_iter: 4\n"}
    return read({f"{name}.prototxt": text.encode() for name, text in texts.items()}, "/s", [])


def inventory(refs: Iterable[SnapshotRef]) -> Inventory:
    return Inventory(tuple(sorted(refs, key=lambda r: (r.attempt, r.iter, r.stage))))


snapshot = partial(made_schedules.snapshot, told_by="solver.base_lr solver.max_iter")


def on_disk(of: Schedule) -> dict[str, SnapshotRef]:
    """What a whole run leaves that others start from, and the ends, as `stage@iter`."""
    found: dict[str, SnapshotRef] = {}
    for stage in of.stages:
        length = of.stage(stage.parent).solver.max_iter if stage.parent else 0
        parent = found[f"{stage.parent}@{stage.parent_iter or length}"].id if stage.parent else ""
        for iter in (*of.branch_points(stage.name), stage.solver.max_iter):
            found[f"{stage.name}@{iter}"] = snapshot(of, stage.name, iter, parent)
    return found


def test_whatever_is_lost_the_plan_leads_to_the_end():
    """Every subset of what is on disk: done step by step as the plan says, each start is there, and at the end all is done."""
    whole = on_disk(of := schedule())
    names = ["main@5", "main@12", "main@20", "a@2", "a@4", "b_x@4", "deep@4"]
    for gone in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1)):
        refs = {place: ref for place, ref in whole.items() if place not in gone}
        for _ in range(20):
            if (step := make_plan(of, inventory(refs.values())).next) is None:
                break
            assert step.start is None or step.start in refs.values()
            assert (step.start is not None) == (step.iter > 0 or step.stage.parent is not None)
            for iter in (*of.branch_points(step.stage.name), step.stage.solver.max_iter):
                if step.iter < iter <= step.last:
                    refs.setdefault(f"{step.stage.name}@{iter}", whole[f"{step.stage.name}@{iter}"])
        assert step is None and all(f"{stage.name}@{stage.solver.max_iter}" in refs for stage in of.stages)


@pytest.mark.slow
def test_renamed_between_all_steps_nothing_is_trained_twice():
    """Any stages get new names, or old ones again, before each life, which ends anywhere; `test_plan_cases` shows what is taken for what."""
    drawn = random.Random(1)
    for _ in range(20):
        refs, trained = list[SnapshotRef](), 0
        for attempt in range(1, 200):
            text = SCHEDULE.replace('"main" }', '"main" solver: "main.prototxt" }')
            for name in ("main", "a", "b", "deep", "end"):
                tag = drawn.choice(["", "", "2", "3"])
                for mark in ('"', "@"):
                    text = text.replace(f'"{name}{mark}', f'"{name}{tag}{mark}')
            now = schedule(text)
            if (step := make_plan(now, inventory(refs)).next) is None:
                break
            stage, to = step.stage, drawn.randint(step.iter + 1, step.last)
            came_from = "" if step.start is None else step.start.parent if step.state is State.RESUME else step.start.id
            places = (iter for iter in sorted({*now.branch_points(stage.name), to}) if step.iter < iter <= to)
            refs += [snapshot(now, stage.name, iter, came_from, attempt) for iter in places]
            trained += to - step.iter
        assert (trained, make_plan(now, inventory(refs)).iterations) == (40, 40)
