"""The logs of a run of two workers that was killed and carried to its end."""

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
from log_help import points


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
        init='base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 120 test_interval: 35 snapshot: 50',
        cyc1=small.STAGES["cyc1"].replace("test_interval: 4", "test_interval: 3"),
    )
    words = ["--log", "tensorboard"] if importlib.util.find_spec("tensorboard") else []
    first = small.start(schedule, base / "out", *words, *small.ENDLESS, nproc=2)
    small.wait_for(base / "out" / "snapshots" / "init-00000050-a0001", first)
    processes.kill(first, "all", random.Random(1))
    first.wait()
    assert first.gone()
    done = small.run(schedule, base / "out", *words, *small.AGAIN, nproc=2)
    assert done.returncode == 0, done.stdout + done.stderr
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


def reported(base: Path, form: str, *words: object) -> str:
    done = small.stagerun("report", base / "out", "--format", form, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_caffe_log_of_a_run_is_read_by_a_parser_of_caffes_lines(killed: Path) -> None:
    parsed = caffe_parser.parse(reported(killed, "caffe"), datetime.now().year)
    events = counting(killed)
    above = {"init": 0, "cyc1": 120, "collapse": 125, "early": 128}
    numbers = [above[e["stage"]] + e["iter"] - 1 for e in events["Iterated"]]
    assert numbers == [*range(131)]
    assert [row["NumIters"] for row in parsed.train] == numbers
    assert [row["loss"] for row in parsed.train] == [float(f"{e['loss']:g}") for e in events["Iterated"]]
    assert [row["LearningRate"] for row in parsed.train] == [float(f"{e['lr']:g}") for e in events["Iterated"]]
    assert [row["NumIters"] for row in parsed.test] == [above[e["stage"]] + e["iter"] for e in events["Tested"]]
    assert [row["accuracy"] for row in parsed.test] == [float(f"{e['top1']:g}") for e in events["Tested"]]
    assert len(parsed.snapshots) == len(events["SnapshotWritten"])
    seconds = [row["Seconds"] for row in parsed.train]
    assert seconds == sorted(seconds) and parsed.ends == ["Optimization Done."]


def test_tensorboard_of_a_run_that_was_killed(killed: Path) -> None:
    pytest.importorskip("tensorboard")
    last = {(e["stage"], e["iter"]): e for e in counting(killed)["Iterated"]}
    before = {"init": 0, "cyc1": 120, "collapse": 125, "early": 120}
    for stage in small.STAGES:
        expected = [(before[s] + i, round(e["loss"], 5)) for (s, i), e in sorted(last.items()) if s == stage]
        found = points(killed / "out" / "tensorboard" / stage, "train/loss")
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-4)
