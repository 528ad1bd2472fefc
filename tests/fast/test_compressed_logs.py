"""What is seen of compressed gradients: the progress line, log.jsonl, `report`; and that nothing is seen of none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from log_help import feed, iterated, run_started, stage_started
from made_up_runs import STAGES, Story, report, rows

from stagerun.base.events import (
    Compressed,
    CompressedItem,
    CompressionChosen,
    Event,
    Retraced,
    StageStarted,
    Synchronised,
)
from stagerun.base.pace import live_line, progress_line, sent
from stagerun.train.log_file import JsonLines, read_last_life

DENSE = 1_000_000


def compressed(iter: int, stage: str = "trunk", residual: float | None = 3.0) -> Compressed:
    """Two layers, of which the first loses a quarter."""
    kept = None if residual is None else 1 - (residual / 6) ** 2
    first = CompressedItem(name="conv.weight", norm=6.0, residual_norm=residual, kept=kept, bytes=800)
    second = CompressedItem(name="fc.weight", norm=0.0, residual_norm=0.0, kept=1.0, bytes=200)
    return Compressed(stage=stage, iter=iter, items=(first, second))


@pytest.mark.parametrize(
    ("bytes", "text"),
    [
        (21_340, "21.3 kB sent, 2.1 % of dense"),
        (217, "217 B sent, 0.022 % of dense"),
        (499_000, "499.0 kB sent, 50 % of dense"),
        (1_000_000, "1.0 MB sent, 100 % of dense"),
        (1_204_000, "1.2 MB sent, 120 % of dense"),
    ],
)
def test_bytes_and_their_share_of_dense(bytes: int, text: str) -> None:
    assert sent(bytes, DENSE) == text


def test_progress_lines_name_bytes_where_a_stage_compresses() -> None:
    window = [iterated("trunk", 3, sent_bytes=20_000), iterated("trunk", 4, sent_bytes=24_000)]
    dense, stage = stage_started("trunk"), stage_started("trunk", dense_bytes=DENSE)
    words = "  22.0 kB sent, 2.2 % of dense  "
    assert words in progress_line(stage, 2, window, (4, 4)) and "sent" not in progress_line(dense, 2, window, (4, 4))
    assert progress_line(stage, 2, window, (4, 4)).replace(words, "  ") == progress_line(dense, 2, window, (4, 4))
    assert words in live_line({"trunk": "50 %"}, stage, window, (4, 4), 200)[2]
    assert "sent" not in live_line({"trunk": "50 %"}, stage, window, (4, 4), 80)[2]
    assert "sent" not in live_line({"trunk": "50 %"}, dense, window, (4, 4), 200)[2]


def logged(path: Path, *events: Event) -> list[dict[str, object]]:
    with JsonLines(path, print) as log:
        feed(log, *events)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_has_bytes_only_where_there_are_any(tmp_path: Path) -> None:
    again = Retraced(stage="trunk", iter=1, until=2, lr=0.1, loss=1.0, images=1, seconds=1.0)
    silent = logged(tmp_path / "one", stage_started("trunk"), iterated("trunk", 1), again)
    assert not any({"sent_bytes", "dense_bytes"} & set(record) for record in silent)
    start, iteration, retraced = logged(
        tmp_path / "two",
        stage_started("trunk", dense_bytes=DENSE),
        iterated("trunk", 1, sent_bytes=20_000),
        replace(again, sent_bytes=20_000),
    )
    assert start["dense_bytes"] == DENSE and iteration["sent_bytes"] == retraced["sent_bytes"] == 20_000


def test_the_last_life_leaves_out_what_compression_kept(tmp_path: Path) -> None:
    """A long run has many such lines, and long ones."""
    events: list[Event] = [run_started(), stage_started("trunk", dense_bytes=DENSE)]
    for i in range(1, 5001):
        events += [iterated("trunk", i, sent_bytes=i), compressed(i)]
    logged(tmp_path / "log.jsonl", *events)
    life = read_last_life(tmp_path / "log.jsonl")
    assert life is not None and life.seen[1][1] == events[1] and len(life.seen) == 2
    assert [e.sent_bytes for e in life.window] == list(range(4951, 5001)) and life.unreadable == 0


# -- report


def add(out: Path, start: dict[str, int], each: dict[int, int]) -> None:
    """Puts `dense_bytes` and `sent_bytes` into a log."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    for record in lines:
        if record["event"] == "StageStarted" and record["stage"] in start:
            record["dense_bytes"] = start[record["stage"]]
        if record["event"] == "Iterated":
            record["sent_bytes"] = each[record["iter"]] if record["stage"] in start else 2 * DENSE
    (out / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))


@pytest.mark.long
def test_the_report_of_a_run_without_compression_is_what_it_was(tmp_path: Path) -> None:
    """With several workers there are bytes, and nothing to compare them with."""
    one, two = (
        Story(tmp_path / "one" / "run").whole(0.6, 0.8, 0.9),
        Story(tmp_path / "two" / "run").whole(0.6, 0.8, 0.9),
    )
    add(two.out, {}, {})
    for form in ("markdown", "csv"):
        first, second = (report(story.out, "--format", form).stdout for story in (one, two))
        assert first == second and "dense" not in first and "sent" not in first.replace("presented", "")


def test_the_report_says_what_was_sent(tmp_path: Path) -> None:
    story = Story(tmp_path / "out").whole(0.6, 0.8, 0.9)
    add(story.out, {"init": DENSE}, {i: 10_000 * i for i in range(1, STAGES["init"][0] + 1)})
    init, cyc1, _ = rows(story.out)
    assert float(init["sent_bytes"]) == 35_000 and float(init["of_dense"]) == 0.035
    assert cyc1["sent_bytes"] == cyc1["of_dense"] == "", "gradients as they are"
    text = report(story.out).stdout
    assert "| of dense |" in text and "35.0 kB |    3.5 % |" in text and "sent: by rank 0 in an iteration" in text


def test_the_report_names_methods_and_synchronisations(tmp_path: Path) -> None:
    """What AUTO chose, the schedule's own method, and how often replicas met, of what counts."""
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    methods = (("NONE", 34, 900, "conv1 to fc"), ("TOP_K", 16, 90_000, "conv2"))
    story.write(CompressionChosen(stage="init", methods=methods, why="fastest"))
    story.train("init", 1, STAGES["init"][0], 0)
    story.write(stage_started("cyc1", dense_bytes=DENSE, gradients="2 replicas by LOCAL"))
    story.train("cyc1", 1, 3, 0)
    for iter in (1, 2, 3):
        story.write(Synchronised(stage="cyc1", iter=iter, bytes=9, iterations=1, sent_bytes=9))
    story.begin()
    story.write(replace(stage_started("cyc1", dense_bytes=DENSE, gradients="2 replicas by LOCAL"), iter=2))
    init, cyc1, _ = rows(story.out)
    assert (init["gradients"], init["synchronisations"]) == ("AUTO: dense for 34 tensors, TOP_K for 16", "0")
    assert (cyc1["gradients"], cyc1["synchronisations"]) == ("2 replicas by LOCAL", "2")


def test_the_last_life_finds_the_newest_synchronisation_however_long_ago(tmp_path: Path) -> None:
    """A long run has many such lines, too; the mean since the one before is what a line of progress shows."""
    events: list[Event] = [run_started(), stage_started("trunk", dense_bytes=DENSE)]
    for i in range(1, 9001):
        events.append(iterated("trunk", i, sent_bytes=100))
        if i <= 6000 and i % 10 == 0:
            events.append(Synchronised(stage="trunk", iter=i, bytes=5000, iterations=10, sent_bytes=6000))
    logged(tmp_path / "log.jsonl", *events)
    life = read_last_life(tmp_path / "log.jsonl")
    assert life is not None and life.met == events[-3001] and life.met.iter == 6000 and len(life.seen) == 2
    start = events[1]
    assert isinstance(start, StageStarted)
    assert "  600 B sent, 0.06 % of dense  " in progress_line(start, 2, life.window, (4, 4), met=life.met)
    with JsonLines(tmp_path / "log.jsonl", print) as log:
        feed(log, stage_started("next"), iterated("next", 1))
    life = read_last_life(tmp_path / "log.jsonl")
    assert life is not None and life.met is None, "of another stage"
