"""`stagerun help`, and places in `stagerun plan --why`; cases/plan_why*.txt and cases/help_names.txt show what they print."""

import re
from pathlib import Path

import contract
import pytest
from click.testing import CliRunner
from facade import UsageError, explained, stagerun_pb2
from hypothesis import given
from hypothesis import strategies as st

from stagerun.cli import main
from stagerun.language import load, read
from stagerun.manual import fields as topics
from stagerun.manual import pages
from stagerun.schedule import POLICIES

CASE = contract.Case.read(contract.CASES / "plan_why.txt")
READ = read(CASE.files, "/s")


def helped(*words: str) -> str:
    done = CliRunner().invoke(main, ["help", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


OVERRIDES = (
    "cool.base_lr=0.3",
    "cool_low.transform_param.crop_size=20",
    "solver={ momentum: 0.5 }",
    "seed=3",
    "data.train.images=500",
)


@pytest.mark.parametrize("overrides", [(), OVERRIDES], ids=["files", "--set"])
def test_what_counts_is_where_the_value_came_from(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Of every field of every stage: the first place that is shown is the one whose value counts. None lacks a name."""
    CASE.write(tmp_path)
    schedule = load(tmp_path, overrides)
    for stage in schedule.stages:
        for key in stage.origins.keys() - {"from_iter"}:
            name = key.replace("solver.", f"{stage.name}.", 1) if key.startswith("solver.") else key
            _, _, said = explained(schedule, name, overrides).partition("\n\n")
            span = stage.origins[key].span
            assert said.startswith(f"{span}: set " if span else ("the default", "a default", "not set")), name


WORDS = (
    "trunk cool off solver transform_param base_lr data train param clear from enabled sweep name ensemble rule stage é"
)


@given(st.lists(st.sampled_from([*WORDS.split(), ""]), max_size=4).map(".".join) | st.text(max_size=8))
def test_any_name_is_explained_or_a_mistake(name: str) -> None:
    try:
        assert explained(READ, name)
    except UsageError as mistake:
        assert mistake.message and mistake.hint


@pytest.mark.parametrize(
    ("words", "leads_to"),
    [
        ("early stop", "early_stop"), ("Weight-Decay", "Solver.weight_decay"), ("adam", "Solver.type"), ("balanced", "Solver.sampling"),
        ("distill", "LossParameter.type"), ("notebook", "stagerun help library"), ("mAP", "EarlyStopParameter.metric"),
        ("timm", "your-own-network"), ("batchnorm", "your-own-network"), ("nn.Module", "your-own-network"), ("top5", "stagerun eval"),
        ("own loss", "stagerun help losses"), ("dataloader", "your-own-images"), ("bf16", "Solver.precision"),
        ("Fine-Tuning", "freeze"), ("freeze", "running statistics"), ("collapse", "`stagerun help from`"), ("resize", "--resize-shorter N"),
        ("own network", 'name: "mynet.py:build"'), ("class weights", "`class_weight` is a factor"), ("class folders", "`run` imports it"),
        ("caffe weights", 'file: "x.caffemodel"'), ("WeightsParameter", "WeightsParameter Weights from elsewhere"),
        ("Model", "labels are 0 .. num_classes-1"), ("Solver", "transform_param"), ("name", "StageEntry.name"),
        ("display", "makes no snapshot stale"), ("Solver.net", "A change of"),
    ],
)  # fmt: skip
def test_words_of_other_frameworks_and_spellings_lead_somewhere(words: str, leads_to: str) -> None:
    assert leads_to in " ".join(helped(*words.split()).split())


def test_what_counts_is_not_said_to_make_nothing_stale() -> None:
    for name in ("momentum", "Solver.net", "caffe_net"):  # of a net, what is in the file counts
        assert "makes no snapshot stale" not in helped(name)


def test_every_policy_is_explained() -> None:
    assert set(POLICIES) <= set(re.findall(r"\w+", helped("lr_policy")))


@pytest.mark.parametrize("words", [["many-machines"], ["many", "machines"], ["Many_Machines"]])
def test_a_page(words: list[str]) -> None:
    assert helped(*words) == (pages.FOLDER / "many-machines.md").read_text()


def test_pictures_of_a_page_are_shown_by_caption_and_path() -> None:
    text = helped("designing")
    assert (
        "![" not in text
        and "[One trunk, three branches: `stagerun plan solvers/wsd_branches --plot branches.svg`: " in text
    )
    shown = re.findall(r": (/[^\]]+)\]", text)
    assert shown and all(Path(path).exists() for path in shown)


def test_the_overview_names_pages_and_topics() -> None:
    text = helped()
    assert all(re.search(rf"^  {page} +{re.escape(says)}$", text, re.M) for page, says in pages.PAGES.items())
    assert not {pages.page_name(word) for word in topics.WORDS} & set(pages.PAGES)


def test_every_topic_leads_to_what_there_is_and_hides_no_field() -> None:
    messages = stagerun_pb2.DESCRIPTOR.message_types_by_name.values()
    assert not {field for message in messages for field in message.fields_by_name} & set(topics.WORDS)
    for topic in topics.TOPICS:
        text = helped(*topic.split())
        named = re.findall(r"`stagerun ([\w -]+?)(?: --help)?`", " ".join(text[text.index("  See ") :].split()))
        assert text.startswith(f"{topic}\n  ") and named
        for name in named:
            assert not name.startswith("help ") or name[5:] not in topics.WORDS
            assert (
                helped(*name.split()[1:])
                if name.startswith("help ")
                else CliRunner().invoke(main, [*name.split(), "--help"]).exit_code == 0
            )


def test_a_page_on_a_terminal_has_no_marks_and_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for page in pages.PAGES:
        pages.print_page(page)
        shown = capsys.readouterr().out
        assert shown and "](" not in shown and "|---" not in shown
        assert max(map(len, shown.splitlines())) <= 80
