"""Schedule + inventory -> Plan, with made-up inventories: no disk."""

import json
from dataclasses import replace

import pytest
from made_schedules import snapshot

from stagerun.base.errors import RecipeError, ResumeRefused
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.drawing.bands import not_shown
from stagerun.drawing.picture import make_picture
from stagerun.language import read
from stagerun.plan import Plan, PlannedStage, State, make_plan, require_fresh
from stagerun.plan.hours import at_images_per_second, render_hours
from stagerun.plan.render import going_on, render_json, render_text

SCHEDULE = """
name: "tree"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } }
stage { name: "trunk" }
stage { name: "long" }
stage { name: "collapse" from: "long" }
stage { name: "early" from: "trunk" }
"""
STAGES = {
    "trunk": 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 20\n',
    "long": 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 30\n',
    "collapse": 'base_lr: 0.1\nlr_policy: "poly"\npower: 2\nmax_iter: 10\n',
    "early": 'base_lr: 0.1\nlr_policy: "poly"\npower: 1\nmax_iter: 5\n',
}


def schedule(*, shared: str = SCHEDULE, **stages: str) -> Schedule:
    """The tree, with other files for some stages."""
    texts = {"schedule.prototxt": shared.encode()}
    texts |= {f"{name}.prototxt": text.encode() for name, text in {**STAGES, **stages}.items()}
    return read(texts, "/s", [])


def finished(of: Schedule, attempt: int = 1) -> list[SnapshotRef]:
    """The last snapshot of each stage."""
    ends: dict[str, SnapshotRef] = {}
    for stage in of.stages:
        parent = ends[stage.parent].id if stage.parent else ""
        ends[stage.name] = snapshot(of, stage.name, stage.solver.max_iter, parent, attempt)
    return list(ends.values())


def inventory(*refs: SnapshotRef) -> Inventory:
    return Inventory(tuple(sorted(refs, key=lambda r: (r.attempt, r.iter, r.stage))))


def states(plan: Plan) -> dict[str, str]:
    return {s.stage.name: s.state.value for s in plan.stages}


def planned(plan: Plan, name: str) -> PlannedStage:
    return next(s for s in plan.stages if s.stage.name == name)


def test_nothing_on_disk_is_all_fresh() -> None:
    plan = make_plan(schedule(), inventory())
    assert set(states(plan).values()) == {"fresh"}
    assert (plan.iterations, plan.iterations_left) == (65, 65)
    assert plan.next is not None and plan.next.stage.name == "trunk" and plan.next.start is None


def test_everything_on_disk_is_done() -> None:
    plan = make_plan(schedule(), inventory(*finished(schedule())))
    assert set(states(plan).values()) == {"done"}
    assert plan.next is None and plan.iterations_left == 0


def test_resume_at_the_newest_snapshot() -> None:
    s = schedule()
    trunk = finished(s)[0]
    halves = [snapshot(s, "long", i, trunk.id, attempt) for i, attempt in ((6, 1), (12, 1), (9, 2))]
    plan = make_plan(s, inventory(trunk, *halves))
    long = planned(plan, "long")
    # An older life got further; the bits are the same, so its snapshot is the one that saves most.
    assert (long.state, long.iter, long.start) == (State.RESUME, 12, halves[1])
    assert long.iterations_left == 18
    assert states(plan)["collapse"] == "fresh" and planned(plan, "collapse").start is None
    assert plan.next is long
    assert "resume at 12" in render_text(plan)


def test_of_two_snapshots_of_one_iteration_the_later_counts() -> None:
    s = schedule()
    first, second = snapshot(s, "trunk", 5, ""), snapshot(s, "trunk", 5, "", attempt=2)
    assert planned(make_plan(s, inventory(first, second)), "trunk").start == second


def test_a_fresh_stage_starts_from_its_parents_end() -> None:
    s = schedule()
    trunk, long, *_ = finished(s)
    plan = make_plan(s, inventory(trunk, long))
    assert planned(plan, "collapse").start == long
    assert planned(plan, "early").start == trunk
    assert plan.next is planned(plan, "collapse")


def test_a_changed_stage_is_stale_with_its_children_and_not_its_elders() -> None:
    on_disk = inventory(*finished(schedule()))
    now = schedule(long=STAGES["long"].replace("base_lr: 0.1", "# lower\nbase_lr: 0.05"))
    plan = make_plan(now, on_disk)
    assert states(plan) == {"trunk": "done", "long": "stale", "collapse": "stale", "early": "done"}
    assert [str(c) for c in planned(plan, "long").changes] == ["base_lr 0.1 -> 0.05 (long.prototxt:2)"]
    assert planned(plan, "collapse").why == "its parent `long` is stale"
    assert plan.next is None
    with pytest.raises(ResumeRefused) as caught:
        require_fresh(plan)
    text = caught.value.render()
    assert "stage `long` is stale" in text and "base_lr 0.1 -> 0.05 (long.prototxt:2)" in text
    assert "`--redo long`" in text
    assert "if this is another schedule, give it a `name:` of its own or another --out" in text


@pytest.mark.parametrize(
    "text",
    [
        STAGES["trunk"] + "# a comment\n",
        STAGES["trunk"] + "display: 7\n",
        STAGES["trunk"] + "snapshot: 3\n",
        'lr_policy: "fixed" max_iter: 20 base_lr: 1e-1',
        STAGES["trunk"].replace("max_iter: 20", "max_epoch: 2"),
        STAGES["trunk"] + "average_loss: 20\n",
    ],
    ids=["comment", "display", "snapshot", "other spelling", "epochs", "a mean that nothing reads"],
)
def test_what_the_weights_dont_depend_on_makes_nothing_stale(text: str) -> None:
    plan = make_plan(schedule(trunk=text), inventory(*finished(schedule())))
    assert set(states(plan).values()) == {"done"}


@pytest.mark.parametrize(
    "said",
    [
        "gamma: 0.1", "momentum2: 0.5", "warmup_start_lr: 0.01", "param { kind: NORM }", "loss { type: SOFTMAX }",
        "transform_param { mean_value: [0, 0, 0] std_value: [1, 1, 1] }",
    ],
)  # fmt: skip
def test_what_means_the_same_makes_nothing_stale_in_either_direction(said: str) -> None:
    without, with_it = schedule(), schedule(trunk=STAGES["trunk"] + said)
    for now, before in ((without, with_it), (with_it, without)):
        assert set(states(make_plan(now, inventory(*finished(before)))).values()) == {"done"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("param { kind: NORM }", "param { kind: NORM decay_mult: 0 }"),
        ("loss { type: SOFTMAX }", "loss { type: BINARY }"),
        ("", "transform_param { mean_value: [0, 0, 1] }"),
        ("", "transform_param { random_resized_crop_param {} }"),
        ('type: "Adam" momentum: 0.9 delta: 1e-8 momentum2: 0.9', 'type: "Adam" momentum: 0.9 delta: 1e-8 momentum2: 0.99'),
    ],
)  # fmt: skip
def test_what_does_not_mean_the_same_is_stale_in_both_directions(one: str, other: str) -> None:
    both = [schedule(trunk=STAGES["trunk"] + said) for said in (one, other)]
    for now, before in (both, both[::-1]):
        assert states(make_plan(now, inventory(*finished(before))))["trunk"] == "stale"


def test_the_mean_that_plateau_reads_is_part_of_the_stage() -> None:
    text = 'base_lr: 0.1 lr_policy: "plateau" gamma: 0.5 plateau_winsize: 5 max_iter: 20 average_loss: '
    plan = make_plan(schedule(trunk=text + "20"), inventory(*finished(schedule(trunk=text + "10"))))
    assert [str(c) for c in planned(plan, "trunk").changes] == ["average_loss 10 -> 20 (trunk.prototxt:1)"]
    # A version that took it for part of every stage has left it in its snapshots.
    older = [replace(r, identity={**r.identity, "solver.average_loss": "20"}) for r in finished(schedule())]
    assert set(states(make_plan(schedule(), inventory(*older))).values()) == {"done"}


def test_another_path_to_the_data_makes_nothing_stale() -> None:
    moved = schedule(shared=SCHEDULE.replace("/d/train", "/elsewhere/train"))
    assert set(states(make_plan(moved, inventory(*finished(schedule())))).values()) == {"done"}


def test_another_from_is_stale_and_says_so() -> None:
    moved = schedule(shared=SCHEDULE.replace('name: "early" from: "trunk"', 'name: "early" from: "long"'))
    plan = make_plan(moved, inventory(*finished(schedule())))
    assert states(plan) == {"trunk": "done", "long": "done", "collapse": "done", "early": "stale"}
    assert planned(plan, "early").why == "it was trained from `trunk`, and now starts from `long`"


def test_redo_of_a_stage_that_is_up_to_date_leaves_the_changes_below_it_to_be_named() -> None:
    changed = schedule(long=STAGES["long"].replace("0.1", "0.2"))
    done = inventory(*finished(schedule()))
    assert states(make_plan(changed, done, redo=["trunk"]))["long"] == "stale"
    assert states(make_plan(changed, done, redo=["long"]))["long"] == "fresh"


CHANGED = {"long": STAGES["long"].replace("0.1", "0.05")}


def test_redo_trains_the_stage_and_its_stale_children() -> None:
    now = schedule(**CHANGED)
    plan = make_plan(now, inventory(*finished(schedule())), redo=["long"])
    assert states(plan) == {"trunk": "done", "long": "fresh", "collapse": "fresh", "early": "done"}
    require_fresh(plan)
    assert planned(plan, "long").again and planned(plan, "collapse").again
    # While it goes on, its new snapshots count; when it is done, the child follows, and then nothing is left.
    trunk, *old = finished(schedule())
    half = snapshot(now, "long", 8, trunk.id, attempt=2)
    plan = make_plan(now, inventory(trunk, *old, half), redo=["long"])
    assert (planned(plan, "long").state, planned(plan, "long").iter) == (State.RESUME, 8)
    assert states(plan)["collapse"] == "fresh"
    plan = make_plan(now, inventory(trunk, *old, *finished(now, attempt=2)[1:]), redo=["long"])
    assert plan.next is None and not plan.stale


def test_redo_of_a_stage_that_is_not_stale_does_nothing() -> None:
    plan = make_plan(schedule(), inventory(*finished(schedule())), redo=["trunk", "collapse"])
    assert plan == make_plan(schedule(), inventory(*finished(schedule())))


def test_without_redo_a_half_trained_again_stage_goes_on() -> None:
    now = schedule(**CHANGED)
    trunk, *old = finished(schedule())
    plan = make_plan(now, inventory(trunk, *old, snapshot(now, "long", 8, trunk.id, attempt=2)))
    assert planned(plan, "long").state is State.RESUME
    # Its child's snapshots are of a parent that is gone: not silently trained again.
    assert states(make_plan(now, inventory(trunk, *old, *finished(now, 2)[1:2])))["collapse"] == "stale"


def test_unknown_names_are_all_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(schedule(), inventory(), redo=["lnog", "trunk"], only=["xyz", "trunk"])
    text = caught.value.render()
    assert "no stage is named `lnog`" in text and "did you mean `long`?" in text
    assert "no stage is named `xyz`" in text and "the stages are `trunk`" in text


def test_a_parent_that_lost_its_last_snapshot_is_finished_again_and_its_children_stay() -> None:
    s = schedule()
    trunk, long, collapse, early = finished(s)
    plan = make_plan(s, inventory(snapshot(s, "trunk", 15, ""), long, collapse, early))
    assert states(plan) == {"trunk": "resume", "long": "done", "collapse": "done", "early": "done"}
    # The same bits come out of it: then nothing is left. Others make its children stale, with the reason.
    assert make_plan(s, inventory(trunk, long, collapse, early)).next is None
    other = snapshot(s, "trunk", 20, "other bits", attempt=2)
    other = SnapshotRef(name=other.name, stage="trunk", iter=20, attempt=2, id="x", parent="", identity=other.identity)
    plan = make_plan(s, inventory(other, long, collapse, early))
    assert states(plan) == {"trunk": "done", "long": "stale", "collapse": "stale", "early": "stale"}
    assert planned(plan, "long").why == "it was trained from another end of `trunk`"


def test_positions_follow_the_path_of_ancestors() -> None:
    restart = schedule(collapse=STAGES["collapse"] + "carry { data: RESTART }\n")
    plan = make_plan(restart, inventory())
    assert {s.stage.name: s.position for s in plan.stages} == {
        "trunk": 0,
        "long": 2000,
        "collapse": 0,
        "early": 2000,  # off the trunk: what `long` consumed is another branch's
    }
    assert planned(make_plan(schedule(), inventory()), "collapse").position == 5000


def test_a_field_that_an_older_version_did_not_know_had_its_default() -> None:
    now = schedule()
    old = [
        replace(r, identity={k: v for k, v in r.identity.items() if k != "solver.clip_gradients"})
        for r in finished(now)
    ]
    assert set(states(make_plan(now, inventory(*old))).values()) == {"done"}
    written = schedule(early=STAGES["early"] + "clip_gradients: 5\n")
    assert states(make_plan(written, inventory(*old)))["early"] == "stale", "whether it was the same can't be known"


def test_a_field_that_counted_in_an_older_version_does_not_any_more() -> None:
    """What a run did about bad records (`on_bad_record`) is such a field."""
    now = schedule()
    old = [replace(r, identity={**r.identity, "data.on_bad_record": "STOP"}) for r in finished(now)]
    for snapshots in (old, finished(schedule())):
        assert set(states(make_plan(now, inventory(*snapshots))).values()) == {"done"}
    unknown = [replace(r, identity={**r.identity, "data.mirror": "true"}) for r in finished(now)]
    assert states(make_plan(now, inventory(*unknown)))["trunk"] == "stale", "nobody knows what it was"


STOPS = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 30 test_interval: 4 early_stop { metric: LOSS patience_iter: 6 }\n'


def test_totals_are_from_the_earliest_end_to_the_latest_and_then_what_it_came_to() -> None:
    shared = SCHEDULE.replace("images: 1000 }", 'images: 1000 } val { source: "/d/val" images: 100 }')
    stops = schedule(shared=shared, long=STOPS)
    plan = make_plan(stops, inventory())
    assert (plan.least, plan.iterations, plan.least_left, plan.iterations_left) == (47, 65, 47, 65)
    lines = render_text(plan).splitlines()
    assert lines[0] == "tree: 4 stages, 47 to 65 iterations, 4.70 to 6.50 epochs of 1000 images"
    row, total = (next(line for line in lines if line.startswith(name)).split("  ") for name in ("long", "total"))
    assert "12 to 30" in [cell.strip() for cell in row] and total[-1].strip() == "47 to 65 to do"
    whole = json.loads(render_json(plan))
    assert (whole["least_iterations"], whole["iterations"], whole["least_iterations_left"]) == (47, 65, 47)
    assert "about 1 min 09 s left at the most at 100 images/s" in render_hours(plan, at_images_per_second(stops, 100))
    remarks = not_shown(make_picture(stops))
    assert remarks == ["long: 12 to 30 iterations, and the longest is drawn"]

    trunk, long, *_ = finished(stops)
    ended = replace(long, iter=16, ended=True)
    plan = make_plan(stops, inventory(trunk, ended))
    assert (plan.least, plan.iterations, plan.least_left, plan.iterations_left) == (51, 51, 15, 15)
    half = replace(long, iter=14)
    plan = make_plan(stops, inventory(trunk, half))
    assert (plan.least, plan.iterations, plan.least_left, plan.iterations_left) == (49, 65, 15, 31)
    assert going_on(plan).splitlines()[-1] == "15 to 31 of 49 to 65 iterations to do"
    without = json.loads(render_json(make_plan(schedule(), inventory())))
    assert not [name for name in (*without, *without["stages"][0]) if "least" in name]
