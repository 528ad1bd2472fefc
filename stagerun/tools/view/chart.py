"""The chart of a plan and of the runs over it, as SVG that stands in a page or is a file. Pure.

One x axis for all of it: the learning rate, what runs have come to, the stages, and what else is set from where to where. Colours
are classes, whose style `style` gives, and the page's in the dark too.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise

from stagerun.drawing.bands import Band, Label, Segment, bands, captions, leaves, mark_labels, mark_text, on_rows
from stagerun.drawing.colours import DARK, FILLS, INK, TEXTS, variable
from stagerun.drawing.picture import Kind, Picture, StagePicture, Unit
from stagerun.drawing.scale import Scale, labels, round_steps
from stagerun.drawing.svg import document, element, number, path, title, wide, words
from stagerun.tools.report.history import Run
from stagerun.tools.view.panel import MARGIN, SIZE, Axis, Panel, dash, hue
from stagerun.tools.view.results import courses, incidents, now, panels, remarks, results
from stagerun.tools.view.values import values

WIDTH, LEFT, RIGHT = 1100, 104, 18
RATE, RATE_ABOVE_RESULTS = 240, 190  # height of the panel
LABELS, TICKS, CAPTION, GAP = 14, 24, 15, 5  # a line of labels; the ticks of the x axis; a line of text; between bands
MOST_LINES = 14  # of a band that is drawn, if it is not that of the stages
TICK_APART = 2.0  # pixels
# Pixels of an ensemble's line: its height, to its dots, to the foot of its text, and between dots.
HIGH, LINE, WRITTEN, DOTS_APART = 22.0, 4.0, 17.0, 5.0


def style() -> str:
    """What a page needs beside the variables of `drawing.html.colour_style`."""
    hues = "".join(f".{variable(c)[2:]} {{ --hue: var({variable(c)}); }}\n" for c in DARK)
    return hues + STYLE


STYLE = """
#chart { display: block; width: 100%; height: auto; font-size: 11px; font-family: "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
#chart text { fill: var(--ink); }
#chart .tick, #chart .band, #chart .caption { fill: var(--soft); }
#chart .name { font-weight: bold; }
#chart .hued { fill: var(--hue); }
#chart path { fill: none; }
#chart .grid { stroke: var(--grid); }
#chart .frame { stroke: var(--rule); }
#chart .rule { stroke: var(--rule); stroke-width: 0.9; }
#chart .fine { stroke: var(--rule); stroke-width: 0.9; stroke-dasharray: 1 2; }
#chart .join { stroke: var(--soft); stroke-width: 0.9; }
#chart .line { stroke: var(--hue); stroke-width: 1.7; stroke-linejoin: round; }
#chart .leap { stroke: var(--hue); stroke-width: 0.9; stroke-dasharray: 1 1.5; }
#chart .thin { stroke: var(--hue); stroke-width: 1.1; stroke-linejoin: round; }
#chart .faint { stroke: var(--soft); stroke-width: 0.6; stroke-opacity: 0.3; }
#chart path[data-run].picked { stroke-width: 2.5; stroke-opacity: 1; }
#chart .faint.picked { stroke: var(--c0072b2); }
#chart .ahead { stroke-opacity: 0.38; }
#chart .done { fill: var(--hue); fill-opacity: 0.1; }
#chart .dot { fill: var(--hue); stroke: none; }
#chart .ring { fill: var(--card, var(--paper)); stroke: var(--hue); stroke-width: 1.2; }
#chart .fill { fill: var(--hue); }
#chart .came { fill: var(--hue); fill-opacity: 0.45; }
#chart .foot { stroke: var(--hue); stroke-width: 2; }
#chart .saved { stroke: var(--ink); stroke-width: 1; }
#chart .met { stroke: var(--hue); stroke-width: 0.6; }
#chart .now { stroke: var(--ink); stroke-width: 1.2; }
#chart .head { fill: var(--hue); }
#chart .ink { --hue: var(--ink); }
#chart .column { fill: none; }
#chart .picked .column { fill: var(--grid); fill-opacity: 0.6; }
#chart .picked .line { stroke-width: 3; stroke-opacity: 1; }
#chart .stage { cursor: pointer; outline: none; }
#chart .stage:hover .box, #chart .stage:focus-visible .box { stroke: var(--ink); stroke-width: 1; }
#chart .stage:focus-visible .box { stroke-width: 2; }
#chart .picked .box { stroke: var(--ink); stroke-width: 1.5; }
#chart .box { fill: none; stroke: none; }
#chart .restart { fill: var(--c0072b2); }
#chart .rollback, #chart .warning { fill: var(--cd55e00); font-weight: bold; }
"""


def chart(
    picture: Picture,
    unit: Unit,
    scale: Scale,
    runs: Sequence[Run] = (),
) -> str:
    """ValueError for hours that are not known."""
    axis = Axis.of(picture, unit, LEFT, WIDTH - RIGHT, grey=len(runs) > 1)
    rows, left_out = _label_rows(axis)
    top = 10.0 + LABELS * max(1, len(rows))
    rate = Panel("learning rate", axis, top, RATE_ABOVE_RESULTS if runs else RATE, scale)
    drawn = courses(axis, runs)
    others = panels(axis, rate.bottom, drawn)
    bottom = max(panel.bottom for panel in (rate, *others))
    parts = [_across(axis, rate.top, bottom), *(panel.frame() for panel in (rate, *others))]
    parts += [
        _labels(axis, rows, rate.top),
        *_rates(rate, runs),
        results(others, drawn),
        _ticks(axis, bottom),
    ]
    top = bottom + TICKS
    marked, top = incidents(axis, top, runs)
    parts += [marked, now(axis, rate.top, bottom, runs), _members_on(rate)]
    lanes: list[tuple[int | None, float, float]] = []
    unsaid = []
    for band in bands(picture, unit):
        if not _fits(axis, band):
            unsaid.append(band)
        if (
            band.title != "stages" and len(band.lanes) > MOST_LINES
        ):  # a line for each branch would say less than the pointer does
            continue
        high = _row(band)
        parts.append(_band(axis, band, top, high, runs))
        for n, lane in enumerate(band.lanes):
            common = all(segment.stage == "" for segment in lane)
            lanes.append((None if common else n, top + n * high, top + (n + 1) * high))
        top += len(band.lanes) * high + GAP
        if band.title == "stages" and picture.ensembles:
            parts.append(_ensembles(axis, top))
            lanes.append((None, top, top + HIGH * len(picture.ensembles)))
            top += HIGH * len(picture.ensembles) + GAP
    said = [*captions(picture, scale, unsaid, left_out), *remarks(others, drawn)]
    foot = [line for text in said for line in textwrap.wrap(text, int(WIDTH / 6.2))]
    parts += [words(line, LEFT, top + CAPTION * n, "caption") for n, line in enumerate(foot, 1)]
    data = values((rate, *others), lanes, (rate.top, top - GAP), drawn)
    return element(
        "svg", *parts, id="chart", viewBox=f"0 0 {WIDTH} {number(top + CAPTION * (len(foot) + 0.5))}", role="group",
        aria_label=f"{picture.name}: learning rate and stages", data_values=json.dumps(data, separators=(",", ":"), allow_nan=False),
    )  # fmt: skip


def file(picture: Picture, unit: Unit, scale: Scale, runs: Sequence[Run] = ()) -> bytes:
    """A chart for itself, on white. Its style names colours, since converters of SVG know no variables, and it has nothing for a script."""
    drawn = chart(picture, unit, scale, runs)
    drawn = re.sub(r' (?:data-[a-z]+|tabindex|role|aria-[a-z]+)="[^"]*"', "", drawn)
    box = re.match(r'<svg id="chart" viewBox="0 0 (\S+) (\S+)">', drawn)
    assert box is not None
    colours = {f"--{name}": colour for name, colour in TEXTS.items()} | {variable(colour): colour for colour in DARK}
    hues = {name: f"#{name[1:]}" for name in sorted(set(re.findall(r"\bc[0-9a-f]{6}\b", drawn)))} | {"ink": INK}
    rules = []
    for rule in STYLE.strip().split("\n")[1:]:
        selector, said = rule.split(" {", 1)
        if "var(--hue)" in said:
            rules += [f"{selector}.{name} {{{said.replace('var(--hue)', hue)}" for name, hue in hues.items()]
        elif ":" not in selector and "picked" not in selector:
            rules.append(rule)
    style = "\n".join(rules).replace("var(--card, var(--paper))", "#ffffff")
    style = re.sub(r"var\((--\w+)\)", lambda match: colours[match[1]], style)
    inside = element("g", drawn[box.end() : -len("</svg>")], id="chart", font_size=11)
    return document(picture.name, float(box[1]), float(box[2]), element("style", style), inside)


# -- what stands behind and above


def _label_rows(axis: Axis) -> tuple[list[list[tuple[float, Label]]], int]:
    """What is written above the panel and where, in pixels, and how many labels have no room there."""

    def extent(label: Label) -> tuple[float, float]:
        long = wide(label.text, SIZE) + 6
        begin = min(axis.x(label.at), WIDTH - long)
        return begin, begin + long

    unit = axis.unit
    return on_rows(mark_labels(axis.picture, mark_text, lambda s, mark: round(s.x(mark.iter, unit), 9)), extent)


def _labels(axis: Axis, rows: list[list[tuple[float, Label]]], top: float) -> str:
    numbers, of = axis.picture.curves(axis.unit), axis.strokes
    found = []
    for n, row in enumerate(rows):
        for x, label in row:
            first = label.stages[0].name
            kind = f"hued {hue(of[first])}" if numbers[first] else "tick"
            found.append(words(label.text, x + 2, top - 5 - LABELS * n, kind))
    return "".join(found)


def _across(axis: Axis, top: float, bottom: float) -> str:
    """Through all panels: each stage, which is filled where it is chosen, where it begins, and where a warm-up ends or the rate steps."""
    down, found = f",{number(top)}V{number(bottom)}", []
    rules, fine = set[str](), set[str]()
    for stage in axis.picture.stages:
        begin, end = (axis.x(at) for at in stage.extent(axis.unit))
        box = element("rect", x=begin, y=top, width=max(1, end - begin), height=bottom - top, class_="column")
        found.append(_of(stage.name, box))
        rules |= {number(axis.place(stage.name, 0))} if stage.parent is not None else set()
        fine |= {number(axis.place(stage.name, mark.iter)) for mark in stage.marks if mark.kind is not Kind.START}
    for kind, places in (("rule", rules), ("fine", fine - rules)):
        found.append(element("path", d="".join(f"M{x}{down}" for x in sorted(places)), class_=kind))
    return "".join(found)


def _of(stage: str, *inside: str) -> str:
    """What changes its look in the page where the stage is chosen."""
    return element("g", *inside, data_of=stage)


def _ticks(axis: Axis, top: float) -> str:
    places = round_steps(0.0, axis.end, max(2, int((axis.right - axis.left) // 80)))
    found = [words(axis.unit.value, axis.left - 14, top + 15, "tick", "end")]
    for at, text in zip(places, labels(places), strict=True):
        found.append(element("path", d=f"M{number(axis.x(at))},{number(top)}v4", class_="frame"))
        found.append(words(text, axis.x(at), top + 15, "tick", "middle"))
    return "".join(found)


# -- the learning rate


def _rates(panel: Panel, runs: Sequence[Run]) -> list[str]:
    """A curve for each stage; with one run, in full what it has trained and paler what is to come."""
    axis, found = panel.axis, []
    numbers = axis.picture.curves(axis.unit)
    for stage in axis.picture.stages:
        stroke = axis.strokes[stage.name]
        came = reached(stage, runs)
        places = panel.line((stage.x(i, axis.unit), lr) for i, lr in stage.line())
        ahead = " ahead" if len(runs) == 1 and came < stage.iterations else ""
        said = [element("path", d=path([places]), class_=f"line {hue(stroke)}{ahead}", stroke_dasharray=dash(stroke))]
        if len(runs) == 1 and came > 0:
            done = panel.line((stage.x(i, axis.unit), lr) for i, lr in stage.until(came))
            foot = [(done[-1][0], panel.bottom), (done[0][0], panel.bottom)]
            if not numbers[stage.name]:  # those of branches would lie on each other
                said.append(element("path", d=path([[*done, *foot]]), class_=f"done {hue(stroke)}"))
            if ahead:
                line_of = f"line {hue(stroke)}"
                said.append(element("path", d=path([done]), class_=line_of, stroke_dasharray=dash(stroke)))
        for mark in stage.marks:
            if mark.jumps and mark.kind is Kind.START:
                x = places[0][0]
                leap = [(x, panel.y(mark.before)), (x, panel.y(mark.after))]
                said.append(element("path", d=path([leap]), class_=f"leap {hue(stroke)}"))
        said.append(_feet(panel, stage.name, stage.meetings, 7, f"met {hue(stroke)}"))
        found.append(_of(stage.name, *said))
    return found


def reached(stage: StagePicture, runs: Sequence[Run]) -> int:
    """The iteration that the furthest of the runs has come to, the stage's last at most."""
    histories = [run.history.stage(stage.name) for run in runs]
    return min(stage.iterations, max((past.iter for past in histories if past), default=0))


def _feet(panel: Panel, stage: str, iters: Sequence[int], high: float, kind: str) -> str:
    """A tick at the foot for each; those that would lie on each other are one."""
    places = {round(panel.axis.place(stage, i) / TICK_APART) for i in iters}
    d = "".join(f"M{number(x * TICK_APART)},{number(panel.bottom)}v{-high}" for x in sorted(places))
    return element("path", d=d, class_=kind) if d else ""


# -- the bands


def _limits(lane: Sequence[Segment]) -> list[float]:
    """Up to where the label of each may go."""
    return [segment.begin for segment in lane[1:]] + [float("inf")]


def _fits(axis: Axis, band: Band) -> bool:
    """Whether the picture says each of its values somewhere."""
    if band.title == "stages":
        return True
    drawn = len(band.lanes) <= MOST_LINES
    written = {s.text for lane in band.lanes for s, to in zip(lane, _limits(lane), strict=True) if axis.fits(s, to)}
    return drawn and written >= {*band.texts}


def _row(band: Band) -> float:
    """The height of each of its lines."""
    return 15 if len(band.lanes) > MOST_LINES else 18


def _band(axis: Axis, band: Band, top: float, high: float, runs: Sequence[Run]) -> str:
    fills = {text: variable(FILLS[n % len(FILLS)])[2:] for n, text in enumerate(band.texts)}
    found = [words(band.title, axis.left - 8, top + high * 0.5 + 4, "band", "end")]
    for row, lane in enumerate(band.lanes):
        y = top + row * high
        for segment, limit in zip(lane, _limits(lane), strict=True):
            if band.title == "stages":
                found.append(_stage(axis, segment, limit, y, high, runs))
            else:
                box = _box(axis, segment, y, high, f"fill {fills[segment.text]}", title(segment.text))
                found += [box, _written(axis, segment, limit, y, high)]
        borders = [b.begin for a, b in pairwise(lane) if b.begin <= a.end * (1 + 1e-9)]
        d = "".join(f"M{number(axis.x(at))},{number(y + 1)}v{number(high - 2)}" for at in borders)
        found.append(element("path", d=d, class_="rule") if d else "")
    return "".join(found) + (_joins(axis, top, high) if band.title == "stages" else "")


def _box(axis: Axis, segment: Segment, y: float, high: float, kind: str, *inside: str) -> str:
    begin, end = axis.x(segment.begin), axis.x(segment.end)
    low = min(1.0, high / 8)
    return element(
        "rect", *inside, x=begin, y=y + low, width=max(1, end - begin), height=high - 2 * low, class_=kind
    )  # fmt: skip


def _written(axis: Axis, segment: Segment, limit: float, y: float, high: float) -> str:
    if not axis.fits(segment, limit):
        return ""
    place = segment.begin if axis.inside(segment, limit) else segment.end
    return words(segment.text, axis.x(place) + MARGIN, y + high / 2 + 3.5)


def _stage(axis: Axis, segment: Segment, limit: float, y: float, high: float, runs: Sequence[Run]) -> str:
    """One that can be reached with the keyboard. Filled as far as it is trained; ticks are snapshots."""
    stage = axis.stages[segment.stage]
    own, came = axis.strokes[stage.name], reached(stage, runs)
    said = about(stage, came if runs else None)
    begin, end = axis.x(segment.begin), axis.x(segment.end)
    parts = [title(said), _box(axis, segment, y, high, f"fill {variable(FILLS[0])[2:]}")]
    if came and len(runs) == 1:
        there = axis.place(stage.name, came)
        parts.append(
            element("rect", x=begin, y=y + 1, width=max(1, there - begin), height=high - 2, class_=f"came {hue(own)}")
        )
    foot = f"M{number(begin)},{number(y + high - 1.5)}H{number(max(end, begin + 1))}"
    parts.append(element("path", d=foot, class_=f"foot {hue(own)}", stroke_dasharray=dash(own)))
    saved = {round(axis.place(*at)) for run in runs for at in run.snapshots if at[0] == stage.name and axis.has(*at)}
    ticks = "".join(f"M{x},{number(y + high - 6)}v4.5" for x in sorted(saved))
    parts += [element("path", d=ticks, class_="saved") if ticks and len(runs) == 1 else ""]
    parts += [_written(axis, segment, limit, y, high), _box(axis, segment, y, high, "box")]
    return element(
        "g", *parts, class_="stage", data_stage=stage.name, tabindex="0",
        role="button", aria_label=said,
    )  # fmt: skip


def about(stage: StagePicture, came: int | None) -> str:
    """A stage in words. `came`: how far it is trained, None where there is no run."""
    found = [f"{stage.name}: {stage.iterations} iterations"]
    found += [leaves(stage)] if stage.parent is not None else []
    found += ["not enabled"] if not stage.enabled else []
    if came is not None:
        done = "trained" if came == stage.iterations else f"trained to {came}" if came else "not started"
        found.append(done)
    return ", ".join(found)


def _joins(axis: Axis, top: float, high: float) -> str:
    """A branch is joined to the line of its parent, or to the average that it starts from."""
    lanes, d = axis.lanes, ""
    foot = top + high * (1 + max(lanes.values())) + GAP
    for stage, ensemble in axis.picture.joins(axis.unit):
        begin, end = top + (lanes[stage.parent or ""] + 0.92) * high, top + (lanes[stage.name] + 0.5) * high
        if ensemble is not None:
            begin, end = top + (lanes[stage.name] + 0.92) * high, foot + HIGH * ensemble + LINE
        d += f"M{number(axis.place(stage.name, 0))},{number(begin)}V{number(end)}"
    return element("path", d=d, class_="join") if d else ""


# -- ensembles


def _ensembles(axis: Axis, top: float) -> str:
    """Their members in the colours of their curves, and the name below them."""
    found = [words("ensembles", axis.left - 8, top + WRITTEN, "band", "end")]
    for row, ensemble in enumerate(axis.picture.ensembles):
        y, places = top + HIGH * row, axis.picture.places(ensemble, axis.unit)
        first, last = axis.x(places[0][0]), axis.x(places[-1][0])
        room = axis.right - axis.left
        label = next((said for said in (ensemble.label, ensemble.name) if wide(said, SIZE) <= room), "")
        inside = [title(ensemble.label)]
        inside.append(element("path", d=f"M{number(first)},{number(y + LINE)}H{number(last)}", class_="join"))
        inside.append(_dots(axis, ((axis.x(x), y + LINE, stage.name) for x, stage, _ in places)))
        inside.append(words(label, min(first, axis.right - wide(label, SIZE)), y + WRITTEN))
        found.append(element("g", *inside))
    return "".join(found)


def _members_on(panel: Panel) -> str:
    """Each where its stage's curve is after as many iterations."""
    axis = panel.axis
    every = (place for ensemble in axis.picture.ensembles for place in axis.picture.places(ensemble, axis.unit))
    return _dots(axis, ((axis.x(x), panel.y(stage.until(iter)[-1][1]), stage.name) for x, stage, iter in every))


def _dots(axis: Axis, places: Iterable[tuple[float, float, str]]) -> str:
    """Those that would lie on each other are one."""
    found = {(stage, round(x / DOTS_APART)): (x, y) for x, y, stage in places}
    return "".join(
        element("circle", cx=x, cy=y, r=2.2, class_=f"dot {hue(axis.strokes[stage])}")
        for (stage, _), (x, y) in found.items()
    )
