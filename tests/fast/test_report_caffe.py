"""Where stages lie in a schedule, and Caffe's lines, for made-up events."""

from datetime import datetime

import caffe_parser
import pytest
from log_help import (
    BRANCH,
    COLLAPSE,
    SCHEDULE,
    evaluated,
    feed,
    finished,
    iterated,
    make,
    run_started,
    stage_started,
    trained,
)

from stagerun.base.events import Note, RunFinished, SnapshotFailed, SnapshotWritten, Stopped
from stagerun.plan import Plan
from stagerun.train.logs.caffe_log import CaffeLog
from stagerun.train.logs.course import course, ends


def test_the_legs_of_a_tree() -> None:
    legs = course(make(SCHEDULE + BRANCH, early=COLLAPSE + "batch_size: 40 carry { data: RESTART }"))
    assert [leg.iterations_before for leg in legs.values()] == [0, 8, 8]
    assert [leg.iterations_above for leg in legs.values()] == [0, 8, 12], "another branch counts too"
    assert [stage for stage, _ in legs["early"].steps] == ["trunk", "early"]
    assert legs["early"].epoch(4) == pytest.approx(1.6 + 1.6), "trained on, whatever the position in the data"
    assert ends(legs) == ["collapse", "early"] and ends(course(make())) == ["collapse"]


def caffe(plan: Plan) -> CaffeLog:
    display = {stage.name: stage.solver.display for stage in plan.schedule.stages}
    return CaffeLog(course(plan), display, {s.name: s.parent for s in plan.schedule.stages})


def test_caffes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with caffe(make()) as log:
        feed(
            log,
            run_started(),
            stage_started("trunk"),
            trained("trunk", range(1, 5)),
            evaluated("trunk", 4, 0.25),
            SnapshotWritten(
                stage="trunk", iter=4, name="trunk-00000004-a0001", bytes=1, blocked_seconds=0, seconds=0.25
            ),
            trained("trunk", range(5, 9)),
            finished("trunk", 8, 0.5, 10.0),
            stage_started("collapse"),
            iterated("collapse", 1, lr=5.876e-08, loss=1e-5),
            evaluated("collapse", 4, 0.625),
            finished("collapse", 4, 0.625, 5.0),
            RunFinished(trained=True, seconds=10),
        )
    parsed = caffe_parser.parse(capsys.readouterr().out, datetime.now().year)
    assert parsed.solving == ["tree"] and parsed.ends == ["Optimization Done."]
    # N counts the updates before the line, and goes on from stage to stage.
    assert parsed.losses == {0: 2.01, 2: 2.03, 4: 2.05, 6: 2.07, 8: 1e-5}
    assert parsed.rates == {0: 0.5, 2: 0.5, 4: 0.5, 6: 0.5, 8: 5.876e-08}
    assert [(r["NumIters"], r["LearningRate"], r["loss"]) for r in parsed.train][-1] == (8, 5.876e-08, 1e-5)
    assert [list(row) for row in parsed.test] == [
        ["NumIters", "Seconds", "LearningRate", "accuracy", "loss", "accuracy_top5"]
    ] * 2
    assert [(r["NumIters"], r["accuracy"], r["loss"], r["accuracy_top5"]) for r in parsed.test] == [
        (4, 0.25, 1.5, 0.9), (12, 0.625, 1.5, 0.9)
    ]  # fmt: skip
    assert parsed.snapshots == ["out/tree/snapshots/trunk-00000004-a0001"]
    table = [said for _, said in parsed.severities[-5:-1]]
    assert [line.split()[0] for line in table] == ["stage", "trunk", "collapse", "total"]


def test_caffes_form_of_what_caffe_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    log = caffe(make())
    feed(
        log,
        run_started(),
        Note(text="resume is BIT-EXACT"),
        Note(text="resume is EQUIVALENT:\ntorch", warning=True),
        evaluated("trunk", 8, 0.5, ema=True),
        SnapshotFailed(stage="trunk", iter=3, message="no space left"),
        Stopped(stage="trunk", iter=4, reason="asked to stop"),
    )
    log.say("warning: out/tree/log.jsonl can't be written")
    parsed = caffe_parser.parse(capsys.readouterr().out, datetime.now().year)
    assert ("I", "resume is BIT-EXACT") in parsed.severities
    assert [said for severity, said in parsed.severities if severity == "W"] == [
        "resume is EQUIVALENT:",
        "torch",
        "no snapshot of trunk at 3: no space left",
        "out/tree/log.jsonl can't be written",
    ]
    assert not parsed.test, "a row of averaged weights would have other columns than the rest"
    assert any("averaged weights at 8: top-1 0.5" in said for _, said in parsed.severities)
    assert parsed.ends == ["Optimization stopped early."]


def test_caffes_lines_without_display(capsys: pytest.CaptureFixture[str]) -> None:
    feed(caffe(make(SCHEDULE.replace("display: 2", "display: 0"))), run_started(), trained("trunk", range(1, 9)))
    assert "Iteration" not in capsys.readouterr().out
