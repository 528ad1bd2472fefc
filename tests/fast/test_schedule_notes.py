"""What plan and check say of the newer settings of learning rate, momentum and weight decay."""

import pytest
from test_plan import schedule

from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.plan.hazards import joints, notes
from stagerun.plan.render import render_text
from stagerun.schedule import warm_up_end

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
            'lr_policy: "cosine" policy_start_iter: 4',
            ["LR stays at 0 from iteration 16 on: policy_start_iter 4 (trunk.prototxt:1)"],
        ),
        (
            'lr_policy: "poly_cyc" power: 2 lr_iter: 15 warmup_iter: 5 decay_from: WARMUP_END',
            [],
        ),
        (
            'lr_policy: "plateau" gamma: 0.5 plateau_winsize: 15 warmup_iter: 5 average_loss: 3',
            ["LR drops once, down to 0.05, when the loss stands still; shown is the rate before (trunk.prototxt:1)"],
        ),
    ],
)  # fmt: skip
def test_note(text: str, expected: list[str]) -> None:
    assert trunk(text) == expected


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
