"""The published 72-epoch schedule by `plan --csv`: what is printed is what is trained. golden/plan: its lengths and joints."""

import csv
from pathlib import Path

import contract

from stagerun.language import load
from stagerun.schedule import learning_rate

SCHEDULE = Path(__file__).parents[2] / "solvers" / "resnet50_72ep"


def test_csv_holds_every_iteration_exactly(tmp_path):
    assert contract.stagerun(["plan", SCHEDULE, "--out", "out", "--csv", "plan.csv"], tmp_path).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plan.csv"], "a plan writes nothing into the output folder"
    rows = list(csv.DictReader((tmp_path / "plan.csv").read_text().splitlines()))
    assert list(rows[0]) == ["stage", "iter", "epoch", "lr", "momentum", "weight_decay"]
    rates = [(stage, learning_rate(stage.solver)) for stage in load(SCHEDULE).stages]
    expected = [(stage.name, i, rate(i)) for stage, rate in rates for i in range(stage.solver.max_iter)]
    assert [(r["stage"], int(r["iter"]), float(r["lr"])) for r in rows] == expected
    assert [float(r["epoch"]) for r in rows] == [at * 4096 / 1281167 for at in range(len(rows))]
    assert {(r["momentum"], r["weight_decay"]) for r in rows} == {("0.9", "5e-05"), ("0.9", "0.0002")}
