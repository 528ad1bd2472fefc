"""Stages under other names: what was trained counts for what it is, whatever it is called."""

import random
from pathlib import Path

import pytest
from test_plan_trees import inventory, on_disk, planned, shown, snapshot, states

from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.language import read
from stagerun.plan import State, make_plan
from stagerun.plan.counting import names_of, under
from stagerun.tools.plan.command import remarks
from stagerun.train.keeper import Keeper

HEAD = """
name: "renamed"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } base_lr: 0.1 lr_policy: "fixed" }
"""
MAIN = 'stage { name: "main" }\n'
ONE = 'stage { name: "b" solver: "cut.prototxt" from: "main@5" }\n'
TWO = ONE.replace('"main@5"', '["main@5", "main@12"]')


def schedule(stages: str, main: str = "max_iter: 20", cut: str = "max_iter: 4") -> Schedule:
    texts = {"schedule.prototxt": HEAD + stages, "main.prototxt": main, "cut.prototxt": cut}
    return read({name: text.encode() for name, text in texts.items()}, "/s", [])


def test_one_more_parent_trains_one_more_stage() -> None:
    before = on_disk(schedule(MAIN + ONE))
    plan = make_plan(schedule(MAIN + TWO), inventory(before.values()))
    assert states(plan) == {"main": "done", "b_main_5": "done", "b_main_12": "fresh"}
    first = planned(plan, "b_main_5")
    assert first.why == "trained as `b`" and first.end is not None
    assert (first.end.name, first.end.stage, first.end.trained_as) == (before["b@4"].name, "b_main_5", "b")
    assert (plan.iterations_left, plan.unclaimed, planned(plan, "b_main_12").why) == (7 + 4, (), "")
    # And back again.
    grown = on_disk(schedule(MAIN + TWO))
    back = make_plan(schedule(MAIN + ONE), inventory(grown.values()))
    assert states(back) == {"main": "done", "b": "done"} and planned(back, "b").why == "trained as `b_main_5`"
    assert back.unclaimed == ("b_main_12",)
    (note,) = [text for text in remarks(back) if "b_main_12" in text]
    assert note.startswith("snapshots of `b_main_12` count for no stage of this schedule")


def test_a_sweep_finds_what_was_trained_with_its_values() -> None:
    """The values were tried one after the other, by editing the file."""
    sweep = 'sweep { name: "x" solver { base_lr: 0.2 } } sweep { name: "y" solver { base_lr: 0.1 } } sweep { name: "z" solver { base_lr: 0.3 } }'
    before, edited = schedule(MAIN + ONE), schedule(MAIN + ONE, cut="max_iter: 4 base_lr: 0.2")
    found = on_disk(before)
    second = snapshot(edited, "b", 4, found["main@5"].id, attempt=2)
    plan = make_plan(schedule(MAIN + ONE.replace(" }", f" {sweep} }}")), inventory([*found.values(), second]))
    assert states(plan) == {"main": "done", "b_x": "done", "b_y": "done", "b_z": "fresh"}
    assert planned(plan, "b_x").end == under(inventory([second]), {second.name: "b_x"}).snapshots[0]


@pytest.mark.parametrize("old, new", [("main", "trunk"), ("b", "cool"), ("deep", "deeper")])
def test_a_better_word(old: str, new: str) -> None:
    text = (
        'stage { name: "main" solver: "main.prototxt" }\n'
        + ONE
        + 'stage { name: "deep" solver: "cut.prototxt" from: "b@2" }'
    )
    before = on_disk(schedule(text))
    renamed = schedule(text.replace(f'"{old}', f'"{new}').replace(f'"{new}.prototxt', f'"{old}.prototxt'))
    plan = make_plan(renamed, inventory(before.values()))
    assert set(states(plan).values()) == {"done"} and plan.pieces == () and plan.unclaimed == ()
    assert {s.stage.name: s.why for s in plan.stages if s.why} == {new: f"trained as `{old}`"}
    assert names_of(plan.inventory) == {ref.name: new for ref in before.values() if ref.stage == old}


def test_in_its_midst_and_then_on_under_the_new_name() -> None:
    tree = MAIN + ONE
    again = 'stage { name: "trunk" solver: "main.prototxt" }\n' + ONE.replace("main@5", "trunk@5")
    s, now = schedule(tree), schedule(again)
    begun = [snapshot(s, "main", 5), snapshot(s, "main", 8)]
    plan = make_plan(now, inventory(begun))
    assert plan.next == planned(plan, "trunk") and plan.next.iter == 8
    assert plan.next.why == "from main-00000008-a0001, trained as `main`"
    gone_on = snapshot(now, "trunk", 10, attempt=2)
    plan = make_plan(now, inventory([*begun, gone_on]))
    assert planned(plan, "trunk").why == "from trunk-00000010-a0002" and planned(plan, "trunk").iter == 10
    assert planned(plan, "b").start == under(inventory(begun), {begun[0].name: "trunk"}).snapshots[0]
    assert plan.pieces == () and plan.unclaimed == ()


def test_a_piece_under_the_new_name_leaves_the_end_under_the_old_one() -> None:
    now = schedule('stage { name: "trunk" solver: "main.prototxt" }\n' + TWO.replace("main@", "trunk@"))
    found = on_disk(schedule(MAIN))
    plan = make_plan(now, inventory(found.values()))
    assert states(plan)["trunk"] == "done" and shown(plan) == [("trunk", 0, 12, ("b_trunk_5", "b_trunk_12"))]
    half = [*found.values(), snapshot(now, "trunk", 5, attempt=2)]
    plan = make_plan(now, inventory(half))
    assert states(plan)["trunk"] == "done" and shown(plan) == [("trunk", 5, 12, ("b_trunk_12",))]
    plan = make_plan(now, inventory([*half, snapshot(now, "trunk", 12, attempt=2)]))
    assert states(plan) == {"trunk": "done", "b_trunk_5": "fresh", "b_trunk_12": "fresh"} and not plan.pieces


def test_another_definition_or_another_start_is_another_stage() -> None:
    found = on_disk(schedule(MAIN + ONE))
    other = ONE.replace('"b"', '"c"')
    for stages, cut in [
        (MAIN + other, "max_iter: 4 base_lr: 0.2"),
        (MAIN + other.replace("@5", "@12"), "max_iter: 4"),
        (MAIN + other.replace("main@5", "main"), "max_iter: 4"),
    ]:
        plan = make_plan(schedule(stages, cut=cut), inventory(found.values()))
        assert states(plan) == {"main": "done", "c": "fresh"} and plan.unclaimed == ("b",)
    # Nor after the trunk was trained again, to other bits.
    now = schedule(MAIN + other, main="max_iter: 20 base_lr: 0.3")
    newer = [ref for ref in on_disk(now).values() if ref.stage == "main"]
    assert states(make_plan(now, inventory([*found.values(), *newer])))["c"] == "fresh"
    # Under a trunk that is yet to be trained nobody knows.
    gone = [ref for ref in found.values() if ref.stage == "b"]
    assert states(make_plan(schedule(MAIN + other), inventory(gone))) == {"main": "fresh", "c": "fresh"}
    # Nor where the one is gone that it came from.
    lost = [ref for place, ref in found.items() if place != "main@5"]
    assert states(make_plan(schedule(MAIN + other), inventory(lost))) == {"main": "done", "c": "fresh"}


def test_what_the_schedule_has_is_not_taken() -> None:
    s = schedule(MAIN + ONE)
    found = on_disk(s)
    plan = make_plan(schedule(MAIN + ONE + ONE.replace('"b"', '"c"')), inventory(found.values()))
    assert states(plan) == {"main": "done", "b": "done", "c": "fresh"}


def test_alike_are_taken_one_for_one() -> None:
    def alike(*names: str) -> Schedule:
        return schedule(MAIN + "".join(ONE.replace('"b"', f'"{name}"') for name in names))

    found = on_disk(alike("b", "c"))
    plan = make_plan(alike("d", "e"), inventory(found.values()))
    assert [s.why for s in plan.stages if s.why] == ["trained as `b`", "trained as `c`"]
    one = [ref for ref in found.values() if ref.stage != "c"]
    assert states(make_plan(alike("d", "e"), inventory(one))) == {"main": "done", "d": "done", "e": "fresh"}
    # Its own end comes first.
    plan = make_plan(alike("c"), inventory(found.values()))
    assert planned(plan, "c").why == "" and plan.unclaimed == ("b",)


def test_a_result_of_the_plan_is_what_the_plan_says_again() -> None:
    found = inventory(on_disk(schedule(MAIN + ONE)).values())
    now = schedule(MAIN + TWO)
    plan = make_plan(now, found)
    again = make_plan(now, plan.inventory)
    assert (again.stages, again.inventory) == (plan.stages, plan.inventory)
    assert under(found, names_of(plan.inventory)) == plan.inventory


TREE = """stage { name: "main" solver: "main.prototxt" }
stage { name: "a" solver: "cut.prototxt" from: "main@5" }
stage { name: "b" solver: "cut.prototxt" from: "main@12" sweep { name: "x" } sweep { name: "y" solver { base_lr: 0.2 } } }
stage { name: "deep" from: "a@2" solver: "cut.prototxt" }
stage { name: "end" from: "main" solver: "cut.prototxt" }
"""


@pytest.mark.slow
def test_renamed_between_all_steps_nothing_is_trained_twice() -> None:
    """Any stages get new names, or old ones again, before each life, which ends anywhere."""
    drawn = random.Random(1)
    for _ in range(60):
        refs: list[SnapshotRef] = []
        trained = 0
        for attempt in range(1, 200):
            text = TREE
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


def test_what_another_trunk_left_is_not_taken() -> None:
    """A branch was taken out, its trunk edited and trained again, and a branch of another name put at the same place."""
    old, now = schedule(MAIN + ONE), schedule(MAIN + ONE.replace('"b"', '"c"'), main="max_iter: 20 base_lr: 0.3")
    before = on_disk(old)
    again = [snapshot(now, "main", iter, attempt=2) for iter in (15, 20)]
    everything = inventory([*before.values(), *again])
    # Retention leaves what `b` came from where it is, though no branch begins there any more.
    kept = Keeper(now, Path("nowhere"))._pinned(everything, now.stage("main"), finished=True)
    assert before["main@5"].name in kept and before["main@20"].name not in kept
    assert states(make_plan(now, everything)) == {"main": "done", "c": "fresh"}
    # Nor where somebody deleted it: all that is left of the trunk is younger.
    plan = make_plan(now, inventory([before["b@4"], *again]))
    assert states(plan) == {"main": "done", "c": "fresh"} and shown(plan) == [("main", 0, 5, ("c",))]
