"""Reports and `status` of runs with branches, pieces and ensembles, of made-up folders: numbers stand beside what they belong to."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_runs import STAGES, Story, report, rows

from stagerun.base.events import PieceStarted, Retraced, RunFinished, StageStarted
from stagerun.tools.status.command import status_json, status_text
from stagerun.train.log_file import read_last_life
from stagerun.train.output import Target
from stagerun.train.status import look

TREE = {
    "main": (6, 0.1),
    "a": (2, 0.01),
    "b": (2, 0.02),
    "cut": (2, 0.03),
}  # a and b start at main's end, cut at main@3
ALONE = {"main": 0.5, "a": 0.6, "b": 0.7, "cut": 0.4}


@pytest.fixture(autouse=True)
def tree() -> Iterator[None]:
    """Puts all of STAGES back in its order, which other tests go by; monkeypatch would put the items back in reverse."""
    before = dict(STAGES)
    STAGES.clear()
    STAGES.update(TREE)
    yield
    STAGES.clear()
    STAGES.update(before)


def trained(story: Story, stage: str, parent: str | None, before: int, top1: float) -> None:
    story.start(stage, parent)
    story.train(stage, 1, STAGES[stage][0], before)
    story.end(stage, parent, top1)


def trunk(story: Story, top1: float = 0.5) -> None:
    """With the snapshot at 3."""
    story.start("main", None)
    story.train("main", 1, 3, 0)
    story.snapshot("main", 3, None, f"half{story.life}{story.seed}")
    story.train("main", 4, 6, 0)
    story.end("main", None, top1)


def whole(story: Story, better: float = 0.0) -> Story:
    """One life of the whole tree, and its two ensembles."""
    story.begin(ensembles=("both", "three"))
    trunk(story, ALONE["main"] + better)
    for stage, parent, before in (("a", "main", 6), ("b", "main", 6), ("cut", "main@3", 3)):
        trained(story, stage, parent, before, ALONE[stage] + better)
    story.results()
    story.ensemble("both", "a", "b", top1=0.75 + better)
    story.ensemble("three", "a", "b", "cut", top1=0.8 + better, rule="MEAN_LOGIT")
    story.write(RunFinished(trained=True, seconds=1))
    return story


def piece(story: Story, iters: int = 3, until: int = 3) -> None:
    """The first iterations of the trunk once more, for `cut`."""
    story.write(
        PieceStarted(stage="main", iter=0, until=until, start="seed 1", children=("cut",), iterations_left=until + 2)
    )
    for i in range(1, iters + 1):
        story.clock += 2
        story.write(Retraced(stage="main", iter=i, until=until, lr=0.1, loss=2 - 0.1 * i, images=25, seconds=2.0))


def undone(folder: Path) -> Story:
    """An edit, all trained again, the edit taken back: what was trained first counts, and the ensembles are evaluated on that."""
    story = whole(Story(folder))
    first = dict(story.ids), dict(story.top1)
    story.recipe = {"in_main": "0.2"}
    whole(story, better=0.1)
    story.begin(ensembles=("both", "three"))
    story.ids, story.top1 = first
    story.ensemble("both", "a", "b", top1=0.75)
    story.ensemble("three", "a", "b", "cut", top1=0.8, rule="MEAN_LOGIT")
    story.write(RunFinished(trained=True, seconds=1))
    return story


def members(out: Path, name: str) -> dict[str, str]:
    return {row["member"]: row["top1"] for row in rows(out, "--by", "ensemble") if row["ensemble"] == name}


def ensembles(out: Path) -> list[str]:
    return [tested.name for tested in look(Target(out), 0.0).ensembles]


# -- ensembles


def test_members_stand_beside_an_ensemble_with_the_results_that_it_was_made_from(tmp_path: Path) -> None:
    story = undone(tmp_path / "out")
    assert members(story.out, "both") == {"a": "0.6", "b": "0.7", "": "0.75"}
    assert {row["stage"]: float(row["top1"]) for row in rows(story.out)}["a"] == pytest.approx(0.7)
    text = report(story.out).stdout
    assert "out: evaluated with a-00000002-a0001, b-00000002-a0001, cut-00000002-a0001; the other tables show" in text
    assert "evaluated with" not in report(whole(Story(tmp_path / "other")).out).stdout


def test_status_knows_ensembles_of_which_a_member_was_trained_a_piece_again(tmp_path: Path) -> None:
    story = whole(Story(tmp_path / "out"))
    story.begin(ensembles=("both", "three"))
    story.snapshot("a", 1, "main", "a piece")
    assert ensembles(story.out) == ["both", "three"]
    found = look(Target(story.out), 0.0)
    assert "both      a, b       MEAN_PROBABILITY" in status_text(found, 0.0)
    (both, _) = json.loads(status_json(found))["ensembles"]
    assert (both["best"], both["gain"]) == ("b", pytest.approx(0.05))
    assert both["gain_over_mean"] == pytest.approx(0.1)


def test_status_and_report_pass_over_an_ensemble_whose_member_has_become_another(tmp_path: Path) -> None:
    story = whole(Story(tmp_path / "out"))
    file = story.out / "results" / "ensembles" / "both.json"
    story.recipe = {"in_a": "0.5"}
    story.begin(ensembles=("both", "three"))
    trained(story, "a", "main", 6, 0.9)
    assert ensembles(story.out) == [] == rows(story.out, "--by", "ensemble")
    result = json.loads(file.read_text())  # it was evaluated after that, on what was there before
    file.write_text(json.dumps(result | {"attempt": story.life, "serial": 9}))
    os.utime(file, (1, 1))  # by a clock that is wrong
    assert ensembles(story.out) == ["both"]
    shutil.rmtree(story.out / "snapshots" / "b-00000002-a0001")
    assert ensembles(story.out) == []


def test_ensembles_of_other_recipes_are_not_averaged(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    whole(Story(one, 1))
    whole(Story(two, 2), better=0.1)
    whole(Story(other, 3, in_a="0.7"), better=0.2)
    text = report(one, two).stdout
    assert "Ensemble both: top-1 80.00 %, 5.00 points above its best member (mean of one and two)." in text
    text = report(one, two, other).stdout
    assert "Ensemble both: top-1 80.00 %, 5.00 points above its best member (mean of one and two)." in text
    assert "Ensemble both: top-1 95.00 %, 5.00 points above its best member (other)." in text
    undone(tmp_path / "back")
    text = report(one, tmp_path / "back").stdout
    assert text.count("Ensemble both: top-1 75.00 %") == 2, "the recipe of one is not that which its stages have now"


# -- runs of two versions


def test_a_field_that_a_snapshot_is_too_old_for_has_its_default(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("old", "new", "other"))
    whole(Story(old, 1))
    whole(Story(new, 2, solver__label_smoothing="0.0", solver__knot="[]", solver__decay_from="STAGE_START"))
    whole(Story(other, 3, solver__label_smoothing="0.1"))
    assert [row["field"] for row in rows(old, new, "--diff") if row["kind"] == "recipe"] == ["seed"]
    assert {row["runs"] for row in rows(old, new, "--by", "seed")} == {"old, new"}
    (row,) = [row for row in rows(old, new, other, "--diff") if row["field"] == "label_smoothing"]
    assert [row[name] for name in ("old", "new", "other")] == ["0.0", "0.0", "0.1"]
    assert {row["runs"] for row in rows(old, new, other, "--by", "seed")} == {"old, new", "other"}


# -- branches and pieces


def test_a_branch_snapshot_that_is_lost_makes_no_stage_another(tmp_path: Path) -> None:
    story = whole(Story(tmp_path / "out"))
    shutil.rmtree(story.out / "snapshots" / "main-00000003-a0001")
    assert {row["state"] for row in rows(story.out)} == {"done"}
    # It comes back as a piece, with the same bits, and then with others.
    story.begin()
    story.life = 2
    story.snapshot("main", 3, None, "half11")
    assert {row["state"] for row in rows(story.out)} == {"done"}
    shutil.rmtree(story.out / "snapshots" / "main-00000003-a0002")
    story.snapshot("main", 3, None, "other bits")
    assert {row["stage"]: row["state"] for row in rows(story.out)}["cut"] == "done, from an earlier main"
    assert [row["state"] for row in rows(story.out)].count("done") == 3


def test_the_lead_says_what_is_of_an_earlier_parent(tmp_path: Path) -> None:
    story = whole(Story(tmp_path / "out"))
    assert "Ensemble both: top-1 75.00 %" in report(story.out).stdout
    story.life, story.recipe = 2, {"in_main": "0.2"}
    story.begin(ensembles=("both", "three"))
    trunk(story, 0.55)
    story.write(RunFinished(trained=True, seconds=1, not_chosen=("a", "b", "cut")))
    text = report(story.out).stdout
    assert "Ensemble both of earlier members: top-1 75.00 %" in text and "Ensemble both: " not in text
    assert (
        "out is not finished: 4 of 4 stages done, of them a, b, cut from an earlier parent, "
        "the last run did all it was asked for (not chosen: a, b and cut)."
    ) in text


def test_a_stage_that_is_not_enabled_is_not_gone(tmp_path: Path) -> None:
    story = whole(Story(tmp_path / "out"))
    story.begin(["main", "b"], disabled=("a", "never"), ensembles=("both",))
    story.write(RunFinished(trained=True, seconds=1))
    states = {row["stage"]: row["state"] for row in rows(story.out)}
    assert states == {"main": "done", "b": "done", "a": "not enabled", "cut": "no longer in the schedule"}
    (run,) = rows(story.out, "--by", "run")
    assert (run["state"], run["end"]) == ("finished", "b")
    assert rows(story.out, "--by", "ensemble") == []


def test_a_piece_is_work_of_its_life_and_done_again(tmp_path: Path) -> None:
    story = whole(Story(tmp_path / "out"))
    story.begin()
    piece(story)
    trained(story, "cut", "main@3", 3, 0.4)
    first, second = rows(story.out, "--by", "life")
    assert (first["iterations"], first["done_again"]) == ("12", "2"), "`cut` was trained again"
    assert (second["start"], second["iterations"], second["done_again"]) == ("main 0 again", "5", "3")
    assert float(second["images_per_second"]) == pytest.approx(5 * 25 / (3 * 2 + 2))
    assert sum(int(row["iterations"]) - int(row["done_again"]) for row in (first, second)) == 6 + 2 + 2 + 2
    assert {row["stage"]: row["iterations"] for row in rows(story.out)}["main"] == "6"
    assert "by which a branch got the snapshot that it starts from once more" in report(story.out).stdout


# -- status of a piece under way


def under_way(story: Story) -> Iterator[None]:
    whole(story)
    story.begin(["main", "a", "b", "cut"])
    piece(story, 0, 200)
    yield
    for i in range(1, 121):
        story.clock += 1
        line = Retraced(
            stage="main", iter=i, until=200, lr=0.1, loss=i / 100, images=25, seconds=9.0 if i < 61 else 2.0
        )
        story.write(line)
    yield
    story.write(
        StageStarted(
            stage="cut", number=4, iter=0, max_iter=2, start="main-00000003-a0002", batch_size=25, device_batch_size=5
        )
    )
    yield


def test_status_reads_no_more_of_a_piece_than_of_a_stage(tmp_path: Path) -> None:
    story = Story(tmp_path / "out")
    steps = under_way(story)
    next(steps)
    progress = look(Target(story.out), 0.0).progress
    assert progress is not None and progress.line == "main again, for cut  0/200" and progress.lr is None
    next(steps)
    life = read_last_life(story.out / "log.jsonl")
    assert life is not None and [e.iter for e in life.retraced] == list(range(71, 121)) and life.window == ()
    assert not list(life.of(Retraced)) and life.last is not None and isinstance(life.last[1], Retraced)
    status = look(Target(story.out), 0.0)
    assert status.last_event == "Retraced" and status.progress is not None
    assert (status.progress.stage, status.progress.iter, status.progress.loss) == ("main", 120, 1.2)
    assert (status.progress.number, status.progress.stages) == (1, 4)
    assert (status.progress.iterations_left, status.progress.seconds_left_in_stage) == (202 - 120, 80 * 2.0)
    next(steps)
    life = read_last_life(story.out / "log.jsonl")
    assert life is not None and life.retraced == ()
    status = look(Target(story.out), 0.0)
    assert status.progress is not None and status.progress.stage == "cut"


def test_of_many_ends_the_first_lines_name_the_best(tmp_path: Path) -> None:
    names = [f"end{n:02}" for n in range(20)]
    STAGES.update({name: (1, 0.01 * (n + 1)) for n, name in enumerate(names)})
    story = Story(tmp_path / "out").begin(["main", *names], ensembles=[f"pair{n}" for n in range(9)])
    trunk(story)
    for n, name in enumerate(names):
        trained(story, name, "main", 6, 0.6 + 0.01 * (7 * n % 20))  # 0.60 to 0.79, each once
    story.results()
    for n in range(9):
        story.ensemble(f"pair{n}", *names[n : n + 2], top1=0.8 + 0.01 * n)
    story.write(RunFinished(trained=True, seconds=1))
    lines = report(tmp_path / "out", "--output", tmp_path / "r.md")
    assert lines.exit_code == 0
    lead = [line for line in (tmp_path / "r.md").read_text().partition("\n## ")[0].split("\n") if line][1:]
    assert [line.split(",")[0] for line in lead] == [
        *(f"Top-1 {79 - n}.00 % at the end of end{(17 - 3 * n) % 20:02}" for n in range(8)),
        "12 more ends: top-1 60.00 to 71.00 %.",
        *(f"Ensemble pair{n}: top-1 {80 + n}.00 %" for n in range(8, 0, -1)), "1 more ensembles: top-1 80.00 to 80.00 %.",
    ]  # fmt: skip


def test_a_run_with_stages_side_by_side_is_one_life_with_what_it_did_afterwards(tmp_path: Path) -> None:
    """`run --parallel` logs a start for its stages, and one for the ensembles."""
    story = Story(tmp_path / "out").begin(side_by_side=2)
    trunk(story)
    for stage in ("a", "b"):
        trained(story, stage, "main", 6, ALONE[stage])
    story.results()
    story.write(RunFinished(trained=True, seconds=1))
    story.begin(ensembles=("both",), rest=True)
    story.clock += 5
    story.ensemble("both", "a", "b", top1=0.75)
    story.write(RunFinished(trained=True, seconds=1))
    (life,) = rows(story.out, "--by", "life")
    assert (life["iterations"], life["end"]) == ("10", "finished")
    story.begin()
    story.write(RunFinished(trained=True, seconds=1))
    assert len(rows(story.out, "--by", "life")) == 2, "a later run is another"


@pytest.mark.parametrize("tested, gain", [((3, 0.3), 0.1), ((2, 0.3), None)])
def test_a_branch_from_the_midst_gains_on_the_evaluation_there(
    tmp_path: Path, tested: tuple[int, float], gain: float | None
) -> None:
    story = Story(tmp_path / "out")
    story.begin()
    story.start("main", None)
    story.train("main", 1, 3, 0)
    story.test("main", *tested)
    story.snapshot("main", 3, None, "half")
    story.train("main", 4, 6, 0)
    story.end("main", None, 0.5)
    trained(story, "cut", "main@3", 3, 0.4)
    (row,) = (row for row in rows(tmp_path / "out", "--by", "stage") if row["stage"] == "cut")
    assert row["gain"] == "" if gain is None else float(row["gain"]) == pytest.approx(gain)
