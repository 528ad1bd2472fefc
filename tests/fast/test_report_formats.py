"""`stagerun report`: Markdown, CSV and HTML, mistakes on the command line, damaged logs, and one real run."""

import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_runs import STAGES, Story, killed_and_resumed, refusal, report, rows, three_seeds

from stagerun import store


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


class Page(HTMLParser):
    """What a browser would load and run, and whether what is opened is closed."""

    VOID = frozenset({"meta", "use"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "srcset") and v and v[0] != "#"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


EVIL = "</script><script>alert(1)</script><!-- $x^{2$ & \"q\" 'p'"


def test_the_page_loads_nothing_and_escapes_what_files_hold(three: list[Path], tmp_path: Path) -> None:
    """Names come from paths, from the log (stages, schedules, how a run ended) and from snapshots."""
    pytest.importorskip("matplotlib")
    odd = tmp_path / EVIL.replace("/", "")
    three[0].rename(odd)
    log = odd / "log.jsonl"
    text = log.read_text().replace("made_up", json.dumps(EVIL)[1:-1]).replace('"cyc1"', json.dumps(EVIL))
    log.write_text(text + json.dumps({"time": 9e9, "event": "Failed", "code": 79, "text": EVIL}) + "\n")
    result = report(odd, *three[1:], "--diff", "--format", "html")
    assert result.exit_code == 0, result.output
    page = Page(result.stdout)
    assert not page.open and not page.loads
    assert page.tags.count("script") == 2 and "img" not in page.tags and "iframe" not in page.tags  # its data, its own
    assert "@import" not in result.stdout and "url(http" not in result.stdout and "default-src 'none'" in result.stdout
    assert EVIL not in result.stdout and "<!--" not in result.stdout
    assert page.text.count(odd.name) >= 4  # title, heading, legend, tables
    assert page.text.count(EVIL) >= 4  # the schedule, the stage, how it ended
    assert page.tags.count("svg") == 2 and "sd 1.41 over 2 runs" in page.text  # for wide screens, and for narrow ones


def sections(page: str) -> dict[str, str]:
    """The text of each by its heading."""
    parts = re.findall(r"<section>(.*?)</section>", page, re.DOTALL)
    found = [(re.search(r"<(?:h2|summary)>(.*?)<", part), part) for part in parts]
    return {m[1].strip(): " ".join(re.sub(r"<[^>]*>", " ", part).split()) for m, part in found if m}


def drawn(page: str) -> list[str]:
    """The panels of the wide picture that are over epochs."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return [panel[0] for panel in json.loads(found.group(1))["panels"][0]] if found else []


def test_the_best_stands_on_top_with_mean_and_deviation_over_seeds(three: list[Path]) -> None:
    pytest.importorskip("matplotlib")
    found = sections(report(*three, "--format", "html").stdout)
    assert next(iter(found)) == "Ranking"
    ranked = re.findall(r"(\d) (\w+) (\d) ([\d.]+) % ([\d.]+) ([\d.]+)", found["Ranking"])
    assert ranked == [
        ("1", "collapse", "3", "92.33", "1.53", "1.0000"), ("2", "cyc1", "3", "80.00", "0.00", "1.0000"),
        ("3", "init", "3", "60.00", "0.00", "1.0000"),
    ]  # fmt: skip


@pytest.mark.long
def test_a_page_in_mid_run_says_what_is_done_and_has_no_empty_axes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    begun = sections(report(story.out, "--format", "html").stdout)
    assert "No iteration was done yet." in begun["Curves"] and "Ranking" not in begun
    story.train("init", 1, 3, 0)
    whole = report(story.out, "--format", "html").stdout
    assert drawn(whole) == ["loss", "lr"]  # nothing was evaluated
    assert "killed, or ended without a word" in sections(whole)["Progress"]
    story.test("init", 3, 0.5)
    with store.Lock(story.out):
        story.clock = 9e9
        story.begin(["init", "cyc1", "collapse"])
        story.start("init", None, iter=3)
        story.train("init", 4, 4, 0)
        whole = report(story.out, "--format", "html").stdout
        text = report(story.out).stdout
    assert "0 of 3 stages done, running" in text and "0 of 3 stages done, running; last" in sections(whole)["Progress"]
    assert "init at 4 of 6 cyc1 not started collapse not started" in sections(whole)["Progress"]
    assert "1 init at 3 of 6 50.00 % 1.0000" in sections(whole)["Ranking"]
    assert drawn(whole) == ["top1", "loss", "lr"]


def test_a_loss_is_not_a_gain_and_no_name_stands_twice(tmp_path: Path) -> None:
    Story(tmp_path / "made_up").whole(0.5, 0.7575, 0.75)
    text = report(tmp_path / "made_up").stdout
    assert text.startswith("# made_up\n") and "0.75 points below the stage it starts from (made_up)" in text


def test_equal_runs_give_an_equal_page(three: list[Path]) -> None:
    pytest.importorskip("matplotlib")
    first, second = (report(*three, "--format", "html").stdout for _ in range(2))
    assert first == second


def test_a_page_of_a_run_that_has_just_begun(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Story(tmp_path / "out").begin()
    assert report(tmp_path / "out", "--format", "html").exit_code == 0
    assert "0 of 3 stages done, killed, or ended without a word" in report(tmp_path / "out").stdout


@pytest.mark.slow
def test_three_long_runs_give_a_small_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(STAGES, "init", (22610, 0.1))
    story = Story(tmp_path / "a").begin()
    story.start("init", None)
    rng = random.Random(1)
    with open(story.out / "log.jsonl", "a") as file:
        for i in range(1, 22611):
            peak = 1.6 if i == 7000 else 0.1
            line = {
                "time": 2000 + i, "event": "Iterated", "stage": "init", "iter": i, "epoch": i / 4, "lr": peak,
                "momentum": 0.9, "weight_decay": 0, "loss": 2 + rng.random(), "images": 25, "seconds": 1 + rng.random(),
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_bytes((story.out / "log.jsonl").read_bytes())
    result = report(*(tmp_path / name for name in "abc"), "--format", "html")
    assert result.exit_code == 0, result.output
    assert 30_000 < len(result.stdout) < 2_000_000
    assert "each point is the mean of 76 iterations at most" in result.stdout


def test_thinning_loses_no_peak_of_the_learning_rate() -> None:
    from stagerun.tools.report.read_log import Columns, Updates, chunk_size

    n = range(1, 2001)
    rates = [5.0 if i == 777 else 0.1 for i in n]
    columns, ones = Columns(), [1] * 2000
    columns.extend(Updates("a", ones, n, ones, rates, ones, ones, ones, ones, n, ones, ones), 0, 2000, life=1)
    size = chunk_size(2000, 20)
    trained = columns.trained(size, 0.0, 0.1)
    assert trained is not None
    shown = [place for b in trained.bins for place in b.rates]
    assert size == 100 and len(shown) <= 80
    assert max(rate for _, rate in shown) == 5.0 and dict(shown)[777 * 0.1] == 5.0
    assert shown[0][0] == 0.1 and shown[-1][0] == 200.0 and shown == sorted(shown)


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
    assert "--op is for --by epoch" in refusal(*three, "--op", "mean")
    assert "--diff needs two runs" in refusal(three[0], "--diff")
    assert "csv holds one" in refusal(*three, "--diff", "--by", "stage", "--format", "csv")
    assert "names no format" in refusal(*three, "--output", tmp_path / "report.pdf")
    assert "can't write" in refusal(*three, "--output", tmp_path / "nowhere" / "a.md", code=74)


def test_without_matplotlib_the_page_says_what_to_install(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'stagerun[plots]'" in refusal(*three, "--format", "html")
    assert report(*three).exit_code == 0


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
        for by in ("run", "stage", "epoch", "life", "seed", "workers"):
            assert report(tmp_path / "out", "--by", by).exit_code in (0, 64)


# -- a real one
