"""`status` beside `run --parallel`: the stages at work, by the logs of their folders; and behind a run that left stages out."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from facade import Event, Iterated, Note, RunFinished, RunStarted, StageStarted, Target
from made_up_runs import Story

from stagerun import store
from stagerun.tools.status.command import status_json, status_text
from stagerun.train.status import look


def write(out: Path, *events: Event, at: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = ({"time": at, "event": type(event).__name__, **asdict(event)} for event in events)
    (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_started(out: Path) -> RunStarted:
    return RunStarted(
        schedule="s", out=str(out), workers=1, device="cpu", threads=1, stages=("a", "b", "c", "d"), iterations=400,
        iterations_left=300, version="0.1.0", side_by_side=2,
    )  # fmt: skip


def stage_started(stage: str) -> StageStarted:
    return StageStarted(
        stage=stage, number=2, iter=0, max_iter=100, start="a-1", batch_size=10, device_batch_size=10, iterations_left=100
    )  # fmt: skip


def iterated(stage: str, iter: int) -> Iterated:
    return Iterated(
        stage=stage, iter=iter, epoch=1.0, lr=0.1, momentum=0.9, weight_decay=0.0, loss=2.0, images=10, seconds=0.5
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """`a` has ended; `b` is in its midst, `c` loads its images, `d` has not been given out. `mine` is not a stage's folder."""
    now = time.time() + 1
    write(tmp_path, run_started(tmp_path), stage_started("a"), iterated("a", 100), at=now)
    b, c = tmp_path / ".parallel" / "b", tmp_path / ".parallel" / "c"
    slow = Note(text="a disk is slow", warning=True)
    write(b, run_started(b), stage_started("b"), iterated("b", 40), slow, at=now + 400)
    write(tmp_path / ".parallel" / "mine", stage_started("d"), iterated("d", 7), at=now)
    c.mkdir()
    for folder in (b, c):
        (folder / ".stage").touch()
    return tmp_path


def test_each_stage_at_work_has_its_iteration_and_speed(out: Path) -> None:
    now = time.time() + 410
    with store.Lock(out):
        found = look(Target(out), now)
        text, record = status_text(found, now).split("\n"), json.loads(status_json(found))
    assert text[2:6] == [
        "a -  b 40 %  c 0 %  d -",
        "at work  iteration  loss    images/s  left in stage",
        "b        40/100     2.0000  20        30 s",
        "c        starting",
    ]
    assert not found.silent and "nothing has been logged" not in "\n".join(text), "b has logged since"
    assert [warned.text for warned in found.warnings] == ["a disk is slow"]
    assert found.progress is None and [one["images_per_second"] for one in record["beside"]] == [20, None]


def test_the_headline_of_one_that_was_killed_names_what_was_at_work(out: Path) -> None:
    """And not the stage that the log names last, which has ended."""
    found = look(Target(out), time.time())
    assert (found.state, found.beside) == ("killed", ())
    (head, workers, marks, *_) = status_text(found, time.time()).split("\n")
    assert "in b after iteration 40 and c after iteration 0: the same" in head and "a after" not in head
    assert workers.startswith("2 workers, a stage each, on cpu, 1 thread each, output in ") and "b 40 %  c 0 %" in marks


def test_what_a_run_left_out_is_to_be_trained_whatever_is_there(tmp_path: Path) -> None:
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
    head, _, marks, *rest = status_text(look(Target(tmp_path), story.clock), story.clock).split("\n")
    assert head.endswith("; not chosen, and still to be trained: cyc1 and collapse")
    assert marks == "init ok  cyc1 stale  collapse -"
    assert [row.split("  ")[0] for row in rest[-2:]] == ["init", "cyc1 (stale)"]
