"""How long a schedule takes, and where an allocation ends, by hand; tests/cases/hours.txt has what `plan` says of them."""

from dataclasses import replace

import pytest
from facade import Event, Inventory, Schedule, SnapshotRef, SnapshotWritten, duration, forecast, units
from hypothesis import given
from hypothesis import strategies as st
from log_help import evaluated, finished, run_started, stage_started

from stagerun.language import read
from stagerun.plan import make_plan
from stagerun.plan.hours import (
    Hours,
    Measured,
    Speed,
    Spent,
    at_images_per_second,
    hours_of_run,
    left,
    measured,
    render_hours,
    spent,
)

Budget, budget, render_budget = forecast.Budget, forecast.budget, forecast.render_budget
SCHEDULE = """
name: "tree"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 300 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } test_batch_size: 50 }
stage { name: "trunk" }
stage { name: "long" }
stage { name: "collapse" from: "trunk@12" }
"""
STAGES = {
    "trunk": 'base_lr: 0.1 lr_policy: "fixed" max_iter: 20 snapshot: 5 test_interval: 8 test_iter: 2',
    "long": 'base_lr: 0.1 lr_policy: "fixed" max_iter: 30 snapshot: 10',
    "collapse": 'base_lr: 0.1 lr_policy: "poly" power: 2 max_iter: 10 ema_decay: 0.9',
}
# An iteration takes 1 s, the start of a stage 10 s, an evaluation 5 s or 2 s, a snapshot 0.5 s inside and 3 s at the end.
SPEED = Speed(iteration=1.0, start=10.0, test=5.0, inner_test=2.0, blocked=0.5, written=3.0)


def schedule(shared: str = SCHEDULE, **stages: str) -> Schedule:
    texts = {"schedule.prototxt": shared.encode()}
    texts |= {f"{name}.prototxt": text.encode() for name, text in {**STAGES, **stages}.items()}
    return read(texts, "/s", [])


TREE = schedule()
HOURS = Hours(source="as made up", speeds=dict.fromkeys(STAGES, SPEED), opening=100.0)


def part(iter: int, parent: str = "", stage: str = "trunk") -> SnapshotRef:
    name = f"{stage}-{iter:08d}-a0001"
    return SnapshotRef(
        name=name, stage=stage, iter=iter, attempt=1, id=name, parent=parent, identity=TREE.stage(stage).identity
    )


# -- lengths of time


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("4h", 14400), ("90m", 5400), ("90min", 5400), ("3h30m", 12600), ("1:30:00", 5400), ("2d", 172800), ("45s", 45),
        ("1-12:00:00", 129600), ("1.5h", 5400), ("0.1 h", 360), ("2 d 04 h", 187200), ("100:00:00", 360000), (" 4h ", 14400),
    ],
)  # fmt: skip
def test_lengths_of_time(text, seconds):
    assert units.seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "4", "1:30", "h", "-4h", "4h4h", "30m3h", "1:60:00", "0h", "1e3h", "nan", "inf", "4 hours", "٤h",
        "9" * 99 + "d",
    ],
)  # fmt: skip
def test_what_is_no_length_of_time(text):
    with pytest.raises(ValueError):
        units.seconds(text)


@given(st.integers(1, 9 * 86400))
def test_what_is_printed_can_be_typed(seconds):
    # `duration` leaves seconds out above an hour, and minutes above a day.
    assert abs(units.seconds(duration(seconds)) - seconds) < (60 if seconds < 86400 else 3600)


def test_a_stage_in_parts():
    trunk = TREE.stage("trunk")
    # Snapshots after 5, 10 and 15 and, where the collapse leaves, 12; evaluations after 8 and 16.
    assert spent(TREE, trunk, SPEED, 0, 20) == Spent(training=20.0, tests=4.0, snapshots=2.0)
    assert spent(TREE, trunk, SPEED, 5, 12) == Spent(training=7.0, tests=2.0, snapshots=1.0)
    assert spent(TREE, trunk, SPEED, 12, 12) == Spent()
    plan = make_plan(TREE, Inventory())
    assert left(plan, HOURS) == {
        "trunk": Spent(start=10.0, training=20.0, tests=9.0, snapshots=5.0),
        "long": Spent(start=10.0, training=30.0, tests=5.0, snapshots=4.0),
        "collapse": Spent(start=10.0, training=10.0, tests=5.0, snapshots=3.0),
    }


def test_images_per_second():
    trunk = at_images_per_second(TREE, 50.0).speeds["trunk"]
    assert trunk.inner_test == pytest.approx(100 / 150), "test_iter 2 of 50 images, each of which takes a third"
    known = at_images_per_second(TREE, 50.0, Measured(blocked=0.5, written=3.0, start=1.0, opening=7.0))
    assert known.left_out == () and "(the job)" in render_hours(make_plan(TREE, Inventory()), known)
    quick = replace(HOURS, speeds=dict.fromkeys(STAGES, replace(SPEED, start=0.01)), opening=0.2)
    text = render_hours(make_plan(TREE, Inventory()), quick)
    assert "(the job)" not in text and "start" not in text and "training" in text and " 0 s" not in text


def test_a_stage_of_which_nothing_is_known():
    some = Hours(source="as made up", speeds={"trunk": SPEED}, unknown="was not rehearsed")
    text = render_hours(make_plan(TREE, Inventory()), some)
    assert text.startswith("about 44 s left without long, collapse as made up\n")
    assert "stage long, collapse was not rehearsed" in text and "long      30          ?" in text


# -- budgets


def found(seconds: float, *refs: SnapshotRef, hours: Hours = HOURS) -> Budget:
    return budget(make_plan(TREE, Inventory(refs)), hours, seconds)


def test_an_allocation_that_is_long_enough():
    whole = found(10**6)
    assert whole.done and whole.finished == ("trunk", "long", "collapse")
    assert whole.total == 100 + 44 + 49 + 28
    assert found(whole.total).done and not found(whole.total - 0.01).done
    assert render_budget(found(86400)) == "an allocation of 1 d 00 h is enough: all is done after 3 min 41 s"


# 100 s of opening and 10 s of start; then an iteration a second, with snapshots after 5, 10, 12, 15 and an evaluation after 8 and 16.
ENDS = {
    # The last 3 seconds are for the snapshot: told to stop, it is that of iteration 11, and that of 12 is not on disk yet.
    110 + 13 + 1.5 + 2: ("trunk", 10, "at iteration 10 of 20"),
    110 + 15 + 1.5 + 2: ("trunk", 12, "the same command resumes"),
    110 + 4: ("trunk", 1, "ends in trunk, at iteration 1 of 20\n"),
    100 + 44 + 10 + 7: ("long", 4, "after trunk"),
    100 + 44 + 49 + 10 + 6: ("collapse", 3, "after trunk, long"),
    110 + 20 + 4 + 2 + 3 + 1: ("trunk", 20, "the same command evaluates again"),
}


@pytest.mark.parametrize("seconds", ENDS)
def test_where_an_allocation_ends(seconds):
    end = found(seconds)
    stage, iter, said = ENDS[seconds]
    assert (end.stage, end.iter) == (stage, iter)
    assert said in render_budget(end) and not end.done


def test_only_what_is_left_is_in_a_budget():
    resumed = found(110 + 6, part(10))
    assert (resumed.stage, resumed.iter) == ("trunk", 12), "two snapshots of half a second"
    assert found(10**6, part(10)).total < found(10**6).total
    all_done = found(1.0, *(part(r, p, s) for r, p, s in ((12, "", "trunk"), (20, "", "trunk"))),
                     part(30, "trunk-00000020-a0001", "long"), part(10, "trunk-00000012-a0001", "collapse"))  # fmt: skip
    assert all_done.done and all_done.total == 0.0 and render_budget(all_done).startswith("nothing is left")


def test_a_piece_that_is_trained_once_more_counts_and_the_trunk_once():
    # The trunk and the long stage are trained; what the collapse starts from is gone, and was 2 iterations after a snapshot.
    refs = (part(10), part(20), part(30, "trunk-00000020-a0001", "long"))
    plan = make_plan(TREE, Inventory(refs))
    assert left(plan, HOURS) == {
        "trunk@12": Spent(start=10.0, training=2.0, snapshots=0.5 + 3.0),
        "collapse": Spent(start=10.0, training=10.0, tests=5.0, snapshots=3.0),
    }
    assert "trunk@12   2 " in render_hours(plan, HOURS)
    end = budget(plan, HOURS, 100 + 10 + 1)
    assert (end.stage, end.iter, end.last) == ("trunk@12", 10, 12)
    assert budget(plan, HOURS, 200).total == 100 + 15.5 + 28


def test_ensembles_come_last():
    plan = make_plan(TREE, Inventory())
    assert budget(plan, HOURS, 300, ensembles=50.0).total == 221 + 50
    end = budget(plan, HOURS, 240, ensembles=50.0)
    assert not end.stage and end.finished == ("trunk", "long", "collapse")
    said = "ends in the evaluation of the ensembles, after trunk, long, collapse\n  training is saved"
    assert said in render_budget(end)


# -- what a run measured


def life(*events: tuple[float, Event]) -> list[tuple[float, Event]]:
    return [(1000.0, run_started()), *events]


def test_what_a_process_life_measured():
    snapshot = SnapshotWritten(stage="trunk", iter=5, name="x", bytes=1, blocked_seconds=0.2, seconds=2.0)
    tested, ended = evaluated("trunk", 20, 0.5, images=300, seconds=6.0), finished("trunk", 20, 0.5, 20.0)
    said = stage_started("trunk"), snapshot, tested, ended, stage_started("long")
    events = life(*zip((1030.0, 1040.0, 1060.0, 1061.0, 1065.0), said, strict=True))
    assert measured(events) == Measured(
        who="with 2 workers on cpu", test_image=0.02, blocked=0.2, written=2.0, start=4.0, opening=26.0
    )
    assert measured(events[1:]) is None
    nothing = measured(life())
    assert nothing == Measured(who="with 2 workers on cpu")
    hours = hours_of_run(TREE, nothing, {"trunk": 50.0})
    assert hours.left_out == ("snapshots", "the start of each stage", "the start of the job")
    assert hours.speeds["trunk"].test == pytest.approx(2.0), "until an evaluation is measured, a third of training"


def test_a_stage_that_was_not_trained_goes_as_its_like_or_as_the_slowest():
    run = Measured(who="with 2 workers on cpu", test_image=0.01)
    other = schedule(long=STAGES["long"] + ' type: "Adam" momentum: 0.9')
    hours = hours_of_run(other, run, {"trunk": 50.0, "long": 25.0})
    # The collapse keeps an average, which the two others do not.
    assert {name: speed.iteration for name, speed in hours.speeds.items()} == {
        "trunk": 2.0,
        "long": 4.0,
        "collapse": 4.0,
    }
    assert hours.speeds["trunk"].test == pytest.approx(3.0) and hours.speeds["collapse"].test == pytest.approx(6.0)
    assert hours.notes == ("collapse: of a kind that was not trained yet, assumed as slow as the slowest stage so far",)
    alike = hours_of_run(TREE, run, {"trunk": 50.0})
    assert alike.speeds["long"].iteration == 2.0
