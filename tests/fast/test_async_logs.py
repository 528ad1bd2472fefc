"""What is seen of `sync_param { method: ASYNC }`: progress lines, log.jsonl, `status`, `report`; and that nothing is seen of others."""

import json
import time
from pathlib import Path

import pytest
from log_help import feed, iterated, make, run_started, stage_started
from made_up_runs import STAGES, Story, report, rows

from stagerun.base.pace import live_line, progress_line, stale
from stagerun.base.staleness import Staleness, histogram, staleness_of
from stagerun.tools.report.look import look_at
from stagerun.tools.status.command import status_json, status_text
from stagerun.train.log_file import JsonLines, read_last_life
from stagerun.train.logs.console import Console
from stagerun.train.output import Target
from stagerun.train.status import look

# Of two replicas, the second of which is twice as slow: (staleness, replica) of iterations 1 to 6.
PUSHES = ((0, 0), (1, 0), (2, 1), (0, 0), (1, 0), (2, 1))


def test_mean_largest_shares_and_histogram() -> None:
    found = staleness_of(PUSHES)
    assert found is not None and (found.pushes, found.mean, found.largest) == (6, 1.0, 2)
    assert found.shares == {0: pytest.approx(2 / 3), 1: pytest.approx(1 / 3)} and found.of(1).mean == 2
    assert found.bars() == [(name, pytest.approx(1 / 3)) for name in ("0", "1", "2")]
    assert str(found) == "staleness 1, at most 2"
    assert staleness_of([(None, None), (None, None)]) is None


def test_a_long_tail_has_wide_bars() -> None:
    found = Staleness({0: {0: 30, 100: 10}})
    assert found.bars(10) == [("0-10", 0.75), *[(f"{a}-{a + 10}", 0) for a in range(11, 99, 11)], ("99-109", 0.25)]
    assert len(found.bars()) == 12
    assert histogram(Staleness({0: {0: 3}, 2: {1: 1}}), 8) == [
        "0   75.0 %  ########",
        "1   25.0 %  ###",
        "by replica: 0 75.0 %, 2 25.0 %",
    ]


def test_a_log_has_both_where_an_iteration_is_a_push(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "log.jsonl", print) as log:
        feed(log, iterated("trunk", 1), iterated("trunk", 2, staleness=0, replica=0))
    plain, pushed = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert not {"staleness", "replica"} & set(plain)
    assert (pushed["staleness"], pushed["replica"]) == (0, 0), "0 says something here"
    life = read_last_life(tmp_path / "log.jsonl")
    assert life is not None and [e.staleness for e in life.window] == [None, 0]


def test_progress_lines_say_how_stale_the_pushes_were() -> None:
    window = [iterated("trunk", i, staleness=s, replica=r) for i, (s, r) in enumerate(PUSHES, 1)]
    stage, plain = stage_started("trunk"), [iterated("trunk", i) for i in range(1, 7)]
    words = "  staleness 1, at most 2  "
    assert words in progress_line(stage, 2, window, (4, 4), stale(window))
    assert progress_line(stage, 2, window, (4, 4), stale(window)).replace(words, "  ") == progress_line(
        stage, 2, plain, (4, 4)
    )
    assert words in live_line({"trunk": "50 %"}, stage, window, (4, 4), 220)[2]
    assert "stale" not in live_line({"trunk": "50 %"}, stage, plain, (4, 4), 220)[2]


def test_a_line_is_about_the_pushes_since_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with Console({"trunk": 2}, {"trunk": None}, live=False) as console:
        feed(console, run_started(), stage_started("trunk"))
        feed(console, *(iterated("trunk", i, staleness=s, replica=r) for i, (s, r) in enumerate(PUSHES, 1)))
        feed(console, stage_started("collapse"), iterated("collapse", 2), iterated("collapse", 4))
    lines = [line for line in capsys.readouterr().out.splitlines() if "images/s" in line]
    words = [line.partition("images/s  ")[2].partition("  ")[0] for line in lines]
    assert words[:3] == ["staleness 0.5, at most 1", "staleness 1, at most 2", "staleness 1.5, at most 2"]
    assert "stale" not in "".join(lines[3:])


def test_status_shows_the_distribution(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "log.jsonl", print) as log:
        feed(log, run_started(), stage_started("trunk"))
        feed(log, *(iterated("trunk", i, staleness=s, replica=r) for i, (s, r) in enumerate(PUSHES, 1)))
    status = look(Target(tmp_path, make().schedule), time.time())
    text = status_text(status, time.time())
    assert "staleness of the last 6 iterations:\n  0   33.3 %  ####" in text
    assert "\n  by replica: 0 66.7 %, 1 33.3 %\n" in text + "\n" and "staleness 1, at most 2  " in text
    assert json.loads(status_json(status))["progress"]["staleness"] == {
        "by_replica": {"0": {"0": 2, "1": 2}, "1": {"2": 2}}
    }


# -- report


def add(out: Path, stage: str) -> None:
    """Puts them into a log."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    for record in lines:
        if record["event"] == "Iterated" and record["stage"] == stage:
            record["staleness"], record["replica"] = PUSHES[record["iter"] - 1]
    (out / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))


def test_the_report_says_how_stale_and_who(tmp_path: Path) -> None:
    story = Story(tmp_path / "out").whole(0.6, 0.8, 0.9)
    add(story.out, "init")
    assert STAGES["init"][0] == len(PUSHES)
    init, cyc1, _ = rows(story.out)
    assert (float(init["staleness_mean"]), init["staleness_max"]) == (1.0, "2") and cyc1["staleness_mean"] == ""
    assert "staleness: updates between the pull" in report(story.out).stdout


def test_what_a_later_life_did_again_counts_once(tmp_path: Path) -> None:
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    for i in range(1, 6):
        story.write(iterated("init", i, staleness=9, replica=3))
    story.begin().start("init", None, iter=3)
    story.write(iterated("init", 4, staleness=1, replica=0))
    trained = look_at(story.out, "out", 900, lambda text: None).history.stages[0].trained
    assert trained is not None and trained.staleness == Staleness({0: {1: 1}, 3: {9: 3}})
