"""`stagerun help`, and places in `stagerun plan --why`; cases/plan_why*.txt and cases/help_names.txt show what they print."""

import contextlib
import fcntl
import os
import re
import struct
import termios
import threading
from pathlib import Path

import contract
import pytest
from facade import UsageError, explained, stagerun_pb2, tree
from hypothesis import given
from hypothesis import strategies as st

from stagerun.cli import main
from stagerun.language import load, read
from stagerun.schedule import POLICIES

CASE = contract.Case.read(contract.CASES / "plan_why.txt")
READ = read(CASE.files, "/s")
MANUAL = Path(__file__).parents[2] / "stagerun" / "manual"
PAGES = [path.stem for path in MANUAL.glob("*.md")]


def helped(*words: str) -> str:
    done = contract.stagerun(["help", *words], MANUAL)
    assert done.exit_code == 0, done.output
    return done.stdout


KINDS = stagerun_pb2.DESCRIPTOR.message_types_by_name.values()
RETIRED = {field.name for kind in KINDS for field in kind.fields if tree.retired(field)}
OVERRIDES = ("cool.base_lr=0.3", "cool_low.transform_param.crop_size=20", "solver={ momentum: 0.5 }", "seed=3")


@pytest.mark.parametrize("overrides", [(), OVERRIDES], ids=["files", "--set"])
def test_what_counts_is_where_the_value_came_from(tmp_path, overrides):
    """Of every field of every stage: the first place that is shown is the one whose value counts. None lacks a name."""
    CASE.write(tmp_path)
    schedule = load(tmp_path, overrides)
    for stage in schedule.stages:
        for key in stage.origins.keys() - {"from_iter"}:
            if key.rpartition(".")[2] in RETIRED:
                continue
            name = key.replace("solver.", f"{stage.name}.", 1) if key.startswith("solver.") else key
            _, _, said = explained(schedule, name, overrides).partition("\n\n")
            span = stage.origins[key].span
            assert said.startswith(f"{span}: set\n" if span else ("the default", "a default", "not set")), name


WORDS = (
    "trunk cool off solver transform_param base_lr data train param clear from enabled sweep name ensemble rule stage é"
)


@given(st.lists(st.sampled_from([*WORDS.split(), ""]), max_size=4).map(".".join) | st.text(max_size=8))
def test_any_name_is_explained_or_a_mistake(name):
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
        ("caffe weights", 'file: "x.caffemodel"'), ("WeightsParameter", "WeightsParameter Weights from a file"),
        ("Model", "labels are 0 .. num_classes-1"), ("Solver", "transform_param"), ("name", "StageEntry.name"),
        ("display", "makes no snapshot stale"), ("Solver.net", "A change of"),
    ],
)  # fmt: skip
def test_words_of_other_frameworks_and_spellings_lead_somewhere(words, leads_to):
    assert leads_to in " ".join(helped(*words.split()).split())


def test_what_counts_is_not_said_to_make_nothing_stale():
    for name in ("momentum", "Solver.net", "caffe_net"):  # of a net, what is in the file counts
        assert "makes no snapshot stale" not in helped(name)


def test_every_policy_is_explained():
    assert set(POLICIES) <= set(re.findall(r"\w+", helped("lr_policy")))


@pytest.mark.parametrize("words", ["many-machines", "many machines", "Many_Machines"])
def test_a_page(words):
    assert helped(*words.split()) == (MANUAL / "many-machines.md").read_text()


def test_pictures_of_a_page_are_shown_by_caption_and_path():
    text = helped("designing")
    assert "![" not in text
    assert "[One trunk, three branches: `stagerun plan solvers/wsd_branches --plot branches.svg`: " in text
    shown = re.findall(r": (/[^\]]+)\]", text)
    assert shown and all(Path(path).exists() for path in shown)


def test_the_overview_names_pages_and_topics_that_lead_to_what_there_is():
    text = helped()
    assert set(PAGES) == set(re.findall(r"^  (\S+) ", text[: text.index("\nMessages")], re.M))
    topics = " ".join(text[text.index("\nTopics") :].split("\n\n")[1].split()).split(", ")
    messages = stagerun_pb2.DESCRIPTOR.message_types_by_name.values()
    fields = {field for message in messages for field in message.fields_by_name}
    assert len(topics) > 20 and not fields & set(topics)
    for topic in topics:
        said = helped(*topic.split())
        named = re.findall(r"`stagerun ([\w -]+?)(?: --help)?`", " ".join(said[said.index("  See ") :].split()))
        assert said.startswith(f"{topic}\n  ") and named
        for words in (name.split() for name in named):
            if words[0] == "help":
                assert " ".join(words[1:]) not in topics and helped(*words[1:])
            else:
                assert contract.stagerun([*words, "--help"], MANUAL).exit_code == 0


def test_a_page_on_a_terminal_has_no_marks_and_fits():
    for page in PAGES:
        shown = on_a_terminal("help", page)
        assert shown and "](" not in shown and "|---" not in shown
        assert max(map(len, shown.splitlines())) <= 80


def on_a_terminal(*words: str) -> str:
    side, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    seen: list[bytes] = []

    def follow() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while True:
                seen.append(os.read(side, 1 << 16))

    reader = threading.Thread(target=follow)
    reader.start()
    with open(other, "w") as terminal, contextlib.redirect_stdout(terminal), contextlib.suppress(SystemExit):
        main([*words])
    reader.join()
    os.close(side)
    return re.sub(r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b]*\x1b\\|\r", "", b"".join(seen).decode())
