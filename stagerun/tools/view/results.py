"""What runs have come to, in panels under the learning rate: top-1 and loss, where they are, and what happened to them. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stagerun.base.events import Tested
from stagerun.drawing.colours import SOFT, Stroke, stroke_of_run
from stagerun.drawing.scale import Scale
from stagerun.drawing.svg import Place, element, number, path, spaced, title, wide, words
from stagerun.tools.report.history import Run, StageHistory
from stagerun.tools.view.panel import SIZE, Axis, Panel, dash, hue

HIGH, BETWEEN = 120, 28  # of a panel, and above it
MOST_NAMED = 12  # runs that have a colour and a name of their own
FAR = 25  # a loss so many times the median makes the axis logarithmic
HUGE = 1e300  # losses beyond leave the panel: the axis needs numbers of its own above them
APART = 9.0  # pixels between two signs
MOST_SAID = 12  # incidents of one sign
TOP1, LOSS = "top-1, %", "loss"
# Kinds of incidents, the worst first, and the sign of each.
SIGNS = {"rollback": "\N{BLACK LEFT-POINTING TRIANGLE}", "warning": "!", "restart": "\N{BLACK UP-POINTING TRIANGLE}"}


@dataclass(frozen=True, slots=True)
class Course:
    """What one run has done of a stage, as far as the schedule has it, and how it is drawn: `label` is '' for a single run, `faint`: one of
    very many. `beyond`: it has gone further."""

    run: Run
    past: StageHistory
    label: str
    stroke: Stroke
    faint: bool
    losses: tuple[tuple[float, float], ...]  # iteration, mean
    evaluations: tuple[Tested, ...]
    beyond: bool

    @property
    def kind(self) -> str:
        """The classes of its lines."""
        return "faint" if self.faint else f"thin {hue(self.stroke)}"


def courses(axis: Axis, runs: Sequence[Run]) -> list[Course]:
    """The course of each stage: of one run in the colours of its branches, of several each in its own, and without averaged weights."""
    several, faint, found = len(runs) > 1, len(runs) > MOST_NAMED, []
    for n, run in enumerate(runs):
        for past in (past for past in run.history.stages if past.name in axis.stages):
            end = axis.stages[past.name].iterations
            stroke = Stroke(SOFT, "solid") if faint else stroke_of_run(n) if several else axis.strokes[past.name]
            losses = tuple(point for point in (past.trained.losses if past.trained else ()) if point[0] <= end)
            tests = [t for t in past.tests if t.iter <= end and math.isfinite(100 * t.top1)]  # a log may say anything
            tests = [t for t in tests if not (several and t.ema)]
            label = run.label if several else ""
            found.append(Course(run, past, label, stroke, faint, losses, tuple(tests), past.iter > end))
    return found


def panels(axis: Axis, top: float, drawn: Sequence[Course]) -> list[Panel]:
    """Top-1 and loss, where a run has them."""
    found = []
    top1 = [100 * e.top1 for course in drawn for e in course.evaluations]
    if top1:
        low, high = min(top1), max(top1)
        room = max(0.5, 0.06 * (high - low))
        scale = Scale(False, max(0.0, low - room), min(100.0, high + room))
        found.append(Panel(TOP1, axis, top + BETWEEN, HIGH, scale))
        top = found[-1].bottom
    losses = [loss for course in drawn for _, loss in course.losses]
    losses += [e.loss for course in drawn for e in course.evaluations]
    if losses:
        low, high = max(min(losses), -HUGE), min(max(losses), HUGE)
        log = low > 0 and high > FAR * median(losses)
        room = 0.06 * (high - min(low, 0.0)) or 1.0
        scale = Scale(True, low / 1.1, high * 1.1) if log else Scale(False, min(0.0, low), high + room)
        found.append(Panel(LOSS, axis, top + BETWEEN, HIGH, scale))
    return found


def results(panels: Sequence[Panel], drawn: Sequence[Course]) -> str:
    """The lines and dots of all runs. Of many, one is brought out by the page's script."""
    if not panels:
        return ""
    found = [_names(panels[0], drawn)]
    for panel in panels:
        last: dict[tuple[str, str, bool], Place] = {}  # by label, stage and `ema`, where a line ends
        lines = [line for course in drawn for line in _lines(panel, course, last)]
        dots = [_dots(panel, course) for course in drawn if not course.faint]
        found += [panel.clipped(*lines), *dots]
    return "".join(found)


def _lines(panel: Panel, course: Course, last: dict[tuple[str, str, bool], Place]) -> Iterator[str]:
    """The training loss, or top-1 of the weights and of their average; each goes on from where the stage ends that it follows."""
    stage, unit = panel.axis.stages[course.past.name], panel.axis.unit
    follows = course.run.history.follows(course.past)
    for ema in (False, True):
        if panel.name == LOSS:
            values = [] if ema else [(stage.x(i, unit), loss) for i, loss in course.losses]
        else:
            values = [(stage.x(e.iter, unit), 100 * e.top1) for e in course.evaluations if e.ema is ema]
        if line := panel.line(values):
            before = last.get((course.label, follows.name, ema)) if follows else None
            last[course.label, course.past.name, ema] = line[-1]
            d = path([[before, *line] if before else line])
            dashes, label = dash(course.stroke), course.label or None
            yield element("path", d=d, class_=course.kind, stroke_dasharray=dashes, data_run=label)


def _dots(panel: Panel, course: Course) -> str:
    """The evaluations, that at the stage's end larger than those inside. Those above or below the panel have none."""
    found: dict[tuple[bool, float], list[Place]] = {}
    end = course.past.finished.iterations if course.past.finished else -1
    for e in course.evaluations:
        value = 100 * e.top1 if panel.name == TOP1 else e.loss
        place = panel.axis.place(course.past.name, e.iter), panel.y(value)
        if panel.top - 3 <= place[1] <= panel.bottom + 1:
            found.setdefault((e.ema, 3.6 if e.iter == end else 2.0), []).append(place)
    return "".join(_circles(ema, size, places, hue(course.stroke)) for (ema, size), places in found.items())


def _circles(hollow: bool, size: float, places: Sequence[Place], hue: str) -> str:
    """One path of them all; hollow for averaged weights."""
    r, d = number(size), number(2 * size)
    shape = f"m-{r},0a{r},{r} 0 1 0 {d},0a{r},{r} 0 1 0 -{d},0"
    found = "".join(f"M{number(x)},{number(y)}{shape}" for x, y in places)
    return element("path", d=found, class_=f"{'ring' if hollow else 'dot'} {hue}")


def _names(panel: Panel, drawn: Sequence[Course]) -> str:
    """Which colour is what run, and what is hollow, above the first panel from the right."""
    found = {
        course.label: element("path", d="M-8,-4h14", class_=course.kind, stroke_dasharray=dash(course.stroke))
        for course in drawn
        if course.label and not course.faint
    }
    if any(e.ema for course in drawn for e in course.evaluations):
        found["averaged weights"] = _circles(True, 3, [(0, -4)], hue(drawn[0].stroke))
    parts, x = [], panel.axis.right
    for name, sign in reversed(found.items()):
        x -= wide(name, SIZE)
        if x < panel.axis.left:  # the table has them all
            break
        at = f"translate({number(x - 10)},{number(panel.top - 7)})"
        parts.append(words(name, x, panel.top - 7, "tick") + element("g", sign, transform=at))
        x -= 26
    return "".join(parts)


def remarks(panels: Sequence[Panel], drawn: Sequence[Course]) -> list[str]:
    """What is not drawn, and what the dots are."""
    found = []
    if any(panel.name == LOSS for panel in panels):
        found.append("loss: the line is that of training, dots are evaluations, a larger one at the end of a stage")
    beyond = dict.fromkeys(course.past.name for course in drawn if course.beyond)
    if beyond:
        found.append(f"trained further than the schedule goes now, which is not drawn: {', '.join(beyond)}")
    return found


# -- where it is, and what happened


def incidents(axis: Axis, top: float, runs: Sequence[Run]) -> tuple[str, float]:
    """A line of signs, and where it ends. Of what lies close together the sign of the worst."""
    known = [(run, one) for run in runs for one in run.history.incidents if axis.has(one.stage, one.iter)]
    if not known:
        return "", top
    found = [words("incidents", axis.left - 8, top + 11, "band", "end")]
    for x, marks in spaced([(axis.place(one[1].stage, one[1].iter), one) for one in known], APART):
        kind = next(kind for kind in SIGNS if any(mark.kind == kind for _, mark in marks))
        said = [f"{run.label}: {mark.text}" if len(runs) > 1 else mark.text for run, mark in marks]
        more = [f"and {len(said) - MOST_SAID} more"] if len(said) > MOST_SAID else []
        sign = words(SIGNS[kind], x, top + 11, kind, "middle")
        found.append(element("g", title("\n".join([*said[:MOST_SAID], *more])), sign))
    return "".join(found), top + 18


def now(axis: Axis, top: float, bottom: float, runs: Sequence[Run]) -> str:
    """Where a run is: a line through all panels, of several runs the heads alone."""
    found = []
    for n, run in enumerate(runs if len(runs) <= MOST_NAMED else ()):
        if run.history.now is None or not axis.has(*run.history.now):
            continue
        stage, iter = run.history.now
        x, alone = number(axis.place(stage, iter)), len(runs) == 1
        kind = "ink" if alone else hue(stroke_of_run(n))
        parts = [element("path", d=f"M{x},{number(top)}l-4.5,-7h9z", class_=f"head {kind}")]
        parts += [element("path", d=f"M{x},{number(top)}V{number(bottom)}", class_="now")] if alone else []
        said = f"{'' if alone else run.label + ': '}{stage} {iter}"
        found.append(element("g", title(said), *parts, class_="cursor alive" if run.alive else "cursor"))
    return "".join(found)
