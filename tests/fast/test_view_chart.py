"""The chart of `stagerun view`: what stands in it, whatever names and logs hold."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import made_schedules
import pytest
from facade import Note, Reader, make_picture
from log_help import evaluated, iterated
from long_log import line, write_log

from stagerun.drawing.picture import Picture, Unit
from stagerun.drawing.scale import make_scale
from stagerun.language import load
from stagerun.tools.report.history import Incident, Run
from stagerun.tools.view.chart import chart

SOLVERS = Path(__file__).parents[2] / "solvers"
NASTY = "<script>alert(1)</script>\"'&<b onload=x>]]>"


def tree(picture: Picture, runs: Sequence[Run] = ()) -> ElementTree.Element:
    return ElementTree.fromstring(chart(picture, Unit.EPOCHS, make_scale(picture), runs))


def show_piece() -> Picture:
    return make_picture(load(SOLVERS / "resnet50_72ep"))


def small() -> Picture:
    return make_picture(made_schedules.branches())


def run(out: Path, picture: Picture, **log: Any) -> Run:
    return Run(label="", history=Reader(write_log(out, picture, **log), 300).read(), alive=True)


def texts(svg: ElementTree.Element, kind: str | None = None) -> list[str]:
    return [e.text or "" for e in svg.iter("text") if kind is None or kind in e.get("class", "").split()]


def stages(svg: ElementTree.Element) -> dict[str, str]:
    return {e.attrib["data-stage"]: e.attrib["aria-label"] for e in svg.iter("g") if "data-stage" in e.attrib}


def values(svg: ElementTree.Element) -> Any:
    return json.loads(svg.attrib["data-values"])


# -- a plan


def test_a_plan_has_its_stages_labels_and_bands() -> None:
    svg = tree(show_piece())
    assert texts(svg, "name") == ["learning rate"]
    assert texts(svg, "band") == ["stages", "weight decay", "batch", "image size", "augmentation"]
    assert {"x0.917", "x1.09", "x1.85", "x1.86", "2e-4", "4096", "cyc2"} <= set(texts(svg))
    assert any(line.startswith("augmentation, which stages differ in: ") for line in texts(svg, "caption"))
    assert list(stages(svg)) == ["init", "cyc1", "cyc2", "cyc3", "collapse"]
    assert stages(svg)["cyc1"] == "cyc1: 3750 iterations, leaves init"
    for stage in [e for e in svg.iter("g") if "data-stage" in e.attrib]:  # reached with the keyboard, and read aloud
        assert (stage.get("tabindex"), stage.get("role")) == ("0", "button")
        assert stage.findtext("title") == stage.get("aria-label")


def test_the_pointer_gets_what_the_trainer_does() -> None:
    picture = show_piece()
    for stage in values(tree(picture))["stages"]:
        points = {point.iter: point for point in picture.stage(stage["name"]).points}
        assert stage["n"] == picture.stage(stage["name"]).iterations
        for iter, rate in zip(*stage["lr"], strict=True):
            assert rate == pytest.approx(points[iter].lr, rel=1e-5)
        assert {0, stage["n"] - 1} <= set(stage["lr"][0])
    ends = values(tree(picture))["stages"][-1]
    assert (ends["d"], ends["s"][1], ends["b"]) == ([[0], [2e-4]], ["224"], 4096)


# -- runs


def test_what_is_trained_is_drawn_in_full_and_the_rest_pale(tmp_path: Path) -> None:
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


def test_all_evaluations_are_shown_and_what_the_schedule_no_longer_has_is_said_not_drawn(tmp_path: Path) -> None:
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


def test_names_and_texts_are_never_markup(tmp_path: Path) -> None:
    picture = small()
    first = picture.stages[0]
    stage = replace(first, name=NASTY, augmentation=NASTY, marks=())
    rest = [replace(s, parent=NASTY if s.parent == first.name else s.parent) for s in picture.stages[1:]]
    nasty = Picture(NASTY, (stage, *rest))
    past = run(tmp_path, picture, restarts=1).history
    stages = tuple(replace(s, name=NASTY) if s.name == first.name else s for s in past.stages)
    past = replace(past, stages=stages, now=(NASTY, 3), incidents=(Incident(NASTY, 3, "warning", NASTY),))
    svg = tree(nasty, [Run(label=NASTY, history=past), Run(label="other", history=past)])
    text = ElementTree.tostring(svg, encoding="unicode")
    assert not re.search(r" style=|=\"#[0-9a-fA-F]{6}", text), "a strict page would drop it"
    for element in svg.iter():
        assert element.tag in {"svg", "g", "path", "rect", "text", "title"}
        assert not any(name.startswith("on") or name in ("style", "href") for name in element.attrib)
    assert NASTY in texts(svg) and NASTY in [s["name"] for s in values(svg)["stages"]]
    assert [e.get("data-stage") for e in svg.iter("g") if e.get("data-stage") == NASTY] == [NASTY]


def test_a_log_with_absurd_numbers_makes_a_chart_all_the_same(tmp_path: Path) -> None:
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
    one = Run(label="", history=Reader(out, 300).read())
    svg = tree(picture, [replace(one, snapshots=frozenset({(name, 10**9)}))])
    assert "loss" in texts(svg, "name") and values(svg)["runs"]
    assert not [e for e in svg.iter("g") if "cursor" in e.get("class", "") or e.findtext("title") == "far"]
