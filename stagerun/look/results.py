"""Runs in the chart: top-1 and loss in panels below the learning rate, incidents, and where a run is. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from stagerun.base.events import NotFinite, StageStarted, Tested
from stagerun.logs.lines import warning_of
from stagerun.look.history import History, Stage
from stagerun.look.picture import (
    LEFT,
    RIGHT,
    XY,
    Picture,
    StagePicture,
    curve_colour,
    curve_dash,
    element,
    joined,
    line,
    number,
    round_steps,
    text_width,
    title,
    words,
)
from stagerun.look.runs import Run

HEIGHT, GAP = 120, 28  # of a panel, and above it
SPIKE = 25  # losses this many times the median are drawn at the upper edge
TOP1, LOSS = "top-1, %", "loss"
# Kinds of incidents, the worst first.
SIGNS = {"rollback": "\N{BLACK LEFT-POINTING TRIANGLE}", "warning": "!", "restart": "\N{BLACK UP-POINTING TRIANGLE}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A y axis from `top` to `bottom`."""

    name: str
    top: float
    height: float
    low: float
    high: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def y(self, value: float) -> float:
        """Return the pixel of a value, at an edge for one beyond it."""
        return self.bottom - min(1.0, max(0.0, (value - self.low) / (self.high - self.low))) * self.height

    def path(self, stage: StagePicture, values: Iterable[XY]) -> list[XY]:
        """Return pixels for iterations and values."""
        return [(stage.x(iter), self.y(value)) for iter, value in values]

    def frame(self) -> str:
        parts = [words(self.name, LEFT - 8, self.top - 7, "name", "end")]
        for value in round_steps(self.low, self.high, int(self.height // 22)):
            y = self.y(value)
            parts.append(line(joined((LEFT, y), (RIGHT, y)), "grid"))
            parts.append(words(f"{value:.6g}", LEFT - 8, y + 4, "tick", "end"))
        return "".join(parts) + line(joined((LEFT, self.top), (LEFT, self.bottom), (RIGHT, self.bottom)), "frame")


class Course(NamedTuple):
    """A stage of a run, up to its end in the schedule. `label`: the run's, '' for a single one."""

    stage: StagePicture
    run: Run
    past: Stage
    label: str
    colour: str
    dash: str | None
    losses: Sequence[XY]
    tests: Sequence[Tested]


def courses(picture: Picture, runs: Sequence[Run]) -> list[Course]:
    """A single run has the colours of its branches; several have one each, and no averaged weights."""
    made, several = [], len(runs) > 1
    for n, run in enumerate(runs):
        for past in run.history.stages:
            if (stage := picture.stages.get(past.name)) is None:
                continue
            colour, dash = (curve_colour(n), curve_dash(n)) if several else (stage.colour, stage.dash)
            losses = [point for point in past.losses if point[0] <= stage.iterations]
            # A damaged log may have any number.
            tests = [test for test in past.tests if test.iter <= stage.iterations and math.isfinite(100 * test.top1)]
            tests = [test for test in tests if not (several and test.ema)]
            made.append(Course(stage, run, past, run.label if several else "", colour, dash, losses, tests))
    return made


def reached(stage: StagePicture, runs: Sequence[Run]) -> int:
    """Return the furthest iteration that a run has trained."""
    stages = (run.history.stage(stage.name) for run in runs)
    return min(stage.iterations, max((past.iter for past in stages if past), default=0))


def panels(top: float, courses: Sequence[Course]) -> Iterator[Panel]:
    top1 = [100 * test.top1 for course in courses for test in course.tests]
    if top1:
        margin = max(0.5, 0.06 * (max(top1) - min(top1)))
        yield Panel(TOP1, top + GAP, HEIGHT, max(0.0, min(99.0, min(top1) - margin)), min(100.0, max(top1) + margin))
        top += GAP + HEIGHT
    losses = [loss for course in courses for _, loss in course.losses]
    losses += [test.loss for course in courses for test in course.tests]
    if losses:
        high = min(abs(max(losses)), SPIKE * abs(median(losses))) or 1.0
        yield Panel(LOSS, top + GAP, HEIGHT, min(0.0, max(min(losses), -high)), 1.06 * high)


def draw(panels: Sequence[Panel], courses: Sequence[Course]) -> str:
    """Draw lines, each from the end of the stage that it continues, and circles for evaluations."""
    parts, circles = [_legend(panels[0], courses)] if panels else [], list[str]()
    for panel in panels:
        ends: dict[tuple[str, str, bool], XY] = {}
        for course in courses:
            parent, end = course.run.history.follows(course.past), course.past.finished
            for ema in (False, True):
                tests = [test for test in course.tests if test.ema is ema]
                values: list[XY] = [(test.iter, 100 * test.top1 if panel.name == TOP1 else test.loss) for test in tests]
                radii = [3.6 if end and end.iterations == test.iter else 2.0 for test in tests]
                d = "".join(map(_circle, panel.path(course.stage, values), radii))
                circles.append(line(d, f"{'ring' if ema else 'dot'} {course.colour}"))
                if panel.name == LOSS:
                    values = [] if ema else [*course.losses]
                if points := panel.path(course.stage, values):
                    before = ends.get((course.label, parent.name, ema)) if parent else None
                    ends[course.label, course.stage.name, ema] = points[-1]
                    d = joined(before or points[0], *points)
                    parts.append(line(d, f"thin {course.colour}", course.dash, data_run=course.label or None))
    return "".join([*parts, *circles])


def _circle(centre: XY, radius: float) -> str:
    return (
        f"{joined(centre)}m{-radius},0a{radius},{radius} 0 1 0 {2 * radius},0a{radius},{radius} 0 1 0 {-2 * radius},0"
    )


def _legend(panel: Panel, courses: Sequence[Course]) -> str:
    """Draw the names of runs above a panel, from the right, as far as they have room; the tables have them all."""
    signs = {one.label: line("M-8,-4h14", f"thin {one.colour}", one.dash) for one in courses if one.label}
    parts, x = [], RIGHT
    for name, sign in reversed(signs.items()):
        x -= text_width(name)
        if x < LEFT:
            break
        parts.append(words(name, x, panel.top - 7, "tick"))
        parts.append(element("g", sign, transform=f"translate({number(x - 10)},{number(panel.top - 7)})"))
        x -= 26
    return "".join(parts)


def notes(courses: Sequence[Course]) -> Iterator[str]:
    if courses:
        yield "loss: the line is training; dots are evaluations, a larger one at the end of a stage, hollow for averaged weights"
    if beyond := dict.fromkeys(course.stage.name for course in courses if course.past.iter > course.stage.iterations):
        yield f"trained further than the schedule goes now, which is not drawn: {', '.join(beyond)}"


class Incident(NamedTuple):
    """`kind`: rollback, warning or restart."""

    stage: str
    iter: int
    kind: str
    text: str


def incidents_of(history: History) -> list[Incident]:
    """Return restarts, rollbacks and warnings by stage; not those in iterations that were repeated."""
    incidents = []
    for stage in history.stages:
        for _, _, iter, event in stage.moments:
            if isinstance(event, StageStarted) and iter > event.begins:
                incidents.append(Incident(stage.name, iter, "restart", f"{stage.name} resumes at {iter}"))
            elif (text := warning_of(event)) is not None:
                back = isinstance(event, NotFinite) and event.back_to is not None
                incidents.append(Incident(stage.name, iter, "rollback" if back else "warning", text))
    return incidents


def incidents(picture: Picture, top: float, runs: Sequence[Run]) -> tuple[str, float]:
    """Return a line of signs and its foot."""
    parts = [words("incidents", LEFT - 8, top + 11, "band", "end")]
    for run in runs:
        for one in sorted(incidents_of(run.history), key=lambda one: -[*SIGNS].index(one.kind)):
            if (x := picture.x(one.stage, one.iter)) is not None:
                sign = words(SIGNS[one.kind], x, top + 11, one.kind, "middle")
                parts.append(element("g", title(f"{run.label} {one.text}" if len(runs) > 1 else one.text), sign))
    return ("".join(parts), top + 18) if len(parts) > 1 else ("", top)


def position(picture: Picture, top: float, bottom: float, run: Run) -> str:
    """Draw a line through all panels where the run is."""
    if run.history.now is None or (x := picture.x(*run.history.now)) is None:
        return ""
    stage, iter = run.history.now
    head, rule = line(f"{joined((x, top))}l-4.5,-7h9z", "head ink"), line(joined((x, top), (x, bottom)), "now")
    return element("g", title(f"{stage} {iter}"), head, rule, class_="cursor")


def pointed(courses: Sequence[Course]) -> list[dict[str, object]]:
    """Return what page.js shows of runs under the pointer; the last member of a test: of averaged weights."""
    return [
        {
            "label": course.label,
            "stage": course.stage.name,
            "loss": [[round(iter) for iter, _ in course.losses], [float(f"{loss:.5g}") for _, loss in course.losses]],
            "tests": [[test.iter, round(100 * test.top1, 2), int(test.ema)] for test in course.tests],
        }
        for course in courses
    ]
