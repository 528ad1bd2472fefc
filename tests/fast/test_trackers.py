"""What the process of a tracker sends, whatever is killed, lost or undone in between; and trackers of other packages."""

import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from drawn import examples
from facade import EnsembleTested, Event, JsonLines, Note, RunFinished, SnapshotWritten, UsageError
from hypothesis import given
from hypothesis import strategies as st
from log_help import evaluated, feed, finished, iterated, stage_started

from stagerun.logs import follower, table
from stagerun.logs.follower import Follower, Orders
from stagerun.logs.tracker import Point, Text, TrackedRun

BEFORE = {"trunk": 0, "collapse": 8, "both": 12}


class Shelf:
    """A tracker whose store is `runs`. `known`: whether it can say how much that has."""

    runs: dict[str, list[tuple[str, int, tuple[tuple[str, float], ...]]]]
    texts: dict[str, str]
    ends: list[tuple[str, str]]
    known = True

    def begin(self, run: TrackedRun) -> int | None:
        self.id, there = run.id, self.runs.setdefault(run.id, [])
        return len(there) if self.known else None

    def send(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        for point in points:
            assert point.number == len(self.runs[self.id])
            self.runs[self.id].append((point.stage, point.iteration, tuple(point.values.items())))
        self.texts.update({text.name: text.text for text in texts})

    def end(self, status: str) -> None:
        self.ends.append((self.id, status))


def distribution(folder: Path, *points: str) -> None:
    """One with entry points, as pip would leave it."""
    info = folder / "lab_notes-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-notes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[stagerun.logs]", *points, ""]))


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch):
    """The place of a package that brings Shelf."""
    clear()
    place = tmp_path_factory.mktemp("site")
    distribution(place, f"shelf = {__name__}:Shelf", "notes = lab_notes:Notes")
    monkeypatch.syspath_prepend(str(place))
    table.all_logs.cache_clear()
    yield place
    table.all_logs.cache_clear()
    sys.modules.pop("lab_notes", None)


def clear() -> None:
    Shelf.runs, Shelf.texts, Shelf.ends, Shelf.known = {}, {}, [], True


def life(out: Path) -> Follower:
    """The follower of a new process life."""
    (out / "trackers").mkdir(exist_ok=True, parents=True)
    log = out / "log.jsonl"
    log.touch()
    at = log.stat().st_size
    orders = Orders(tracker="shelf", project="tree", out=str(out), size=at, before=BEFORE, settings={}, workers=1)
    return Follower(orders)


def write(out: Path, *events: Event | Iterator[Event]) -> None:
    with JsonLines(out / "log.jsonl", print) as log:
        feed(log, *events)


def saved(stage: str, iter: int) -> SnapshotWritten:
    return SnapshotWritten(stage=stage, iter=iter, name=f"{stage}-{iter}", bytes=1, blocked_seconds=0, seconds=0)


def losses(run: list[tuple[str, int, tuple[tuple[str, float], ...]]]) -> list[tuple[int, float]]:
    return [
        (iteration, dict(values)[f"{stage}/loss"])
        for stage, iteration, values in run
        if f"{stage}/loss" in dict(values)
    ]


def test_nothing_is_sent_before_a_snapshot_holds_it(tmp_path):
    here = life(tmp_path)
    write(tmp_path, stage_started("trunk"), *(iterated("trunk", i) for i in range(1, 5)), evaluated("trunk", 3, 0.5))
    here.follow()
    (run,) = Shelf.runs.values()
    assert not run
    write(tmp_path, saved("trunk", 3))
    here.follow()
    assert [point[1] for point in run] == [1, 2, 3, 3]
    assert dict(run[3][2]) == {"trunk/test_top1": 0.5, "trunk/test_top5": 0.9, "trunk/test_loss": 1.5}
    write(tmp_path, evaluated("trunk", 3, 0.6), Note(text="the disk is slow", warning=True))
    here.follow()
    assert dict(run[4][2])["trunk/test_top1"] == 0.6  # behind its snapshot
    assert Shelf.texts == {"trunk/snapshot": "trunk-3", "warning": "the disk is slow"}


def test_a_whole_run(tmp_path):
    here = life(tmp_path)
    together = EnsembleTested(
        name="both", rule="MEAN_PROBABILITY", members=("trunk", "collapse"), images=9, top1=0.7, top5=0.9, loss=None, seconds=1.0,
        best="trunk", best_top1=0.6, mean_top1=0.6, snapshots=("a", "b"), batch_norm_iter=0, tested_on="",
    )  # fmt: skip
    for stage in ("trunk", "collapse"):
        write(tmp_path, stage_started(stage), *(iterated(stage, i) for i in range(1, 4)), saved(stage, 3))
        write(tmp_path, evaluated(stage, 3, 0.6), finished(stage, 3, 0.6, 1.0))
    write(tmp_path, together, RunFinished(trained=True, seconds=1.0))
    here.follow()
    here.end()
    ((name, run),) = Shelf.runs.items()
    assert [point[:2] for point in run] == [
        *[("trunk", i) for i in (1, 2, 3, 3)], *[("collapse", i) for i in (9, 10, 11, 11)], ("both", 12),
    ]  # fmt: skip
    assert Shelf.ends == [(name, "finished")]


@given(data=st.data())
@examples(60, deadline=None)
def test_each_iteration_once_whatever_is_killed(tmp_path_factory, data):
    """Lives of a stage of 60 iterations; each ends somewhere, between any two lines. The tracker may lose what it was sent last, and the note of
    how far it got may be an older one."""
    clear()
    Shelf.known = data.draw(st.booleans())
    numbers = itertools.count()
    out, newest, notes = tmp_path_factory.mktemp("out"), 0, [b""]
    note = out / "trackers" / "shelf.json"
    for _ in range(20):
        here, at, due = life(out), newest, 0
        write(out, stage_started("trunk", newest))
        for _ in range(data.draw(st.integers(0, 30))):
            at += 1
            write(out, iterated("trunk", at, loss=float(next(numbers))))
            if at % 5 == 0:
                due = at
            if due and data.draw(st.booleans()):
                newest, due = due, 0
                if data.draw(st.integers(0, 9)):  # else it is killed before the log says so
                    write(out, saved("trunk", newest))
                else:
                    break
            if data.draw(st.booleans()):
                here.follow()
                notes.append(note.read_bytes())
        if Shelf.known:
            (run,) = Shelf.runs.values() or [[]]
            del run[len(run) - data.draw(st.integers(0, len(run))) :]
            if (kept := data.draw(st.sampled_from(notes))) and note.exists():
                note.write_bytes(kept)
        if newest >= 60:
            break
    here = life(out)
    write(out, finished("trunk", newest, 0.5, 1.0))
    here.follow()
    (run,) = Shelf.runs.values()
    expected: dict[int, float] = {}
    for line in map(json.loads, (out / "log.jsonl").read_text().splitlines()):
        if line["event"] == "StageStarted":
            expected = {iter: loss for iter, loss in expected.items() if iter <= line["iter"]}
        elif line["event"] == "Iterated":
            expected[line["iter"]] = line["loss"]
    assert losses(run) == [*((i, loss) for i, loss in expected.items() if i <= newest)]


def test_what_is_trained_again_is_shown_in_another_run(tmp_path):
    def trained(stage: str, loss: float) -> list[Event]:
        return [
            stage_started(stage),
            *(iterated(stage, i, loss=loss) for i in range(1, 4)),
            finished(stage, 3, 0.5, 1.0),
        ]

    here = life(tmp_path)
    write(tmp_path, *trained("trunk", 1.0), *trained("collapse", 1.5))
    here.follow()
    here = life(tmp_path)  # --redo collapse
    write(tmp_path, *trained("collapse", 2.5))
    here.follow()
    (first, old), (second, new) = Shelf.runs.items()
    assert second == f"{first}-2" and (first, "undone") in Shelf.ends
    assert [loss for _, loss in losses(old)] == [1.0] * 3 + [1.5] * 3
    assert losses(new) == [(1, 1.0), (2, 1.0), (3, 1.0), (9, 2.5), (10, 2.5), (11, 2.5)]
    # Its store is lost: all is sent again, and what was undone long ago is not.
    Shelf.runs[second].clear()
    life(tmp_path).follow()
    assert losses(Shelf.runs[second]) == [(1, 1.0), (2, 1.0), (3, 1.0), (9, 2.5), (10, 2.5), (11, 2.5)]


def test_a_tracker_that_comes_later_shows_nothing_that_was_undone(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        write(tmp_path, stage_started("trunk"), *(iterated("trunk", i, loss=loss) for i in (1, 2)), saved("trunk", 2))
    life(tmp_path).follow()
    ((name, run),) = Shelf.runs.items()
    assert losses(run) == [(1, 3.0), (2, 3.0)] and not name.endswith("-2")


def test_a_note_of_a_log_that_was_removed_does_not_count(tmp_path):
    write(tmp_path, stage_started("trunk"), *(iterated("trunk", i) for i in (1, 2, 3)), saved("trunk", 3))
    life(tmp_path).follow()
    (tmp_path / "log.jsonl").unlink()
    here = life(tmp_path)
    write(tmp_path, stage_started("trunk"), iterated("trunk", 1, loss=7.0), saved("trunk", 1))
    here.follow()
    assert [losses(run)[-1] for run in Shelf.runs.values()] == [(3, 2.03), (1, 7.0)]


def one_stage(out: Path, upto: int = 2) -> None:
    write(out, stage_started("trunk"), *(iterated("trunk", i) for i in range(1, upto + 1)), saved("trunk", upto))


def test_a_tracker_that_was_not_waited_for_is_asked_again(tmp_path):
    here = life(tmp_path)
    one_stage(tmp_path)
    write(tmp_path, RunFinished(trained=True, seconds=1.0))
    here.follow()
    assert follower.lacks(tmp_path, "shelf")
    again = life(tmp_path)
    again.follow()
    again.end()
    assert not follower.lacks(tmp_path, "shelf") and [status for _, status in Shelf.ends] == ["finished"]


def test_a_copy_of_the_folder_is_another_run_and_a_moved_one_is_not(tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    here = life(first)
    one_stage(first)
    here.follow()
    shutil.copytree(first, tmp_path / "copy")
    life(tmp_path / "copy").follow()
    assert [losses(run) for run in Shelf.runs.values()] == [[(1, 2.01), (2, 2.02)]] * 2
    first.rename(tmp_path / "moved")
    life(tmp_path / "moved").follow()
    assert len(Shelf.runs) == 2


# -- of other packages


@pytest.mark.parametrize("extra", ["", " [cloud]"])
def test_an_entry_point_adds_a_tracker(installed, extra):
    distribution(installed, f"notes = lab_notes:Notes{extra}")
    (installed / "lab_notes.py").write_text("class Notes:\n    pass\n")
    assert table.all_logs()["notes"].about == "of the package lab-notes."
    table.require_packages(["notes"])
    assert table.tracker_of("notes").__name__ == "Notes"


@pytest.mark.parametrize(
    "text",
    ["import nothing_of_that_name", "x =", "raise SystemError('broken')", "raise SystemExit", "class Other: pass"],
)
def test_one_that_cant_be_imported_is_one_message(installed, text):
    (installed / "lab_notes.py").write_text(text)
    with pytest.raises(
        UsageError, match="`--log notes`: lab_notes:Notes of the package lab-notes can't be imported"
    ) as caught:
        table.require_packages(["notes"])
    assert "uninstall lab-notes" in caught.value.hint and "\n" not in caught.value.message
