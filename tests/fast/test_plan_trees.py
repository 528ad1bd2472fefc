"""Trees of stages + inventory -> Plan: branch points, pieces trained again, what is not enabled, --only and --until."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import made_schedules
import pytest

from stagerun.base.errors import RecipeError, ResumeRefused, UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.language import read
from stagerun.plan import Plan, PlannedStage, State, make_plan, require_fresh
from stagerun.plan.render import render_text

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
NAMES = ["main", "a", "b_x", "b_y", "deep", "end"]
MAIN, CUT = "max_iter: 20 snapshot: 3\n", "max_iter: 4\n"


def schedule(shared: str = SCHEDULE, main: str = MAIN, cut: str = CUT) -> Schedule:
    texts = {"schedule.prototxt": shared, "main.prototxt": main, "cut.prototxt": cut}
    return read({name: text.encode() for name, text in texts.items()}, "/s", [])


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


def inventory(refs: Iterable[SnapshotRef]) -> Inventory:
    return Inventory(tuple(sorted(refs, key=lambda r: (r.attempt, r.iter, r.stage))))


def without(found: Mapping[str, SnapshotRef], *gone: str) -> Inventory:
    """All but some, and but what some stages have."""
    return inventory(ref for place, ref in found.items() if place not in gone and ref.stage not in gone)


def states(plan: Plan) -> dict[str, str]:
    return {s.stage.name: s.state.value for s in plan.stages}


def planned(plan: Plan, name: str) -> PlannedStage:
    return next(s for s in plan.stages if s.stage.name == name)


def shown(plan: Plan) -> list[tuple[str, int, int | None, tuple[str, ...]]]:
    return [(p.stage.name, p.iter, p.until, p.children) for p in plan.pieces]


def test_nothing_on_disk() -> None:
    plan = make_plan(schedule(), inventory([]))
    assert list(states(plan)) == NAMES and set(states(plan).values()) == {"fresh"}
    assert (plan.iterations, plan.iterations_left, plan.pieces) == (40, 40, ())
    positions = {s.stage.name: s.position for s in plan.stages}
    assert positions == {"main": 0, "a": 500, "b_x": 1200, "b_y": 1200, "deep": 700, "end": 2000}
    assert plan.next is planned(plan, "main")


def test_everything_on_disk() -> None:
    found = on_disk(schedule())
    assert sorted(found) == sorted(["main@5", "main@12", "main@20", "a@2", "a@4", "b_x@4", "b_y@4", "deep@4", "end@4"])
    plan = make_plan(schedule(), inventory(found.values()))
    assert set(states(plan).values()) == {"done"} and plan.next is None and plan.iterations_left == 0


def test_a_child_starts_from_the_snapshot_at_its_iteration() -> None:
    found = on_disk(schedule())
    plan = make_plan(schedule(), without(found, "a", "b_x", "b_y", "deep", "end"))
    assert [planned(plan, n).start for n in NAMES[1:]] == [
        found["main@5"], found["main@12"], found["main@12"], None, found["main@20"],
    ]  # fmt: skip
    assert plan.next is planned(plan, "a") and plan.pieces == ()


def test_of_two_snapshots_there_all_children_take_the_older() -> None:
    s = schedule()
    found = on_disk(s)
    other = snapshot(s, "main", 12, attempt=2)
    twin = SnapshotRef(name=other.name, stage="main", iter=12, attempt=2, id="twin", parent="", identity=other.identity)
    refs = [ref for ref in found.values() if ref.stage in ("main", "b_x")]
    plan = make_plan(s, inventory([*refs, twin]))
    assert states(plan)["b_x"] == "done" and planned(plan, "b_y").start == found["main@12"]


def test_while_the_parent_is_under_way_children_wait_in_order() -> None:
    s = schedule()
    refs = [snapshot(s, "main", 5), snapshot(s, "main", 9)]
    plan = make_plan(s, inventory(refs))
    assert plan.next is planned(plan, "main") and planned(plan, "main").iter == 9
    assert planned(plan, "a").start == refs[0] and planned(plan, "b_x").start is None and plan.pieces == ()
    assert make_plan(s, inventory(refs), only=["a"]).next == planned(plan, "a"), "its start is there"


def test_a_branch_of_a_stage_that_has_ended_trains_a_piece_of_it_again() -> None:
    s = schedule()
    found = on_disk(s)
    plan = make_plan(s, without(found, "main@12", "b_x", "b_y"))
    assert states(plan)["main"] == "done" and shown(plan) == [("main", 5, 12, ("b_x", "b_y"))]
    (piece,) = plan.pieces
    assert (piece.state, piece.start, piece.position, piece.iterations_left) == (State.RESUME, found["main@5"], 0, 7)
    assert plan.next is piece and plan.iterations_left == 7 + 4 + 4 and plan.iterations == 40
    # A snapshot nearer to it is a nearer start, one behind it is none.
    near = [snapshot(s, "main", 9), snapshot(s, "main", 18)]
    refs = [ref for place, ref in found.items() if place != "main@12" and ref.stage not in ("b_x", "b_y")]
    assert shown(make_plan(s, inventory([*refs, *near]))) == [("main", 9, 12, ("b_x", "b_y"))]


def test_a_piece_may_need_a_piece_of_the_stage_above() -> None:
    s = schedule()
    found = on_disk(s)
    plan = make_plan(s, without(found, "main@5", "a@2", "deep"))
    assert states(plan)["a"] == "done", "what it came from was lost, which changes nothing"
    assert shown(plan) == [("main", 0, 5, ("a",)), ("a", 0, 2, ("deep",))]
    assert plan.next is plan.pieces[0]
    with_it = make_plan(s, without(found, "a@2", "deep"))
    assert shown(with_it) == [("a", 0, 2, ("deep",))] and with_it.pieces[0].start == found["main@5"]
    assert with_it.next is with_it.pieces[0]


def test_no_piece_for_a_child_that_is_done_or_not_trained() -> None:
    s = schedule()
    found = on_disk(s)
    assert make_plan(s, without(found, "main@5", "main@12")).next is None
    off = schedule(SCHEDULE.replace('from: "main@12"', 'from: "main@12" enabled: false'))
    assert make_plan(off, without(found, "main@12", "b_x", "b_y")).pieces == ()
    assert make_plan(s, without(found, "main@12", "b_x", "b_y", "end"), only=["end"]).pieces == ()


def lost(plan: Plan) -> list[tuple[str, int, tuple[str, ...], tuple[str, ...], str]]:
    return [
        (p.stage if p.end else f"{p.stage}@{p.iter}", p.iter, p.children, p.unasked, p.like.name if p.like else "")
        for p in plan.lost
    ]


def test_a_snapshot_that_comes_back_must_be_the_same_for_those_who_came_from_it() -> None:
    s = schedule()
    found = on_disk(s)
    # Nothing is trained for it, so it doesn't come back; and nothing came from what is yet to be trained.
    assert make_plan(s, without(found, "main@12")).lost == ()
    assert make_plan(s, without(found, "main@12", "b_x", "b_y")).lost == ()
    gone = without(found, "main@12", "b_y")
    for choice, unasked in (
        ({}, ("b_x",)),
        ({"redo": ["b_x"]}, ()),
        ({"redo": ["main"]}, ()),
        ({"redo": ["b_y"]}, ("b_x",)),
    ):
        plan = make_plan(s, gone, **choice)  # type: ignore[arg-type]
        assert lost(plan) == [("main@12", 12, ("b_x",), unasked, "main-00000020-a0001")], choice
        assert states(plan)["b_x"] == "done" and [p.like for p in plan.pieces] == [found["main@20"]]
    assert make_plan(s, gone, only=["a"]).lost == ()
    off = schedule(SCHEDULE.replace('name: "a"', 'name: "a" enabled: false'))
    assert make_plan(off, without(found, "main@5", "main@12", "b_y", "deep")).lost[0].children == ("b_x",)


def test_the_environment_of_a_piece_is_that_of_the_first_time() -> None:
    """The nearest behind the place, for the run may have moved later; not what came in a piece of another life."""
    s = schedule()
    found = on_disk(s)
    refs = [ref for place, ref in found.items() if place not in ("main@5", "main@12") and ref.stage != "b_y"]
    later = [snapshot(s, "main", 15, attempt=2)]
    assert lost(make_plan(s, inventory([*refs, *later])))[-1][-1] == "main-00000020-a0001"
    near = [snapshot(s, "main", 9), snapshot(s, "main", 18)]
    assert lost(make_plan(s, inventory([*refs, *near])))[-1][-1] == "main-00000018-a0001"
    # Two places, of which one is asked for: the other comes by on the way.
    assert lost(make_plan(s, inventory(refs))) == [
        ("main@5", 5, ("a",), ("a",), "main-00000020-a0001"),
        ("main@12", 12, ("b_x",), ("b_x",), "main-00000020-a0001"),
    ]


def test_an_end_that_is_gone_comes_back_on_the_stages_own_way() -> None:
    s = schedule()
    found = on_disk(s)
    plan = make_plan(s, without(found, "main@20"))
    assert states(plan) == {name: "resume" if name == "main" else "done" for name in NAMES}
    assert lost(plan) == [("main", 20, ("end",), ("end",), "main-00000012-a0001")]
    # Of the stage nothing is left, and what came from it in the first life tells where it was trained, as all before was.
    later = [replace(ref, attempt=2) if ref.stage == "end" else ref for ref in without(found, "main").snapshots]
    assert lost(make_plan(s, inventory(later))) == [
        ("main@5", 5, ("a",), ("a",), "a-00000002-a0001"),
        ("main@12", 12, ("b_x", "b_y"), ("b_x", "b_y"), "b_x-00000004-a0001"),
        ("main", 20, ("end",), ("end",), ""),
    ]


def test_what_a_life_that_began_without_snapshots_has_trained_tells_where_its_parents_were() -> None:
    """Which attempt that life has tells nothing: one before it may have ended without a snapshot, and a later one not."""
    s = schedule()
    refs = [replace(ref, serial=1) for ref in without(on_disk(s), "main").snapshots if ref.stage == "end"]
    for attempt in (1, 2):
        for began_empty, like in ((True, refs[0].name), (False, "")):
            found = [replace(ref, attempt=attempt, began_empty=began_empty) for ref in refs]
            assert lost(make_plan(s, inventory(found)))[-1] == ("main", 20, ("end",), ("end",), like)


def test_another_iteration_makes_the_child_stale() -> None:
    found = on_disk(schedule())
    moved = schedule(SCHEDULE.replace("main@5", "main@7"))
    for disk in (inventory(found.values()), without(found, "main@5")):
        plan = make_plan(moved, disk)
        assert states(plan) == {n: "stale" if n in ("a", "deep") else "done" for n in NAMES}
        assert planned(plan, "a").why == "it was trained from `main@5`, and now starts from `main@7`"
        assert [str(c) for c in planned(plan, "a").changes] == ["from 5 -> 7 (schedule.prototxt:7)"]
    plan = make_plan(moved, inventory(found.values()), redo=["a"])
    assert shown(plan) == [("main", 5, 7, ("a",))] and states(plan)["deep"] == "fresh"


def test_a_trunk_trained_again_to_other_bits_makes_its_branches_stale() -> None:
    now = schedule(main=MAIN + "base_lr: 0.3")
    old, new = on_disk(schedule()), on_disk(now)
    refs = [*old.values(), *(ref for ref in new.values() if ref.stage == "main")]
    plan = make_plan(now, inventory(refs))
    assert states(plan) == {n: "done" if n == "main" else "stale" for n in NAMES}
    assert planned(plan, "a").why == "it was trained from another `main@5`"
    assert planned(plan, "end").why == "it was trained from another end of `main`"


OFF = SCHEDULE.replace('name: "a" ', 'name: "a" enabled: false ')


def test_what_is_not_enabled_is_not_trained_and_not_counted() -> None:
    plan = make_plan(schedule(OFF), inventory([]))
    assert states(plan) == {n: "disabled" if n in ("a", "deep") else "fresh" for n in NAMES}
    assert (plan.iterations, plan.iterations_left) == (32, 32)
    assert [s.stage.name for s in plan.left_out] == ["a", "deep"]
    assert planned(plan, "deep").why == "its parent `a` is disabled" and planned(plan, "a").why == ""
    assert "  disabled: its parent `a` is disabled" in render_text(plan).splitlines()
    off = make_plan(schedule(OFF), inventory(on_disk(schedule()).values()))
    assert states(off)["a"] == "disabled" and off.next is None
    assert set(states(make_plan(schedule(), inventory(on_disk(schedule(OFF)).values()))).values()) == {"done"}


def test_only_and_until() -> None:
    s = schedule()
    found = on_disk(s)
    trunk = without(found, "a", "b_x", "b_y", "deep", "end")
    plan = make_plan(s, trunk, only=["b"])
    assert states(plan) == {n: "done" if n == "main" else "fresh" if n[0] == "b" else "not chosen" for n in NAMES}
    assert plan.iterations_left == 8 and plan.iterations == 40 and plan.next is planned(plan, "b_x")
    until = make_plan(s, trunk, until="b")
    assert [n for n, state in states(until).items() if state == "not chosen"] == ["deep", "end"]
    assert [n for n, state in states(make_plan(s, trunk, until="a")).items() if state == "fresh"] == ["a"]
    half = make_plan(s, inventory([snapshot(s, "main", 9)]), until="main")
    assert half.next is planned(half, "main") and half.iterations_left == 11


@pytest.mark.parametrize(
    "gone, only, message, hint",
    [
        ("main", ["a"], "stage `a` starts from `main@5`", "`--only main --only a` trains that first"),
        ("main@5", ["a"], "`main@5`", "`--only main --only a` trains that first"),
        ("main", ["end"], "stage `end` starts from `main`", "`--only main --only end`"),
        ("a", ["deep"], "stage `deep` starts from `a@2`", "`--only a --only deep`"),
        ("main a", ["deep"], "stage `deep` starts from `a@2`", "`--only main --only a --only deep`"),
        ("main@12", ["b_x"], "stage `b_x` starts from `main@12`", "`--only main --only b_x`"),
        ("main@5 a@2", ["deep"], "stage `deep` starts from `a@2`", "`--only main --only a --only deep`"),
    ],
)
def test_only_needs_what_it_starts_from(gone: str, only: list[str], message: str, hint: str) -> None:
    s = schedule()
    found = on_disk(s)
    disk = without(found, *gone.split(), *only)
    with pytest.raises(UsageError) as caught:
        make_plan(s, disk, only=only)
    assert message in caught.value.message and hint in caught.value.hint
    # What the hint says does it.
    words = [w for w in caught.value.hint.split("`")[1].split() if w != "--only"]
    plan = make_plan(s, disk, only=words)
    assert plan.next is not None and plan.next.stage.name == words[0]


def test_stale_stages_that_are_not_chosen_stand_in_nobodys_way() -> None:
    found = on_disk(schedule())
    now = schedule(SCHEDULE.replace("base_lr: 0.2", "base_lr: 0.3"))
    disk = without(found, "end")
    with pytest.raises(ResumeRefused):
        require_fresh(make_plan(now, disk))
    plan = make_plan(now, disk, only=["end"])
    require_fresh(plan)
    assert plan.next is planned(plan, "end")
    assert (
        planned(plan, "b_y").why
        == "stale: its definition has changed since it was trained: it was edited, or `run` had a --set that isn't given here"
    )


def test_whatever_is_lost_the_plan_leads_to_the_end() -> None:
    """Every subset of what is on disk: done step by step as the plan says, each start is there, and at the end all is done."""
    s = schedule()
    whole = on_disk(s)
    names = ["main@5", "main@12", "main@20", "a@2", "a@4", "b_x@4", "deep@4"]
    for gone in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1)):
        refs = {place: ref for place, ref in whole.items() if place not in gone}
        steps = 0
        while (step := make_plan(s, inventory(refs.values())).next) is not None:
            steps += 1
            assert steps < 20
            stage = step.stage
            assert step.start is None or step.start in refs.values()
            assert (step.start is not None) == (step.iter > 0 or stage.parent is not None)
            for iter in (*s.branch_points(stage.name), stage.solver.max_iter):
                if step.iter < iter <= step.last:
                    refs.setdefault(f"{stage.name}@{iter}", whole[f"{stage.name}@{iter}"])
        assert all(f"{stage.name}@{stage.solver.max_iter}" in refs for stage in s.stages)


# -- a stage that may end early


def test_what_comes_after_an_open_end_is_at_most_there() -> None:
    """What starts before the earliest end, or after the end is known, starts where it says."""
    data = 'train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 10 }'
    shared = (
        SCHEDULE.replace('train { source: "/d/train" images: 1000 }', data) + 'stage { name: "last" from: "end" }\n'
    )
    texts = {"schedule.prototxt": shared.replace("main@12", "main@10"), "cut.prototxt": CUT, "last.prototxt": CUT}
    texts["main.prototxt"] = MAIN + "test_interval: 5 early_stop { metric: LOSS patience_iter: 5 }\n"
    of = read(texts, "/s", [])
    plan = make_plan(of, Inventory())
    assert {s.stage.name for s in plan.stages if s.at_most} == {"end", "last"}
    text = render_text(plan)
    assert "data from image 2000 at most" in text and "data from image 2400 at most" in text
    assert "data from image 500\n" in text
    ended = replace(snapshot(of, "main", 15), ended=True)
    plan = make_plan(of, inventory([snapshot(of, "main", 10), ended]))
    assert not any(s.at_most for s in plan.stages) and planned(plan, "last").begins_at == 1900


SWEPT = """
name: "tree" model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } base_lr: 0.1 lr_policy: "fixed" max_iter: 20 audit_param {} }
stage { name: "main" solver_param {} }
stage { name: "c1" from: "main@8" solver_param {} }
stage { name: "cool" from: ["main@8", "main"] sweep { name: "a" solver {} } sweep { name: "b" solver {} } }
ensemble { name: "late" members: ["main@8", "c1"] rule: WEIGHT_AVERAGE }
stage { name: "fine" from: "late" solver_param {} }
"""


@pytest.mark.parametrize("options", [{"only": ["late"]}, {"until": "late"}, {"redo": ["late"]}])
def test_an_ensemble_where_a_stage_belongs_is_told_with_its_members(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(read({"schedule.prototxt": SWEPT}, "/s", []), inventory([]), **options)
    text = caught.value.render()
    assert "`late` is an ensemble, not a stage" in text
    assert f"hint: --{next(iter(options))} takes stages: its members are of `main` and `c1`" in text
