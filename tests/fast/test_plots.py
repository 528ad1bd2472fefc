"""Pictures of schedules: their words, scales and colours. What they say is `test_plan_picture`'s."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import made_schedules
from made_schedules import schedule, stage

from stagerun.base.recipe import Schedule
from stagerun.drawing.bands import bands, factor_text, jumps, mark_labels, not_shown, short_number
from stagerun.drawing.colours import CURVES, OVER, strokes
from stagerun.drawing.picture import EnsemblePicture, Picture, Unit, make_picture
from stagerun.drawing.scale import labels, make_scale, round_steps
from stagerun.tools.diff.command import Found, Side, difference, overlay
from stagerun.tools.view.chart import file

BRANCHES = make_picture(made_schedules.branches())
STEPS = make_picture(made_schedules.steps())
AVERAGES = make_picture(made_schedules.averages())
EVIL = '</script><img src=x onerror="alert(1)">&<!--'


def texts(picture: Picture, log: bool | None = None) -> list[str]:
    drawn = ElementTree.fromstring(file(picture, Unit.EPOCHS, make_scale(picture, log)))
    return [node.text or "" for node in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_the_label_of_a_jump_that_several_make_is_the_first_ones() -> None:
    """A stage on the trunk's line and a branch jump alike at one place: it has the trunk's colour."""
    flat = {"lr_policy": "fixed", "max_iter": 100}
    picture = make_picture(
        schedule(
            stage("main", base_lr=0.1, **flat),
            stage("next", "main", base_lr=0.2, **flat),
            stage("branch", "main", base_lr=0.2, **flat),
        )
    )
    (label,) = mark_labels(picture, lambda mark: factor_text(mark.factor), lambda s, m: s.x(m.iter, Unit.EPOCHS))
    assert (label.text, [s.name for s in label.stages]) == ("x2", ["next", "branch"])


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
    assert [short_number(v) for v in (5e-5, 0.0002, 0.9, 0.01, 0.0, 4096.0)] == [
        "5e-5",
        "2e-4",
        "0.9",
        "0.01",
        "0",
        "4096",
    ]


# -- words


def test_a_setting_that_is_the_same_everywhere_is_said_once() -> None:
    found = {band.title: band for band in bands(BRANCHES, Unit.EPOCHS)}
    assert [s.text for lane in found["image size"].lanes for s in lane] == ["28"]
    assert [[s.text for s in lane] for lane in found["weight decay"].lanes] == [["5e-5"], ["5e-5", "1e-4"]]
    assert "momentum" not in found


def test_jumps_in_words() -> None:
    assert jumps(STEPS)[-1] == "collapse: 0.004 -> 0.02 (x5) where it leaves main"


def test_a_plateau_says_that_its_drops_are_not_drawn() -> None:
    first = stage("main", base_lr=0.1, lr_policy="plateau", gamma=0.1, plateau_winsize=(10, 20), max_iter=100)
    then = stage("next", "main", base_lr=0.01, lr_policy="fixed", max_iter=10)
    picture = make_picture(schedule(first, then))
    said = "main: up to 2 drops, which depend on the loss, are not drawn"
    assert not_shown(picture) == [said] and not jumps(picture)
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


def test_an_ensemble_names_as_many_members_as_fit() -> None:
    many = EnsemblePicture("all", "MEAN_LOGIT", tuple("abcde"), ())
    said = {width: many.label(lambda text: len(text) <= width) for width in (40, 32, 20, 3, 2)}  # noqa: B023
    assert [*said.values()] == [
        "all (MEAN_LOGIT): a, b, c, d, e",
        "all (MEAN_LOGIT): a, b, c, d, e",
        "all (MEAN_LOGIT)",
        "all",
        "",
    ]
    assert many.label(lambda text: len(text) < 31) == "all (MEAN_LOGIT): a and 4 more"
