"""What a stage's own network, weights and freeze are in identities, in recipes, and in a plan: pure, no files."""

from dataclasses import replace

import pytest
from facade import RecipeError, Schedule, render_text
from test_plan import inventory, schedule, snapshot

from stagerun.plan import State, make_plan

WEIGHTS_DIGEST = "weights.sha256"


def given(text: str) -> Schedule:
    return schedule(long=f'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 30\n{text}')


def with_digest(of: Schedule, digest: str) -> Schedule:
    stages = (replace(s, identity={**s.identity, WEIGHTS_DIGEST: digest}) if s.solver.weights else s for s in of.stages)
    return replace(of, stages=tuple(stages))


def states(of: Schedule, trained: Schedule) -> list[State]:
    trunk = snapshot(trained, "trunk", 20, "")
    return [s.state for s in make_plan(of, inventory(trunk, snapshot(trained, "long", 30, trunk.id))).stages[:2]]


def test_a_stages_own_network_is_its_identity():
    same = given('model { name: "resnet_small" num_classes: 10 }')
    assert same.stage("long").identity == schedule().stage("long").identity, "the same network, written twice"
    other = given('model { name: "resnet_small" num_classes: 7 }')
    assert states(other, schedule()) == [State.DONE, State.STALE]
    plan = make_plan(other, inventory(snapshot(schedule(), "long", 30, "x")))
    (change,) = plan.stages[1].changes
    assert (change.field, change.old, change.new) == ("model.num_classes", "10", "7")
    assert change.span is not None and change.span.path.endswith("long.prototxt")
    assert "7 classes, and `trunk` has 10: its head starts from random weights" in render_text(
        make_plan(other, inventory())
    )


def test_freezing_makes_a_stage_stale_and_a_file_counts_by_its_digest_alone():
    assert states(given('freeze: "layer1.*"'), schedule()) == [State.DONE, State.STALE]
    before = with_digest(given('weights { file: "a.pt" }'), "1")
    moved = with_digest(given('weights { file: "b.pt" strict: false }'), "1")
    assert states(moved, before) == [State.DONE, State.DONE], "the same bytes"
    assert states(given('weights { file: "a.pt" }'), before) == [State.DONE, State.DONE], "the file is gone"
    dropped = with_digest(given('weights { file: "a.pt" drop: "fc*" }'), "1")
    for other in (with_digest(before, "2"), dropped, schedule()):
        assert states(other, before) == [State.DONE, State.STALE]
    assert states(given('weights { file: "a.pt" }'), schedule()) == [State.DONE, State.STALE], "added, and not there"


def test_a_stage_goes_on_with_the_digest_that_it_started_with():
    before = with_digest(given('weights { file: "a.pt" }'), "1")
    trunk = snapshot(before, "trunk", 20, "")
    plan = make_plan(given('weights { file: "a.pt" }'), inventory(trunk, snapshot(before, "long", 10, trunk.id)))
    assert plan.stages[1].state is State.RESUME and plan.stages[1].stage.identity[WEIGHTS_DIGEST] == "1"


def test_a_state_from_the_stages_end_is_a_mistake_at_its_field():
    text = 'base_lr: 0.1\nlr_policy: "fixed"\nsolverstate: "x.solverstate"\nmax_iter: 20\n'
    of = schedule(trunk=text)

    def begun(iter: int) -> Schedule:
        digest = {WEIGHTS_DIGEST: f"{iter} of-the-state of-the-weights"}
        stages = (replace(s, identity={**s.identity, **(digest if s.name == "trunk" else {})}) for s in of.stages)
        return replace(of, stages=tuple(stages))

    make_plan(begun(19), inventory())
    for iter in (20, 500):
        with pytest.raises(RecipeError) as error:
            make_plan(begun(iter), inventory())
        (problem,) = error.value.problems
        assert (problem.span.path, problem.span.line) == ("trunk.prototxt", 3)
        assert f"has iteration {iter}, and stage `trunk` ends at 20" in problem.message
