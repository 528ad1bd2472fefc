"""What the chart's script needs to say what the pointer is on. Pure."""

from collections.abc import Sequence

from stagerun.drawing.bands import leaves, size_text
from stagerun.drawing.picture import Point, StagePicture
from stagerun.tools.view.panel import Axis, Panel, hue
from stagerun.tools.view.results import Course

MOST = 1500  # points of all rates together


def values(
    panels: Sequence[Panel],
    rows: Sequence[tuple[int | None, float, float]],
    extent: tuple[float, float],
    drawn: Sequence[Course],
) -> dict[str, object]:
    """A JSON value. `y`: from where to where the pointer counts. `panels`: name, top and bottom, the ends of the scale, whether it is
    logarithmic. `rows`: lane (None for all), top and bottom of each line of a band. Places of a stage are `x[0] + (x[1] - x[0]) * iter /
    n`; its epoch is `(e[0] + iter * b) / e[1]`. `lr` are iterations and rates; `m`, `d`, `s` the iterations from which momentum, decay and
    size are so. `runs`: label, class, and of stages the iterations and losses, and [iteration, top-1, loss, whether weights are averaged]
    of evaluations."""
    axis = panels[0].axis
    most = max(16, MOST // len(axis.picture.stages))
    runs: dict[str, dict[str, object]] = {}
    for course in drawn:
        if course.faint:
            continue
        stages = runs.setdefault(course.label, {})
        stages[course.past.name] = {
            "c": hue(course.stroke),
            "loss": [[round(i) for i, _ in course.losses], [_short(loss) for _, loss in course.losses]],
            "tests": [[e.iter, round(100 * e.top1, 2), _short(e.loss), int(e.ema)] for e in course.evaluations],
        }
    return {
        "x": [axis.left, axis.right],
        "y": [round(y, 1) for y in extent],
        "panels": [
            [p.name, round(p.top, 1), round(p.bottom, 1), p.scale.low, p.scale.high, p.scale.log] for p in panels
        ],
        "rows": [[lane, round(top, 1), round(bottom, 1)] for lane, top, bottom in rows],
        "stages": [_stage(axis, stage, most) for stage in axis.picture.stages],
        "runs": runs,
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _stage(axis: Axis, stage: StagePicture, most: int) -> dict[str, object]:
    points = _thinned(stage, most)
    begin, end = (round(axis.x(at), 1) for at in stage.extent(axis.unit))
    left = leaves(stage) if stage.leaves_early else ""
    return {
        "name": stage.name,
        "note": ", ".join(filter(None, (left, "" if stage.enabled else "not enabled"))),
        "lane": axis.lanes[stage.name],
        "c": hue(axis.strokes[stage.name]),
        "x": [begin, end],
        "n": stage.iterations,
        "b": stage.batch_size,
        "e": [round(stage.begin_own, 3), stage.images],
        "aug": stage.augmentation,
        "lr": [[p.iter for p in points], [float(f"{p.lr:.6g}") for p in points]],
        "m": _steps([(p.iter, _short(p.momentum)) for p in points]),
        "d": _steps([(p.iter, _short(p.weight_decay)) for p in points]),
        "s": _steps([(p.iter, size_text(p)) for p in points]),
    }


def _thinned(stage: StagePicture, most: int) -> list[Point]:
    """Evenly, with the first, the last, and both sides of each mark."""
    points = stage.points
    sides = {i for mark in stage.marks for i in (mark.iter - 1, mark.iter)}
    every = -(-len(points) // most)
    return [p for n, p in enumerate(points) if n % every == 0 or p.iter in sides or p is points[-1]]


def _steps(pairs: Sequence[tuple[int, object]]) -> list[list[object]]:
    kept = [pair for n, pair in enumerate(pairs) if n == 0 or pair[1] != pairs[n - 1][1]]
    return [[iter for iter, _ in kept], [value for _, value in kept]]
