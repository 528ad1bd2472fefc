"""The published 72-epoch schedule in numbers, by `plan --json` and `plan --csv`: what is printed is what is trained."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagerun.cli import main
from stagerun.language import load
from stagerun.schedule import learning_rate

SCHEDULE = str(Path(__file__).parents[2] / "solvers" / "resnet50_72ep")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds plan.json and plan.csv."""
    folder = tmp_path_factory.mktemp("plan")
    arguments = ["plan", SCHEDULE, "--out", str(folder / "out"), "--json", "--csv", str(folder / "plan.csv")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (folder / "plan.json").write_text(result.stdout)
    assert not (folder / "out").exists(), "a plan writes nothing into the output folder"
    return folder


def test_lengths_and_joints(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["iterations"] == plan["iterations_left"] == 22610
    assert sum(s["epochs"] for s in plan["stages"]) == pytest.approx(72.29, abs=0.005)
    ends = {s["name"]: j for s in plan["stages"] for j in s["joints"] if j["place"] == "warm-up"}
    found = {name: (j["iter"], round(j["before"], 2), round(j["after"], 4)) for name, j in ends.items()}
    assert found == {"init": (1560, 1.6, 1.4667), "cyc2": (1000, 0.76, 0.5738), "cyc3": (1000, 0.57, 0.4296)}
    # One iteration before the end of a ramp towards 0.764 and 0.572.
    assert ends["cyc2"]["before"] == pytest.approx(0.764 - (0.764 - 0.255) / 1000)
    assert ends["cyc3"]["before"] == pytest.approx(0.572 - (0.572 - 0.19) / 1000)


def test_csv_holds_every_iteration_exactly(folder: Path) -> None:
    with open(folder / "plan.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    schedule = load(SCHEDULE, ())
    assert list(rows[0]) == ["stage", "iter", "epoch", "lr", "momentum", "weight_decay"]
    assert len(rows) == 22610
    at = 0
    for stage in schedule.stages:
        rate = learning_rate(stage.solver)
        mine = rows[at : at + stage.solver.max_iter]
        assert [(r["stage"], int(r["iter"])) for r in mine] == [(stage.name, i) for i in range(stage.solver.max_iter)]
        assert [float(r["lr"]) for r in mine] == [rate(i) for i in range(stage.solver.max_iter)]
        assert float(mine[0]["epoch"]) == at * 4096 / 1281167
        at += stage.solver.max_iter
    assert {(r["momentum"], r["weight_decay"]) for r in rows} == {("0.9", "5e-05"), ("0.9", "0.0002")}
