"""The chart of a schedule and its runs, as SVG in a page or a file: rate, top-1 and loss, stages and settings over one x axis."""

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from stagerun.base.errors import UsageError
from stagerun.command.ending import tell
from stagerun.look import results
from stagerun.look.picture import (
    LEFT,
    RIGHT,
    Picture,
    StagePicture,
    box,
    element,
    joined,
    line,
    number,
    round_steps,
    text_width,
    title,
    words,
)
from stagerun.look.results import Panel, Run
from stagerun.system.files import writing

WIDTH = 1100
RATE, RATE_ABOVE_RESULTS = 240, 190  # height of the panel
LABELS, TICKS, ROW, CAPTION, GAP = 14, 24, 18, 15, 5  # height of a line of labels, ticks, bands, text; between bands
MOST_LABEL_LINES = 6
MOST_LANES = 14  # of the bands of settings
MOST_WRITTEN = 6  # values of a band that are written below the chart
ENSEMBLE, TO_DOTS, TO_TEXT = 22.0, 4.0, 17.0  # of an ensemble: height, to its dots, to the foot of its text
MARGIN = 4.0  # between a text and the box that it is in


def chart(picture: Picture, runs: Sequence[Run] = ()) -> str:
    labels = _labels(picture, grey=len(runs) > 1)
    top = 10.0 + LABELS * (1 + max((row for row, *_ in labels), default=0))
    rate = Panel("learning rate", top, RATE_ABOVE_RESULTS if runs else RATE, *picture.rates())
    courses = results.courses(picture, runs)
    panels = [rate, *results.panels(rate.bottom, courses)]
    bottom = panels[-1].bottom
    parts = [_rules(picture, top, bottom), *(panel.frame() for panel in panels)]
    parts += [words(text, x + 2, top - 5 - LABELS * row, kind) for row, x, text, kind in labels]
    parts += [*_rates(picture, rate, runs), results.draw(panels[1:], courses), _ticks(picture, bottom)]
    incidents, foot = results.incidents(picture, bottom + TICKS, runs)
    parts += [incidents, *(results.position(picture, top, bottom, run) for run in runs if len(runs) == 1)]
    notes: list[str] = []
    for name, lanes in _bands(picture):
        texts = list(dict.fromkeys(segment.text for lane in lanes for segment in lane))
        written = set[str]()
        if (
            name == "stages" or len(lanes) <= MOST_LANES
        ):  # the pointer says more than a line for each of very many branches
            paint = partial(_stage, runs) if name == "stages" else partial(_value, texts)
            svg, written = _band(name, lanes, foot, paint)
            parts.append(svg)
            foot += len(lanes) * ROW + GAP
        if name == "stages":
            parts.append(_joins(picture, foot - len(lanes) * ROW - GAP) + _ensembles(picture, foot))
            foot += (ENSEMBLE * len(picture.ensembles) + GAP) if picture.ensembles else 0
        elif not written >= {*texts}:
            more = f" and {len(texts) - MOST_WRITTEN} more" if len(texts) > MOST_WRITTEN else ""
            notes.append(f"{name}, which stages differ in: {'; '.join(texts[:MOST_WRITTEN])}{more}")
    notes += [_caption(picture), *results.notes(courses)]
    lines = [text for note in notes for text in textwrap.wrap(note, int(WIDTH / 6.2))]
    parts += [words(text, LEFT, foot + CAPTION * n, "caption") for n, text in enumerate(lines, 1)]
    values = {
        "foot": bottom,
        "panels": [[p.name, p.top, p.bottom, p.low, p.high] for p in panels],
        "stages": [_pointed(stage) for stage in picture.stages.values()],
        "runs": results.pointed(courses),
    }
    height = foot + CAPTION * (len(lines) + 0.5)
    return element(
        "svg", *parts, id="chart", xmlns="http://www.w3.org/2000/svg", width=WIDTH, height=height, viewBox=f"0 0 {WIDTH} {number(height)}",
        role="group", aria_label=f"{picture.name}: learning rate and stages", data_values=json.dumps(values, separators=(",", ":")),
    )  # fmt: skip


def _pointed(stage: StagePicture) -> dict[str, object]:
    """Return what page.js shows of a stage under the pointer."""
    return {
        "name": stage.name,
        "note": stage.note,
        "lane": stage.lane,
        "colour": stage.colour,
        "x": [round(stage.left, 1), round(stage.right, 1)],
        "n": stage.iterations,
        "at": [stage.begin, stage.each],
        "lr": [[int(iter) for iter, _ in stage.rates], [float(f"{rate:.6g}") for _, rate in stage.rates]],
        "settings": {name: [*zip(*values, strict=True)] for name, values in stage.settings.items()},
    }


# -- behind, above and below the curves


def _labels(picture: Picture, grey: bool) -> list[tuple[int, float, str, str]]:
    """Return line, x, text and class of the labels above the panel that have room."""
    stages: dict[tuple[float, str], list[StagePicture]] = {}
    for stage in picture.stages.values():
        for mark in stage.marks:
            if mark.text:
                stages.setdefault((round(stage.x(mark.iter), 3), mark.text), []).append(stage)
    labels, ends = [], [0.0] * MOST_LABEL_LINES
    for (x, text), at in sorted(stages.items(), key=lambda item: item[0][0]):
        width = text_width(text) + 6
        x = min(x, WIDTH - width)
        row = next((row for row, end in enumerate(ends) if end <= x), None)
        if row is not None:
            ends[row] = x + width
            labels.append((row, x, text, f"hued {at[0].colour}" if at[0].curve and not grey else "tick"))
    return labels


def _rules(picture: Picture, top: float, bottom: float) -> str:
    """Draw lines through all panels: where stages begin, and where a warm-up ends or the rate steps."""
    begins, inside = set[float](), set[float]()
    for stage in picture.stages.values():
        if stage.parent is not None:
            begins.add(round(stage.left, 1))
        inside |= {round(stage.x(mark.iter), 1) for mark in stage.marks if mark.iter}
    return "".join(
        line("".join(joined((x, top), (x, bottom)) for x in sorted(xs)), kind)
        for kind, xs in (("rule", begins), ("fine", inside - begins))
    )


def _ticks(picture: Picture, top: float) -> str:
    parts = [words("epochs", LEFT - 14, top + 15, "tick", "end")]
    for value in round_steps(0.0, picture.end, 12):
        x = LEFT + value / picture.end * (RIGHT - LEFT)
        parts.append(line(f"{joined((x, top))}v4", "frame"))
        parts.append(words(f"{value:.6g}", x, top + 15, "tick", "middle"))
    return "".join(parts)


def _caption(picture: Picture) -> str:
    notes = ["lines: a stage begins; dotted: a warm-up ends, or the rate steps; x: by what factor it jumps"]
    notes += ["dots: the members of an ensemble"] if picture.ensembles else []
    return "; ".join([*notes, *(note for stage in picture.stages.values() for note in stage.notes)])


# -- the learning rate


def _rates(picture: Picture, panel: Panel, runs: Sequence[Run]) -> Iterator[str]:
    """Draw a curve for each stage; with one run, pale from where it is."""
    for stage in picture.stages.values():
        colour = stage.colour if len(runs) < 2 else "soft"
        kind, trained = f"line {colour}", results.reached(stage, runs) if len(runs) == 1 else 0
        ahead = " ahead" if len(runs) == 1 and trained < stage.iterations else ""
        parts = [line(joined(*panel.path(stage, stage.line())), kind + ahead, stage.dash)]
        if trained:
            done = panel.path(stage, stage.line(trained))
            if not stage.curve:  # areas of branches would cover each other
                area = joined(*done, (done[-1][0], panel.bottom), (stage.left, panel.bottom))
                parts.append(line(area, f"done {colour}"))
            parts.append(line(joined(*done), kind, stage.dash))
        for mark in stage.marks:
            if mark.jumps and not mark.iter:
                leap = joined((stage.left, panel.y(mark.before)), (stage.left, panel.y(mark.after)))
                parts.append(line(leap, f"leap {colour}"))
        yield element("g", *parts, data_of=stage.name)


# -- bands: stages and settings below the curves


class Segment(NamedTuple):
    """Pixels for which a text holds."""

    stage: StagePicture
    begin: float
    end: float
    text: str


Painter = Callable[[Segment, float, str], str]  # a segment at a y, with its label, as SVG


def _bands(picture: Picture) -> Iterator[tuple[str, list[list[Segment]]]]:
    """Yield the name of each setting and its segments on the lines of the stages; one segment for a value that all stages share."""
    stages = sorted(picture.stages.values(), key=lambda stage: stage.left)
    for name in ("stages", "weight decay", "momentum", "batch", "image size", "augmentation"):
        lanes: list[list[Segment]] = [[] for _ in range(1 + max(stage.lane for stage in stages))]
        for stage in stages:
            values = [(0, _stage_title(stage))] if name == "stages" else stage.settings[name]
            for (iter, text), (end, _) in pairwise([*values, (stage.iterations, "")]):
                lane, segment = lanes[stage.lane], Segment(stage, stage.x(iter), stage.x(end), text)
                if lane and lane[-1].text == text and segment.begin - lane[-1].end < 0.05:
                    lane[-1] = lane[-1]._replace(end=segment.end)
                else:
                    lane.append(segment)
        texts = {segment.text for lane in lanes for segment in lane}
        if len(texts) == 1 and name != "stages":
            lanes = [[Segment(stages[0], LEFT, RIGHT, *texts)]]
        if name != "momentum" or len(texts) > 1:
            yield name, lanes


def _stage_title(stage: StagePicture) -> str:
    notes = [f"from {stage.average}"] if stage.average is not None else []
    notes += [] if stage.enabled else ["not enabled"]
    return stage.name + (f" ({', '.join(notes)})" if notes else "")


def _band(name: str, lanes: Sequence[Sequence[Segment]], top: float, paint: Painter) -> tuple[str, set[str]]:
    """Draw a band. Return it, and the texts that had room inside their segment or behind it."""
    parts, written, borders = [words(name, LEFT - 8, top + ROW / 2 + 4, "band", "end")], set[str](), ""
    for n, lane in enumerate(lanes):
        y = top + n * ROW
        for segment, following in zip(lane, (*lane[1:], None), strict=True):
            limit, room = following.begin if following else RIGHT, text_width(segment.text) + 2 * MARGIN
            is_inside = room <= min(segment.end, limit) - segment.begin
            label = ""
            if is_inside or room <= limit - segment.end:
                x = (segment.begin if is_inside else segment.end) + MARGIN
                label = words(segment.text, x, y + ROW / 2 + 3.5)
                written.add(segment.text)
            parts.append(paint(segment, y, label))
            if following and following.begin - segment.end < 0.05:
                borders += f"M{number(following.begin)},{number(y + 1)}v{ROW - 2}"
    return "".join([*parts, line(borders, "rule")]), written


def _value(texts: Sequence[str], segment: Segment, y: float, label: str) -> str:
    return _fill(segment, y, f"fill f{texts.index(segment.text) % 6}", title(segment.text)) + label


def _stage(runs: Sequence[Run], segment: Segment, y: float, label: str) -> str:
    """Stages can be clicked and reached with the keyboard; they are filled as far as they are trained, with ticks for snapshots."""
    stage, begin, foot = segment.stage, segment.begin, y + ROW - 1.5
    trained, colour = results.reached(stage, runs), stage.colour if len(runs) < 2 else "soft"
    state = "trained" if trained == stage.iterations else f"trained to {trained}" if trained else "not started"
    about = ", ".join(filter(None, [f"{stage.name}: {stage.iterations} iterations", stage.note, state if runs else ""]))
    parts = [title(about), _fill(segment, y, "fill f0")]
    if trained and len(runs) == 1:
        parts.append(_fill(segment._replace(end=stage.x(trained)), y, f"came {colour}"))
    parts.append(line(joined((begin, foot), (max(segment.end, begin + 1), foot)), f"foot {colour}", stage.dash))
    parts += [label, _fill(segment, y, "box")]
    return element("g", *parts, class_="stage", data_stage=stage.name, tabindex="0", role="button", aria_label=about)


def _fill(segment: Segment, y: float, kind: str, *inside: str) -> str:
    return box(segment.begin, segment.end, y + 1, y + ROW - 1, kind, *inside)


def _joins(picture: Picture, top: float) -> str:
    """Join each branch to the line of its parent."""
    d = ""
    for stage in picture.stages.values():
        if stage.parent is not None and stage.parent.lane != stage.lane:
            begin, end = top + (stage.parent.lane + 0.92) * ROW, top + (stage.lane + 0.5) * ROW
            d += joined((stage.left, begin), (stage.left, end))
    return line(d, "join")


def _ensembles(picture: Picture, top: float) -> str:
    """Draw the members of each, and its label below them."""
    parts = [words("ensembles", LEFT - 8, top + TO_TEXT, "band", "end")] if picture.ensembles else []
    for row, ensemble in enumerate(picture.ensembles):
        y, xs = top + ENSEMBLE * row + TO_DOTS, [x for x, _ in ensemble.members]
        parts.append(line(joined((min(xs), y), (max(xs), y)), "join"))
        parts += [element("circle", cx=x, cy=y, r=2.2, class_=f"dot {stage.colour}") for x, stage in ensemble.members]
        x = max(LEFT, min(*xs, RIGHT - text_width(ensemble.label)))
        parts.append(words(ensemble.label, x, y + TO_TEXT - TO_DOTS))
    return "".join(parts)


# -- files


def stylesheet() -> str:
    return files("stagerun.look").joinpath("chart.css").read_text(encoding="utf-8")


def svg(picture: Picture, runs: Sequence[Run] = ()) -> str:
    """Return the chart with its style, on white. It has no variables, which converters of SVG don't know, and nothing for a script."""
    drawn = re.sub(r' (?:data-[a-z]+|tabindex|role|aria-[a-z]+)="[^"]*"', "", chart(picture, runs))
    colours, style = re.split(r"@media.*?/\*.*?\*/\n", stylesheet(), flags=re.DOTALL)
    hexes = dict(re.findall(r"(--\w+): (#\w+)", colours))
    style = re.sub(r".*(?:picked|:hover|:focus).*\n", "", style)
    style = re.sub(r"var\((--\w+)\)", lambda match: hexes[match[1]], style)
    paper = element("rect", width="100%", height="100%", fill="#ffffff")
    return drawn.replace(">", f">{title(picture.name)}{element('style', style)}{paper}", 1) + "\n"


def write_plot(file: str, picture: Picture, runs: Sequence[Run] = ()) -> None:
    """UsageError for a file that isn't SVG."""
    if not file.lower().endswith(".svg"):
        raise UsageError(
            f"--plot {file}: pictures are written as SVG", "name FILE.svg; `rsvg-convert` makes a PNG of it"
        )
    with writing(file, "give --plot another file"):
        Path(file).write_text(svg(picture, runs), encoding="utf-8")
    tell(f"written to {file}")
