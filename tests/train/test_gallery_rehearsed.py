"""What was trained with is what the plan shows; and every schedule of the gallery, rehearsed."""

import csv
import json
from pathlib import Path

import contract
import pytest
from facade import Iterated, Schedule
from nan_help import lives, make_data, make_schedule

from stagerun.language import load

STAGES = {
    "cycle": """base_lr: 0.2 base_lr_batch: 64 lr_policy: "piecewise_linear" max_iter: 5
    knot { iter: 0 factor: 0.1 } knot { iter: 2 factor: 1 } knot { iter: 5 factor: 0 }""",
    "fall": """base_lr: 0.05 lr_policy: "one_minus_sqrt" max_iter: 4 warmup_iter: 1 decay_from: WARMUP_END weight_decay: 1e-3 type: "AdamW"
    policy_start_iter: 1""",
}


@pytest.mark.long
def test_the_log_is_the_plan(tmp_path):
    folder = make_schedule(tmp_path / "schedule", make_data(tmp_path / "lmdb"), **STAGES)
    assert contract.stagerun(["plan", folder, "--csv", "plan.csv"], tmp_path).exit_code == 0
    rows = csv.DictReader((tmp_path / "plan.csv").read_text().splitlines())
    knobs = ("lr", "momentum", "weight_decay")
    planned = [(row["stage"], int(row["iter"]) + 1, *(float(row[name]) for name in knobs)) for row in rows]
    events = [event for event in lives(folder, tmp_path / "out") if isinstance(event, Iterated)]
    assert [(e.stage, e.iter, e.lr, e.momentum, e.weight_decay) for e in events] == planned


# -- Every schedule in solvers/ goes through a rehearsal with made-up images: all stages, a stop and a resume

SOLVERS = Path(__file__).parents[2] / "solvers"
SIDE = 64
# One with branches and an ensemble; the others are left to scripts/test --slow.
QUICK = "fashion_ensemble"
GALLERY = [
    pytest.param(path.name, marks=() if path.name == QUICK else pytest.mark.slow) for path in sorted(SOLVERS.iterdir())
]


def small_images(schedule: Schedule) -> list[str]:
    """The changes (--set) with which no image of a schedule is larger than SIDE."""
    words = []
    for stage in schedule.stages:
        of = {"transform_param": stage.solver.transform, "test_transform_param": stage.solver.test_transform}
        for field, transform in of.items():
            if transform.crop_size is not None and transform.crop_size > SIDE:
                words.append(f"{stage.name}.{field}.crop_size={SIDE}")
            if transform.crop_size_ramp is not None:
                words.append(f"{stage.name}.{field}.crop_size_ramp_param.start_size={SIDE // 2}")
    return words


@pytest.mark.parametrize("name", GALLERY)
def test_a_rehearsal_goes_through_every_stage(name, tmp_path):
    sets = small_images(load(SOLVERS / name))
    stages = {stage.name for stage in load(SOLVERS / name, sets).stages}
    words = ["rehearse", SOLVERS / name, "--synthetic", "--iters", 2, "--device-batch", 4, "--nproc", 1, "--out", "out"]
    done = contract.stagerun([*words, *(word for change in sets for word in ("--set", change))], tmp_path)
    assert done.exit_code == 0, done.output
    assert all(f"  {stage}: evaluated " in done.stdout for stage in stages)
    figures = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert {stage for cost in figures["costs"] for stage in cost["stages"]} == stages
