"""What runs have come to, in panels under the learning rate: top-1 and loss, where they are, and what happened to them. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stagerun.drawing.colours import SOFT, Stroke
from stagerun.drawing.scale import Scale
from stagerun.tools.report.curves import colour, hidden
from stagerun.tools.report.history import StageHistory
from stagerun.tools.view.panel import SIZE, Axis, Panel, dash, hue
from stagerun.tools.view.svg import Place, element, number, path, spaced, title, wide, words
from stagerun.tools.view.trace import SIGNS, Trace

HIGH, BETWEEN = 120, 28  # of a panel, and above it
MOST_NAMED = 12  # runs that have a colour and a name of their own
FAR = 25  # a loss so many times the median makes the axis logarithmic
APART = 9.0  # pixels between two signs
TOP1, LOSS = "top-1, %", "loss"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`kind`: 0 is that of the first validation set, 1 with averaged weights; those after are of further sets."""

    iter: int
    top1: float  # percent
    loss: float
    kind: int


@dataclass(frozen=True, slots=True)
class Course:
    """What one run has done of a stage, as far as the schedule has it."""

    trace: Trace
    past: StageHistory
    losses: tuple[tuple[float, float], ...]  # iteration, mean
    evaluations: tuple[Evaluation, ...]


def courses(axis: Axis, traces: Sequence[Trace]) -> list[Course]:
    kinds = kinds_of(traces)
    return [
        _course(trace, past, axis.stages[past.name].iterations, kinds)
        for trace in traces
        for past in trace.history.stages
        if past.name in axis.stages
    ]


def kinds_of(traces: Sequence[Trace]) -> dict[tuple[str, bool], int]:
    """By the name of a further validation set, '' for the first, and whether the weights are averaged: the kind of evaluation."""
    beside = [test for trace in traces for past in trace.history.stages for _, test in past.beside]
    others = dict.fromkeys((test.val, test.ema) for test in beside)
    return {key: kind for kind, key in enumerate([("", False), ("", True), *others])}


def _course(trace: Trace, past: StageHistory, end: int, kinds: dict[tuple[str, bool], int]) -> Course:
    bins = past.trained.bins if past.trained else ()
    losses = [(bin.iter - (bin.updates - 1) / 2, bin.loss) for bin in bins if bin.iter <= end]
    found = [Evaluation(t.iter, 100 * t.top1, t.loss, kinds["", t.ema]) for _, t in past.tests if t.iter <= end]
    found += [Evaluation(t.iter, 100 * t.top1, t.loss, kinds[t.val, t.ema]) for _, t in past.beside if t.iter <= end]
    return Course(trace, past, tuple(losses), tuple(found))


def panels(axis: Axis, top: float, traces: Sequence[Trace], drawn: Sequence[Course]) -> list[Panel]:
    """Top-1 and loss, where a run has them."""
    found = []
    top1 = [e.top1 for course in drawn for e in course.evaluations]
    if top1:
        least = hidden(trace.history for trace in traces)
        low, high = min(top1) if least is None else least, max(top1)
        room = max(0.5, 0.06 * (high - low))
        low = low - room if least is None else low
        found.append(Panel(TOP1, axis, top + BETWEEN, HIGH, Scale(False, max(0.0, low), min(100.0, high + room))))
        top = found[-1].bottom
    losses = [loss for course in drawn for _, loss in course.losses]
    losses += [e.loss for course in drawn for e in course.evaluations]
    if losses:
        low, high = min(losses), max(losses)
        log = low > 0 and high > FAR * median(losses)
        room = 0.06 * (high - min(low, 0.0)) or 1.0
        scale = Scale(True, low / 1.1, high * 1.1) if log else Scale(False, min(0.0, low), high + room)
        found.append(Panel(LOSS, axis, top + BETWEEN, HIGH, scale))
    return found


def results(panels: Sequence[Panel], traces: Sequence[Trace], drawn: Sequence[Course], run: str) -> str:
    """The lines and dots of all runs; those of the chosen run lie on top."""
    if not panels:
        return ""
    axis = panels[0].axis
    order = sorted(drawn, key=lambda course: course.trace.label == run)
    found = [_names(panels[0], traces, run)]
    for panel in panels:
        last: dict[tuple[str, str, int], Place] = {}
        lines, dots = [], []
        for course in order:
            stroke, kind = look(axis, course, traces, run)
            if panel.name == LOSS:
                line = panel.line((axis.stages[course.past.name].x(i, axis.unit), loss) for i, loss in course.losses)
                lines.append(
                    element("path", d=path([line]), class_=kind, stroke_dasharray=dash(stroke)) if line else ""
                )
            else:
                lines += _joined(panel, course, last, kind, stroke)
            if "faint" not in kind:
                dots.append(_dots(panel, course, stroke))
        found += [panel.clipped(*lines), *dots]
    return "".join(found)


def look(axis: Axis, course: Course, traces: Sequence[Trace], run: str) -> tuple[Stroke, str]:
    """How it is drawn, and its classes: one run by its branches, several by their own colours, many faintly but for the chosen."""
    if len(traces) == 1:
        stroke = axis.strokes[course.past.name]
        return stroke, f"thin {hue(stroke)}"
    label = course.trace.label
    if len(traces) > MOST_NAMED and label != run:
        return Stroke(SOFT, "solid"), "faint"
    number = 0 if len(traces) > MOST_NAMED else [trace.label for trace in traces].index(label)
    stroke = Stroke(*colour(number))
    return stroke, f"thin {hue(stroke)}" + (" bold" if label == run else "")


def _joined(
    panel: Panel, course: Course, last: dict[tuple[str, str, int], Place], kind: str, stroke: Stroke
) -> Iterator[str]:
    """A line for each kind of evaluation, from the end of the stage that it follows."""
    axis, past = panel.axis, course.past
    parent = course.trace.history.follows(past)
    for which in dict.fromkeys(e.kind for e in course.evaluations):
        line = [(axis.place(past.name, e.iter), panel.y(e.top1)) for e in course.evaluations if e.kind == which]
        before = last.get((course.trace.label, parent.name, which)) if parent else None
        last[course.trace.label, past.name, which] = line[-1]
        d = path([[*([before] if before else []), *line]])
        yield element("path", d=d, class_=kind + (" side" if which else ""), stroke_dasharray=dash(stroke))


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
    """One path of them all: dots, rings for averaged weights, and squares and diamonds for further sets."""
    r = number(size)
    a = number(2 * size)
    round_, square, diamond = f"m-{r},0a{r},{r} 0 1 0 {a},0a{r},{r} 0 1 0 -{a},0", f"m-{r},-{r}h{a}v{a}h-{a}z", ""
    diamond = f"m0,-{a}l{a},{a}l-{a},{a}l-{a},-{a}z"
    shape = round_ if kind < 2 else (square, diamond)[kind % 2]
    d = "".join(f"M{number(x)},{number(y)}{shape}" for x, y in places)
    return element("path", d=d, class_=f"{'dot' if kind % 4 in (0, 2) else 'ring'} {hue}")


def _names(panel: Panel, traces: Sequence[Trace], run: str) -> str:
    """Which shape and which colour is what, above the first panel from the right; nothing where there is one of each."""
    kinds = kinds_of(traces)
    averaged = any(test.ema for trace in traces for past in trace.history.stages for _, test in past.tests)
    first = next(
        (t.val for trace in traces for past in trace.history.stages for _, t in past.tests if t.val), "validation"
    )
    shown = [(key, kind) for key, kind in kinds.items() if kind != 1 or averaged]
    found: list[tuple[str, str]] = []
    if len(traces) == 1:
        if len(shown) == 1:
            return ""
        own = hue(next(iter(panel.axis.strokes.values())))
        for (val, ema), kind in shown:
            found.append((_shapes(kind, 3.2, [(0, -4)], own), (val or first) + (", averaged weights" if ema else "")))
    elif len(traces) <= MOST_NAMED:
        for n, trace in enumerate(traces):
            stroke = Stroke(*colour(n))
            line = element("path", d="M-8,-4h14", class_=f"thin {hue(stroke)}", stroke_dasharray=dash(stroke))
            found.append((line, trace.label))
    elif any(trace.label == run for trace in traces):
        found.append((element("path", d="M-8,-4h14", class_=f"thin {hue(Stroke(*colour(0)))}"), run))
    parts, x = [], panel.axis.right
    for sign, name in reversed(found):
        x -= wide(name, SIZE)
        at = f"translate({number(x - 10)},{number(panel.top - 7)})"
        parts.append(words(name, x, panel.top - 7, "tick") + element("g", sign, transform=at))
        x -= 26
    return "".join(parts)


# -- where it is, and what happened


def incidents(axis: Axis, top: float, traces: Sequence[Trace]) -> tuple[str, float]:
    """A line of signs, and where it ends."""
    known = [(trace, mark) for trace in traces for mark in trace.marks if mark.stage in axis.stages]
    if not known:
        return "", top
    found = [words("incidents", axis.left - 8, top + 11, "band", "end")]
    for kind, sign in SIGNS.items():
        places = [
            (axis.place(mark.stage, mark.iter), f"{trace.label}: {mark.text}" if trace.label else mark.text)
            for trace, mark in known
            if mark.kind == kind
        ]
        for x, texts in spaced(places, APART):
            text = words(sign, x, top + 11, kind, "middle")
            found.append(element("g", title("\n".join(texts[:12])), text))
    return "".join(found), top + 18


def now(axis: Axis, top: float, bottom: float, traces: Sequence[Trace]) -> str:
    """A line through all panels for where a run is, with a head."""
    found = []
    for trace in traces if len(traces) <= MOST_NAMED else ():
        if trace.now is None or trace.now[0] not in axis.stages:
            continue
        stage, iter = trace.now
        x = number(axis.place(stage, iter))
        head = element("path", d=f"M{x},{number(top)}l-4.5,-7h9z", class_="head")
        line = element("path", d=f"M{x},{number(top)}V{number(bottom)}", class_="now")
        said = f"{trace.label + ': ' if trace.label else ''}{stage} {iter}"
        found.append(element("g", title(said), line, head, class_="cursor alive" if trace.alive else "cursor"))
    return "".join(found)
