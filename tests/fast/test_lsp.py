"""What `stagerun lsp` answers: the same as `check`, `plan --why` and `help`, at the right place. process/test_lsp_server has an editor."""

import re
import sys
from pathlib import Path

import contract
import pytest
from facade import Level

from stagerun.tools.language_server import Look, Target, folder_of, hover_text, look, proposals, target_at

TREE = """\
name: "t"
model { name: "resnet18" num_classes: 10 }
data {
  train { source: "a" images: 6400 }
  val { source: "b" images: 100 }
}
solver { batch_size: 64 device_batch_size: 32 base_lr: 0.1 lr_policy: "fixed" transform_param { crop_size: 32 mirror: true scale: 0.01 } momentum: 0.9 }
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


def at(folder: Path, marked: str, name: str = "schedule.prototxt") -> tuple[Look, str, str, Target | None]:
    """The text, in which `|` is the cursor, as the editor holds it; and what is there."""
    path, (before, _, after) = str(folder / name), marked.partition("|")
    found = look(str(folder), {path: before + after})
    line = before.count("\n")
    return found, path, before + after, target_at(before + after, found.kinds[path], line, len(before.split("\n")[-1]))


def at_words(folder: Path, words: str, under: str) -> tuple[Look, str, str, Target]:
    """The same where in one of the two files `words` are `under`."""
    own = words in TRUNK
    text = (TRUNK if own else TREE).replace(words, under)
    found, path, text, place = at(folder, text, "trunk.prototxt" if own else "schedule.prototxt")
    assert place is not None
    return found, path, text, place


def offered(folder: Path, marked: str, name: str = "schedule.prototxt") -> dict[str, str]:
    """What can be completed there: label and text."""
    found, _, text, place = at(folder, marked, name)
    return {one.label: one.text_edit.new_text for one in proposals(found, text, place)} if place else {}


@pytest.mark.parametrize(("old", "new"), [("", ""), ("base_lr", "base_rl"), ("{", "}"), ('"trunk"', '"no_file"')])
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
        found = look(str(folder), typed).problems
        for path, text in typed.items():
            Path(path).write_bytes(text.encode(errors="surrogatepass"))
        assert found and found == look(str(folder), {}).problems
    assert folder_of(str(folder / "a" / "b.prototxt"), {}) == str(folder)
    assert folder_of("", {}) is None
    assert folder_of("/nowhere/a.prototxt", {"/nowhere/schedule.prototxt": ""}) == "/nowhere"


@pytest.mark.parametrize(
    ("words", "under", "shown"),
    [
        ("mirror: false", "mir|ror: false", r"trunk\.transform_param\.mirror   false"),
        (
            "base_lr: 0.2",
            "base_|lr: 0.2",
            r"side_trunk_100  base_lr  0\.2(.|\n)*Learning rate at the start of the policy",
        ),
        ("base_lr: 0.2", "base_|lr: 0.2 oops: 1", r"^Solver\.base_lr   number"),  # such a schedule can't be loaded
        ("images: 6400", "ima|ges: 6400", r"data\.train\.images   6400"),
        ("members", "mem|bers", r"Ensemble\.members"),
        ("DISTILL", "DIST|ILL", "DISTILL\n"),
        ("model {", "mod|el {", "."),
        ('"resnet18"', '"resnet|18"', "."),
    ],
)
def test_hover_is_plan_why_or_the_manual(folder, words, under, shown):
    found, path, _, place = at_words(folder, words, under)
    assert re.search(shown, hover_text(found, path, place))


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
    assert offered(folder, 'model { name: "res| }')["resnet50"] == '"resnet50"'
    assert offered(folder, 'model { name: "res|" }')["resnet50"] == '"resnet50'
    assert {"trunk", "side_trunk"} <= offered(folder, TREE + 'stage { name: "z" from: "|" }').keys()
    assert offered(folder, 'model { name: |"resnet18" }') == {}


def test_without_the_extra_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pygls", None)
    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    shown = contract.stagerun(["lsp"], tmp_path)
    assert shown.exit_code == 64 and "needs the package pygls" in shown.output and "stagerun[lsp]" in shown.output
