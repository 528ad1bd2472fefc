"""Pictures of schedules: their numbers against the function that the trainer calls, and what is drawn of them and of runs, whatever names
and logs hold. `plan --plot` and `diff --plot` write it, `view` shows it; tests/cases/plot.txt has what is refused."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import made_schedules
import pytest
from click.testing import CliRunner, Result
from facade import Note, Reader, Schedule, chart, make_picture, make_scale
from facade import picture as drawn
from log_help import evaluated, iterated
from long_log import line, write_log
from made_schedules import schedule, stage

from stagerun.cli import main
from stagerun.language import load
from stagerun.schedule import make_knobs

SOLVERS = Path(__file__).parents[2] / "solvers"


def pictures() -> list[Schedule]:
    return [load(SOLVERS / "resnet50_72ep"), made_schedules.steps(), made_schedules.branches()]


def alone(**settings: object) -> drawn.StagePicture:
    return make_picture(schedule(stage("main", **settings))).stages[0]


@pytest.mark.parametrize("of", pictures(), ids=lambda s: s.name)
def test_few_points_that_hide_nothing(of):
    """Each is what the trainer gets. A line through them is never off by more than 1 % of the stage's largest rate."""
    for one in make_picture(of).stages:
        solver = of.stage(one.name).solver
        knobs = make_knobs(solver)
        found = {p.iter: (p.lr, p.momentum, p.weight_decay) for p in one.points}
        for at in found:
            now = knobs(at)
            assert found[at] == (now.lr, now.momentum, now.weight_decay)
        assert [*found] == sorted(found) and (min(found), max(found)) == (0, solver.max_iter - 1)
        rates = [knobs(i).lr for i in range(one.iterations)]
        assert len(one.points) < 700 and {min(rates), max(rates)} <= {p.lr for p in one.points}
        for a, b in pairwise(one.points):
            for i in range(a.iter, b.iter):
                line = a.lr + (b.lr - a.lr) * (i - a.iter) / (b.iter - a.iter)
                assert abs(line - rates[i]) < 0.01 * max(rates)


def test_joints_and_the_end_of_a_warm_up_are_marked_with_their_factor():
    found = {
        (s.name, m.iter): (m.kind, m.factor) for s in make_picture(pictures()[0]).stages for m in s.marks if m.jumps
    }
    assert found["init", 1560] == (drawn.Kind.WARM_UP, pytest.approx(0.917218, abs=1e-6))
    assert found["cyc1", 0] == (drawn.Kind.START, pytest.approx(1.092757, abs=1e-6))
    assert ("cyc2", 0) not in found  # 0.2551 -> 0.255
    assert found["collapse", 0] == (drawn.Kind.START, pytest.approx(1.858153, abs=1e-6))


def test_steps_of_a_policy_are_jumps_and_a_warm_up_that_reaches_base_lr_is_none():
    main, collapse = make_picture(made_schedules.steps()).stages
    assert [(m.kind, m.iter, m.jumps) for m in main.marks] == [
        (drawn.Kind.WARM_UP, 10, False),
        (drawn.Kind.STEP, 60, True),
        (drawn.Kind.STEP, 90, True),
    ]
    assert {59, 60, 89, 90} <= {p.iter for p in main.points}
    assert [m.factor for m in collapse.marks] == [pytest.approx(5.0)]


# -- places


def test_a_place_counts_along_the_path_of_ancestors():
    picture = make_picture(made_schedules.branches())
    begins = {s.name: (s.begin_iterations, s.begin_images, s.leaves_early) for s in picture.stages}
    assert begins == {
        "main": (0, 0, False),
        "cool_a": (400, 40_000, True),
        "cool_b": (700, 70_000, True),
        "cool_c": (1000, 100_000, False),
    }
    cool_c = picture.stage("cool_c")  # at twice the batch
    assert cool_c.extent(drawn.Unit.EPOCHS) == (100.0, 160.0)
    assert cool_c.extent(drawn.Unit.IMAGES) == (100_000, 160_000)
    assert cool_c.extent(drawn.Unit.ITERATIONS) == (1000, 1300)
    assert not cool_c.enabled and picture.end(drawn.Unit.EPOCHS) == 160.0


# -- the chart


NASTY = "<script>alert(1)</script>\"'&<b onload=x>]]>"


def tree(picture: drawn.Picture, runs: Sequence[chart.Run] = ()) -> ElementTree.Element:
    return ElementTree.fromstring(chart.chart(picture, drawn.Unit.EPOCHS, make_scale(picture), runs))


def show_piece() -> drawn.Picture:
    return make_picture(load(SOLVERS / "resnet50_72ep"))


def small() -> drawn.Picture:
    return make_picture(made_schedules.branches())


def run(out: Path, picture: drawn.Picture, **log: Any) -> chart.Run:
    return chart.Run(label="", history=Reader(write_log(out, picture, **log), 300).read(), alive=True)


def texts(svg: ElementTree.Element, kind: str | None = None) -> list[str]:
    return [e.text or "" for e in svg.iter("text") if kind is None or kind in e.get("class", "").split()]


def stages(svg: ElementTree.Element) -> dict[str, str]:
    return {e.attrib["data-stage"]: e.attrib["aria-label"] for e in svg.iter("g") if "data-stage" in e.attrib}


def values(svg: ElementTree.Element) -> Any:
    return json.loads(svg.attrib["data-values"])


# -- a plan


def test_a_plan_has_its_stages_labels_and_bands():
    svg = tree(show_piece())
    assert texts(svg, "name") == ["learning rate"]
    assert texts(svg, "band") == ["stages", "weight decay", "batch", "image size", "augmentation"]
    assert {"x0.917", "x1.09", "x1.85", "x1.86", "2e-4", "4096", "cyc2"} <= set(texts(svg))
    assert any(line.startswith("augmentation, which stages differ in: ") for line in texts(svg, "caption"))
    assert list(stages(svg)) == ["init", "cyc1", "cyc2", "cyc3", "collapse"]
    assert stages(svg)["cyc1"] == "cyc1: 3750 iterations, leaves init"
    for group in [e for e in svg.iter("g") if "data-stage" in e.attrib]:  # reached with the keyboard, and read aloud
        assert (group.get("tabindex"), group.get("role")) == ("0", "button")
        assert group.findtext("title") == group.get("aria-label")


def test_the_pointer_gets_what_the_trainer_does():
    picture = show_piece()
    for one in values(tree(picture))["stages"]:
        points = {point.iter: point for point in picture.stage(one["name"]).points}
        assert one["n"] == picture.stage(one["name"]).iterations
        for iter, rate in zip(*one["lr"], strict=True):
            assert rate == pytest.approx(points[iter].lr, rel=1e-5)
        assert {0, one["n"] - 1} <= set(one["lr"][0])
    ends = values(tree(picture))["stages"][-1]
    assert (ends["d"], ends["s"][1], ends["b"]) == ([[0], [2e-4]], ["224"], 4096)


# -- runs


def test_what_is_trained_is_drawn_in_full_and_the_rest_pale(tmp_path):
    picture = show_piece()
    one = run(tmp_path, picture, share=0.5)
    svg = tree(picture, [one])
    assert texts(svg, "name") == ["learning rate", "top-1, %", "loss"]
    done = {name: words.rpartition(", ")[2] for name, words in stages(svg).items()}
    assert (done["init"], done["cyc3"]) == ("trained", "not started")
    assert one.history.now is not None
    name, iter = one.history.now
    assert done[name] == f"trained to {iter}"
    pale = {
        e.get("data-of")
        for e in svg.iter("g")
        if "data-of" in e.attrib and any("ahead" in p.get("class", "") for p in e)
    }
    assert pale == {name, *(stage for stage, word in done.items() if word == "not started")}
    cursor = next(e for e in svg.iter("g") if "cursor" in e.get("class", ""))
    assert cursor.findtext("title") == f"{name} {iter}"
    runs = values(svg)["runs"][""]
    assert runs["init"]["tests"][0][0] == one.history.stages[0].tests[0].iter


def test_all_evaluations_are_shown_and_what_the_schedule_no_longer_has_is_said_not_drawn(tmp_path):
    picture = show_piece()
    one = run(tmp_path, picture)
    tests = [100 * test.top1 for stage in one.history.stages for test in stage.tests]
    low, high = next(panel[3:5] for panel in values(tree(picture, [one]))["panels"] if panel[0].startswith("top-1"))
    assert low <= min(tests) < 40 and high >= max(tests)
    shorter = replace(picture, stages=(replace(picture.stages[0], iterations=1000), *picture.stages[1:]))
    svg = tree(shorter, [one])
    assert "trained further than the schedule goes now, which is not drawn: init" in texts(svg)
    assert max(values(svg)["runs"][""]["init"]["loss"][0]) <= 1000


# -- from outside


def test_names_and_texts_are_never_markup(tmp_path):
    picture = small()
    first = picture.stages[0]
    stage = replace(first, name=NASTY, augmentation=NASTY, marks=())
    rest = [replace(s, parent=NASTY if s.parent == first.name else s.parent) for s in picture.stages[1:]]
    nasty = drawn.Picture(NASTY, (stage, *rest))
    past = run(tmp_path, picture, restarts=1).history
    stages = tuple(replace(s, name=NASTY) if s.name == first.name else s for s in past.stages)
    past = replace(
        past, stages=stages, now=(NASTY, 3), incidents=(past.incidents[0]._replace(stage=NASTY, text=NASTY),)
    )
    svg = tree(nasty, [chart.Run(label=NASTY, history=past), chart.Run(label="other", history=past)])
    text = ElementTree.tostring(svg, encoding="unicode")
    assert not re.search(r" style=|=\"#[0-9a-fA-F]{6}", text), "a strict page would drop it"
    for element in svg.iter():
        assert element.tag in {"svg", "g", "path", "rect", "text", "title"}
        assert not any(name.startswith("on") or name in ("style", "href") for name in element.attrib)
    assert NASTY in texts(svg) and NASTY in [s["name"] for s in values(svg)["stages"]]
    assert [e.get("data-stage") for e in svg.iter("g") if e.get("data-stage") == NASTY] == [NASTY]


def test_a_log_with_absurd_numbers_makes_a_chart_all_the_same(tmp_path):
    picture, out = (
        make_picture(made_schedules.steps()),
        write_log(tmp_path, make_picture(made_schedules.steps()), share=0.5),
    )
    name, far = picture.stages[0].name, 1e308
    with open(out / "log.jsonl", "a") as file:
        for n, (loss, top1) in enumerate([(far, far), (-far, -1.0), (0.0, 1e300)]):
            file.write(line(2e9, iterated(name, 82 + n, loss=loss)))
            file.write(line(2e9, evaluated(name, 82 + n, top1, loss=loss)))
        file.write(line(2e9, iterated(name, 10**12)))
        file.write(line(2e9, Note(text="far", warning=True)))
    one = chart.Run(label="", history=Reader(out, 300).read())
    svg = tree(picture, [replace(one, snapshots=frozenset({(name, 10**9)}))])
    assert "loss" in texts(svg, "name") and values(svg)["runs"]
    assert not [e for e in svg.iter("g") if "cursor" in e.get("class", "") or e.findtext("title") == "far"]


# -- the commands


TINY = """
model { name: "resnet_small" num_classes: 10 } data { train { source: "/d" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 base_lr: 0.1 transform_param { crop_size: 28 } }
stage { name: "main" solver_param { lr_policy: "multistep" gamma: 0.1 stepvalue: [60, 90] max_iter: 120 } }
stage { name: "next" solver_param { lr_policy: "plateau" gamma: 0.1 plateau_winsize: [10, 20] max_iter: 40 } }
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "schedule.prototxt").write_text(TINY)
    return tmp_path / "tree"


def called(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, words)], prog_name="stagerun")
    assert result.exit_code == code, result.output
    return result


def written(file: Path) -> list[str]:
    return [node.text or "" for node in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]


def test_a_file_and_nothing_beside_it(folder, tmp_path):
    target = tmp_path / "pictures" / "tree.SVG"
    target.parent.mkdir()
    target.write_text("old")
    result = called("plan", folder, "--plot", target)
    assert result.stderr.strip().endswith(f"written to {target}") and "stage  from" in result.stdout
    assert {"learning rate", "epochs", "main", "next"} <= {*written(target)}
    assert any("next: up to 2 drops, which depend on the loss, are not drawn" in line for line in written(target))
    assert os.listdir(target.parent) == [target.name]
    first = target.read_bytes()
    assert b"var(" not in first and b"data-" not in first, "a converter of SVG knows no variables"
    called("plan", folder, "--plot", target)
    assert target.read_bytes() == first


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--x images --scale log", {"images", "10k"}),
        ("--x iterations --scale linear", {"iterations", "100"}),
        ("--x hours --images-per-second 0.001", {"hours"}),
        ("--x hours --images-per-second 1000000000", {"hours"}),
        ("--x iterations --set main.max_iter=100000", {"20k"}),
        ("--set solver.base_lr=0 --scale log", {"main"}),
        ("--set solver.base_lr=0 --scale linear", {"main"}),
    ],
)
def test_axes(folder, tmp_path, words, says):
    called("plan", folder, "--plot", tmp_path / "x.svg", *words.split())
    assert says <= {*written(tmp_path / "x.svg")}


def test_hours_need_a_speed(folder):
    said = called("plan", folder, "--plot", "x.svg", "--x", "hours", code=64).stderr
    assert "--x hours needs to know how fast training is" in said


def test_two_schedules_in_one_picture(folder, tmp_path):
    """B is seen over A, and each has epochs of its own."""
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "schedule.prototxt").write_text(TINY.replace("images: 1000", "images: 500"))
    called("diff", folder, folder, "--plot", tmp_path / "same.svg")
    same = written(tmp_path / "same.svg")
    assert "AB x0.1" in same and any("B is dashed, over A" in line for line in same) and "30" not in same
    called("diff", folder, tmp_path / "half", "--plot", tmp_path / "half.svg")
    assert {"30", "A x0.1", "B x0.1"} <= {*written(tmp_path / "half.svg")}
