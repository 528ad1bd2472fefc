"""Pictures of schedules: their numbers against the function that the trainer calls, and what is drawn of them and of runs, whatever names
and logs hold. `plan --plot` writes it, `view` shows it; tests/cases/plot.txt has what is refused."""

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
from facade import Note, Reader, Schedule, chart, make_picture
from log_help import evaluated, iterated
from long_log import line, write_log

import stagerun
from stagerun.cli import main
from stagerun.language import load
from stagerun.schedule import make_knobs

SOLVERS = Path(__file__).parents[2] / "solvers"


def pictures() -> list[Schedule]:
    return [load(SOLVERS / "resnet50_72ep"), made_schedules.steps(), made_schedules.branches()]


@pytest.mark.parametrize("of", pictures(), ids=lambda s: s.name)
def test_few_points_that_hide_nothing(of):
    """Each is what the trainer gets. A line through them is never off by more than 1 % of the stage's largest rate."""
    for one in make_picture(of).stages.values():
        solver = of.stage(one.name).solver
        knobs = make_knobs(solver)
        assert [rate for _, rate in one.rates] == [knobs(int(iter)).lr for iter, _ in one.rates]
        iters = [iter for iter, _ in one.rates]
        assert iters == sorted(iters) and (iters[0], iters[-1]) == (0, solver.max_iter - 1)
        rates = [knobs(i).lr for i in range(one.iterations)]
        assert len(iters) < 700 and {min(rates), max(rates)} <= {rate for _, rate in one.rates}
        for (a, low), (b, high) in pairwise(one.rates):
            for i in range(int(a), int(b)):
                assert abs(low + (high - low) * (i - a) / (b - a) - rates[i]) < 0.01 * max(rates)


def test_joints_and_the_end_of_a_warm_up_are_marked_with_their_factor():
    found = {(s.name, m.iter): m.text for s in make_picture(pictures()[0]).stages.values() for m in s.marks if m.jumps}
    assert found["init", 1560] == "x0.917" and found["cyc1", 0] == "x1.09" and found["collapse", 0] == "x1.86"
    assert ("cyc2", 0) not in found  # 0.2551 -> 0.255


def test_steps_of_a_policy_are_jumps_and_a_warm_up_that_reaches_base_lr_is_none():
    main, collapse = make_picture(made_schedules.steps()).stages.values()
    assert [(m.iter, m.jumps) for m in main.marks] == [(10, False), (60, True), (90, True)]
    assert {59, 60, 89, 90} <= {iter for iter, _ in main.rates}
    assert [m.text for m in collapse.marks] == ["x5"]


# -- places


def test_a_place_counts_along_the_path_of_ancestors():
    picture = make_picture(made_schedules.branches())
    assert {stage.name: stage.begin for stage in picture.stages.values()} == {
        "main": 0, "cool_a": 40, "cool_b": 70, "cool_c": 100,
    }  # fmt: skip
    cool_c = picture.stages["cool_c"]  # at twice the batch
    assert cool_c.begin + cool_c.iterations * cool_c.each == picture.end == 160.0 and not cool_c.enabled
    assert [stage.name for stage in picture.stages.values() if stage.leaves_early] == ["cool_a", "cool_b"]


# -- the chart


NASTY = "<script>alert(1)</script>\"'&<b onload=x>]]>"


def tree(picture: chart.Picture, runs: Sequence[chart.Run] = ()) -> ElementTree.Element:
    return ElementTree.fromstring(chart.chart(picture, runs).replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def show_piece() -> chart.Picture:
    return make_picture(load(SOLVERS / "resnet50_72ep"))


def run(out: Path, picture: chart.Picture, **log: Any) -> chart.Run:
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
    assert {"x0.917", "x1.09", "x1.85", "x1.86", "0.0002", "4096", "cyc2"} <= set(texts(svg))
    assert any(line.startswith("augmentation, which stages differ in: ") for line in texts(svg, "caption"))
    assert list(stages(svg)) == ["init", "cyc1", "cyc2", "cyc3", "collapse"]
    assert stages(svg)["cyc1"] == "cyc1: 3750 iterations, leaves init"
    for group in [e for e in svg.iter("g") if "data-stage" in e.attrib]:  # reached with the keyboard, and read aloud
        assert (group.get("tabindex"), group.get("role")) == ("0", "button")
        assert group.findtext("title") == group.get("aria-label")


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
    first = values(svg)["runs"][0]
    assert first["stage"] == "init" and first["tests"][0][0] == one.history.stages[0].tests[0].iter


def test_all_evaluations_are_shown_and_what_the_schedule_no_longer_has_is_said_not_drawn(tmp_path):
    picture = show_piece()
    one = run(tmp_path, picture)
    tests = [100 * test.top1 for stage in one.history.stages for test in stage.tests]
    low, high = next(panel[3:5] for panel in values(tree(picture, [one]))["panels"] if panel[0].startswith("top-1"))
    assert low <= min(tests) < 40 and high >= max(tests)
    shorter = show_piece()
    shorter.stages["init"].iterations = 1000
    svg = tree(shorter, [one])
    assert "trained further than the schedule goes now, which is not drawn: init" in texts(svg)
    assert max(values(svg)["runs"][0]["loss"][0]) <= 1000


# -- from outside


def test_names_and_texts_are_never_markup(tmp_path):
    picture = make_picture(made_schedules.branches())
    past = run(tmp_path, picture, restarts=1).history
    first = picture.stages["main"]
    first.name, first.marks, first.settings = NASTY, (), {**first.settings, "augmentation": [(0, NASTY)]}
    stages = {stage.name: stage for stage in picture.stages.values()}
    nasty = replace(picture, name=NASTY, stages=stages)
    renamed = tuple(replace(s, name=NASTY) if s.name == "main" else s for s in past.stages)
    past = replace(past, stages=renamed, now=(NASTY, 3))
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
    name, far = "main", 1e308
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


def test_a_notebook_shows_the_plan_and_its_picture(folder):
    html = stagerun.plan(folder)._repr_html_()
    assert html.startswith("<pre>") and "<svg" in html and "<style>" in html
