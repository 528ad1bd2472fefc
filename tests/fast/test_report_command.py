"""`stagerun report`: what it makes of logs and snapshots, and what it says about several runs."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from made_up_runs import BATCH, STAGES, Story, killed_and_resumed, report, rows, three_seeds

from stagerun.base.events import Failed, RunFinished, Stopped
from stagerun.tools.report.replay import Reader
from stagerun.tools.report.table import Column, Table, document


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return three_seeds(tmp_path)


# -- one run, several process lives


def test_what_was_done_again_takes_the_place_of_what_was_lost(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path / "out")
    init, cyc1, collapse = rows(tmp_path / "out")
    assert (init["iterations"], init["top1"], init["resumes"], init["state"]) == ("6", "0.5", "1", "done")
    assert (cyc1["state"], collapse["state"]) == ("not started", "not started")
    first, second = rows(tmp_path / "out", "--by", "epoch")
    assert float(first["train_loss"]) == pytest.approx((1.9 + 1.8 + 1.7 + 1.6) / 4)  # not 8.6 at iteration 4
    assert (float(first["valid_accuracy"]), float(second["valid_accuracy"])) == (0.3, 0.5)  # not 0.99


def test_process_lives(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path / "out")
    first, second = rows(tmp_path / "out", "--by", "life")
    assert (first["iterations"], first["done_again"], first["end"]) == ("5", "2", "broken off")
    assert (second["iterations"], second["done_again"], second["start"]) == ("3", "0", "init 3")
    assert (first["workers"], second["workers"]) == ("1", "2")
    assert second["end"] == "killed, or ended without a word"  # as `status` says
    assert float(first["wall_seconds"]) == 5 + 2 + 2
    assert float(rows(tmp_path / "out", "--by", "run")[0]["wall_seconds"]) == 9 + 3 + 2


def test_curves_are_thin_and_the_rest_is_over_every_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGES, "init", (3000, 0.1))
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    story.train("init", 1, 2000, 0)
    story.train("init", 1501, 3000, 0, loss=1000.0)  # killed; the line that says where it goes on is lost
    found = Reader(tmp_path / "out", points=50).read()
    (life,), init = found.lives, found.stages[0].trained
    assert init is not None and (init.updates, init.images, init.seconds) == (3000, 3000 * BATCH, 3000.0)
    assert (life.updates, life.again, life.seconds) == (3500, 500, 3500.0)
    assert [(n, span.updates) for n, span in init.epochs.items()] == [(n, 4) for n in range(1, 751)]
    assert init.loss == pytest.approx(sum(1000 - 0.1 * i for i in range(2901, 3001)) / 100)
    assert [iter for iter, _ in init.losses] == [60 * n + 30.5 for n in range(50)]
    for iter, loss in init.losses:  # a mean, of what counts alone
        assert loss == pytest.approx((2.0 if iter < 1500 else 1000.0) - 0.1 * iter)


@pytest.mark.parametrize("number", ["1-2", "1e", "9" * 400, "1e999", "NaN", "true", '"2"'])
def test_a_number_that_is_none_makes_its_line_a_damaged_one(tmp_path: Path, number: str) -> None:
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    story.train("init", 1, 4, 0)
    path = tmp_path / "out" / "log.jsonl"
    path.write_text(path.read_text().replace('"loss": 1.7', f'"loss": {number}'))
    read = Reader(tmp_path / "out").read()
    assert read.damaged == 1 and read.stages[0].trained is not None
    assert [iter for iter, _ in read.stages[0].trained.losses] == [1, 2, 4]


def test_damaged_lines_are_counted_and_said(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path / "out")
    with open(tmp_path / "out" / "log.jsonl", "ab") as file:
        file.write(b'[]\n{"time": 1, "event": "Iterated"}\n\xff\xfe\n{"time": 1e999, "event": "RunFinished"}\n')
        file.write(b'{"time": 1, "event": "FromTheFuture"}\n{"time": 3001, "event": "Iter')
    text = report(tmp_path / "out").stdout
    assert "can't be read, so that what they said is missing here: 5 " in text
    assert "events that this version of stagerun doesn't know: 1" in text
    assert "tests inside init cover 50 of 100 images" in text


def test_lines_that_a_full_disk_swallowed_are_said_and_the_result_is_found(tmp_path: Path) -> None:
    story = killed_and_resumed(tmp_path / "out")
    log = tmp_path / "out" / "log.jsonl"
    lines = [line for line in log.read_text().splitlines() if '"StageFinished"' not in line and '"iter": 2' not in line]
    log.write_text("\n".join(lines) + "\n")
    text = report(tmp_path / "out").stdout
    assert "iterations of init without a line in log.jsonl: 1" in text
    assert rows(tmp_path / "out")[0]["state"] == "trained, not evaluated"
    (tmp_path / "out" / "results").mkdir()
    result = tmp_path / "out" / "results" / f"{story.ends['init']}.json"
    result.write_text(json.dumps(asdict(story.finished("init", 0.5))))
    assert (rows(tmp_path / "out")[0]["state"], rows(tmp_path / "out")[0]["top1"]) == ("done", "0.5")


def test_a_stage_started_over_and_what_followed_from_its_old_end(tmp_path: Path) -> None:
    story = Story(tmp_path / "out").whole(0.5, 0.6, 0.7)
    story.begin()
    story.start("init", None)
    story.train("init", 1, 2, 0)
    init, cyc1, collapse = rows(tmp_path / "out")
    assert (init["state"], init["iterations"], init["top1"]) == ("at 2 of 6", "2", "")
    assert cyc1["state"] == "done, from an earlier init" and cyc1["gain"] == ""
    assert collapse["state"] == "done, from an earlier cyc1"
    story.train("init", 3, 6, 0)
    story.end("init", None, 0.55)
    assert [row["state"] for row in rows(tmp_path / "out")][1] == "done, from an earlier init"
    assert "Top-1" not in report(tmp_path / "out").stdout.split("## Runs")[0]
    story.start("cyc1", "init")
    story.train("cyc1", 1, 4, 6)
    story.end("cyc1", "init", 0.65)
    row = rows(tmp_path / "out")[1]
    assert row["state"] == "done" and float(row["gain"]) == pytest.approx(0.10)


def test_a_stage_that_left_the_schedule_does_not_keep_the_run_unfinished(tmp_path: Path) -> None:
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    story.train("init", 1, 6, 0)
    story.end("init", None, 0.5)
    story.start("cyc1", "init")
    story.train("cyc1", 1, 2, 6)
    assert "1 of 3 stages done" in rows(story.out, "--by", "run")[0]["state"]
    story.begin(stages=["init", "collapse"])
    story.start("collapse", "init")
    story.train("collapse", 1, 2, 6)
    story.end("collapse", "init", 0.7)
    story.write(RunFinished(trained=True, seconds=1))
    (run,) = rows(story.out, "--by", "run")
    assert (run["state"], run["end"]) == ("finished", "collapse")
    assert {row["stage"]: row["state"] for row in rows(story.out)} == {
        "init": "done", "collapse": "done", "cyc1": "no longer in the schedule",
    }  # fmt: skip
    assert "not finished" not in report(story.out).stdout


def test_an_error_stands_in_the_lives_and_the_lead(tmp_path: Path) -> None:
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    story.train("init", 1, 3, 0)
    story.write(Failed(code=79, text="the loss is nan\n  hint: lower base_lr"))
    assert rows(story.out, "--by", "life")[0]["end"] == "ended with exit code 79: the loss is nan"
    assert (
        "out is not finished: 0 of 3 stages done, ended with exit code 79: the loss is nan." in report(story.out).stdout
    )
    story.write(Failed(code=65, text="data is gone"))  # the next process failed before it could say that it began
    assert [row["end"] for row in rows(story.out, "--by", "life")] == [
        "ended with exit code 79: the loss is nan", "ended with exit code 65: data is gone",
    ]  # fmt: skip


def test_a_life_that_found_nothing_to_do_is_none(tmp_path: Path) -> None:
    story = Story(tmp_path / "out").whole(0.5, 0.6, 0.7)
    story.begin()
    story.write(RunFinished(trained=False, seconds=0))
    (run,) = rows(tmp_path / "out", "--by", "run")
    assert (run["lives"], run["state"]) == ("1", "finished")


# -- several runs


def test_mean_and_spread_over_seeds(three: list[Path]) -> None:
    end = rows(*three, "--by", "seed")[2]
    assert (end["stage"], end["n"], end["seeds"]) == ("collapse", "3", "1, 2, 3")
    assert float(end["top1_mean"]) == pytest.approx((0.91 + 0.92 + 0.94) / 3)
    assert float(end["top1_sd"]) == pytest.approx(0.0152752523)  # sqrt((0.0133^2 + 0.0033^2 + 0.0167^2) / 2)
    assert (float(end["top1_min"]), float(end["top1_max"])) == (0.91, 0.94)
    assert float(end["gain_mean"]) == pytest.approx((0.11 + 0.12 + 0.14) / 3)
    lead = report(*three).stdout
    assert "Top-1 92.33 % (sd 1.53 over 3 runs, seeds 1, 2, 3) at the end of collapse" in lead
    assert "12.33 points above the stage it starts from" in lead


def test_only_runs_that_differ_by_the_seed_alone_are_put_together(three: list[Path], tmp_path: Path) -> None:
    Story(tmp_path / "other", 4, in_cyc1="0.07").whole(0.6, 0.1, 0.1)
    found = {(row["stage"], row["runs"]) for row in rows(*three, tmp_path / "other", "--by", "seed")}
    assert ("init", "seed1, seed2, seed3, other") in found  # up to there they are alike
    assert {("cyc1", "seed1, seed2, seed3"), ("cyc1", "other")} < found
    assert {("collapse", "seed1, seed2, seed3"), ("collapse", "other")} < found  # its own recipe is, its parent's not


def test_averaged_weights_have_their_own_spread(tmp_path: Path) -> None:
    for seed, ema in ((1, 0.95), (2, 0.97)):
        Story(tmp_path / f"s{seed}", seed).whole(0.6, 0.8, 0.9, ema=ema)
    end = rows(tmp_path / "s1", tmp_path / "s2", "--by", "seed")[2]
    assert float(end["ema_top1_mean"]) == pytest.approx(0.96)
    assert float(end["ema_top1_sd"]) == pytest.approx(0.0141421356)
    assert "with averaged weights 96.00 %" in report(tmp_path / "s1", tmp_path / "s2").stdout


def test_a_run_that_is_not_finished_is_shown_as_what_it_is(three: list[Path], tmp_path: Path) -> None:
    half = Story(tmp_path / "half", 4).begin()
    half.start("init", None)
    half.train("init", 1, 6, 0)
    half.end("init", None, 0.7)
    half.start("cyc1", "init")
    half.train("cyc1", 1, 3, 6)
    half.write(Stopped(stage="cyc1", iter=3, reason="asked to stop"))
    text = report(*three, half.out).stdout
    assert "half is not finished: 1 of 3 stages done, stopped (asked to stop)." in text
    assert [row["n"] for row in rows(*three, half.out, "--by", "seed")] == ["4", "3", "3"]
    assert [row["state"] for row in rows(half.out)] == ["done", "at 3 of 4", "not started"]


def test_what_differed(three: list[Path], tmp_path: Path) -> None:
    Story(tmp_path / "other", 1, workers=4, in_cyc1="0.07", now_torch="2.14").whole(0.6, 0.8, 0.9)
    found = {(row["kind"], row["field"]): row for row in rows(three[0], three[1], tmp_path / "other", "--diff")}
    assert set(found) == {
        ("recipe", "seed"), ("recipe", "base_lr"), ("environment", "torch"), ("environment", "workers"),
    }  # fmt: skip
    lr = found["recipe", "base_lr"]
    assert [lr[name] for name in ("stages", "seed1", "seed2", "other")] == ["cyc1", "0.05", "0.05", "0.07"]
    assert found["environment", "workers"]["stages"] == "all"
    assert [found["environment", "workers"][name] for name in ("seed1", "other")] == ["1", "4"]
    assert "## Differences" in report(*three, "--diff").stdout and "## Differences" not in report(*three).stdout


def test_a_recipe_that_no_snapshot_shows_is_not_compared(three: list[Path]) -> None:
    for manifest in (three[0] / "snapshots").glob("*/MANIFEST.json"):
        manifest.unlink()
    result = report(three[0], three[1], "--diff")
    assert "?: no snapshot shows the recipe: seed1 (init, cyc1, collapse)" in result.stdout
    assert "seed  " not in result.stdout.split("## Differences")[1].split("?:")[0]


# -- epochs and workers


def test_epochs_of_stages_that_meet_in_the_middle_of_one(tmp_path: Path) -> None:
    Story(tmp_path / "out").whole(0.6, 0.8, 0.9)
    first, second, third = rows(tmp_path / "out", "--by", "epoch")
    assert [row["stage"] for row in (first, second, third)] == ["init", "init, cyc1", "cyc1, collapse"]
    assert float(second["train_loss"]) == pytest.approx((1.5 + 1.4 + 1.9 + 1.8) / 4)
    assert [row["valid_accuracy"] for row in (first, second, third)] == ["", "0.6", "0.9"]
    assert float(third["lr"]) == 0.01 / 2
    assert [float(row["seconds"]) for row in (first, second, third)] == [4, 4, 4]
    assert float(first["images_per_second"]) == BATCH
    text = report(tmp_path / "out", "--by", "epoch").stdout
    assert "| epoch | stage          |    LR | train loss | valid accuracy | valid loss | images/s |  time |" in text
    assert "|     3 | cyc1, collapse | 0.005 |     1.7500 |        90.00 % |     1.0000 |       25 | 4.0 s |" in text


def test_a_branch_has_its_own_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGES, "early", (2, 0.01))
    story = Story(tmp_path / "out").begin()
    for stage, parent, before in (("init", None, 0), ("cyc1", "init", 6), ("early", "init", 6)):
        story.start(stage, parent)
        story.train(stage, 1, STAGES[stage][0], before)
        story.end(stage, parent, 0.5)
    found = [(row["epoch"], row["stage"]) for row in rows(tmp_path / "out", "--by", "epoch")]
    assert found == [("1", "init"), ("2", "init"), ("2", "cyc1"), ("3", "cyc1"), ("2", "early")]
    ends = [(row["end"], float(row["train_seconds"])) for row in rows(tmp_path / "out", "--by", "run")]
    assert ends == [("cyc1", 6 + 4), ("early", 6 + 2)], "seconds along the path of each"


def test_a_terminal_gets_names_as_they_are() -> None:
    table = Table("a & b", (Column("x", "x", "text"),), (("<n|m>",),), ("note <n>",))
    for room, words in ((80, ("# t<1>", "a & b", "| <n|m> |", "note <n>.")), (None, ("# t&lt;1>", "&lt;n\\|m>"))):
        assert all(one in document("t<1>", [], [table], [], room) for one in words)
