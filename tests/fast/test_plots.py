"""Pictures of schedules: as text, SVG, PNG and a page. What they say is `test_plan_picture`'s."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import made_schedules
import pytest
from made_schedules import schedule, stage

from stagerun.base.recipe import Schedule, Stage
from stagerun.drawing import figure, html
from stagerun.drawing.bands import bands, factor_text, jumps, mark_labels, not_shown, short_number
from stagerun.drawing.colours import CURVES, DARK, OVER, SOFT, strokes
from stagerun.drawing.picture import EnsemblePicture, Picture, Unit, make_picture
from stagerun.drawing.scale import labels, make_scale, round_steps
from stagerun.drawing.terminal import COLOURS, ascii_only, draw
from stagerun.schedule import make_knobs
from stagerun.tools.diff.command import Found, Side, difference, overlay

GOLDEN = Path(__file__).parents[1] / "golden" / "plots"
BRANCHES = make_picture(made_schedules.branches())
STEPS = make_picture(made_schedules.steps())
AVERAGES = make_picture(made_schedules.averages())
EVIL = '</script><img src=x onerror="alert(1)">&<!--'


def text(picture: Picture, width: int, unit: Unit = Unit.EPOCHS, log: bool | None = None) -> str:
    return draw(picture, unit, make_scale(picture, log), width).plain


# -- the terminal


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("picture", [STEPS, BRANCHES, AVERAGES], ids=lambda p: p.name)
def test_text(picture: Picture, width: int) -> None:
    """Written by hand the first time, and looked at: `python tests/fast/test_plots.py` writes them anew."""
    assert text(picture, width) + "\n" == (GOLDEN / f"{picture.name}_{width}.txt").read_text()


@pytest.mark.parametrize("width", [1, 50, 63, 80, 200])
@pytest.mark.parametrize("log", [True, False])
def test_no_line_is_longer_than_the_terminal(width: int, log: bool) -> None:
    for picture in (STEPS, BRANCHES, AVERAGES):
        for unit in (Unit.ITERATIONS, Unit.EPOCHS, Unit.IMAGES):
            chart = text(picture, width, unit, log).split("\n\nLR")[0]
            assert max(len(line) for line in chart.split("\n")[1:]) <= max(width, 50)


def test_bands_stand_under_what_they_are_of() -> None:
    lines = text(STEPS, 80).split("\n")
    border = next(line for line in lines if "┊" in line).index("┊")
    for title in ("stages", "weight decay", "augmentation"):
        line = next(line for line in lines if line.startswith(title))
        assert line[border] == "├"


def test_texts_that_do_not_fit_are_explained() -> None:
    first = stage("main", base_lr=0.1, lr_policy="fixed", max_iter=1000)
    last = stage("a_long_name", "main", base_lr=0.1, lr_policy="poly", power=1.0, max_iter=80)
    found = text(make_picture(schedule(first, last)), 80)
    assert "├(a)" in found and "(a) = a_long_name" in found


def chain(count: int = 8, shorts: int = 3, **short: object) -> Picture:
    """Stages of 3 iterations between such of 500; each has a name, a rate and a weight decay of its own."""
    stages: list[Stage] = []
    for n in range(count):
        names = [f"long{n}", *(f"short_{n}_{k}" for k in range(shorts))]
        for k, name in enumerate(names):
            own = {"weight_decay": 0.001 * (10 * n + k + 1), "base_lr": 0.1 * (k + 1), **(short if k else {})}
            parent = stages[-1].name if stages else None
            stages.append(stage(name, parent, lr_policy="fixed", max_iter=3 if k else 500, **own))
    return make_picture(schedule(*stages))


# The usual width of a terminal, and what is about the least and the most; with the rest it takes a minute.
WIDTHS = [50, 80, 120, 197]
MORE_WIDTHS = [pytest.param(width, marks=pytest.mark.slow) for width in range(57, 197, 7)]
_LONGER = [pytest.param(picture, marks=pytest.mark.long) for picture in (chain(3, 60), chain(40, 1))]


@pytest.mark.parametrize("width", [*WIDTHS, *MORE_WIDTHS])
@pytest.mark.parametrize("picture", [chain(), *_LONGER], ids=["8x3", "3x60", "40x1"])
def test_labels_that_have_no_room_are_left_out_and_counted(picture: Picture, width: int) -> None:
    """No key is cut short, none is explained that is not there, and each stage is labelled, explained or counted."""
    lines = text(picture, width).split("\n\nLR")[0].split("\n")
    first = next(n for n, line in enumerate(lines) if line.startswith("stages "))
    last = next(n for n, line in enumerate(lines) if line.startswith("weight decay"))
    lane, notes = lines[first], [line.strip() for line in lines[first + 1 : last]]
    assert len(lane) <= width
    keys = dict(note.split(" = ") for note in notes if " = " in note)
    assert re.findall(r"\([a-z]*\)?", lane) == list(keys)
    whole = {a or b for a, b in re.findall(r"├(\w+)|┤ (\w+)", lane)} & {s.name for s in picture.stages}
    more = [int(note.split()[0]) for note in notes if note.endswith("more, too short for a label")]
    assert len(whole) + len(keys) + sum(more) == len(picture.stages)


@pytest.mark.long
def test_labels_of_short_stages_are_not_printed_over_each_other_in_files() -> None:
    picture = chain()
    found = svg_texts(figure.svg(picture, Unit.EPOCHS, make_scale(picture)))
    assert {f"long{n}" for n in range(8)} <= {*found} and "stages: 24 more, too short for a label" in found
    assert not [said for said in found if said.startswith("(")]  # there is no room for a key, so none is explained
    assert not [said for said in found if said.startswith("stages (")]


_LONG = pytest.param(chain(3, 60), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "picture", [chain(), _LONG, STEPS, BRANCHES, AVERAGES], ids=["8x3", "3x60", "steps", "branches", "averages"]
)
def test_no_text_of_a_file_overlaps_another_or_the_edge(picture: Picture) -> None:
    with figure.drawing():
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        drawn = figure.draw(picture, Unit.EPOCHS, make_scale(picture)).figure
        renderer = FigureCanvasAgg(drawn).get_renderer()
        for axes in drawn.axes:
            boxes = [label.get_window_extent(renderer) for label in axes.texts]
            assert all(box.x1 <= drawn.get_figwidth() * 72 for box in boxes)
            assert not [(a, b) for n, a in enumerate(boxes) for b in boxes[:n] if a.overlaps(b)]


@pytest.mark.slow
def test_labels_above_the_curve_are_no_tower() -> None:
    picture = chain(2, 100)
    assert "labels more are too close to others" in text(picture, 80)
    svg = figure.svg(picture, Unit.EPOCHS, make_scale(picture))
    assert float(re.search(r'viewBox="0 0 \S+ (\S+)"', svg).group(1)) < 700  # type: ignore[union-attr]


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
    svg = figure.svg(picture, Unit.EPOCHS, make_scale(picture))
    element = svg[: svg.index(">x2</text>")].rpartition("<text")[2]
    assert SOFT in element and CURVES[1] not in element


def test_colours_are_ours_to_leave_out_and_stand_out_on_black_and_on_white() -> None:
    drawn = draw(BRANCHES, Unit.EPOCHS, make_scale(BRANCHES), 80)
    styles = {str(span.style) for span in drawn.spans if span.style}
    assert styles == {COLOURS[0], COLOURS[1], "dim"}

    def luminance(colour: str) -> float:  # WCAG 2's, of one of the 6 x 6 x 6 colours
        number = int(colour[6:-1]) - 16
        levels = [0 if n == 0 else 55 + 40 * n for n in (number // 36, number // 6 % 6, number % 6)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in levels)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in COLOURS:
        assert (luminance(colour) + 0.05) / 0.05 > 3 and 1.05 / (luminance(colour) + 0.05) > 3, colour


def test_characters_of_old_terminals() -> None:
    found = ascii_only(text(STEPS, 80))
    assert found.isascii() and "+collapse---" in found and "*" in found


# -- scales


def test_a_rate_of_zero_stands_at_the_lower_edge_of_a_logarithmic_axis() -> None:
    scale = make_scale(STEPS, True)
    assert scale.hidden and scale.at(0.0) == scale.at(scale.low) and scale.low > 0
    assert "are drawn at the lower edge" in text(STEPS, 80, log=True)
    assert not make_scale(STEPS, False).hidden


def test_the_axis_is_logarithmic_where_rates_fall_far_for_long() -> None:
    assert make_scale(STEPS).log and not make_scale(BRANCHES).log


def test_a_schedule_whose_rates_are_all_zero() -> None:
    picture = make_picture(schedule(stage("main", base_lr=0.0, lr_policy="fixed", max_iter=5)))
    for log in (None, True, False):
        assert "main" in text(picture, 80, log=log)


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
    assert said in text(picture, 80) and "main: up to 2 drops" in figure.svg(picture, Unit.EPOCHS, make_scale(picture))


def test_a_branch_that_leaves_without_a_jump_does_not_read_as_one() -> None:
    said = [line for line in text(BRANCHES, 80).split("\n") if line.startswith("LR cool_a")]
    assert said == ["LR cool_a: leaves main at 400 without a jump, falls from 0.5 to 0.0025"]
    flat = {"base_lr": 0.1, "max_iter": 100}
    tree = schedule(stage("main", lr_policy="fixed", **flat), stage("side", "main", 50, lr_policy="fixed", **flat))
    assert "LR side: leaves main at 50 without a jump, ends at 0.1, too" in text(make_picture(tree), 80)


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
    # In the terminal the first is seen through the gaps of the second, and the factors say whose they are.
    drawn = draw(steps, Unit.EPOCHS, make_scale(steps), 80)
    row = max(drawn.split("\n"), key=lambda line: len(re.findall("[⠁-⣿]", line.plain)))
    cells = {n for n, c in enumerate(row.plain) if "⠁" <= c <= "⣿"}
    inked = {n for span in row.spans if str(span.style) == COLOURS[0] for n in range(span.start, span.end)}
    assert 0 < len(inked & cells) < len(cells)
    assert "AB x5" in drawn.plain and "B is dashed, over A" in drawn.plain


def test_a_second_side_that_differs_has_gaps_without_colours_too() -> None:
    a = schedule(stage("main", base_lr=0.1, lr_policy="fixed", max_iter=100))
    b = schedule(stage("main", base_lr=0.2, lr_policy="fixed", max_iter=100))
    rows = [re.findall("[⠁-⣿]+", line) for line in text(both(a, b), 80).split("\n")]
    upper, lower = [found for found in rows if found]
    assert len(upper) > 10 and len(lower) == 1


def test_each_side_has_epochs_of_its_own() -> None:
    steps = made_schedules.steps()
    picture = both(steps, other_data(steps, 500))
    assert picture.stage("B main").x(60, Unit.EPOCHS) == 2 * picture.stage("A main").x(60, Unit.EPOCHS) == 12.0
    found = page(picture)
    assert [(s["name"], s["epoch"]) for s in data_of(found)["stages"]] == [
        ("A main", 1000), ("A collapse", 1000), ("B main", 500), ("B collapse", 500),
    ]  # fmt: skip
    assert "images / stage.epoch" in found and "data.images" not in found


# -- SVG and PNG


def svg_texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]


def test_svg_is_sound_and_says_what_it_shows() -> None:
    found = svg_texts(figure.svg(BRANCHES, Unit.EPOCHS, make_scale(BRANCHES)))
    assert {"main", "cool_a", "cool_b", "cool_c (not enabled)", "5e-5", "1e-4", "200", "epochs", "mirror, crop 28"} <= {
        *found
    }
    assert "x5" in svg_texts(figure.svg(STEPS, Unit.IMAGES, make_scale(STEPS)))


def test_an_ensemble_has_a_dot_where_each_member_is_and_a_line_to_what_starts_from_it() -> None:
    with figure.drawing():
        drawn = figure.draw(AVERAGES, Unit.ITERATIONS, make_scale(AVERAGES)).figure
        stages, ensembles = (next(a for a in drawn.axes if a.texts[-1].get_text() in of) for of in TITLES)
        late, never = (line for line in ensembles.lines if line.get_marker() == "None")
        assert list(late.get_xdata()) == [600, 1000] and list(never.get_xdata()) == [700, 1300]
        of = strokes(AVERAGES, Unit.ITERATIONS)
        dots = [(list(line.get_xdata()), line.get_color()) for line in ensembles.lines if line.get_marker() == "o"]
        assert dots[0] == ([600, 700, 800, 900, 1000], of["trunk"].colour)
        assert sorted(dots[1:]) == [([700], of["branch"].colour), ([1300], of["fine"].colour)]
        on_curve = [line for line in drawn.axes[0].lines if line.get_marker() == "o"]
        assert (list(on_curve[0].get_xdata()), set(on_curve[0].get_ydata())) == (dots[0][0], {0.5})
        # From the stage's line down to that of the dots, in inches from the top.
        join = next(line for line in stages.lines if list(line.get_xdata()) == [1000, 1000])
        ends = [stages.transData.transform((1000, y))[1] for y in join.get_ydata()]
        assert ends[1] == pytest.approx(ensembles.transData.transform((1000, late.get_ydata()[0]))[1], abs=0.01)
    assert "late (WEIGHT_AVERAGE, linear): trunk@600..900 (4 snapshots), trunk" in svg_texts(
        figure.svg(AVERAGES, Unit.EPOCHS, make_scale(AVERAGES))
    )


TITLES = ({"stages"}, {"never (MEAN_PROBABILITY, not evaluated: a member is not enabled): branch, fine"})


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


def test_equal_schedules_make_equal_bytes() -> None:
    again = make_picture(made_schedules.steps())
    for form in (figure.svg, figure.png):
        assert form(STEPS, Unit.EPOCHS, make_scale(STEPS)) == form(again, Unit.EPOCHS, make_scale(again))
    assert figure.png(STEPS, Unit.EPOCHS, make_scale(STEPS)).startswith(b"\x89PNG\r\n")


def test_a_problem_in_place_of_a_picture() -> None:
    with figure.drawing():
        found = svg_texts(figure.saved_svg(figure.problem("a.prototxt:1:1: wrong & <bad>\n  $x$\n  ^"), "mistakes"))
    assert "a.prototxt:1:1: wrong & <bad>" in found


# -- the page


def page(picture: Picture) -> str:
    return html.html(picture, Unit.EPOCHS, make_scale(picture))


def data_of(page: str) -> dict[str, list[dict[str, object]]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    read: dict[str, list[dict[str, object]]] = json.loads(found.group(1))
    return read


def test_the_page_loads_nothing() -> None:
    found = page(BRANCHES)
    assert not re.search(
        r"https?:|//[a-z]|@import|url\((?!#)|\bsrc=|\bhref=(?!\"#)", found.replace("xlink:href", "href")
    )
    assert "default-src 'none'" in found and 'http-equiv="refresh"' not in found
    assert 'http-equiv="refresh"' in html.html(BRANCHES, Unit.EPOCHS, make_scale(BRANCHES), watched=True)


def test_names_are_text_wherever_they_stand() -> None:
    stages = tuple(replace(s, name=EVIL) for s in STEPS.stages[:1])
    found = page(Picture(EVIL, stages))
    assert found.count("</script>") == 2 and "<img" not in found and EVIL not in found
    assert "<!--" not in found
    assert data_of(found)["stages"][0]["name"] == EVIL
    assert EVIL not in html.problem_html(EVIL)
    assert EVIL in svg_texts(figure.svg(Picture(EVIL, stages), Unit.EPOCHS, make_scale(STEPS)))


def test_its_values_are_the_plan_s() -> None:
    for drawn in data_of(page(STEPS))["stages"]:
        knobs = make_knobs(made_schedules.steps().stage(str(drawn["name"])).solver)
        points = drawn["points"]
        assert isinstance(points, list) and points
        for iter, _, _, lr, momentum, decay, size in points:
            at = knobs(iter)
            assert (lr, momentum, decay) == (f"{at.lr:.6g}", f"{at.momentum:.6g}", f"{at.weight_decay:.6g}")
            assert size == "28"


def test_a_number_is_as_short_as_people_write_it() -> None:
    points = (replace(STEPS.stages[0].points[0], lr=0.024300000000000002),)
    (drawn,) = data_of(page(Picture("one", (replace(STEPS.stages[0], points=points, marks=()),))))["stages"]
    assert drawn["points"][0][3] == "0.0243"  # type: ignore[index]


def test_every_colour_has_one_for_dark_pages() -> None:
    found = page(BRANCHES)
    styles = re.findall(r'style="([^"]*)"', found[found.index("<svg") : found.index("</svg>")])
    assert not [style for style in styles if "#" in style.replace("url(#", "")]
    assert all(f"--c{colour[1:]}: {DARK[colour]}" in found for colour in DARK)


if __name__ == "__main__":
    for each in (STEPS, BRANCHES, AVERAGES):
        for columns in (80, 120):
            (GOLDEN / f"{each.name}_{columns}.txt").write_text(text(each, columns) + "\n")
