"""What was trained with is what the plan shows: learning rate, momentum and weight decay that move, to the last digit."""

import csv
from pathlib import Path

import pytest
import tiny
import torch

from stagerun import language
from stagerun.base.events import Iterated, StageFinished
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.comm import SoloComm
from stagerun.plan import make_plan
from stagerun.plan.rehearsal import rehearsal
from stagerun.plan.render import csv_rows, render_text
from stagerun.schedule import make_knobs
from stagerun.system.world import World
from stagerun.train import walk
from stagerun.train.keeper import Keeper
from stagerun.train.logs.results import results_table

STAGES = {
    "cycle": """base_lr: 0.2 base_lr_batch: 64 lr_policy: "one_cycle" start_lr: 0.02 peak_iter: 2 max_iter: 5
    momentum_policy { policy: "piecewise_linear" knot { iter: 0 factor: 1 } knot { iter: 2 factor: 0.9 } knot { iter: 5 factor: 1 } }
    weight_decay_policy { policy: "linear" end_value: 2e-3 }""",
    "fall": """base_lr: 0.05 lr_policy: "one_minus_sqrt" max_iter: 4 warmup_iter: 1 decay_from: WARMUP_END weight_decay: 0 type: "AdamW"
    weight_decay_policy { policy: "cosine" end_value: 1e-3 } policy_start_iter: 1""",
}


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    base = tmp_path_factory.mktemp("moving")
    tiny.make_data(base / "data")
    text = tiny.SCHEDULE.format(data=base / "data", train=tiny.TRAIN_IMAGES, val=tiny.VAL_IMAGES)
    text = (
        text[: text.index("stage {")].replace("batch_size: 32", "batch_size: 16").replace("snapshot: 3", "snapshot: 0")
    )
    files = {"schedule": text + "".join(f'stage {{ name: "{name}" }}\n' for name in STAGES), **STAGES}
    (base / "schedule").mkdir()
    for name, content in files.items():
        (base / "schedule" / f"{name}.prototxt").write_text(content)
    return language.load(base / "schedule")


def test_the_log_is_the_plan(schedule: Schedule, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    keeper = Keeper(schedule, tmp_path / "out")
    keeper.open()
    try:
        events = list(
            walk.run(schedule, str(tmp_path / "out"), SoloComm(), World(), torch.device("cpu"), keeper, lambda: False)
        )
    finally:
        keeper.close()
    rows = list(csv.DictReader("".join(csv_rows(make_plan(schedule, Inventory()))).splitlines()))
    planned = [
        (r["stage"], int(r["iter"]) + 1, *(float(r[n]) for n in ("lr", "momentum", "weight_decay"))) for r in rows
    ]
    assert [(e.stage, e.iter, e.lr, e.momentum, e.weight_decay) for e in events if isinstance(e, Iterated)] == planned
    assert len({row[3] for row in planned[:5]}) == 5 and len({row[4] for row in planned[:5]}) == 5
    cycle, fall = (e for e in events if isinstance(e, StageFinished))
    assert (cycle.weight_decay, cycle.last_weight_decay) == (5e-4, planned[4][4])
    assert fall.weight_decay == planned[5][4] > 0 and fall.last_weight_decay == 1e-3 == planned[-1][4]
    assert "0.0005 -> 0.0017" in results_table([cycle, fall], {"fall": "cycle"})


def test_the_plan_says_what_moves(schedule: Schedule) -> None:
    text = render_text(make_plan(schedule, Inventory()))
    assert "0.0005 -> 0.0017" in text and "SGD, momentum 0.9 -> 0.81 -> 0.87," in text
    assert "note: base_lr 0.2 for 64 images is 0.05 for 16" in text
    assert "weight_decay (0.0005 -> 0.0017) -> (0.0001464 -> 0.001)" in text


@pytest.mark.parametrize("iters", [1, 2, 3])
def test_a_rehearsal_has_a_rate_everywhere(schedule: Schedule, iters: int) -> None:
    shapes = """base_lr: 1 max_iter: 100 power: 1.5 gamma: 0.5 lr_iter: 300 stepsize: 5 stepvalue: 3 peak_iter: 50 end_lr: 0.5
    plateau_winsize: 1 knot {{ iter: 0 factor: 0 }} knot {{ iter: 50 factor: 1 }} policy_start_iter: 1 {} lr_policy: "{}"
    momentum: 0.5 momentum_policy {{ policy: "poly" power: 0.5 }} weight_decay: 1 weight_decay_policy {{ policy: "linear" }}"""
    files = dict(schedule.files)
    text = next(t for path, t in files.items() if path.endswith("schedule.prototxt"))
    for policy in language.ranges.CHOICES["Solver.lr_policy"]:
        for start in (
            "",
            "warmup_iter: 100",
            "warmup_iter: 2 decay_from: WARMUP_END",
            "warmup_iter: 40 decay_from: WARMUP_END",
        ):
            made = shapes.format(start, policy)
            whole = language.read({"schedule.prototxt": text, "cycle.prototxt": made, "fall.prototxt": made}, "/x")
            for stage in rehearsal(whole, iters, 1, 1).stages:
                knobs = make_knobs(stage.solver)
                seen = [knobs(i) for i in range(stage.solver.max_iter)]
                assert all(0 <= k.lr <= 1 / 16 and 0 <= k.momentum < 1 and k.weight_decay >= 0 for k in seen)
