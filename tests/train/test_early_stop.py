"""`early_stop`: where a stage ends by it, and that kills anywhere, and numbers of workers, change nothing of that."""

import shutil
from pathlib import Path

import pytest
import tiny
from facade import Event, Iterated, Note, ResumeRefused, StageFinished, Tested
from test_distilled import make
from test_run_trees import go, ids, names, of

from stagerun import store

pytestmark = pytest.mark.long

# A learning rate of zero: nothing gets any better after the first evaluation, at 4.
STOPS = 'base_lr: 0 lr_policy: "fixed" max_iter: 40 test_interval: 4 early_stop { metric: LOSS patience_iter: 6 min_delta: 10 }\n'
TREE = (
    'stage { name: "main" }\nstage { name: "next" }\nstage { name: "branch" from: "main@5" solver: "next.prototxt" }\n'
)
FILES = {
    "main": STOPS.replace("base_lr: 0 ", "base_lr: 0.02 "),
    "next": 'base_lr: 0.02 lr_policy: "fixed" max_iter: 3\n',
}
END = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("stops")
    tiny.make_data(base / "data")
    make(base / "schedule", base / "data", stages=TREE, **FILES)
    return base


@pytest.fixture(scope="module")
def whole(base):
    """Of a run to the end, in out/."""
    return go(base / "schedule", base / "out")


def iterations(events: list[Event]) -> dict[str, int]:
    return {event.stage: event.iter for event in of(events, Iterated)}


def test_a_stage_ends_where_it_gets_no_better_and_what_follows_starts_there(base, whole):
    assert iterations(whole) == {"main": END, "next": 3, "branch": 3}
    assert next(event for event in of(whole, StageFinished) if event.stage == "main").iterations == END
    (said,) = [event.text for event in of(whole, Note) if "early_stop" in event.text]
    assert "at iteration 4; stage `main` ends after 12 of 40 iterations" in said
    (end,) = [ref for ref in store.inventory(store.LocalDisk(), base / "out").snapshots if ref.ended]
    assert (end.stage, end.iter, end.ends_stage) == ("main", END, True)
    assert of(go(base / "schedule", base / "out"), Iterated) == []


def test_the_images_of_what_follows_go_on_where_the_stage_ended(base, whole, tmp_path):
    """As after a stage of as many iterations."""
    length = FILES["main"].replace("max_iter: 40", f"max_iter: {END}")
    short = make(tmp_path / "s", base / "data", stages=TREE, **{**FILES, "main": length.split("early_stop")[0] + "\n"})
    go(short, tmp_path / "out")
    assert_same_ends(tmp_path / "out", base / "out")


def assert_same_ends(out: Path, there: Path) -> None:
    mine, theirs = ids(out), ids(there)
    assert all(mine[name] == theirs[name] for name in ("main@12", "next@3", "branch@3"))


@pytest.mark.parametrize("at", [4, 11, 12])
def test_stopped_anywhere_it_comes_to_the_same_decision_and_bits(base, whole, tmp_path, at):
    """Where the run is asked to stop right before an evaluation, that comes first when it goes on."""

    go(base / "schedule", tmp_path / "out", stop=lambda seen: len(of(seen, Iterated)) >= at)
    assert of(go(base / "schedule", tmp_path / "out"), Tested)
    assert_same_ends(tmp_path / "out", base / "out")


def test_without_its_last_snapshot_the_stage_ends_there_again(base, whole, tmp_path):
    shutil.copytree(base / "out", tmp_path / "out")
    for name in names(tmp_path / "out", "main-00000012"):
        shutil.rmtree(tmp_path / "out" / "snapshots" / name)
    events = go(base / "schedule", tmp_path / "out")
    assert set(iterations(events)) == {"main"} and iterations(events)["main"] == END
    assert ids(tmp_path / "out") == ids(base / "out")


def test_how_it_is_tested_is_part_of_what_the_stage_is(base, whole, tmp_path):
    shutil.copytree(base / "out", tmp_path / "out")
    main = FILES["main"].replace("val: 4", "val: 3")
    other = make(tmp_path / "s", base / "data", stages=TREE, **{**FILES, "main": main})
    with pytest.raises(ResumeRefused, match="test_interval 4 -> 3"):
        go(other, tmp_path / "out")


def test_a_stage_that_gets_better_goes_on_to_its_end(base, tmp_path):
    better = STOPS.replace("base_lr: 0 ", "base_lr: 0.02 ").replace("min_delta: 10", "min_delta: 0").replace("40", "13")
    folder = make(tmp_path / "s", base / "data", stages='stage { name: "main" }\n', main=better)
    events = go(folder, tmp_path / "out")
    assert iterations(events) == {"main": 13}
    assert not any("early_stop" in note.text for note in of(events, Note))
