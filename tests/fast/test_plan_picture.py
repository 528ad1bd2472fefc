"""What a picture shows, against the function that the trainer calls."""

from itertools import pairwise
from pathlib import Path

import made_schedules
import pytest
from facade import Schedule, Transform, make_picture
from made_schedules import schedule, stage

from stagerun.base.recipe import CropSizeRamp, Knot
from stagerun.drawing.picture import Kind, StagePicture, Unit
from stagerun.language import load
from stagerun.schedule import make_knobs

SOLVERS = Path(__file__).parents[2] / "solvers"


def pictures() -> list[Schedule]:
    return [load(SOLVERS / "resnet50_72ep"), made_schedules.steps(), made_schedules.branches()]


def alone(**settings: object) -> StagePicture:
    return make_picture(schedule(stage("main", **settings))).stages[0]


@pytest.mark.parametrize("of", pictures(), ids=lambda s: s.name)
def test_few_points_that_hide_nothing(of: Schedule) -> None:
    """Each is what the trainer gets. A line through them is never off by more than 1 % of the stage's largest rate."""
    for drawn in make_picture(of).stages:
        solver = of.stage(drawn.name).solver
        knobs = make_knobs(solver)
        found = {p.iter: (p.lr, p.momentum, p.weight_decay) for p in drawn.points}
        for at in found:
            now = knobs(at)
            assert found[at] == (now.lr, now.momentum, now.weight_decay)
        assert [*found] == sorted(found) and (min(found), max(found)) == (0, solver.max_iter - 1)
        rates = [knobs(i).lr for i in range(drawn.iterations)]
        assert len(drawn.points) < 700 and {min(rates), max(rates)} <= {p.lr for p in drawn.points}
        for a, b in zip(drawn.points, drawn.points[1:], strict=False):
            for i in range(a.iter, b.iter):
                line = a.lr + (b.lr - a.lr) * (i - a.iter) / (b.iter - a.iter)
                assert abs(line - rates[i]) < 0.01 * max(rates)


def test_joints_and_the_end_of_a_warm_up_are_marked_with_their_factor() -> None:
    found = {
        (s.name, m.iter): (m.kind, m.factor) for s in make_picture(pictures()[0]).stages for m in s.marks if m.jumps
    }
    assert found["init", 1560] == (Kind.WARM_UP, pytest.approx(0.917218, abs=1e-6))
    assert found["cyc1", 0] == (Kind.START, pytest.approx(1.092757, abs=1e-6))
    assert ("cyc2", 0) not in found  # 0.2551 -> 0.255
    assert found["collapse", 0] == (Kind.START, pytest.approx(1.858153, abs=1e-6))


def test_steps_of_a_policy_are_jumps_and_a_warm_up_that_reaches_base_lr_is_none() -> None:
    main, collapse = make_picture(made_schedules.steps()).stages
    assert [(m.kind, m.iter, m.jumps) for m in main.marks] == [
        (Kind.WARM_UP, 10, False),
        (Kind.STEP, 60, True),
        (Kind.STEP, 90, True),
    ]
    assert {59, 60, 89, 90} <= {p.iter for p in main.points}
    assert [m.factor for m in collapse.marks] == [pytest.approx(5.0)]


def test_a_jump_is_drawn_upright() -> None:
    line = make_picture(made_schedules.steps()).stages[0].line()
    at = line.index((60, pytest.approx(0.04)))
    assert line[at - 2 : at] == [(59, 0.4), (60, 0.4)]
    assert line[-1] == (120, line[-2][1])  # the last rate holds to the end


def test_knots_are_points() -> None:
    knots = tuple(Knot(iter=at, factor=f) for at, f in ((0, 0.0), (311, 1.0), (312, 0.2), (500, 0.7), (999, 0.0)))
    drawn = alone(base_lr=1.0, lr_policy="piecewise_linear", knot=knots, max_iter=1000)
    assert {0, 311, 312, 500, 999} <= {p.iter for p in drawn.points}


def test_an_image_size_that_moves() -> None:
    """By FFCV's rule: 160 after 15 epochs, 192 after 25, and each change has both of its sides."""
    ramp = CropSizeRamp(start_size=128, start_epoch=10, end_epoch=30, multiple=32)
    moves = Transform(crop_size=192, crop_size_ramp=ramp)
    points = alone(base_lr=0.1, lr_policy="fixed", max_iter=400, transform=moves).points
    changes = [(a.iter, b.iter, a.size, b.size) for a, b in pairwise(points) if a.size != b.size]
    assert changes == [(149, 150, 128, 160), (249, 250, 160, 192)]


# -- places


def test_a_place_counts_along_the_path_of_ancestors() -> None:
    picture = make_picture(made_schedules.branches())
    begins = {s.name: (s.begin_iterations, s.begin_images, s.leaves_early) for s in picture.stages}
    assert begins == {
        "main": (0, 0, False),
        "cool_a": (400, 40_000, True),
        "cool_b": (700, 70_000, True),
        "cool_c": (1000, 100_000, False),
    }
    cool_c = picture.stage("cool_c")  # at twice the batch
    assert cool_c.extent(Unit.EPOCHS) == (100.0, 160.0)
    assert cool_c.extent(Unit.IMAGES) == (100_000, 160_000)
    assert cool_c.extent(Unit.ITERATIONS) == (1000, 1300)
    assert not cool_c.enabled and picture.end(Unit.EPOCHS) == 160.0


def test_hours_are_those_given_and_unknown_ones_are_an_error() -> None:
    of = made_schedules.steps()
    with pytest.raises(ValueError, match="hours"):
        make_picture(of).end(Unit.HOURS)
    at = {("main", 0): 600.0, ("main", 120): 4200.0, ("collapse", 0): 4500.0, ("collapse", 40): 7200.0}
    picture = make_picture(of, lambda name, iter: at[name, iter])
    assert picture.stage("main").extent(Unit.HOURS) == (pytest.approx(1 / 6), pytest.approx(7 / 6))
    assert picture.stage("main").x(60, Unit.HOURS) == pytest.approx(4 / 6)
    assert picture.end(Unit.HOURS) == 2.0


def test_what_goes_on_on_its_parents_line_is_one_curve_with_it_and_branches_share_a_line_where_they_do_not_meet() -> (
    None
):
    """A branch with stages of its own is one; two branches on one line of the bands are two."""
    assert make_picture(made_schedules.steps()).curves(Unit.EPOCHS) == {"main": 0, "collapse": 0}
    branches = make_picture(made_schedules.branches())
    assert branches.curves(Unit.EPOCHS) == {"main": 0, "cool_a": 1, "cool_b": 2, "cool_c": 0}
    assert branches.lanes(Unit.EPOCHS) == {"main": 0, "cool_a": 1, "cool_b": 1, "cool_c": 0}
