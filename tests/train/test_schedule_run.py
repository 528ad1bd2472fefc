"""What was trained with is what the plan shows: to the last digit."""

import csv
from pathlib import Path

import pytest
import tiny
from test_run_trees import go

from stagerun import language
from stagerun.base.events import Iterated
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.plan.rehearsal import rehearsal
from stagerun.plan.render import csv_rows
from stagerun.schedule import make_knobs

STAGES = {
    "cycle": """base_lr: 0.2 base_lr_batch: 64 lr_policy: "piecewise_linear" max_iter: 5
    knot { iter: 0 factor: 0.1 } knot { iter: 2 factor: 1 } knot { iter: 5 factor: 0 }""",
    "fall": """base_lr: 0.05 lr_policy: "one_minus_sqrt" max_iter: 4 warmup_iter: 1 decay_from: WARMUP_END weight_decay: 1e-3 type: "AdamW"
    policy_start_iter: 1""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    return base / "schedule"


@pytest.fixture
def schedule(folder: Path) -> Schedule:
    return language.load(folder)


def test_the_log_is_the_plan(folder: Path, schedule: Schedule, tmp_path: Path) -> None:
    events = go(folder, tmp_path / "out")
    rows = list(csv.DictReader("".join(csv_rows(make_plan(schedule, Inventory()))).splitlines()))
    planned = [
        (r["stage"], int(r["iter"]) + 1, *(float(r[n]) for n in ("lr", "momentum", "weight_decay"))) for r in rows
    ]
    assert [(e.stage, e.iter, e.lr, e.momentum, e.weight_decay) for e in events if isinstance(e, Iterated)] == planned


@pytest.mark.parametrize("iters", [1, 2, 3])
def test_a_rehearsal_has_a_rate_everywhere(schedule: Schedule, iters: int) -> None:
    shapes = """base_lr: 1 max_iter: 100 power: 1.5 gamma: 0.5 lr_iter: 300 stepsize: 5 stepvalue: 3 end_lr: 0.5
    plateau_winsize: 1 knot {{ iter: 0 factor: 0 }} knot {{ iter: 50 factor: 1 }} policy_start_iter: 1 {} lr_policy: "{}" """
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
