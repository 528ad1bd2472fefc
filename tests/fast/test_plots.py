"""Pictures of schedules: their words, scales and colours. What they say is `test_plan_picture`'s."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import made_schedules
from facade import Schedule, make_picture
from made_schedules import schedule, stage

from stagerun.drawing.bands import not_shown, short_number
from stagerun.drawing.colours import CURVES, OVER, strokes
from stagerun.drawing.picture import Picture, Unit
from stagerun.drawing.scale import labels, make_scale, round_steps
from stagerun.tools.diff.command import Found, Side, difference, overlay
from stagerun.tools.view.chart import file

BRANCHES = make_picture(made_schedules.branches())
STEPS = make_picture(made_schedules.steps())


def texts(picture: Picture, log: bool | None = None) -> list[str]:
    drawn = ElementTree.fromstring(file(picture, Unit.EPOCHS, make_scale(picture, log)))
    return [node.text or "" for node in drawn.iter("{http://www.w3.org/2000/svg}text")]


# -- scales


def test_a_rate_of_zero_stands_at_the_lower_edge_of_a_logarithmic_axis() -> None:
    scale = make_scale(STEPS, True)
    assert scale.hidden and scale.at(0.0) == scale.at(scale.low) and scale.low > 0
    assert any("are drawn at the lower edge" in line for line in texts(STEPS, log=True))
    assert not make_scale(STEPS, False).hidden


def test_the_axis_is_logarithmic_where_rates_fall_far_for_long() -> None:
    assert make_scale(STEPS).log and not make_scale(BRANCHES).log


def test_a_schedule_whose_rates_are_all_zero() -> None:
    picture = make_picture(schedule(stage("main", base_lr=0.0, lr_policy="fixed", max_iter=5)))
    for log in (None, True, False):
        assert "main" in texts(picture, log)


def test_ticks_and_their_labels() -> None:
    assert round_steps(0.0, 72.3, 8) == [0, 10, 20, 30, 40, 50, 60, 70]
    assert labels([0.0, 20_000.0, 40_000.0]) == ["0", "20k", "40k"]
    assert labels([0.0, 5e6, 1e7]) == ["0", "5M", "10M"]
    shown = {5e-5: "5e-5", 0.0002: "2e-4", 0.9: "0.9", 0.01: "0.01", 0.0: "0", 4096.0: "4096"}
    assert {value: short_number(value) for value in shown} == shown


# -- words


def test_a_plateau_says_that_its_drops_are_not_drawn() -> None:
    first = stage("main", base_lr=0.1, lr_policy="plateau", gamma=0.1, plateau_winsize=(10, 20), max_iter=100)
    then = stage("next", "main", base_lr=0.01, lr_policy="fixed", max_iter=10)
    picture = make_picture(schedule(first, then))
    said = "main: up to 2 drops, which depend on the loss, are not drawn"
    assert not_shown(picture) == [said]
    assert any("main: up to 2 drops" in line for line in texts(picture))


# -- two in one


def both(a: Schedule, b: Schedule) -> Picture:
    return overlay(Found(Side("a", "", a), Side("b", "", b), difference(a, b)))


def other_data(of: Schedule, images: int) -> Schedule:
    """The same iterations, of epochs with so many images."""
    return of.with_data(lambda data: replace(data, train=replace(data.train, images=images)))


def test_two_sides_are_told_apart_and_both_are_seen() -> None:
    steps, branches = both(made_schedules.steps(), made_schedules.steps()), made_schedules.branches()
    of = strokes(steps, Unit.EPOCHS)
    assert {(s.colour, s.dashes) for n, s in of.items() if n.startswith("A")} == {(CURVES[0], "solid")}
    assert {(s.colour, s.dashes) for n, s in of.items() if n.startswith("B")} == {(CURVES[1], OVER)}
    tree = strokes(both(branches, branches), Unit.EPOCHS)
    assert tree["A cool_a"] == tree["A main"] != tree["B main"] == tree["B cool_b"]
    drawn = texts(steps)
    assert "AB x5" in drawn and any("B is dashed, over A" in line for line in drawn)


def test_each_side_has_epochs_of_its_own() -> None:
    steps = made_schedules.steps()
    picture = both(steps, other_data(steps, 500))
    assert picture.stage("B main").x(60, Unit.EPOCHS) == 2 * picture.stage("A main").x(60, Unit.EPOCHS) == 12.0
