"""`report --format caffe|dawnbench` and `--by iteration`: what other tools read, for made-up logs."""

import csv
import io
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import caffe_parser
from log_help import evaluated, finished, iterated, run_started, stage_started, trained
from made_up_runs import refusal, report

from stagerun.base.events import Event, RunFinished, SnapshotWritten, StageStarted, Stopped
from stagerun.train.log_file import JsonLines

TRUNK = [iterated("trunk", i, epoch=i / 5) for i in range(1, 9)]
EARLY_END = [evaluated("trunk", 8, 0.5), finished("trunk", 8, 0.5, 8 * 36.0)]
START = "trunk-00000008-a0001"


def started(stage: str, iter: int = 0, **changes: object) -> StageStarted:
    parts = {} if stage == "trunk" else {"max_iter": 4, "start": START}
    return replace(stage_started(stage, iter), **{"display": 2, **parts, **changes})  # type: ignore[arg-type]


def written(out: Path, *events: Event) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    with JsonLines(out / "log.jsonl", print) as log:
        for event in events:
            log(event)
    return out


def whole(out: Path, *, killed: bool = False, **start: object) -> Path:
    """A trunk and its collapse; `killed`: once after 6 iterations, to go on from 4."""
    first = [run_started(), started("trunk", **start)]
    at_4 = evaluated("trunk", 4, 0.25)
    saved = SnapshotWritten(stage="trunk", iter=4, name="trunk-00000004-a0001", bytes=1, blocked_seconds=0, seconds=0.1)
    again = [replace(one, loss=9.0) for one in TRUNK[4:6]]
    life = [*again, run_started(), started("trunk", 4, train_seconds=4 * 36.0, **start)] if killed else []
    then = [*TRUNK[4:], *EARLY_END, started("collapse"), *trained("collapse", range(1, 5))]
    end = [
        evaluated("collapse", 4, 0.75),
        finished("collapse", 4, 0.75, 4 * 36.0),
        RunFinished(trained=True, seconds=1),
    ]
    return written(out, *first, *TRUNK[:4], at_4, saved, *life, *then, *end)


def test_caffes_log(tmp_path: Path) -> None:
    for killed in (False, True):
        out = whole(tmp_path / str(killed), killed=killed)
        parsed = caffe_parser.parse(report(out, "--format", "caffe").stdout, datetime.now().year)
        assert parsed.solving == ["tree"] * (1 + killed) and parsed.ends == ["Optimization Done."]
        # N counts the updates before the line, and goes on from stage to stage.
        assert parsed.losses == {0: 2.01, 2: 2.03, 4: 2.05, 6: 2.07, 8: 2.01, 10: 2.03}, "nothing that a kill undid"
        assert [row["NumIters"] for row in parsed.train] == [*parsed.losses] and set(parsed.rates.values()) == {0.5}
        tests = [(row["NumIters"], row["accuracy"], row["loss"], row["accuracy_top5"]) for row in parsed.test]
        assert tests == [(4, 0.25, 1.5, 0.9), (8, 0.5, 1.5, 0.9), (12, 0.75, 1.5, 0.9)]
        assert parsed.snapshots == [f"{out}/snapshots/trunk-00000004-a0001"]


def test_caffes_log_of_averaged_weights_and_a_stop(tmp_path: Path) -> None:
    stop = Stopped(stage="trunk", iter=1, reason="asked to stop")
    out = written(
        tmp_path / "out", run_started(), started("trunk"), TRUNK[0], evaluated("trunk", 1, 0.5, ema=True), stop
    )
    parsed = caffe_parser.parse(report(out, "--format", "caffe").stdout, datetime.now().year)
    assert not parsed.test, "a row of averaged weights would have other columns than the rest"
    assert parsed.ends == ["Optimization stopped early."]


def test_a_row_for_each_displayed_iteration_and_each_evaluation(tmp_path: Path) -> None:
    for killed in (False, True):
        text = report(
            whole(tmp_path / str(killed) / "out", killed=killed), "--by", "iteration", "--format", "csv"
        ).stdout
        assert text.splitlines()[:4] == [
            "run,stage,iter,epoch,what,lr,loss,images_per_s,top1,top5,sent_bytes",
            "out,trunk,2,0.4,train,0.5,2.02,0.5555555555555556,,,",
            "out,trunk,4,0.8,train,0.5,2.04,0.5555555555555556,,,",
            "out,trunk,4,0.8,test,,1.5,25.0,0.25,0.9,",
        ]
        rows = [(row["stage"], int(row["iter"]), row["what"]) for row in csv.DictReader(io.StringIO(text))]
        assert rows[3:] == [
            ("trunk", 6, "train"),
            ("trunk", 8, "train"),
            ("trunk", 8, "test"),
            ("collapse", 2, "train"),
            ("collapse", 4, "train"),
            ("collapse", 4, "test"),
        ]
        assert text.splitlines()[-1].startswith("out,collapse,4,2.4,"), "along the path of ancestors"


def test_stages_that_display_nothing_have_evaluations_alone(tmp_path: Path) -> None:
    out = whole(tmp_path / "out", display=0)
    text = report(out, "--by", "iteration", "--format", "csv").stdout
    trunk = [line.split(",")[4] for line in text.splitlines() if line.startswith("out,trunk")]
    assert trunk == ["test", "test"]


def test_bytes_that_were_sent_have_a_column(tmp_path: Path) -> None:
    sent = replace(TRUNK[1], sent_bytes=20_000)
    out = written(tmp_path / "out", run_started(), started("trunk"), TRUNK[0], sent)
    assert report(out, "--by", "iteration", "--format", "csv").stdout.splitlines()[1].endswith(",,,20000")


HEADER = "epoch\thours\ttop1Accuracy\ttop5Accuracy"


def test_dawnbench(tmp_path: Path) -> None:
    for killed in (False, True):
        text = report(whole(tmp_path / str(killed), killed=killed), "--format", "dawnbench").stdout
        assert text.splitlines() == [
            HEADER,
            "0.8\t0.04000000\t25.00\t90.00",
            "1.6\t0.08000000\t50.00\t90.00",
            "2.4\t0.12000000\t75.00\t90.00",
        ]


def test_dawnbench_has_a_table_for_each_end_and_for_averaged_weights(tmp_path: Path) -> None:
    out = whole(tmp_path / "out")
    averages = {"ema_top1": 0.7, "ema_top5": 0.95}
    written(
        out,
        replace(run_started(), stages=("trunk", "collapse", "early")),
        started("early", start="trunk-00000004-a0001"),
        *trained("early", range(1, 3)),
        evaluated("early", 2, 0.1, images=10),
        *trained("early", range(3, 5)),
        evaluated("early", 4, 0.6),
        evaluated("early", 4, 0.7, ema=True),
        finished("early", 4, 0.6, 4 * 36.0, **averages),
    )
    text = report(out, "--format", "dawnbench").stdout
    blocks = [block.splitlines() for block in text.split("\n\n")]
    assert [block[0] for block in blocks] == ["# collapse", "# early", "# early, averaged weights"]
    assert blocks[1][1:] == [HEADER, "0.8\t0.04000000\t25.00\t90.00", "1.6\t0.08000000\t60.00\t90.00"]
    assert blocks[2][2:] == ["1.6\t0.08000000\t70.00\t95.00"]


def test_they_are_of_one_run(tmp_path: Path) -> None:
    one, two = whole(tmp_path / "one"), whole(tmp_path / "two")
    for words in ((one, two, "--format", "caffe"), (one, "--format", "dawnbench", "--by", "stage")):
        assert "is one run, whole" in refusal(*words)
