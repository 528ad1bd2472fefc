"""A stage whose `max_iter` was raised: whether it goes on from where it ended, and what that means for those below it."""

from dataclasses import replace
from functools import partial

import made_schedules
import pytest

from stagerun.base.errors import ResumeRefused
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.language import read
from stagerun.plan import Plan, PlannedStage, State, make_plan, require_fresh
from stagerun.plan.ensembles import EnsembleState, plan_ensembles
from stagerun.plan.render import going_on, render_text

SHARED = """
name: "raised"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 100 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } base_lr: 0.1 }
stage { name: "trunk" solver_param { TRUNK } }
"""
COOL = 'solver_param { lr_policy: "linear" max_iter: 4 } }\n'
END, AT_END, EARLY = (f'stage {{ name: "{n}" from: "{s}" {COOL}' for n, s in (("end", "trunk"), ("at", "trunk@20"), ("early", "trunk@12")))  # fmt: skip
FIXED = 'lr_policy: "fixed" max_iter: 20'


def schedule(trunk: str = FIXED, below: str = "") -> Schedule:
    return read({"schedule.prototxt": (SHARED.replace("TRUNK", trunk) + below).encode()}, "/s", [])


def longer(trunk: str = FIXED, below: str = "", to: int = 30) -> Schedule:
    return schedule(trunk.replace("max_iter: 20", f"max_iter: {to}"), below)


snapshot = partial(made_schedules.snapshot, told_by="solver.base_lr solver.lr_policy")


def finished(of: Schedule, attempt: int = 1) -> list[SnapshotRef]:
    found: dict[tuple[str, int], SnapshotRef] = {}
    for stage in of.stages:
        start = stage.parent_iter or (of.stage(stage.parent).solver.max_iter if stage.parent else 0)
        parent = found[stage.parent, start].id if stage.parent else ""
        for iter in (*of.branch_points(stage.name), stage.solver.max_iter):
            found[stage.name, iter] = snapshot(of, stage.name, iter, parent, attempt)
    return list(found.values())


def inventory(*refs: SnapshotRef) -> Inventory:
    return Inventory(tuple(sorted(refs, key=lambda r: (r.attempt, r.iter, r.stage))))


def planned(plan: Plan, name: str) -> PlannedStage:
    return next(s for s in plan.stages if s.stage.name == name)


def states(plan: Plan) -> dict[str, str]:
    return {s.stage.name: s.state.value for s in plan.stages}


@pytest.mark.parametrize(
    "trunk",
    [
        FIXED,
        'lr_policy: "fixed" max_iter: 20 warmup_iter: 5 warmup_start_lr: 0.01 ema_decay: 0.9',
        'lr_policy: "step" gamma: 0.1 stepsize: 15 max_iter: 20',
        'lr_policy: "multistep" gamma: 0.1 stepvalue: [10, 25] max_iter: 20',
        'lr_policy: "exp" gamma: 0.99 max_iter: 20',
        'lr_policy: "inv" gamma: 0.1 power: 0.5 max_iter: 20',
        'lr_policy: "sigmoid" gamma: -0.1 stepsize: 10 max_iter: 20',
        'lr_policy: "poly_cyc" power: 1 lr_iter: 40 max_iter: 20',
        'lr_policy: "poly_cyc" power: 1 lr_iter: 40 max_iter: 20 warmup_iter: 5 decay_from: WARMUP_END',
        'lr_policy: "exp_epoch" gamma: 0.9 max_iter: 20',
        'lr_policy: "piecewise_linear" knot { iter: 0 factor: 1 } knot { iter: 40 factor: 0 } max_iter: 20',
        'lr_policy: "plateau" gamma: 0.1 plateau_winsize: [5] max_iter: 20',
        FIXED + " test_interval: 5 early_stop { metric: TOP1 patience_iter: 10 }",
        FIXED + " compress_param { method: TOP_K ratio: 0.1 }",
        FIXED + " transform_param { crop_size: 64 crop_size_ramp_param { start_size: 32 end_epoch: 2.5 } }",
    ],
)
def test_what_does_not_depend_on_the_length_goes_on(trunk: str) -> None:
    old, now = schedule(trunk), longer(trunk)
    (end,) = finished(old)
    plan = make_plan(now, inventory(snapshot(old, "trunk", 12), end))
    found = planned(plan, "trunk")
    assert (found.state, found.iter, found.start, found.iterations_left) == (State.RESUME, 20, end, 10)
    require_fresh(plan)
    for text in (render_text(plan), going_on(plan)):
        assert "goes on from iteration 20 to 30, from trunk-00000020-a0001" in text
        assert "max_iter 20 -> 30 (schedule.prototxt:6)" in text
    # Longer still, when it is half way there.
    half = snapshot(now, "trunk", 25, attempt=2)
    again = planned(make_plan(longer(trunk, to=40), inventory(end, half)), "trunk")
    assert (again.state, again.iter, again.start) == (State.RESUME, 25, half)


@pytest.mark.parametrize(
    "trunk, why",
    [
        ('lr_policy: "poly" power: 2 max_iter: 20', "lr_policy `poly` reads max_iter"),
        ('lr_policy: "linear" max_iter: 20', "lr_policy `linear` reads max_iter"),
        ('lr_policy: "cosine" max_iter: 20 warmup_iter: 5', "lr_policy `cosine` reads max_iter"),
        ('lr_policy: "one_minus_sqrt" max_iter: 20', "lr_policy `one_minus_sqrt` reads max_iter"),
        (FIXED + " sync_param { method: LOCAL replicas: 2 period: 4 }", "its replicas became one at its end, iteration 20"),
        (FIXED + " sync_param { method: DILOCO replicas: 2 period: 5 }", "its replicas became one at its end"),
        (FIXED + " sync_param { method: ASYNC replicas: 2 max_staleness: 4 }", "its workers waited for each other at its end"),
    ],
)  # fmt: skip
def test_what_does_is_stale_and_says_why(trunk: str, why: str) -> None:
    old, now = schedule(trunk), longer(trunk)
    plan = make_plan(now, inventory(snapshot(old, "trunk", 12), *finished(old)))
    assert states(plan) == {"trunk": "stale"} and why in planned(plan, "trunk").why
    assert "max_iter 20 -> 30" in render_text(plan)
    with pytest.raises(ResumeRefused, match="it can't go on from what was trained"):
        require_fresh(plan)
    assert states(make_plan(now, inventory(*finished(old)), redo=["trunk"])) == {"trunk": "fresh"}


@pytest.mark.parametrize("sync", ["LOCAL replicas: 2 period: 4", "ASYNC replicas: 2 max_staleness: 4"])
def test_replicas_that_have_not_come_to_the_end_go_on(sync: str) -> None:
    trunk = f"{FIXED} sync_param {{ method: {sync} }}"
    found = planned(make_plan(longer(trunk), inventory(snapshot(schedule(trunk), "trunk", 12))), "trunk")
    assert (found.state, found.iter) == (State.RESUME, 12)


def test_images_left_out_by_a_rollback_may_have_been_so_at_the_end() -> None:
    trunk = f"{FIXED} on_nan: ROLLBACK snapshot: 5"
    (end,) = finished(schedule(trunk))
    assert states(make_plan(longer(trunk), inventory(end))) == {"trunk": "resume"}
    # From the end it went back beyond 15, and was stopped before it came there again.
    for left in (end, replace(end, iter=15), replace(end, iter=17)):
        plan = make_plan(longer(trunk), inventory(replace(left, skipped=100)))
        assert states(plan) == {"trunk": "stale"} and "`on_nan: ROLLBACK`" in planned(plan, "trunk").why


def test_a_stage_that_early_stop_ended_stays_ended() -> None:
    trunk = f"{FIXED} test_interval: 5 early_stop {{ metric: TOP1 patience_iter: 5 }}"
    end = replace(snapshot(schedule(trunk), "trunk", 10), ended=True)
    assert states(make_plan(longer(trunk), inventory(end))) == {"trunk": "done"}


def test_epochs_count_as_the_iterations_that_they_are() -> None:
    old, now = (schedule(f'lr_policy: "fixed" max_epoch: {n}') for n in (2, 3))
    assert planned(make_plan(now, inventory(*finished(old))), "trunk").iter == 20


def test_another_change_beside_it_or_a_shorter_stage_is_stale_as_ever() -> None:
    done = inventory(*finished(schedule()))
    for trunk in ('lr_policy: "fixed" max_iter: 30 weight_decay: 1e-3', 'lr_policy: "fixed" max_iter: 15'):
        plan = make_plan(schedule(trunk), done)
        assert states(plan) == {"trunk": "stale"}
        assert "its definition has changed" in planned(plan, "trunk").why


def test_taken_back_it_is_finished_again() -> None:
    refs = [*finished(schedule()), snapshot(longer(), "trunk", 25, attempt=2)]
    assert states(make_plan(schedule(), inventory(*refs))) == {"trunk": "done"}


def test_stages_from_the_old_end_are_stale_and_those_from_an_iteration_are_not() -> None:
    old, now = schedule(below=EARLY + END), longer(below=EARLY + END)
    plan = make_plan(now, inventory(*finished(old)))
    assert states(plan) == {"trunk": "resume", "early": "done", "end": "stale"}
    why = 'it started from the end of `trunk`, which goes on from iteration 20 to 30 (`from: "trunk@20"` keeps it)'
    assert planned(plan, "end").why == why
    with pytest.raises(ResumeRefused) as caught:
        require_fresh(plan)
    assert why in caught.value.render() and "`--redo end` trains it" in caught.value.render()
    for options, state in (({"redo": ["end"]}, "fresh"), ({"redo": ["trunk"]}, "fresh")):
        asked = make_plan(now, inventory(*finished(old)), **options)
        assert states(asked) == {"trunk": "resume", "early": "done", "end": state} and not asked.lost
        require_fresh(asked)
    # When the trunk is at its new end, the same is said.
    after = make_plan(now, inventory(*finished(old), snapshot(now, "trunk", 30, attempt=2)))
    assert states(after) == {"trunk": "done", "early": "done", "end": "stale"} and planned(after, "end").why == why
    redone = make_plan(now, inventory(*finished(old), snapshot(now, "trunk", 30, attempt=2)), redo=["end"])
    assert planned(redone, "end").start == snapshot(now, "trunk", 30, attempt=2)


def test_an_old_end_that_is_gone_does_not_come_again() -> None:
    old = schedule(below=END)
    kept = [ref for ref in finished(old) if ref.stage == "end"]
    half = snapshot(old, "trunk", 12)
    assert states(make_plan(old, inventory(half, *kept)))["end"] == "done", "unchanged, it comes to the same end"
    mid = snapshot(old, "trunk", 20, attempt=2)
    lost = [replace(kept[0], parent="gone")]
    for left in (mid, half):
        plan = make_plan(longer(below=END), inventory(left, *lost))
        assert states(plan) == {"trunk": "resume", "end": "stale"} and not plan.lost


def test_the_iteration_of_the_old_end_keeps_what_started_there() -> None:
    for before in (AT_END, AT_END.replace("trunk@20", "trunk")):
        old, now = schedule(below=before), longer(below=AT_END)
        trunk, at = finished(old)
        plan = make_plan(now, inventory(trunk, at))
        assert states(plan) == {"trunk": "resume", "at": "done"} and planned(plan, "at").end == at
        assert not plan.lost and not plan.pieces
        half = replace(at, iter=2)
        assert planned(make_plan(now, inventory(trunk, half)), "at").start == half


def test_members_along_the_trunk_stay() -> None:
    below = (
        'ensemble { name: "late" members: "trunk@8..20/4" rule: WEIGHT_AVERAGE }\nstage { name: "fine" from: "late" '
        + COOL
    )
    old, now = schedule(below=below), longer(below=below)
    refs = {(r.stage, r.iter): r for r in finished(old)}
    ids = " ".join(refs["trunk", iter].id for iter in (8, 12, 16, 20))
    fine = refs["fine", 4]
    refs["fine", 4] = replace(fine, parent=refs["trunk", 20].id, identity={**fine.identity, "average.of": ids})
    plan = make_plan(now, inventory(*refs.values()))
    assert states(plan) == {"trunk": "resume", "fine": "done"} and not plan.pieces
    assert plan_ensembles(plan, {})[0].state is EnsembleState.READY
    ending = below.replace("8..20/4", "8..16/4").replace('/4"', '/4" members: "trunk"')
    waits = make_plan(longer(below=ending), inventory(*refs.values()))
    assert states(waits) == {"trunk": "resume", "fine": "stale"} and "longer now" in planned(waits, "fine").why
    assert plan_ensembles(waits, {})[0].state is EnsembleState.WAITING


def test_a_teacher_that_is_longer_makes_its_pupil_stale() -> None:
    pupil = 'stage { name: "pupil" from: "" solver_param { lr_policy: "fixed" max_iter: 4 loss { type: DISTILL teacher: "trunk" } } }'
    old, now = schedule(below=pupil), longer(below=pupil)
    trunk, end = finished(old)
    end = replace(end, identity={**end.identity, "teacher": trunk.id})
    assert states(make_plan(old, inventory(trunk, end)))["pupil"] == "done"
    plan = make_plan(now, inventory(trunk, end))
    assert states(plan) == {"trunk": "resume", "pupil": "stale"} and "longer now" in planned(plan, "pupil").why
