"""The logs of a run of two workers that was killed and carried to its end, and what `report` says of it."""

import json
import random
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import caffe_parser
import processes
import pytest
import small
import tiny
from made_up_runs import report, rows


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers, killed after its first snapshot, and carried to its end, in out/.

    No evaluation falls on a snapshot: one that a kill cuts off there is not made again.
    """
    base = tmp_path_factory.mktemp("logs")
    tiny.make_data(base / "data")
    schedule = small.make_schedule(
        base / "schedule",
        base / "data",
        init='base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 60 test_interval: 35 snapshot: 25',
        cyc1=small.STAGES["cyc1"].replace("test_interval: 4", "test_interval: 3"),
    )
    first = small.start(schedule, base / "out", *small.ENDLESS, nproc=2)
    small.wait_for(base / "out" / "snapshots" / "init-00000025-a0001", first)
    processes.kill(first, "all", random.Random(1))
    first.wait()
    assert first.gone()
    done = small.run(schedule, base / "out", *small.AGAIN, nproc=2)
    assert done.returncode == 0, done.stdout + done.stderr
    (base / "printed").write_text(done.stdout)
    return base


def counting(base: Path) -> dict[str, list[dict[str, Any]]]:
    """Events of log.jsonl by name, without those of iterations that a later start has undone."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (base / "out" / "log.jsonl").read_text().splitlines():
        event = json.loads(line) if line.endswith("}") else {"event": ""}
        if event["event"] == "StageStarted":
            for name in ("Iterated", "Tested", "SnapshotWritten"):
                kept = [e for e in found.get(name, []) if e["stage"] != event["stage"] or e["iter"] <= event["iter"]]
                found[name] = kept
        found.setdefault(event["event"], []).append(event)
    return found


def test_tables_need_no_torch_and_agree_with_what_was_printed(killed: Path) -> None:
    program = (
        "import sys; from stagerun.cli import main\n"
        "try: main()\nfinally: print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", killed / "out"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr
    table = {line.split()[0]: line for line in (killed / "printed").read_text().splitlines()[-5:]}
    found = rows(killed / "out")
    assert [(row["stage"], row["from"]) for row in found] == [
        ("init", "seed"), ("cyc1", "init"), ("collapse", "cyc1"), ("early", "init"),
    ]  # fmt: skip
    for row in found:
        assert f"{100 * float(row['top1']):.2f} %" in table[row["stage"]]
        assert f"{float(row['loss']):.4f}" in table[row["stage"]]
    assert rows(killed / "out", "--by", "run")[0]["state"] == "finished"
    lives = rows(killed / "out", "--by", "life")
    assert len(lives) == 2 and lives[0]["end"] == "broken off"
    assert sum(int(life["iterations"]) - int(life["done_again"]) for life in lives) == 71


def test_a_caffe_log_of_a_run_is_read_by_a_parser_of_caffes_lines(killed: Path) -> None:
    parsed = caffe_parser.parse(report(killed / "out", "--format", "caffe").stdout, datetime.now().year)
    events = counting(killed)
    above = {"init": 0, "cyc1": 60, "collapse": 65, "early": 68}
    numbers = [above[e["stage"]] + e["iter"] - 1 for e in events["Iterated"]]
    assert numbers == [*range(71)]
    assert [row["NumIters"] for row in parsed.train] == numbers
    assert [row["loss"] for row in parsed.train] == [float(f"{e['loss']:g}") for e in events["Iterated"]]
    assert [row["LearningRate"] for row in parsed.train] == [float(f"{e['lr']:g}") for e in events["Iterated"]]
    assert [row["NumIters"] for row in parsed.test] == [above[e["stage"]] + e["iter"] for e in events["Tested"]]
    assert [row["accuracy"] for row in parsed.test] == [float(f"{e['top1']:g}") for e in events["Tested"]]
    assert len(parsed.snapshots) == len(events["SnapshotWritten"])
    seconds = [row["Seconds"] for row in parsed.train]
    assert seconds == sorted(seconds) and parsed.ends == ["Optimization Done."]
