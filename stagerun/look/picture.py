"""A schedule as stages on an axis of epochs, with the rates that the trainer gets; and SVG as text. Pure.

A stage's x counts along its path from the root, so a branch begins where it leaves its parent.
"""

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from itertools import count

from stagerun.base.recipe import Schedule, Solver, Stage
from stagerun.base.text import listed
from stagerun.plan.described import augmentation, joints, jumps
from stagerun.plan.ensembles import in_words, rule_in_words
from stagerun.plan.steps import policy_steps
from stagerun.schedule import learning_rate
from stagerun.schedule.image_size import crop_size

XY = tuple[float, float]

LEFT, RIGHT = 104.0, 1082.0  # pixels
COLOURS, DASHES = 7, (None, "6 3", "1.5 2.5")  # classes c0 to c6 of chart.css
# Stretches of all stages, and of one stage; the first, least, largest and last rates of each are drawn.
POINTS, LEAST_POINTS = 500, 16
MOST_MARKED = 12  # steps of a stage that are labelled
MOST_MEMBERS = 12  # named in the label of an ensemble


@dataclass(frozen=True, slots=True)
class Mark:
    """An iteration at which the rate may jump: the start of a stage with a parent, the end of a warm-up, a step of the policy."""

    iter: int
    before: float
    after: float
    jumps: bool = True

    @property
    def text(self) -> str:
        if not self.jumps:
            return "warm-up ends" if self.iter else ""
        if self.before > 0 and self.after > 0:
            return f"x{self.after / self.before:.3g}"
        return f"{self.before:.3g} \N{RIGHTWARDS ARROW} {self.after:.3g}"


@dataclass(slots=True, kw_only=True)
class StagePicture:
    """`begin` and `each`: x of iteration 0 and of an iteration, in epochs; `left` and `step`: in pixels. `rates`: iterations and
    rates through which the curve goes. `settings`: values by name, each with its first iteration. `notes`: what isn't drawn. `average`: the
    ensemble that it starts from. `lane`: the line on which it is drawn, 0 for the root's. `curve`: 0 for the root's; a stage on its parent's
    line continues its curve."""

    name: str
    parent: "StagePicture | None"
    parent_iter: int
    average: str | None
    enabled: bool
    iterations: int
    begin: float
    each: float
    rates: tuple[XY, ...]
    settings: Mapping[str, Sequence[tuple[int, str]]]
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]
    left: float = 0.0
    step: float = 0.0
    lane: int = 0
    curve: int = 0
    colour: str = "off"
    dash: str | None = None

    def x(self, iter: float) -> float:
        """Return the pixel of an iteration."""
        return self.left + iter * self.step

    @property
    def right(self) -> float:
        return self.x(self.iterations)

    @property
    def leaves(self) -> str:
        """`leaves main at 600`, `leaves main` at its end, `starts from AVERAGE`; '' for the root."""
        if self.parent is None or self.average is not None:
            return f"starts from {self.average}" if self.average is not None else ""
        return f"leaves {self.parent.name}" + (f" at {self.parent_iter}" if self.leaves_early else "")

    @property
    def note(self) -> str:
        """Return where it starts, and whether it is left out."""
        return ", ".join(filter(None, [self.leaves, "" if self.enabled else "not enabled"]))

    @property
    def leaves_early(self) -> bool:
        return self.parent is not None and self.parent_iter != self.parent.iterations

    def line(self, until: float = math.inf) -> list[XY]:
        """Return the points of the curve up to an iteration."""
        points = [point for point in (*self.rates, (self.iterations, self.rates[-1][1])) if point[0] <= until]
        later = next((point for point in self.rates if point[0] > until), None)
        if later is not None:
            first, low = points[-1]
            points.append((until, low + (later[1] - low) * (until - first) / (later[0] - first)))
        return points


@dataclass(frozen=True, slots=True)
class EnsemblePicture:
    """`members`: pixel and stage of each."""

    name: str
    label: str
    members: tuple[tuple[float, StagePicture], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """`stages` by name, parents before children. `end`: of the x axis."""

    name: str
    end: float
    stages: Mapping[str, StagePicture]
    ensembles: tuple[EnsemblePicture, ...]

    def x(self, stage: str, iter: float) -> float | None:
        """Return the pixel of an iteration; None if the schedule lacks it."""
        drawn = self.stages.get(stage)
        return drawn.x(iter) if drawn is not None and iter <= drawn.iterations else None

    def rates(self) -> tuple[float, float]:
        """Return the ends of the axis of the learning rate."""
        rates = [rate for stage in self.stages.values() for _, rate in stage.rates]
        low, high = min(0.0, *rates), max(0.0, *rates)
        margin = 0.06 * (high - low) or 1.0
        return low - margin if low else 0.0, high + margin


def make_picture(schedule: Schedule) -> Picture:
    stages: dict[str, StagePicture] = {}
    for stage in schedule.stages:
        points = max(LEAST_POINTS, POINTS // len(schedule.stages))
        stages[stage.name] = _stage(schedule, stage, stages.get(stage.parent or ""), points)
    end = max(stage.begin + stage.iterations * stage.each for stage in stages.values())
    _arrange(stages.values(), (RIGHT - LEFT) / end)
    return Picture(schedule.name, end, stages, tuple(_ensembles(schedule, stages)))


def _arrange(stages: Iterable[StagePicture], scale: float) -> None:
    """Set the pixels, line, curve and colour of each stage. A child at its parent's end shares the parent's line if that is free;
    others take the first free line below."""
    taken: dict[int, list[XY]] = {}
    curves = count()
    for stage in stages:
        stage.left, stage.step, parent = LEFT + stage.begin * scale, stage.each * scale, stage.parent

        def is_free(lane: int, left: float = stage.left, right: float = stage.right) -> bool:
            return all(right < first + 0.01 or left > last - 0.01 for first, last in taken.get(lane, ()))

        if parent and not stage.leaves_early and stage.average is None and is_free(parent.lane):
            stage.lane, stage.curve = parent.lane, parent.curve
        else:
            least = parent.lane + 1 if parent else 0
            stage.lane, stage.curve = next(lane for lane in count(least) if is_free(lane)), next(curves)
        taken.setdefault(stage.lane, []).append((stage.left, stage.right))
        stage.dash = curve_dash(stage.curve) if stage.enabled else DASHES[1]
        stage.colour = curve_colour(stage.curve) if stage.enabled else "off"


def curve_colour(number: int) -> str:
    return f"c{number % COLOURS}"


def curve_dash(number: int) -> str | None:
    return DASHES[number // COLOURS % len(DASHES)]


def _ensembles(schedule: Schedule, stages: Mapping[str, StagePicture]) -> Iterator[EnsemblePicture]:
    for ensemble in schedule.ensembles:
        points = [(stages[name], stages[name].iterations if iter is None else iter) for name, iter in ensemble.points]
        off = "" if all(stage.enabled for stage, _ in points) else ", not evaluated: a member is not enabled"
        members = listed([*in_words(ensemble.members)], MOST_MEMBERS)
        yield EnsemblePicture(
            ensemble.name,
            f"{ensemble.name} ({rule_in_words(ensemble)}{off}): {members}",
            tuple((stage.x(iter), stage) for stage, iter in points),
        )


def _stage(schedule: Schedule, stage: Stage, parent: StagePicture | None, points: int) -> StagePicture:
    solver, each = stage.solver, stage.solver.batch_size / stage.data.train.images
    parent_iter = schedule.start_iter(stage) if parent is not None else 0
    marks = {one.iter: Mark(*one[1:], jumps(schedule, stage, one)) for one in joints(schedule, stage)}
    steps = [Mark(*step) for step in policy_steps(solver) if stage.begins < step.iter]
    marks = {step.iter: step for step in steps[:MOST_MARKED]} | marks
    sides = {iter for mark in marks.values() for iter in (mark.iter - 1, mark.iter)}
    rates, sizes = _curve(solver, stage.begins, points, frozenset(sides))
    settings = {
        "weight decay": f"{solver.weight_decay:g}",
        "momentum": f"{solver.momentum:g}",
        "batch": str(solver.batch_size),
        "augmentation": augmentation(solver),
    }
    return StagePicture(
        name=stage.name,
        parent=parent,
        parent_iter=parent_iter,
        average=stage.average,
        enabled=stage.enabled,
        iterations=solver.max_iter,
        begin=-stage.begins * each if parent is None else parent.begin + parent_iter * parent.each,
        each=each,
        rates=rates,
        settings={name: [(0, text)] for name, text in settings.items()} | {"image size": sizes},
        marks=tuple(marks[iter] for iter in sorted(marks)),
        notes=tuple(f"{stage.name}: {note}" for note in _notes(solver)),
    )


def _notes(solver: Solver) -> Iterator[str]:
    if solver.earliest_end < solver.max_iter:
        yield f"{solver.earliest_end} to {solver.max_iter} iterations, and the longest is drawn"
    if solver.lr_policy == "plateau":
        yield f"up to {len(solver.plateau_winsize)} drops, which depend on the loss, are not drawn"


@lru_cache(maxsize=256)  # most stages are unchanged when the page is drawn again
def _curve(
    solver: Solver, begins: int, points: int, kept: frozenset[int]
) -> tuple[tuple[XY, ...], Sequence[tuple[int, str]]]:
    """Return points of the learning rate, among them the iterations of `kept`; and the image sizes."""
    rate = learning_rate(solver)
    iters = {iter for iter in kept if begins <= iter}
    length = -(-(solver.max_iter - begins) // points)
    for first in range(begins, solver.max_iter, length):
        stretch = range(first, min(first + length, solver.max_iter))
        iters |= {first, min(stretch, key=rate), max(stretch, key=rate), stretch[-1]}
    sizes: list[tuple[int, str]] = []
    for iter in range(begins, solver.max_iter) if solver.transform.crop_size_ramp else (0,):
        text = str(crop_size(solver, iter) or "as stored")
        if not sizes or sizes[-1][1] != text:
            sizes.append((iter, text))
    return tuple((iter, rate(iter)) for iter in sorted(iters)), sizes


# -- SVG. `words` and `title` escape texts, `element` escapes attributes.

# Widths of DejaVu Sans, the widest font that a page may get.
_NARROW, _THIN, _WIDE = "ijlI.,:;|!'", 'frt()[]{}/\\ -"', "mwMW@%"
FONT_SIZE = 11


def element(kind: str, *inside: str, **attributes: str | float | None) -> str:
    """`inside` is markup. In attribute names `_` stands for `-`, and a last one is dropped; None leaves an attribute out."""
    texts = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value) if isinstance(value, str) else number(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{kind}{texts}>{''.join(inside)}</{kind}>" if inside else f"<{kind}{texts}/>"


def words(text: str, x: float, y: float, kind: str = "", anchor: str | None = None) -> str:
    return element("text", escape(text), x=x, y=y, class_=kind or None, text_anchor=anchor)


def title(text: str) -> str:
    """A text that browsers show next to the pointer."""
    return element("title", escape(text))


def line(d: str, kind: str, dash: str | None = None, **attributes: str | None) -> str:
    """A path; '' for one without points."""
    return element("path", d=d, class_=kind, stroke_dasharray=dash, **attributes) if d else ""


def box(begin: float, end: float, top: float, bottom: float, kind: str, *inside: str) -> str:
    """A rectangle, at least a pixel wide."""
    return element("rect", *inside, x=begin, y=top, width=max(1, end - begin), height=bottom - top, class_=kind)


def number(value: float) -> str:
    """Tenths of a pixel are enough."""
    return f"{value:.1f}".removesuffix(".0")


def joined(*points: XY) -> str:
    """The `d` of a line through points."""
    return "M" + "L".join(f"{number(x)},{number(y)}" for x, y in points)


def text_width(text: str) -> float:
    """Pixels that a text takes at most, in nearly all cases."""
    return FONT_SIZE * sum(map(_width, text))


def _width(c: str) -> float:
    if not c.isascii():
        return 1.0 if unicodedata.east_asian_width(c) in "WF" else 0.85
    return 0.34 if c in _NARROW else 0.41 if c in _THIN else 0.97 if c in _WIDE else 0.7 if c.isupper() else 0.63


def round_steps(low: float, high: float, most: int) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten from `low` to `high`: 2 to `most`."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) < most)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
