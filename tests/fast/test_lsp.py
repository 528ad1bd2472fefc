"""What `stagerun lsp` answers: the same as `check`, `explain` and `help`, at the right place. tests/process has a client."""

import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from facade import Level

from stagerun.cli import main
from stagerun.tools.lsp import names
from stagerun.tools.lsp.actions import fix
from stagerun.tools.lsp.complete import proposals
from stagerun.tools.lsp.folder import Folder, folder_of, look
from stagerun.tools.lsp.hover import hover_text
from stagerun.tools.lsp.names import changed_text
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
def folder(tmp_path: Path) -> Path:
    tmp_path.joinpath("schedule.prototxt").write_text(TREE)
    tmp_path.joinpath("trunk.prototxt").write_text(TRUNK)
    return tmp_path


def at(folder: Path, marked: str, name: str = "schedule.prototxt") -> tuple[Folder, str, Text, Place | None, int]:
    """The text, in which `|` is the cursor, as the editor holds it; and what is there."""
    path, offset = str(folder / name), marked.index("|")
    text = Text(marked.replace("|", "", 1))
    found = look(str(folder), {path: text.text})
    kind = found.kind(path)
    assert kind is not None
    return found, path, text, place_at(text, kind, offset), offset


def offered(folder: Path, marked: str, name: str = "schedule.prototxt") -> dict[str, str]:
    """What can be completed there: label and text."""
    found, _, text, place, offset = at(folder, marked, name)
    stages = [name for node in found.nodes() for name in (node.name, node.group) if name]
    return {p.label: p.text for p in proposals(text, place, offset, stages, found.listed())} if place else {}


def hovered(folder: Path, marked: str, name: str = "schedule.prototxt") -> str:
    found, path, text, place, _ = at(folder, marked, name)
    return hover_text(found, path, text, place) if place else ""


# -- places


@pytest.mark.parametrize(("encoding", "units"), [("utf-16", 6), ("utf-8", 8), ("utf-32", 5)])
def test_columns_are_in_the_editors_units(encoding: str, units: int) -> None:
    text = Text('\ufeff# a\r\n"\U0001f600" : 1\rb\u2028\x0bc: 2', encoding)
    colon = text.text.index(" :") + 1
    assert text.position(colon + 1) == (1, units)
    assert text.at(1, units) == colon + 1
    assert text.offset(2, 5) == colon  # the language's column, of characters
    assert text.position(text.text.index("c: 2"))[0] == 2  # a \r ends an editor's line, other characters none
    assert all(text.at(*text.position(n)) == n for n in range(len(text.text)) if text.text[n - 1 : n + 1] != "\r\n")


def test_any_text_has_places() -> None:
    rng, kind = random.Random(1), look("/", {"/schedule.prototxt": ""}).kinds["schedule.prototxt"]
    words = [*re.findall(r"\w+|\S", TREE), "[", "]", "<", ">", "{", "}", "'", "#", "\n", "\U0001f600", "\r\n"]
    for _ in range(300):
        text = Text(" ".join(rng.choices(words, k=rng.randint(0, 40))))
        place_at(text, kind, rng.randint(0, len(text.text)))


# -- diagnostics


def same_as_check(folder: Path, name: str) -> bool:
    """Whether each problem that the editor gets is shown by `check`, and no other. Whether there are any."""
    found = look(str(folder), {})
    shown = CliRunner().invoke(main, ["check", str(folder)])
    assert all(p.render() in shown.output for p in found.problems), name
    assert len(re.findall(r"\.prototxt:\d+:\d+: ", shown.output)) == len(found.problems), name
    return any(p.level is not Level.NOTE for p in found.problems)


def test_mistakes_and_findings_are_those_of_check(folder: Path) -> None:
    path = folder / "schedule.prototxt"
    assert not same_as_check(folder, "none")
    for number, (old, new) in enumerate(
        [("base_lr", "base_rl"), ('"trunk@100"', '"x"'), ("{", "}"), ("fixed", "step"), ("2", "0")]
    ):
        path.write_text(TREE.replace(old, new, 1))
        assert same_as_check(folder, str(number))
    path.write_text(TREE)
    folder.joinpath("trunk.prototxt").unlink()
    assert same_as_check(folder, "a file is missing")


def test_the_editors_texts_count_in_place_of_files(folder: Path) -> None:
    first, own = str(folder / "schedule.prototxt"), str(folder / "trunk.prototxt")
    for typed in ({own: "max_iter: -1"}, {first: TREE.replace("base_lr", "base_rl")}, {first: TREE, own: "\udc80"}):
        found = look(str(folder), typed).mistakes
        for path, text in typed.items():
            Path(path).write_bytes(text.encode(errors="surrogatepass"))
        assert found and found == look(str(folder), {}).mistakes
    assert folder_of(str(folder / "a" / "b.prototxt"), {}) == str(folder)
    assert folder_of("", {}) is None
    assert folder_of("/nowhere/a.prototxt", {"/nowhere/schedule.prototxt": ""}) == "/nowhere"


# -- hover


def test_hover_is_explain_or_the_manual(folder: Path) -> None:
    assert "trunk.transform_param.mirror   false" in hovered(
        folder, TRUNK.replace("mirror", "mir|ror"), "trunk.prototxt"
    )
    shown = hovered(folder, TREE.replace("base_lr: 0.2", "base_|lr: 0.2"))
    assert "side_trunk_100  0.2" in shown and "Learning rate that the policy starts from" in shown
    assert "data.train.images   6400" in hovered(folder, TREE.replace("images: 6400", "ima|ges: 6400"))
    assert "Ensemble.members" in hovered(folder, TREE.replace("members", "mem|bers"))
    broken = hovered(folder, TREE.replace("base_lr: 0.2", "base_|lr: 0.2 oops: 1"))
    assert broken.startswith("Solver.base_lr   number")
    assert "DISTILL\n" in hovered(folder, TREE.replace("DISTILL", "DIST|ILL"))
    assert hovered(folder, TREE.replace("model {", "mod|el {"))
    assert hovered(folder, TREE.replace('"resnet18"', '"resnet|18"'))


# -- completion


def test_fields_that_are_not_given_are_offered(folder: Path) -> None:
    found = offered(folder, "solver { base_lr: 0.1 | momentum: 0.9 }")
    assert found["weight_decay"] == "weight_decay: " and found["transform_param"] == "transform_param { "
    assert "base_lr" not in found and "momentum" not in found and "param" in found
    assert offered(folder, "solver { ba|: 0.1 }")["base_lr"] == "base_lr"
    assert "from" in offered(folder, "stage { name: 'a' | ")
    assert "max_iter" in offered(folder, "|", "trunk.prototxt")
    assert offered(folder, "nothing { | }") == {} and offered(folder, "seed: 1 # |") == {}


def test_values_are_offered(folder: Path) -> None:
    assert list(offered(folder, "solver { transform_param { mirror: | } }")) == ["true", "false"]
    assert "NORM" in offered(folder, "solver { param { kind: N| } }")
    assert offered(folder, "solver { lr_policy: | }")["poly"] == '"poly"'
    assert offered(folder, 'model { name: "res| }')["resnet50"] == 'resnet50"'
    assert offered(folder, 'model { name: "res|" }')["resnet50"] == "resnet50"
    assert {"trunk", "side_trunk"} <= offered(folder, TREE + 'stage { name: "z" from: "|" }').keys()
    assert "trunk.prototxt" in offered(folder, 'stage { name: "z" solver: "|" }')
    assert offered(folder, 'model { name: |"resnet18" }') == {}
    assert offered(folder, 'clear: "|"', "trunk.prototxt")["momentum"] == "momentum"


# -- names


def defined(folder: Path, marked: str, name: str = "schedule.prototxt") -> str:
    """The line, with the column's part of it on, and its file."""
    found, path, text, place, _ = at(folder, marked, name)
    assert place is not None
    span = names.definition_of(found, path, text, place, lambda path: Path(path).exists())
    if span is None:
        return ""
    return f"{Path(span.path).name}: {Path(span.path).read_text().splitlines()[span.line - 1][span.column - 1 :][: span.width]}"


def test_definitions(folder: Path) -> None:
    assert defined(folder, TREE.replace('"trunk@100"', '"tr|unk@100"')) == 'schedule.prototxt: "trunk"'
    assert defined(folder, TREE.replace('teacher: "trunk"', 'teacher: "tru|nk"')) == 'schedule.prototxt: "trunk"'
    assert defined(folder, TREE.replace('name: "trunk"', 'name: "tr|unk"')) == "trunk.prototxt: m"
    assert (
        defined(folder, TREE.replace('name: "trunk"', 'name: "trunk" solver: "trunk.pro|totxt"')) == "trunk.prototxt: m"
    )
    assert defined(folder, TRUNK.replace("mirror", "mir|ror"), "trunk.prototxt").endswith(": true")
    assert defined(folder, TREE.replace("base_lr: 0.2", "base|_lr: 0.2")).endswith(": 0.1")
    assert defined(folder, TREE.replace("max_epoch", "max_|epoch")) == ""


# -- actions, hints


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
    ],
)
def test_a_hint_that_can_be_followed_is_an_action(folder: Path, good: str, wrong: str) -> None:
    assert good in TREE
    text, path = Text(TREE.replace(good, wrong)), str(folder / "schedule.prototxt")
    typed = {path: text.text}
    fixes = [found for p in look(str(folder), typed).mistakes if (found := fix(look(str(folder), typed), text, p))]
    assert [changed_text(text.text, [found.edit]) for found in fixes][:1] == [TREE]


@pytest.mark.parametrize("wrong", ["nesterov: true", "train_net: 'a'", "oops: 1", "mirror: true", "base_lr:"])
def test_a_hint_that_would_not_help_is_none(folder: Path, wrong: str) -> None:
    text, path = Text(TREE.replace("base_lr: 0.2", wrong)), str(folder / "schedule.prototxt")
    typed = {path: text.text}
    mistakes = look(str(folder), typed).mistakes
    assert mistakes and not any(fix(look(str(folder), typed), text, problem) for problem in mistakes)


# -- the server


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pygls", None)
    monkeypatch.setitem(__import__("sys").modules, "pygls.lsp.server", None)
    shown = CliRunner().invoke(main, ["lsp"])
    assert shown.exit_code == 64 and "needs the package pygls" in shown.output and "stagerun[lsp]" in shown.output
