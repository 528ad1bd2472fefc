"""`stagerun status` over logs and lives made by hand: what it says of a run that trains, is silent, has ended, was killed, or runs elsewhere."""

import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import contract
import log_help
import pytest
from facade import (
    EnsembleTested,
    Event,
    Failed,
    Iterated,
    Note,
    RunFinished,
    RunStarted,
    SnapshotFailed,
    StageStarted,
    duration,
)
from made_up_runs import Story
from test_store_lease import NODE7, taken

from stagerun import store

AGO = 10  # seconds, since the log was written
RESUMES = "the same `stagerun run` resumes"


def text(out: Path) -> str:
    done = contract.stagerun(["status", out], out)
    assert done.exit_code == 0, done.output
    return done.output


def told(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(contract.stagerun(["status", out, "--json"], out).stdout)
    return found


def run_started(**more: Any) -> RunStarted:
    fields = {"workers": 4, "device": "cuda:0", "threads": 2, "stages": ("a", "b"), "iterations": 300}
    return log_help.run_started(**{"schedule": "s", "iterations_left": 300, **fields, **more})


def stage_started(stage: str = "a", iter: int = 0, max_iter: int = 200) -> StageStarted:
    return log_help.stage_started(stage, iter, max_iter=max_iter, iterations_left=300)


def iterated(iter: int, seconds: float = 0.5, stage: str = "a") -> Iterated:
    return log_help.iterated(stage, iter, epoch=iter / 10, lr=0.1, loss=float(iter), images=64, seconds=seconds)


def write(out: Path, *told: tuple[float, Event] | Event | str, ago: float = AGO) -> Path:
    """A log of events, `ago` seconds old unless said otherwise."""

    def line(one: tuple[float, Event] | Event | str) -> str:
        if isinstance(one, str):
            return one
        at, event = one if isinstance(one, tuple) else (time.time() - ago, one)
        return json.dumps({"time": at, "event": type(event).__name__, **asdict(event)}) + "\n"

    out.mkdir(parents=True, exist_ok=True)
    (out / "log.jsonl").write_text("".join(map(line, told)))
    return out


def test_speed_loss_and_time_left_are_those_of_the_last_fifty_iterations(tmp_path):
    iterations = [iterated(i, 0.5 if i > 10 else 99.0) for i in range(1, 61)]
    write(tmp_path, run_started(hosts=("n1", "n1", "n1", "n2")), stage_started(), *iterations)
    progress = told(tmp_path)["progress"]
    assert progress["loss"] == sum(range(11, 61)) / 50 and progress["images_per_second"] == 128
    assert progress["seconds_left_in_stage"] == 140 * 0.5
    assert progress["seconds_left"] == 240 * 0.5 and progress["iterations_left"] == 240
    line = "60/200  epoch 6.00  LR 0.1  loss 35.5000  128 images/s  1 min 10 s left in stage, 2 min 00 s in all"
    assert line in text(tmp_path) and "\non 2 hosts: n1 and n2\n" in text(tmp_path)
    assert "n6, n7 and 2 more\n" in text(write(tmp_path, run_started(hosts=tuple(f"n{n}" for n in range(10)))))


def test_plan_status_and_view_say_one_time_left(tmp_path):
    """Of a run that is alive, from its last iteration on, with evaluations and ensembles but those that it has evaluated."""
    folder, out = tmp_path / "s", tmp_path / "out"
    folder.mkdir()
    ensembles = "".join(f'ensemble {{ name: "{name}" members: ["trunk", "early"] }}' for name in ("one", "two"))
    (folder / "schedule.prototxt").write_text(log_help.SCHEDULE + log_help.BRANCH + ensembles)
    for name, solver in {"trunk": log_help.TRUNK, "collapse": log_help.COLLAPSE, "early": log_help.COLLAPSE}.items():
        (folder / f"{name}.prototxt").write_text(solver + ("ema_decay: 0.9" if name == "early" else ""))
    run = run_started(schedule="tree", stages=("trunk", "collapse", "early"), iterations_left=16)
    started = log_help.stage_started("trunk", iterations_left=16)
    trained = [log_help.iterated("trunk", i, seconds=2.0) for i in (1, 2, 3)]
    write(out, run, started, *trained)

    def left(one_is_left: bool) -> float:
        progress = json.loads(contract.stagerun(["status", folder, "--out", out, "--json"], out).stdout)["progress"]
        plan = contract.stagerun(["plan", folder, "--out", out, "--json"], out)
        # A third of 0.1 s for each of 50 images; `early` has averaged weights too.
        tests = 4 * 50 * 0.1 / 3 + (2 if one_is_left else 1) * 2 * 50 * 0.1 / 3
        assert progress["seconds_left"] == pytest.approx(13 * 2.0 + tests, abs=0.01)
        return json.loads(plan.stdout)["time"]["left"]["in_all"] - progress["seconds_left"]

    with store.Lock(out):
        assert left(True) == pytest.approx(0, abs=0.01)
        assert "left in the run that is alive" in contract.stagerun(["plan", folder, "--out", out], out).stdout
        told_now = json.loads(contract.stagerun(["status", folder, "--out", out, "--json"], out).stdout)["progress"]
        assert contract.stagerun(["view", folder, out, "--save", tmp_path / "page.html"], out).exit_code == 0
        page = re.sub("<[^>]*>", "", (tmp_path / "page.html").read_text())
        assert "left in all" + duration(told_now["seconds_left"]) in page and "left with 4 workers" not in page
        # `run` plans once, before it evaluates.
        one = EnsembleTested(
            name="one", rule="MEAN_PROBABILITY", members=("trunk", "early"), images=50, top1=0.5, top5=0.9, loss=1.0,
            seconds=1.0, best="early", best_top1=0.5, mean_top1=0.5, snapshots=("a", "b"), batch_norm_iter=0, tested_on="",
        )  # fmt: skip
        write(out, run, one, started, *trained)
        done = contract.stagerun(["status", folder, "--out", out, "--json"], out)
        left_now = json.loads(done.stdout)["progress"]["left"]
        assert "ensemble two" in left_now and "ensemble one" not in left_now
    assert left(False) > 6, "a run that starts now trains these three iterations again"


def test_silence_of_a_living_run_is_told_after_five_minutes(tmp_path):
    with store.Lock(tmp_path):
        (tmp_path / "lock").write_text("process 7 on h, since 2020-02-01 10:00:00 +0000")
        for ago, silent in ((250, False), (312, True)):
            write(tmp_path, run_started(), stage_started(), ago=ago)
            found = told(tmp_path)
            assert (found["state"], found["silent"]) == ("running", silent)
            assert ("the run is alive, but last logged 5 min 1" in text(tmp_path)) is silent
    assert not told(tmp_path)["silent"], "a run that has ended is no longer silent"


def test_a_run_that_has_taken_the_folder_and_logged_nothing_yet(tmp_path):
    store.prepare(store.LocalDisk(), tmp_path)
    write(tmp_path, run_started(attempt=1), stage_started(), iterated(5))
    taken(tmp_path, NODE7)
    taken(tmp_path, NODE7)
    with store.Lock(tmp_path):
        assert told(tmp_path)["progress"] is None
        assert f"starting, nothing logged yet: process {os.getpid()} on" in text(tmp_path)


def test_the_newest_line_is_the_last_one_whatever_the_clock_said(tmp_path):
    back = time.time() - 3600  # the clock was set back while it trained
    write(tmp_path, run_started(), stage_started(), iterated(200), (back, RunFinished(trained=True, seconds=1)))
    assert told(tmp_path)["state"] == "finished"
    write(tmp_path, run_started(), stage_started(), (back, iterated(1)))
    assert (told(tmp_path)["progress"]["iter"], told(tmp_path)["last_logged"]) == (1, back)


@pytest.mark.parametrize(
    "code, why, said",
    [
        (79, "the loss is nan\n  hint: lower base_lr", "ended with exit code 79 AGO in a after iteration 3: the loss is nan"),
        (69, "", f"ended with exit code 69 AGO in a after iteration 3; {RESUMES}"),
        (74, "no space left", f"ended with exit code 74 AGO in a after iteration 3: no space left; {RESUMES}"),
        (None, "", f"killed, or ended without a word, AGO in a after iteration 3: {RESUMES}"),
    ],
)  # fmt: skip
def test_an_error_is_told_and_whether_the_same_command_helps(tmp_path, code, why, said):
    end = [] if code is None else [Failed(code=code, text=why)]
    write(tmp_path, run_started(), stage_started(), iterated(3), *end)
    found = told(tmp_path)
    assert (found["state"], found["exit_code"]) == ("failed" if code else "killed", code)
    assert re.sub(r"1\d s ago", "AGO", text(tmp_path).splitlines()[0]) == f"s: {said}"
    with store.Lock(tmp_path):
        assert told(tmp_path)["exit_code"] is None, "one that was started again has not failed"


def test_warnings_are_those_of_the_last_life(tmp_path):
    told_last = 'says "event": "RunStarted" in its text'
    write(
        tmp_path,
        run_started(),
        Note(text="of an earlier life", warning=True),
        '{"time": 1.0, "event": "Iter\n',  # what a kill left
        run_started(),
        Note(text=told_last, warning=True),
        Note(text="no warning"),
        SnapshotFailed(stage="a", iter=3, message="disk full"),
    )
    found = told(tmp_path)
    assert [one["text"] for one in found["warnings"]] == [told_last, "no snapshot of a at 3: disk full"]
    assert re.search(r"warning 1\d s ago: no snapshot of a at 3: disk full", text(tmp_path))
    many = [Note(text=f"warning {i}", warning=True) for i in range(15)]
    said = text(write(tmp_path, run_started(), *many))
    assert "5 older warnings are in log.jsonl" in said and ": warning 4\n" not in said and ": warning 5\n" in said


# ---- `run --parallel`


@pytest.fixture
def out(tmp_path):
    """`a` has ended; `b` is in its midst, `c` loads its images, `d` has not been given out. `mine` is not a stage's folder."""
    started = run_started(stages=("a", "b", "c", "d"), side_by_side=2)
    write(tmp_path, started, stage_started("a", max_iter=100), iterated(100))
    beside = tmp_path / ".parallel"
    slow = Note(text="a disk is slow", warning=True)
    write(beside / "b", started, stage_started("b", max_iter=100), iterated(40, stage="b"), slow, ago=0)
    write(beside / "mine", stage_started("d"), iterated(7, stage="d"))
    (beside / "c").mkdir()
    for name in "bc":
        (beside / name / ".stage").touch()
    return tmp_path


def test_each_stage_at_work_has_its_iteration_and_speed(out):
    with store.Lock(out):
        (out / "lock").write_text("process 7 on h, since 2020-02-01 10:00:00 +0000")
        found, lines = told(out), text(out).split("\n")
    assert lines[2:6] == [
        "a -  b 40 %  c 0 %  d -",
        "at work  iteration  images/s  left in stage",
        "b        40/100     128       30 s",
        "c        starting",
    ]
    assert [warned["text"] for warned in found["warnings"]] == ["a disk is slow"]
    assert found["progress"] is None and [one["images_per_second"] for one in found["at_work"]] == [128, None]


def test_the_headline_of_one_that_was_killed_names_what_was_at_work(out):
    """And not the stage that the log names last, which has ended."""
    (head, workers, marks, *_) = text(out).split("\n")
    assert "killed, or ended" in head and "in b after iteration 40 and c after iteration 0: the same" in head
    assert "a after" not in head
    assert workers.startswith("2 workers, a stage each, on cuda:0, 2 threads each, output in ")
    assert "b 40 %  c 0 %" in marks


def test_a_stage_whose_process_was_killed_is_as_far_as_its_newest_snapshot(tmp_path):
    story = Story(tmp_path, solver__max_iter="6").begin(side_by_side=2)
    for stage in ("init", "cyc1"):
        story.start(stage, None)
    story.snapshot("init", 3, None, "weights")
    story.write(Failed(code=69, text="stage `init` was killed by SIGKILL"))
    assert "init 50 %  cyc1 0 %  collapse -" in text(tmp_path)


def test_what_a_run_left_out_is_to_be_trained_whatever_is_there(tmp_path):
    """As after an edit of the first stage, and `run --redo init --only init`."""
    story = Story(tmp_path).begin()
    for stage, parent in (("init", None), ("cyc1", "init")):
        story.start(stage, parent)
        story.end(stage, parent, 0.5)
    story.begin()
    story.start("init", None)
    story.end("init", None, 0.6)
    story.results()
    story.write(RunFinished(trained=True, seconds=1.0, not_chosen=("cyc1", "collapse")))
    head, _, marks, *rest = text(tmp_path).rstrip("\n").split("\n")
    assert head.endswith("; not chosen, and still to be trained: cyc1 and collapse")
    assert marks == "init ok  cyc1 stale  collapse -"
    assert rest[0] == "top-1: init 60.00 %, cyc1 50.00 %"


# ---- on another host


def test_a_run_on_another_host_is_named_and_nothing_changes(tmp_path):
    out = write(tmp_path / "out", run_started(), stage_started(), iterated(3))
    store.prepare(store.LocalDisk(), out)
    taken(out, NODE7)
    before = {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in out.rglob("*")}
    for life, said in (
        ("a0001", "process 12 on node7"),
        ("a0002", "a process that left no readable name in a0002.json"),
    ):
        if life == "a0002":
            (out / "lives" / "a0002.json").write_bytes(b"{")
        assert f"no word of an end from {said}" in text(out)
        assert contract.stagerun(["view", out, "--save", tmp_path / "page.html"], tmp_path).exit_code == 0
        assert f"no word of an end from {said}" in (tmp_path / "page.html").read_text()
    (out / "lives" / "a0002.json").unlink()
    assert before.keys() == {*out.rglob("*")}
    assert all(before[p][1] == (p.is_file() and p.read_bytes()) for p in before)
