"""OUT/log.csv, for made-up events."""

import csv
from pathlib import Path

import pytest
from log_help import BRANCH, SCHEDULE, evaluated, feed, finished, iterated, make, stage_started, trained

from stagerun.base.events import SnapshotDue
from stagerun.plan import Plan
from stagerun.train.logs.table import LOGS, Opened, Sink


def opened(out: Path, plan: Plan | None = None, warned: list[str] | None = None) -> Sink:
    said = warned if warned is not None else []
    return LOGS["csv"].make(Opened(plan or make(), out, [], said.append))


def rows(out: Path) -> list[dict[str, str]]:
    with open(out / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


def where(out: Path) -> list[tuple[str, int, str]]:
    return [(row["stage"], int(row["iter"]), row["what"]) for row in rows(out)]


def test_a_row_for_each_displayed_iteration_and_each_evaluation(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        feed(
            log,
            stage_started("trunk"),
            trained("trunk", range(1, 5)),
            evaluated("trunk", 4, 0.25),
            evaluated("trunk", 4, 0.5, ema=True),
            trained("trunk", range(5, 9)),
            evaluated("trunk", 8, 0.75),
            finished("trunk", 8, 0.75, 8 * 36.0),
            stage_started("collapse"),
            trained("collapse", range(1, 3)),
        )
    assert (tmp_path / "log.csv").read_text().splitlines()[:4] == [
        "stage,iter,epoch,what,lr,loss,images_per_s,top1,top5",
        "trunk,2,0.4,train,0.5,2.02,0.555555556,,",
        "trunk,4,0.8,train,0.5,2.04,0.555555556,,",
        "trunk,4,0.8,test,,1.5,25,0.25,0.9",
    ]
    assert where(tmp_path)[3:] == [
        ("trunk", 4, "ema_test"),
        ("trunk", 6, "train"),
        ("trunk", 8, "train"),
        ("trunk", 8, "test"),
        ("collapse", 2, "train"),
    ]
    assert rows(tmp_path)[-1]["epoch"] == "2", "along the path of ancestors"


def test_after_a_kill_no_row_is_missing_and_none_is_there_twice(tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    straight.mkdir()
    with opened(straight) as log:
        feed(log, stage_started("trunk"), trained("trunk", range(1, 9)), evaluated("trunk", 8, 0.5))
    log = opened(tmp_path)
    feed(log, stage_started("trunk"), trained("trunk", range(1, 5)))
    feed(log, SnapshotDue(stage="trunk", iter=4))
    before = where(tmp_path)
    assert before == [("trunk", 2, "train"), ("trunk", 4, "train")], "on disk before the snapshot is"
    feed(log, trained("trunk", range(5, 9)), evaluated("trunk", 8, 0.1))
    # Killed here; the snapshot at 4 is the newest.
    again = opened(tmp_path)
    feed(again, stage_started("trunk", 4))
    assert where(tmp_path) == before
    with again:
        feed(again, trained("trunk", range(5, 9)), evaluated("trunk", 8, 0.5))
    assert (tmp_path / "log.csv").read_text() == (straight / "log.csv").read_text()


def test_a_stage_that_is_trained_again_or_gone_leaves_no_rows(tmp_path: Path) -> None:
    with opened(tmp_path, make(SCHEDULE + BRANCH)) as log:
        for stage in ("trunk", "collapse", "early"):
            feed(log, stage_started(stage), trained(stage, range(1, 5)))
    with opened(tmp_path) as log:
        feed(log, stage_started("trunk"), iterated("trunk", 2))
    assert where(tmp_path) == [("trunk", 2, "train"), ("collapse", 2, "train"), ("collapse", 4, "train")]


def test_lines_of_others_are_left_out_with_a_warning(tmp_path: Path) -> None:
    lines = ["stage,iter,epoch,what,lr,loss,images_per_s,top1,top5", "x", "trunk,1,1,guess,,,,,", "trunk,y,,test,,,,,"]
    (tmp_path / "log.csv").write_text("".join(f"{line}\n" for line in lines) + 'trunk,2,0.4,train,"')
    warned: list[str] = []
    with opened(tmp_path, warned=warned) as log:
        feed(log, stage_started("trunk"))
    assert len(warned) == 1 and "holds 4 lines that are not its own" in warned[0]
    assert rows(tmp_path) == []


@pytest.mark.parametrize("display", [0, 3])
def test_display_says_which_iterations_have_a_row(tmp_path: Path, display: int) -> None:
    with opened(tmp_path, make(SCHEDULE.replace("display: 2", f"display: {display}"))) as log:
        feed(log, stage_started("trunk"), trained("trunk", range(1, 8)), evaluated("trunk", 7, 0.5))
    iterations = [("trunk", 3, "train"), ("trunk", 6, "train")] if display else []
    assert where(tmp_path) == [*iterations, ("trunk", 7, "test")]
