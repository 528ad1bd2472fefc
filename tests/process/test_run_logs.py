"""The logs of a run of two workers that was killed and carried to its end."""

import csv
import importlib.util
import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import caffe_parser
import processes
import pytest
import small
import tiny
from log_help import points, records, table, where

from stagerun.train.logs.table import LOGS

TRUNK = ["0.933333", "1.866667", "2.8", "3.2"]  # epochs of the evaluations in init


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers, killed after its first snapshot, and carried to its end: out/, and what it printed then.

    No evaluation falls on a snapshot: one that a kill cuts off there is not made again.
    """
    base = tmp_path_factory.mktemp("logs")
    tiny.make_data(base / "data")
    schedule = small.make_schedule(
        base / "schedule",
        base / "data",
        init='base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 120 test_interval: 35 snapshot: 50',
        cyc1=small.STAGES["cyc1"].replace("test_interval: 4", "test_interval: 3"),
    )
    here = [name for name in LOGS if not LOGS[name].package or importlib.util.find_spec(LOGS[name].package)]
    names = [name for name in here if not LOGS[name].tracker]  # of those: test_trackers_run.py
    words = ["--log-format", "caffe", *[word for name in names for word in ("--log", name)]]
    first = small.start(schedule, base / "out", *words, *small.ENDLESS, nproc=2)
    small.wait_for(base / "out" / "snapshots" / "init-00000050-a0001", first)
    processes.kill(first, "all", random.Random(1))
    first.wait()
    assert first.gone()
    done = small.run(schedule, base / "out", *words, *small.AGAIN, nproc=2)
    assert done.returncode == 0, done.stdout + done.stderr
    (base / "printed.txt").write_text(done.stdout)
    return base


def logged(base: Path, life: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Events of log.jsonl by name, from the `life`th start on."""
    lines = [json.loads(line) for line in (base / "out" / "log.jsonl").read_text().splitlines() if line.endswith("}")]
    starts = [i for i, line in enumerate(lines) if line["event"] == "RunStarted"]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines[starts[life] :]:
        found.setdefault(line["event"], []).append(line)
    return found


def test_a_caffe_log_of_a_run_is_read_by_a_parser_of_caffes_lines(killed: Path) -> None:
    text = (killed / "printed.txt").read_text()
    parsed = caffe_parser.parse(text, datetime.now().year)
    events = logged(killed, life=1)
    above = {"init": 0, "cyc1": 120, "collapse": 125, "early": 128}
    numbers = [above[e["stage"]] + e["iter"] - 1 for e in events["Iterated"]]
    assert numbers == sorted(set(numbers)) and numbers[0] >= 50 and numbers[-1] == 130
    assert [row["NumIters"] for row in parsed.train] == numbers
    assert [row["loss"] for row in parsed.train] == [float(f"{e['loss']:g}") for e in events["Iterated"]]
    assert [row["LearningRate"] for row in parsed.train] == [float(f"{e['lr']:g}") for e in events["Iterated"]]
    assert [row["NumIters"] for row in parsed.test] == [above[e["stage"]] + e["iter"] for e in events["Tested"]]
    assert [row["accuracy"] for row in parsed.test] == [float(f"{e['top1']:g}") for e in events["Tested"]]
    assert len(parsed.snapshots) == len(events["SnapshotWritten"])
    seconds = [row["Seconds"] for row in parsed.train]
    assert seconds == sorted(seconds) and parsed.ends == ["Optimization Done."]


def test_dawnbench_of_a_run_that_was_killed(killed: Path) -> None:
    results = {e["stage"]: e for e in logged(killed)["StageFinished"]}
    for leaf, inner in (
        ("collapse", [*TRUNK, "3.28", "3.333333", "3.413333"]),
        ("early", [*TRUNK, "3.28"]),
    ):
        rows = table(killed / "out" / f"dawnbench-{leaf}.tsv")
        assert [row[0] for row in rows] == inner
        hours = [float(row[1]) for row in rows]
        assert hours == sorted(hours)
        path = ["init", "cyc1", "collapse"] if leaf == "collapse" else ["init", "early"]
        assert hours[-1] == pytest.approx(sum(results[s]["train_seconds"] for s in path) / 3600, abs=1e-8)
        assert float(rows[-1][2]) == pytest.approx(100 * results[leaf]["top1"], abs=0.01)


def test_mllog_of_a_run_that_was_killed(killed: Path) -> None:
    path = killed / "out" / "mllog.txt"
    marks = [(r["key"], r["metadata"].get("stage"), r["metadata"].get("iter")) for r in records(path)]
    assert len(set(marks)) == len(marks), "nothing is in it twice"
    assert where(path, "eval_accuracy", "iter") == [35, 70, 105, 120, 3, 5, 3, 3]
    for key in ("epoch_start", "epoch_stop"):
        epochs = list(zip(where(path, key, "stage"), where(path, key, "epoch_num"), strict=True))
        assert epochs == [
            ("init", 1),
            ("init", 2),
            ("init", 3),
            ("init", 4),
            ("cyc1", 4),
            ("collapse", 4),
            ("early", 4),
        ]
    assert where(path, "run_stop", "status") == ["success"] and marks[-1][0] == "run_stop"


def test_the_public_checker_reads_mllog_and_misses_only_what_the_submitter_knows(killed: Path, tmp_path: Path) -> None:
    checker = pytest.importorskip(
        "mlperf_logging.compliance_checker.mlp_compliance", reason="pip install 'stagerun[mlperf]' runs it"
    )
    lines = (killed / "out" / "mllog.txt").read_text()
    record = (
        '{"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": "KEY", "value": "VALUE", "metadata": {}}'
    )
    known = {"org": "x", "platform": "x", "division": "open", "status": "research", "benchmark": "resnet"}
    submitter = {**{f"submission_{key}": value for key, value in known.items()}, "cache_clear": "true"}
    added = [":::MLLOG " + record.replace("KEY", key).replace("VALUE", value) for key, value in submitter.items()]
    (tmp_path / "result_0.txt").write_text("\n".join(added) + "\n" + lines)
    checked = checker.make_checker("training", "4.0.0", False, False)
    assert checked.check_file(str(tmp_path / "result_0.txt"), "training_4.0.0/common.yaml")
    for ruleset in ("1.0.0", "4.0.0"):
        parsed, errors = checker.mlp_parser.parse_file(str(killed / "out" / "mllog.txt"), ruleset=ruleset)
        assert not errors and len(parsed) == len(lines.splitlines())


def test_tensorboard_of_a_run_that_was_killed(killed: Path) -> None:
    pytest.importorskip("tensorboard")
    last = {(e["stage"], e["iter"]): e for e in logged(killed)["Iterated"]}
    before = {"init": 0, "cyc1": 120, "collapse": 125, "early": 120}
    for stage in small.STAGES:
        expected = [(before[s] + i, round(e["loss"], 5)) for (s, i), e in sorted(last.items()) if s == stage]
        found = points(killed / "out" / "tensorboard" / stage, "train/loss")
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-4)


def test_csv_of_a_run_that_was_killed(killed: Path) -> None:
    with open(killed / "out" / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    marks = [(row["stage"], int(row["iter"]), row["what"]) for row in rows]
    assert len(set(marks)) == len(marks), "nothing is in it twice"
    events = logged(killed)
    stage_order = {stage: number for number, stage in enumerate(small.STAGES)}
    trained = sorted({(stage_order[e["stage"]], e["iter"]) for e in events["Iterated"] if e["stage"] != "early"})
    found = [(stage_order[stage], iter) for stage, iter, what in marks if what == "train" and stage != "early"]
    assert found == trained, "nor is anything missing"
    last = {(e["stage"], e["iter"]): e for e in events["Iterated"]}
    for row in rows:
        if row["what"] == "train":
            assert float(row["loss"]) == pytest.approx(last[row["stage"], int(row["iter"])]["loss"], rel=1e-8)
    tested = [(row["stage"], int(row["iter"])) for row in rows if row["what"] == "test"]
    assert tested[:4] == [("init", 35), ("init", 70), ("init", 105), ("init", 120)]
