"""What `stagerun lsp` answers: the same as `check`, `plan --why` and `help`, at the right place. process/test_lsp_server has an editor."""

import random
import re
import sys
from pathlib import Path

import contract
import pytest
from facade import Level

from stagerun.tools.lsp import names
from stagerun.tools.lsp.actions import fix
from stagerun.tools.lsp.complete import proposals
from stagerun.tools.lsp.folder import Folder, folder_of, look
from stagerun.tools.lsp.hover import hover_text
from stagerun.tools.lsp.place import Place, Text, place_at

TREE = """\
name: "t"
model { name: "resnet18" num_classes: 10 }
data {
  train { source: "a" images: 6400 }
  val { source: "b" images: 100 }
}
solver { batch_size: 64 device_batch_size: 32 base_lr: 0.1 lr_policy: "fixed" transform_param { crop_size: 32 mirror: true scale: 0.01 } }
stage { name: "trunk" from: "" }
stage { name: "side" from: ["trunk@100", "trunk"] solver_param { max_epoch: 2 base_lr: 0.2 } }
stage {
  name: "end"
  from: "side_trunk_100"
  solver_param { max_iter: 50 loss { type: DISTILL teacher: "trunk" } }
}
ensemble { name: "both" members: ["side", "trunk"] }
"""
TRUNK = "max_iter: 200\ntransform_param { mirror: false crop_size: 32 scale: 0.01 }\n"


@pytest.fixture
def folder(tmp_path):
    tmp_path.joinpath("schedule.prototxt").write_text(TREE)
    tmp_path.joinpath("trunk.prototxt").write_text(TRUNK)
    return tmp_path


def at(folder: Path, marked: str, name: str = "schedule.prototxt") -> tuple[Folder, str, Text, Place | None]:
    """The text, in which `|` is the cursor, as the editor holds it; and what is there."""
    path, text = str(folder / name), Text(marked.replace("|", "", 1))
    found = look(str(folder), {path: text.text})
    kind = found.kind(path)
    assert kind is not None
    return found, path, text, place_at(text, kind, marked.index("|"))


def at_words(folder: Path, words: str, under: str) -> tuple[Folder, str, Text, Place]:
    """The same where in one of the two files `words` are `under`."""
    own = words in TRUNK
    text = (TRUNK if own else TREE).replace(words, under)
    found, path, text, place = at(folder, text, "trunk.prototxt" if own else "schedule.prototxt")
    assert place is not None
    return found, path, text, place


def offered(folder: Path, marked: str, name: str = "schedule.prototxt") -> dict[str, str]:
    """What can be completed there: label and text."""
    found, _, text, place = at(folder, marked, name)
    stages = [name for node in found.nodes() for name in (node.name, node.group) if name]
    shown = proposals(text, place, marked.index("|"), stages, found.listed()) if place else []
    return {one.label: one.text for one in shown}


@pytest.mark.parametrize(("encoding", "units"), [("utf-16", 6), ("utf-8", 8), ("utf-32", 5)])
def test_columns_are_in_the_editors_units(encoding, units):
    text = Text('\ufeff# a\r\n"\U0001f600" : 1\rb\u2028\x0bc: 2', encoding)
    colon = text.text.index(" :") + 1
    assert text.position(colon + 1) == (1, units)
    assert text.at(1, units) == colon + 1
    assert text.offset(2, 5) == colon  # the language's column, of characters
    assert text.position(text.text.index("c: 2"))[0] == 2  # a \r ends an editor's line, other characters none
    assert all(text.at(*text.position(n)) == n for n in range(len(text.text)) if text.text[n - 1 : n + 1] != "\r\n")


def test_any_text_has_places():
    rng, kind = random.Random(1), look("/", {"/schedule.prototxt": ""}).kinds["schedule.prototxt"]
    words = [*re.findall(r"\w+|\S", TREE), "[", "]", "<", ">", "{", "}", "'", "#", "\n", "\U0001f600", "\r\n"]
    for _ in range(300):
        text = Text(" ".join(rng.choices(words, k=rng.randint(0, 40))))
        place_at(text, kind, rng.randint(0, len(text.text)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("base_lr", "base_rl"),
        ('"trunk@100"', '"x"'),
        ("{", "}"),
        ("fixed", "step"),
        ("2", "0"),
        ('"trunk"', '"no_file"'),
    ],
)
def test_mistakes_and_findings_are_those_of_check(folder, old, new):
    (folder / "schedule.prototxt").write_text(TREE.replace(old, new, 1))
    found = look(str(folder), {}).problems
    shown = contract.stagerun(["check", folder], folder).output
    assert all(problem.render() in shown for problem in found)
    assert len(re.findall(r"\.prototxt:\d+:\d+: ", shown)) == len(found)
    assert any(problem.level is not Level.NOTE for problem in found) == bool(old)


def test_the_editors_texts_count_in_place_of_files(folder):
    first, own = str(folder / "schedule.prototxt"), str(folder / "trunk.prototxt")
    for typed in ({own: "max_iter: -1"}, {first: TREE.replace("base_lr", "base_rl")}, {first: TREE, own: "\udc80"}):
        found = look(str(folder), typed).mistakes
        for path, text in typed.items():
            Path(path).write_bytes(text.encode(errors="surrogatepass"))
        assert found and found == look(str(folder), {}).mistakes
    assert folder_of(str(folder / "a" / "b.prototxt"), {}) == str(folder)
    assert folder_of("", {}) is None
    assert folder_of("/nowhere/a.prototxt", {"/nowhere/schedule.prototxt": ""}) == "/nowhere"


@pytest.mark.parametrize(
    ("words", "under", "shown"),
    [
        ("mirror: false", "mir|ror: false", r"trunk\.transform_param\.mirror   false"),
        ("base_lr: 0.2", "base_|lr: 0.2", r"side_trunk_100  0\.2(.|\n)*Learning rate that the policy starts from"),
        ("base_lr: 0.2", "base_|lr: 0.2 oops: 1", r"^Solver\.base_lr   number"),  # such a schedule can't be loaded
        ("images: 6400", "ima|ges: 6400", r"data\.train\.images   6400"),
        ("members", "mem|bers", r"Ensemble\.members"),
        ("DISTILL", "DIST|ILL", "DISTILL\n"),
        ("model {", "mod|el {", "."),
        ('"resnet18"', '"resnet|18"', "."),
    ],
)
def test_hover_is_plan_why_or_the_manual(folder, words, under, shown):
    found, path, text, place = at_words(folder, words, under)
    assert re.search(shown, hover_text(found, path, text, place))


def test_fields_that_are_not_given_are_offered(folder):
    found = offered(folder, "solver { base_lr: 0.1 | momentum: 0.9 }")
    assert found["weight_decay"] == "weight_decay: " and found["transform_param"] == "transform_param { "
    assert "base_lr" not in found and "momentum" not in found and "param" in found
    assert offered(folder, "solver { ba|: 0.1 }")["base_lr"] == "base_lr"
    assert "from" in offered(folder, "stage { name: 'a' | ")
    assert "max_iter" in offered(folder, "|", "trunk.prototxt")
    assert offered(folder, "nothing { | }") == {} and offered(folder, "seed: 1 # |") == {}


def test_values_are_offered(folder):
    assert list(offered(folder, "solver { transform_param { mirror: | } }")) == ["true", "false"]
    assert "NORM" in offered(folder, "solver { param { kind: N| } }")
    assert offered(folder, "solver { lr_policy: | }")["poly"] == '"poly"'
    assert offered(folder, 'model { name: "res| }')["resnet50"] == 'resnet50"'
    assert offered(folder, 'model { name: "res|" }')["resnet50"] == "resnet50"
    assert {"trunk", "side_trunk"} <= offered(folder, TREE + 'stage { name: "z" from: "|" }').keys()
    assert "trunk.prototxt" in offered(folder, 'stage { name: "z" solver: "|" }')
    assert offered(folder, 'model { name: |"resnet18" }') == {}
    assert offered(folder, 'clear: "|"', "trunk.prototxt")["momentum"] == "momentum"


@pytest.mark.parametrize(
    ("words", "under", "line"),
    [
        ('"trunk@100"', '"tr|unk@100"', 'schedule.prototxt: "trunk"'),
        ('teacher: "trunk"', 'teacher: "tru|nk"', 'schedule.prototxt: "trunk"'),
        ('name: "trunk"', 'name: "tr|unk"', "trunk.prototxt: m"),
        ('name: "trunk"', 'name: "trunk" solver: "trunk.pro|totxt"', "trunk.prototxt: m"),
        ("mirror: false", "mir|ror: false", "schedule.prototxt: true"),
        ("base_lr: 0.2", "base|_lr: 0.2", "schedule.prototxt: 0.1"),
        ("max_epoch", "max_|epoch", ""),
    ],
)
def test_definitions(folder, words, under, line):
    found, path, text, place = at_words(folder, words, under)
    span = names.definition_of(found, path, text, place, lambda path: Path(path).exists())
    if span is None:
        assert line == ""
    else:
        file = Path(span.path)
        text = file.read_text().splitlines()[span.line - 1][span.column - 1 :]
        assert f"{file.name}: {text[: span.width]}" == line


@pytest.mark.parametrize(
    ("good", "wrong"),
    [
        ("base_lr: 0.2", "base_rl: 0.2"),
        ("base_lr: 0.2", "base_lr 0.2"),
        ("base_lr: 0.2", "base_lr = 0.2"),
        ('lr_policy: "fixed"', "lr_policy: fixed"),
        ('lr_policy: "fixed"', 'lr_policy: "fixd"'),
        ('"trunk@100"', '"trnk@100"'),
        ("max_iter: 50", 'max_iter: "50"'),
        ("max_iter: 50", "max_iter: 50.0"),
        ("max_epoch: 2", "epochs: 2"),
        *(("", wrong) for wrong in ("nesterov: true", "train_net: 'a'", "oops: 1", "mirror: true", "base_lr:")),
    ],
)
def test_a_hint_that_can_be_followed_is_an_action_and_no_other(folder, good, wrong):
    text = Text(TREE.replace(good or "base_lr: 0.2", wrong))
    found = look(str(folder), {str(folder / "schedule.prototxt"): text.text})
    fixes = [mended for problem in found.mistakes if (mended := fix(found, text, problem))]
    assert found.mistakes and [names.changed_text(text.text, [one.edit]) for one in fixes][:1] == [TREE] * bool(good)


def test_without_the_extra_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pygls", None)
    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    shown = contract.stagerun(["lsp"], tmp_path)
    assert shown.exit_code == 64 and "needs the package pygls" in shown.output and "stagerun[lsp]" in shown.output
