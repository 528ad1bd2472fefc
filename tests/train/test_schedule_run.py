"""What was trained with is what the plan shows: to the last digit."""

import csv

import contract
from facade import Iterated
from nan_help import lives, make_data, make_schedule

STAGES = {
    "cycle": """base_lr: 0.2 base_lr_batch: 64 lr_policy: "piecewise_linear" max_iter: 5
    knot { iter: 0 factor: 0.1 } knot { iter: 2 factor: 1 } knot { iter: 5 factor: 0 }""",
    "fall": """base_lr: 0.05 lr_policy: "one_minus_sqrt" max_iter: 4 warmup_iter: 1 decay_from: WARMUP_END weight_decay: 1e-3 type: "AdamW"
    policy_start_iter: 1""",
}


def test_the_log_is_the_plan(tmp_path):
    folder = make_schedule(tmp_path / "schedule", make_data(tmp_path / "lmdb"), **STAGES)
    assert contract.stagerun(["plan", folder, "--csv", "plan.csv"], tmp_path).exit_code == 0
    rows = csv.DictReader((tmp_path / "plan.csv").read_text().splitlines())
    knobs = ("lr", "momentum", "weight_decay")
    planned = [(row["stage"], int(row["iter"]) + 1, *(float(row[name]) for name in knobs)) for row in rows]
    events = [event for event in lives(folder, tmp_path / "out") if isinstance(event, Iterated)]
    assert [(e.stage, e.iter, e.lr, e.momentum, e.weight_decay) for e in events] == planned
