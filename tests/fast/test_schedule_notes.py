"""What plan and check say of the newer settings of learning rate, momentum and weight decay."""

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from test_plan import schedule
from test_spec_resolve import SCHEDULE, A, mutated, read

from stagerun.base.errors import RecipeError
from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.plan.hazards import joints, notes
from stagerun.plan.render import csv_rows, render_json, render_text
from stagerun.schedule import CURVES, POLICIES, curve_fields, make_knobs, warm_up_end

END = "momentum: 0.9 weight_decay: 1e-4 max_iter: 20 base_lr: 0.1"


def trunk(text: str) -> list[str]:
    s = schedule(trunk=f"{END} {text}")
    return [note for note in notes(s, s.stage("trunk")) if "ends at LR" not in note]


@pytest.mark.parametrize(
    "text, expected",
    [
        ('lr_policy: "cosine"', []),
        ('lr_policy: "linear" warmup_iter: 5 decay_from: WARMUP_END', []),
        (
            'lr_policy: "linear" warmup_iter: 5',
            ["LR falls 0.08 -> 0.075 (x0.938) at iteration 5, where the warm-up to 0.1 ends and linear is read at the absolute "
             "iteration (trunk.prototxt:1)"],
        ),
        (
            'lr_policy: "one_cycle" peak_iter: 5 start_lr: 0.02 warmup_iter: 5 decay_from: WARMUP_END policy_start_iter: 1',
            ["LR falls 0.08 -> 0.02 (x0.25) at iteration 4, where the warm-up to 0.1 ends and one_cycle begins (trunk.prototxt:1)"],
        ),
        (
            'lr_policy: "cosine" policy_start_iter: 4',
            ["LR stays at 0 from iteration 16 on: policy_start_iter 4 (trunk.prototxt:1)"],
        ),
        (
            'lr_policy: "poly_cyc" power: 2 lr_iter: 15 warmup_iter: 5 decay_from: WARMUP_END',
            [],
        ),
        (
            'lr_policy: "piecewise_linear" knot { iter: 0 factor: 1 } knot { iter: 30 factor: 0 }',
            ["the knot at iteration 30 is never reached: the stage ends at 20 (trunk.prototxt:1)"],
        ),
        (
            'lr_policy: "plateau" gamma: 0.5 plateau_winsize: 15 warmup_iter: 5 average_loss: 3',
            ["the end of plateau_winsize 15 is never reached: the stage ends at 20 (trunk.prototxt:1)",
             "LR drops once, down to 0.05, when the loss stands still; shown is the rate before (trunk.prototxt:1)"],
        ),
        ('lr_policy: "linear" base_lr_batch: 50', ["base_lr 0.1 for 50 images is 0.2 for 100 (trunk.prototxt:1)"]),
        (
            'lr_policy: "fixed" decay_from: WARMUP_END end_lr: 0.1 peak_epoch: 1 average_loss: 5 '
            "plateau_winsize_epoch: [1] knot { epoch: 0 factor: 1 } knot { epoch: 1 factor: 1 }",
            ["average_loss is not read by lr_policy fixed (trunk.prototxt:1)",
             "end_lr is not read by lr_policy fixed (trunk.prototxt:1)",
             "knot is not read by lr_policy fixed (trunk.prototxt:1)",
             "peak_epoch is not read by lr_policy fixed (trunk.prototxt:1)",
             "plateau_winsize_epoch is not read by lr_policy fixed (trunk.prototxt:1)",
             "decay_from is not read: there is no warm-up (trunk.prototxt:1)"],
        ),
        (
            'lr_policy: "cosine" weight_decay_policy { policy: "linear" } regularization_type: "L1"',
            [],
        ),
    ],
)  # fmt: skip
def test_note(text: str, expected: list[str]) -> None:
    assert trunk(text) == expected


def test_momentum_policy_of_a_type_without_momentum_and_decay_that_moves_nothing() -> None:
    s = schedule(
        trunk="""base_lr: 0.1 lr_policy: "cosine" max_iter: 20 type: "AdaGrad"
    momentum_policy { policy: "linear" end_value: 0.5 } weight_decay_policy { policy: "poly" power: 1 }"""
    )
    said = notes(s, s.stage("trunk"))
    assert "momentum_policy.policy is not read by type AdaGrad (trunk.prototxt:2)" in said
    assert (
        "weight_decay_policy moves nothing: weight_decay is 0, and stays so by policy poly (trunk.prototxt:2)" in said
    )


def test_epochs_in_lists_are_rounded_with_a_note_each() -> None:
    said = trunk('lr_policy: "plateau" gamma: 0.5 plateau_winsize_epoch: [1, 0.25, 0.5]')
    assert "plateau_winsize_epoch: 0.25 is 2.50 iterations, rounded to 3 (trunk.prototxt:1)" in said
    assert sum("rounded" in note for note in said) == 1


def test_a_shift_moves_the_joint() -> None:
    s = schedule(trunk=f'{END} lr_policy: "fixed" warmup_iter: 5 policy_start_iter: 2')
    (joint,) = joints(s, s.stage("trunk"))
    assert (joint.iter, warm_up_end(s.stage("trunk").solver)) == (3, 3)
    assert (joint.before, joint.after) == pytest.approx((0.08, 0.1))
    assert ", fixed after 3 iterations of warm-up" in render_text(make_plan(s, Inventory()))
    none = schedule(trunk=f'{END} lr_policy: "fixed" warmup_iter: 2 policy_start_iter: 2')
    assert (
        "of warm-up" not in render_text(make_plan(none, Inventory())).partition("\n\ntrunk\n")[2].partition("\n\n")[0]
    )


SHAPES = """base_lr: 0.1 lr_policy: "{}" max_epoch: 3 gamma: 0.9 power: 2 lr_iter: 40 stepsize: 5 stepvalue: [3, 5] peak_epoch: 1
policy_start_iter: 1 base_lr_batch: 50 end_lr: 0.01 start_lr: 0.02 warmup_iter: 2 decay_from: WARMUP_END
knot {{ epoch: 0 factor: 1 }} knot {{ iter: 12 factor: 0.5 }} plateau_winsize_epoch: [1, 2] average_loss: 3
momentum: 0.9 momentum_policy {{ policy: "cosine" end_value: 0.5 }}
weight_decay_policy {{ policy: "piecewise_linear" knot {{ epoch: 0.5 factor: 1 }} knot {{ epoch: 2.5 factor: 4 }} }}
"""


@st.composite
def shaped(draw: st.DrawFn) -> str:
    return draw(mutated(SHAPES.format(draw(st.sampled_from(list(POLICIES)))).replace("{{", "{").replace("}}", "}")))


@given(shaped(), st.lists(mutated("a.momentum_policy.end_value=0.3"), max_size=1))
@examples(300)
def test_mutated_shapes_give_rates_or_mistakes_with_places(text: str, changes: list[str]) -> None:
    try:
        found = read(SCHEDULE, text, A, tuple(changes))
    except RecipeError as error:
        assert error.render() and all(p.span.line >= 1 and p.span.column >= 1 and p.message for p in error.problems)
        return
    plan = make_plan(found, Inventory())
    for planned in plan.stages:
        solver = planned.stage.solver
        knobs = make_knobs(solver)
        for iter in {0, solver.max_iter // 3, solver.max_iter // 2, solver.max_iter - 1}:
            now = knobs(iter)
            assert now.lr >= 0 and 0 <= now.momentum < 1 and now.weight_decay >= 0
    assert render_text(plan) and render_json(plan)
    if plan.iterations < 10_000:
        assert sum(1 for _ in csv_rows(plan)) == 1


NUMBERS = st.sampled_from(["0", "0.25", "0.5", "1", "1.5", "2", "3", "1e-300", "1e154", "1e300"])
COUNTS = st.integers(1, 24).map(str)


@st.composite
def drawn(draw: st.DrawFn) -> str:
    """Settings in range, that may or may not fit together."""

    def knots() -> str:
        places = sorted(draw(st.lists(st.integers(0, 24), min_size=2, max_size=4)))
        return " ".join(f"knot {{ epoch: {p / 10} factor: {draw(NUMBERS)} }}" for p in places)

    def curve() -> str:
        policy = draw(st.sampled_from(CURVES))
        own = {"end_value": NUMBERS, "power": NUMBERS, "gamma": NUMBERS}
        fields = [f"{n}: {draw(v)}" for n, v in own.items() if n in curve_fields(policy)]
        return f'policy: "{policy}" {" ".join(fields)} {knots() if "knot" in curve_fields(policy) else ""}'

    numbers = {
        n: draw(NUMBERS) for n in ("base_lr", "power", "gamma", "end_lr", "start_lr", "warmup_start_lr", "weight_decay")
    }
    counts = {n: draw(COUNTS) for n in ("stepsize", "lr_iter", "peak_iter", "warmup_iter", "max_iter", "base_lr_batch")}
    start, policy = draw(st.integers(0, 5)), draw(st.sampled_from(list(POLICIES)))
    windows = f"plateau_winsize: [{draw(COUNTS)}, {draw(COUNTS)}] stepvalue: [3, 9]"
    fields = " ".join(f"{n}: {v}" for n, v in (numbers | counts).items())
    decay_from = draw(st.sampled_from(["STAGE_START", "WARMUP_END"]))
    return (
        f'lr_policy: "{policy}" policy_start_iter: {start} decay_from: {decay_from} {fields} {windows} {knots()} momentum: 0.5 '
        f"momentum_policy {{ {curve()} }} weight_decay_policy {{ {curve()} }}"
    )
