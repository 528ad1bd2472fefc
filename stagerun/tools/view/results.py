"""What runs have come to, in panels under the learning rate: top-1 and loss, where they are, and what happened to them. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stagerun.base.events import Tested, TestedBeside
from stagerun.drawing.colours import SOFT, Stroke, stroke_of_run
from stagerun.drawing.scale import Scale
from stagerun.drawing.svg import Place, element, number, path, spaced, title, wide, words
from stagerun.tools.report.history import StageHistory
from stagerun.tools.view.panel import SIZE, Axis, Panel, dash, hue
from stagerun.tools.view.trace import SIGNS, Trace

HIGH, BETWEEN = 120, 28  # of a panel, and above it
MOST_NAMED = 12  # runs that have a colour and a name of their own
FAR = 25  # a loss so many times the median makes the axis logarithmic
HUGE = 1e300  # losses beyond leave the panel: the axis needs numbers of its own above them
APART = 9.0  # pixels between two signs
MOST_SAID = 12  # incidents of one sign
TOP1, LOSS = "top-1, %", "loss"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`kind`: twice the number of the validation set, 0 for the first, and one more with averaged weights."""

    iter: int
    top1: float  # percent
    loss: float
    kind: int


@dataclass(frozen=True, slots=True)
class Course:
    """What one run has done of a stage, as far as the schedule has it. `beyond`: it has gone further."""

    trace: Trace
    past: StageHistory
    losses: tuple[tuple[float, float], ...]  # iteration, mean
    evaluations: tuple[Evaluation, ...]
    beyond: bool


def courses(axis: Axis, traces: Sequence[Trace]) -> list[Course]:
    """The course of each stage. Several runs show their first validation set alone."""
    sets = val_sets(traces)[: None if len(traces) == 1 else 1]
    return [
        _course(trace, past, axis.stages[past.name].iterations, sets)
        for trace in traces
        for past in trace.history.stages
        if past.name in axis.stages
    ]


def val_sets(traces: Sequence[Trace]) -> list[str]:
    """The first, which may have no name, and then the further ones."""
    stages = [past for trace in traces for past in trace.history.stages]
    first = next((test.val for past in stages for _, test in past.tests if test.val), "validation")
    return [first, *dict.fromkeys(test.val for past in stages for _, test in past.beside)]


def _course(trace: Trace, past: StageHistory, end: int, sets: Sequence[str]) -> Course:
    bins = past.trained.bins if past.trained else ()
    losses = tuple((bin.iter - (bin.updates - 1) / 2, bin.loss) for bin in bins if bin.iter <= end)
    tests: list[tuple[int, Tested | TestedBeside]] = [
        (0, test) for _, test in past.tests if len(sets) > 1 or not test.ema
    ]
    tests += [(sets.index(test.val, 1), test) for _, test in past.beside if test.val in sets[1:]]
    found = [Evaluation(t.iter, 100 * t.top1, t.loss, 2 * n + t.ema) for n, t in tests if t.iter <= end]
    found = [e for e in found if math.isfinite(e.top1)]  # a log may say anything
    return Course(trace, past, losses, tuple(found), past.iter > end)


def panels(axis: Axis, top: float, traces: Sequence[Trace], drawn: Sequence[Course]) -> list[Panel]:
    """Top-1 and loss, where a run has them."""
    found = []
    top1 = [e.top1 for course in drawn for e in course.evaluations]
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


def results(panels: Sequence[Panel], traces: Sequence[Trace], drawn: Sequence[Course]) -> str:
    """The lines and dots of all runs. Of many, one is brought out by the page's script."""
    if not panels:
        return ""
    axis = panels[0].axis
    found = [_names(panels[0], traces, drawn)]
    for panel in panels:
        last: Ends = {}
        lines, dots = [], []
        for course in drawn:
            stroke, kind = look(axis, course, traces)
            if panel.name == LOSS and course.losses:
                own = axis.stages[course.past.name]
                line = panel.line((own.x(i, axis.unit), loss) for i, loss in course.losses)
                d = path([_after(course, 0, last, line)])
                lines.append(
                    element(
                        "path", d=d, class_=kind, stroke_dasharray=dash(stroke), data_run=course.trace.label or None
                    )
                )
            elif panel.name == TOP1:
                lines += _joined(panel, course, last, kind, stroke)
            if "faint" not in kind:
                dots.append(_dots(panel, course, stroke))
        found += [panel.clipped(*lines), *dots]
    return "".join(found)


def look(axis: Axis, course: Course, traces: Sequence[Trace]) -> tuple[Stroke, str]:
    """How it is drawn, and its classes: one run in the colours of its branches, several each in its own."""
    if len(traces) == 1:
        stroke = axis.strokes[course.past.name]
        return stroke, f"thin {hue(stroke)}"
    return look_of(course.trace, traces)


def look_of(trace: Trace, traces: Sequence[Trace]) -> tuple[Stroke, str]:
    """One of several; many are all faint."""
    if len(traces) > MOST_NAMED:
        return Stroke(SOFT, "solid"), "faint"
    stroke = stroke_of_run(traces.index(trace))
    return stroke, f"thin {hue(stroke)}"


Ends = dict[tuple[str, str, int], Place]  # by run, stage and kind, where a line ends


def _after(course: Course, kind: int, ends: Ends, line: list[Place]) -> list[Place]:
    """The line, from where that of the stage ends which it follows."""
    parent = course.trace.history.follows(course.past)
    before = ends.get((course.trace.label, parent.name, kind)) if parent else None
    ends[course.trace.label, course.past.name, kind] = line[-1]
    return [before, *line] if before else line


def _joined(panel: Panel, course: Course, ends: Ends, look: str, stroke: Stroke) -> Iterator[str]:
    """A line for each kind of evaluation."""
    for kind in dict.fromkeys(e.kind for e in course.evaluations):
        places = [
            (panel.axis.place(course.past.name, e.iter), panel.y(e.top1)) for e in course.evaluations if e.kind == kind
        ]
        d = path([_after(course, kind, ends, places)])
        yield element("path", d=d, class_=look, stroke_dasharray=dash(stroke), data_run=course.trace.label or None)


def _dots(panel: Panel, course: Course, stroke: Stroke) -> str:
    """The evaluations, that at the stage's end larger than those inside. Those above or below the panel have none."""
    found: dict[tuple[int, float], list[Place]] = {}
    end = course.past.finished.iterations if course.past.finished else -1
    for e in course.evaluations:
        place = panel.axis.place(course.past.name, e.iter), panel.y(e.top1 if panel.name == TOP1 else e.loss)
        if panel.top - 3 <= place[1] <= panel.bottom + 1:
            found.setdefault((e.kind, 3.6 if e.iter == end else 2.0), []).append(place)
    return "".join(_shapes(kind, size, places, hue(stroke)) for (kind, size), places in found.items())


def _shapes(kind: int, size: float, places: Sequence[Place], hue: str) -> str:
    """One path of them all: a shape for each validation set, hollow for averaged weights."""
    r, d = number(size), number(2 * size)
    shapes = (
        f"m-{r},0a{r},{r} 0 1 0 {d},0a{r},{r} 0 1 0 -{d},0",
        f"m-{r},-{r}h{d}v{d}h-{d}z",
        f"m0,-{d}l{r},{d}l-{r},{d}l-{r},-{d}z",
        f"m0,-{r}l{r},{d}h-{d}z",
    )
    shape = shapes[kind // 2 % len(shapes)]
    found = "".join(f"M{number(x)},{number(y)}{shape}" for x, y in places)
    return element("path", d=found, class_=f"{'ring' if kind % 2 else 'dot'} {hue}")


def _names(panel: Panel, traces: Sequence[Trace], drawn: Sequence[Course]) -> str:
    """Which shape and which colour is what, above the first panel from the right."""
    found: list[tuple[str, str]] = []
    if 1 < len(traces) <= MOST_NAMED:
        for trace in traces:
            stroke, kind = look_of(trace, traces)
            sign = element("path", d="M-8,-4h14", class_=kind, stroke_dasharray=dash(stroke))
            found.append((sign, trace.label))
    kinds = {e.kind for course in drawn for e in course.evaluations}
    hollow, sets = any(kind % 2 for kind in kinds), val_sets(traces)
    if len(sets) > 1 or hollow:
        own = hue(next(iter(panel.axis.strokes.values())))
        found += [(_shapes(2 * n, 3, [(0, -4)], own), name) for n, name in enumerate(sets) if 2 * n in kinds]
        found += [(_shapes(1, 3, [(0, -4)], own), "averaged weights")] if hollow else []
    parts, x = [], panel.axis.right
    for sign, name in reversed(found):
        x -= wide(name, SIZE)
        if x < panel.axis.left:  # the table has them all
            break
        at = f"translate({number(x - 10)},{number(panel.top - 7)})"
        parts.append(words(name, x, panel.top - 7, "tick") + element("g", sign, transform=at))
        x -= 26
    return "".join(parts)


def remarks(panels: Sequence[Panel], traces: Sequence[Trace], drawn: Sequence[Course]) -> list[str]:
    """What is not drawn, and what the dots are."""
    found = []
    if any(panel.name == LOSS for panel in panels):
        found.append("loss: the line is that of training, dots are evaluations, a larger one at the end of a stage")
    beyond = dict.fromkeys(course.past.name for course in drawn if course.beyond)
    if beyond:
        found.append(f"trained further than the schedule goes now, which is not drawn: {', '.join(beyond)}")
    more = any(test.ema for trace in traces for past in trace.history.stages for _, test in past.tests)
    if len(traces) > 1 and (more or len(val_sets(traces)) > 1):
        found.append("of several runs: the first validation set, without averaged weights")
    return found


# -- where it is, and what happened


def incidents(axis: Axis, top: float, traces: Sequence[Trace]) -> tuple[str, float]:
    """A line of signs, and where it ends. Of what lies close together the sign of the worst."""
    known = [(trace, mark) for trace in traces for mark in trace.marks if axis.has(mark.stage, mark.iter)]
    if not known:
        return "", top
    found = [words("incidents", axis.left - 8, top + 11, "band", "end")]
    for x, marks in spaced([(axis.place(one[1].stage, one[1].iter), one) for one in known], APART):
        kind = next(kind for kind in SIGNS if any(mark.kind == kind for _, mark in marks))
        said = [f"{trace.label}: {mark.text}" if trace.label else mark.text for trace, mark in marks]
        more = [f"and {len(said) - MOST_SAID} more"] if len(said) > MOST_SAID else []
        sign = words(SIGNS[kind], x, top + 11, kind, "middle")
        found.append(element("g", title("\n".join([*said[:MOST_SAID], *more])), sign))
    return "".join(found), top + 18


def now(axis: Axis, top: float, bottom: float, traces: Sequence[Trace]) -> str:
    """Where a run is: a line through all panels, of several runs the heads alone."""
    found = []
    for trace in traces if len(traces) <= MOST_NAMED else ():
        if trace.now is None or not axis.has(*trace.now):
            continue
        stage, iter = trace.now
        x, alone = number(axis.place(stage, iter)), len(traces) == 1
        kind = "ink" if alone else hue(look_of(trace, traces)[0])
        parts = [element("path", d=f"M{x},{number(top)}l-4.5,-7h9z", class_=f"head {kind}")]
        parts += [element("path", d=f"M{x},{number(top)}V{number(bottom)}", class_="now")] if alone else []
        said = f"{trace.label + ': ' if trace.label else ''}{stage} {iter}"
        found.append(element("g", title(said), *parts, class_="cursor alive" if trace.alive else "cursor"))
    return "".join(found)
