"""What the plan points at in a stage's learning rate."""

from dataclasses import replace

import pytest
from test_plan import SCHEDULE, schedule

from stagerun.base.recipe import WEIGHTS_DIGEST
from stagerun.language import read
from stagerun.plan.hazards import notes

FIXED = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 20'
TO_ZERO = 'base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 20'


def test_a_stage_that_begins_in_the_midst_of_its_policy_says_which_part_it_uses() -> None:
    s = schedule(
        trunk='base_lr: 0.1 lr_policy: "poly_cyc" power: 2 max_iter: 20 lr_iter: 30 solverstate: "a.solverstate"'
    )
    stage = s.stage("trunk")
    stage = replace(stage, identity={**stage.identity, WEIGHTS_DIGEST: "5 one two"})
    assert notes(s, stage)[0].startswith(
        "uses iterations 5 to 20 of the 30 iterations of its poly_cyc; the last 10 are never"
    )


@pytest.mark.parametrize(
    "solver, expected",
    [
        (FIXED, ["ends at LR 0.1, above zero"]),
        (TO_ZERO.replace("20", "2000"), []),
        (TO_ZERO, []),
        (
            'base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 2000 warmup_iter: 500',
            [
                "LR falls 0.0998 -> 0.075 (x0.752) at iteration 500, where the warm-up to 0.1 ends and poly is read at the "
                "absolute iteration (trunk.prototxt:1)"
            ],
        ),
        (f"{FIXED} warmup_iter: 5", ["ends at LR 0.1, above zero"]),
        (
            f"{FIXED} warmup_iter: 20",
            ["is warm-up from end to end: fixed is never used (trunk.prototxt:1)", "ends at LR 0.095, above zero"],
        ),
        (
            'base_lr: 0.1 lr_policy: "poly_cyc" power: 2 max_iter: 20 lr_iter: 30',
            [
                "uses 20 of the 30 iterations of its poly_cyc; the last 10 are never reached (trunk.prototxt:1)",
                "ends at LR 0.01344, above zero",
            ],
        ),
        (
            'base_lr: 0.1 lr_policy: "poly_cyc" power: 2 max_iter: 20 lr_iter: 10',
            [
                "LR reaches zero at iteration 10 and rises again until 20 (trunk.prototxt:1)",
                "ends at LR 0.081, above zero",
            ],
        ),
    ],
    ids=["above zero", "clean", "clean and short", "warm-up joint", "smooth warm-up", "all warm-up", "lr_iter unused", "rises again"],
)  # fmt: skip
def test_notes_of_a_stage(solver: str, expected: list[str]) -> None:
    s = schedule(shared=SCHEDULE.partition('stage { name: "long"')[0], trunk=solver)
    assert notes(s, s.stage("trunk")) == expected


@pytest.mark.parametrize(
    ("solver", "said"),
    [
        ('"poly" power: 1 max_iter: 20', None),
        ('"linear" max_iter: 20 end_lr: 0.01', "0.0145"),
        ('"poly" power: 0.5 max_iter: 20', "0.02236"),
        ('"poly" power: 0.5 max_iter: 20 policy_start_iter: 1', None),  # one further there is no root
        ('"poly_cyc" power: 0.5 max_iter: 20 lr_iter: 19', None),
        ('"inv" gamma: -0.05 power: 1 max_iter: 20', "2"),
        ('"poly" power: 1 max_iter: 20 warmup_iter: 20 decay_from: WARMUP_END', "0.095"),
    ],
)
def test_a_decay_to_zero_does_not_end_above_it(solver: str, said: str | None) -> None:
    s = schedule(shared=SCHEDULE.partition('stage { name: "long"')[0], trunk=f"base_lr: 0.1 lr_policy: {solver}")
    found = [note for note in notes(s, s.stage("trunk")) if "above zero" in note]
    assert found == ([f"ends at LR {said}, above zero"] if said else [])


TRUNK = """
name: "tree" model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } base_lr: 0.1 lr_policy: "fixed" max_iter: 20 }
stage { name: "trunk" solver_param {} }
"""
MEAN = 'ensemble { name: "late" members: ["trunk@5", "b"] rule: WEIGHT_AVERAGE }'


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("", True),
        ('stage { name: "b" from: "" solver_param {} }', True),
        ('stage { name: "b" from: "trunk" enabled: false solver_param {} }', True),
        ('stage { name: "b" solver_param {} }', False),
        ('stage { name: "b" from: "trunk@5" solver_param {} }', False),
        (f'stage {{ name: "b" from: "" solver_param {{}} }} {MEAN}', True),
        (f'stage {{ name: "b" from: "" solver_param {{}} }} {MEAN} stage {{ name: "c" from: "late" solver_param {{}} }}', False),
    ],
    ids=["alone", "another root", "disabled", "its end", "within", "a member", "an average"],
)  # fmt: skip
def test_a_rate_above_zero_is_noted_where_no_stage_goes_on(after: str, said: bool) -> None:
    s = read({"schedule.prototxt": TRUNK + after}, "/s", [])
    assert ("ends at LR 0.1, above zero" in notes(s, s.stage("trunk"))) is said


def test_a_jump_away_from_an_average_names_the_average() -> None:
    fine = 'stage { name: "b" solver_param {} } stage { name: "fine" from: "late" solver_param { base_lr: 0.02 } }'
    s = read({"schedule.prototxt": f"{TRUNK} {fine} {MEAN}"}, "/s", [])
    assert notes(s, s.stage("fine"))[0] == "LR jumps 0.1 -> 0.02 (x0.2) where it leaves `late`"


@pytest.mark.parametrize(
    "first, expected",
    [
        ("0.1", []),
        ("0.104", []),
        ("0.2", ["LR jumps 0.1 -> 0.2 (x2) where it leaves `trunk`"]),
        ("0.05", ["LR jumps 0.1 -> 0.05 (x0.5) where it leaves `trunk`"]),
    ],
)
def test_a_join_that_jumps(first: str, expected: list[str]) -> None:
    s = schedule(trunk=FIXED, long=f'base_lr: {first} lr_policy: "fixed" max_iter: 20')
    assert [n for n in notes(s, s.stage("long")) if "jumps" in n] == expected
