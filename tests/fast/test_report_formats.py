"""`stagerun report`: Markdown, CSV and HTML, mistakes on the command line, damaged logs, and one real run."""

import json
import random
from pathlib import Path

import pytest
from made_up_runs import Story, killed_and_resumed, refusal, report, rows, three_seeds


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return three_seeds(tmp_path)


# -- formats


def test_csv_is_at_full_precision_and_markdown_in_words(tmp_path: Path) -> None:
    Story(tmp_path / "out").whole(0.6, 0.8, 0.912345678)
    assert rows(tmp_path / "out")[2]["top1"] == "0.912345678"
    assert "91.23 %" in report(tmp_path / "out").stdout
    tsv = report(tmp_path / "out", "--format", "tsv").stdout.splitlines()
    assert tsv[0].split("\t")[:3] == ["run", "stage", "from"] and len(tsv) == 4


def test_the_format_follows_from_the_file(three: list[Path], tmp_path: Path) -> None:
    result = report(*three, "--output", tmp_path / "table.csv", "--by", "seed")
    assert result.exit_code == 0 and result.stdout == f"written to {tmp_path / 'table.csv'}\n"
    assert (tmp_path / "table.csv").read_text().startswith("stage,runs,n,seeds,")


def test_markdown_rows_have_the_columns_of_their_header(three: list[Path], tmp_path: Path) -> None:
    odd = tmp_path / "a|b<i>"
    three[0].rename(odd)
    blocks = [b.splitlines() for b in report(odd, *three[1:], "--diff").stdout.split("\n\n") if b.startswith("|")]
    assert len(blocks) == 4
    for block in blocks:
        counts = {line.replace("\\|", "").count("|") for line in block}
        assert len(counts) == 1 and len({len(line) for line in block}) == 1, block
    assert "<i>" not in report(odd).stdout


def test_a_loss_is_not_a_gain_and_no_name_stands_twice(tmp_path: Path) -> None:
    Story(tmp_path / "made_up").whole(0.5, 0.7575, 0.75)
    text = report(tmp_path / "made_up").stdout
    assert text.startswith("# made_up\n") and "0.75 points below the stage it starts from (made_up)" in text


# -- mistakes


def test_folders_that_hold_no_run(three: list[Path], tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "nowhere")
    assert "File name too long" in refusal(tmp_path / ("n" * 300), code=74)
    assert "is the folder of a schedule" in refusal(Path(__file__).parents[2] / "solvers" / "fashion_collapse")
    assert f"name the output folder: {three[0]}" in refusal(three[0] / "log.jsonl")
    assert "has no log.jsonl" in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.jsonl").write_text("\nnot JSON\n")
    assert "holds no event of a run" in refusal(tmp_path / "empty")
    assert "are the same folder" in refusal(three[0], f"{three[0]}/../seed1")


def test_among_several_folders_those_without_a_log_are_left_out(three: list[Path], tmp_path: Path) -> None:
    rehearsed = tmp_path / "rehearsed"
    rehearsed.mkdir()
    (rehearsed / "rehearsal.json").write_text("{}")
    result = report(rehearsed, *three, "--by", "run", "--format", "csv")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 4
    assert result.stderr == f"note: {rehearsed} has no log.jsonl and is left out\n"
    assert "has no log.jsonl" in refusal(rehearsed, tmp_path), "nothing is left"
    assert "--diff needs two runs" in refusal(rehearsed, three[0], "--diff")
    assert "there is no folder" in refusal(three[0], tmp_path / "nowhere"), "a mistake, not an empty folder"


def test_options_that_do_not_go_together(three: list[Path], tmp_path: Path) -> None:
    assert "--by epoch --format csv" in report(*three, "--op", "mean").stderr
    assert "--plot and --effect don't go together" in refusal(*three, "--effect", "from", "--plot", "a.svg")
    assert "--diff needs two runs" in refusal(three[0], "--diff")
    assert "csv holds one" in refusal(*three, "--diff", "--by", "stage", "--format", "csv")
    assert "names no format" in refusal(*three, "--output", tmp_path / "report.pdf")
    assert "stagerun view OUT --save" in refusal(*three, "--output", tmp_path / "report.html")
    assert "rsvg-convert" in refusal(*three, "--plot", tmp_path / "report.png")
    assert "no snapshot says yet" in refusal(*three, "--plot", tmp_path / "report.svg")
    assert "can't write" in refusal(*three, "--output", tmp_path / "nowhere" / "a.md", code=74)


@pytest.mark.long
def test_no_log_however_damaged_is_a_bug(tmp_path: Path) -> None:
    """Lines with values changed at random: a report or one clear message, in every format but the slow one."""
    killed_and_resumed(tmp_path / "out")
    log = tmp_path / "out" / "log.jsonl"
    whole = log.read_text().splitlines()
    rng = random.Random(7)
    odd = ["", "x", -1, 0, 1, 7, 1e300, -1e300, 1e-300, None, True, [], ["init"], {}, "init", "cyc1-00000004-a0001"]
    for _ in range(150):
        lines = []
        for line in whole:
            record = json.loads(line) if line.endswith("}") else {}
            if record and rng.random() < 0.3:
                record[rng.choice(list(record))] = rng.choice(odd)
                line = json.dumps(record)
            lines += [] if rng.random() < 0.1 else [line]
        rng.shuffle(lines)
        log.write_text("\n".join(lines))
        for by in ("run", "stage", "epoch", "iteration", "life", "ensemble", "seed"):
            assert report(tmp_path / "out", "--by", by).exit_code in (0, 64)
