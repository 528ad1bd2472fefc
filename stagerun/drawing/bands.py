"""The bands beneath the curve: what holds from where to where, in words. Pure.

Every stage has its line (`Picture.lanes`); what is the same in all of them is shown once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from stagerun.drawing.picture import Kind, Mark, Picture, Point, StagePicture, Unit
from stagerun.drawing.scale import Scale

# A setting that takes more values than this within a stage is shown by its first and last.
MOST_RUNS = 12
# Lines of labels above the curve; labels closer together are left out.
MOST_ROWS = 6
MOST_SAID = 6  # values of a band that are said beneath the picture


@dataclass(frozen=True, slots=True)
class Segment:
    """`text` holds from `begin` to `end` on an x axis, in `stage`; in `stage` '' it is that of all of them."""

    stage: str
    begin: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Band:
    """`lanes` from top to bottom."""

    title: str
    lanes: tuple[tuple[Segment, ...], ...]

    @property
    def texts(self) -> list[str]:
        """What differs, from above and from the left."""
        return list(dict.fromkeys(segment.text for lane in self.lanes for segment in lane))


def bands(picture: Picture, unit: Unit) -> list[Band]:
    """Stages, weight decay, momentum where it moves, batch size, image size, augmentation."""
    lanes = picture.lanes(unit)

    def band(title: str, runs: Callable[[StagePicture], list[tuple[int, str]]]) -> Band:
        rows: list[list[Segment]] = [[] for _ in range(1 + max(lanes.values()))]
        for stage in picture.stages:
            found = runs(stage)
            ends = [at for at, _ in found[1:]] + [stage.iterations]
            rows[lanes[stage.name]] += [
                Segment(stage.name, stage.x(at, unit), stage.x(end, unit), text)
                for (at, text), end in zip(found, ends, strict=True)
            ]
        return Band(title, tuple(tuple(sorted(row, key=lambda s: s.begin)) for row in rows))

    found = [
        band("stages", lambda s: [(0, _name(s))]),
        band("weight decay", lambda s: _runs(s.points, lambda p: short_number(p.weight_decay))),
        band("momentum", lambda s: _runs(s.points, lambda p: short_number(p.momentum))),
        band("batch", lambda s: [(0, str(s.batch_size))]),
        band("image size", lambda s: _runs(s.points, size_text)),
        band("augmentation", lambda s: [(0, s.augmentation)]),
    ]
    return [
        _together(b, picture.end(unit)) if b.title != "stages" else b
        for b in found
        if b.title != "momentum" or len(b.texts) > 1
    ]


def _name(stage: StagePicture) -> str:
    """With what its curve doesn't show."""
    said = [f"from {stage.average}"] * (stage.average is not None) + ["not enabled"] * (not stage.enabled)
    return stage.name + (f" ({', '.join(said)})" if said else "")


def _runs(points: Sequence[Point], text: Callable[[Point], str]) -> list[tuple[int, str]]:
    """Where each value begins; one stretch with both ends where there are many."""
    found: list[tuple[int, str]] = []
    for point in points:
        now = text(point)
        if not found or found[-1][1] != now:
            found.append((point.iter, now))
    return found if len(found) <= MOST_RUNS else [(0, f"{found[0][1]} \N{RIGHTWARDS ARROW} {found[-1][1]}")]


def size_text(point: Point) -> str:
    return "as stored" if point.size is None else str(point.size)


def _together(band: Band, end: float) -> Band:
    """One line where all stages have the same, and one with both where consecutive stages have."""
    texts = band.texts
    if len(texts) == 1:
        return replace(band, lanes=((Segment("", 0.0, end, texts[0]),),))
    return replace(band, lanes=tuple(_merged(lane) for lane in band.lanes))


def _merged(lane: Sequence[Segment]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for segment in lane:
        last = found[-1] if found else None
        if last is not None and last.text == segment.text and segment.begin <= last.end * (1 + 1e-9):
            found[-1] = replace(last, end=segment.end)
        else:
            found.append(segment)
    return tuple(found)


@lru_cache(maxsize=1024)  # of a curve's points, most have the same
def short_number(value: float) -> str:
    """As recipes write it: 5e-5, 0.9, 4096."""
    plain = f"{value:.4g}"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    power = f"{float(mantissa):g}e{int(exponent)}"
    return power if value and len(power) < len(plain) else plain


def factor_text(factor: float | None) -> str:
    """`x0.557`; an arrow from or to zero has none."""
    return "" if factor is None else f"x{factor:.3g}"


def mark_text(mark: Mark) -> str:
    """What is written above its place; '' for nothing."""
    if not mark.jumps:
        return "warm-up ends" if mark.kind is Kind.WARM_UP else ""
    return factor_text(mark.factor) or f"{mark.before:.3g} \N{RIGHTWARDS ARROW} {mark.after:.3g}"


def leaves(stage: StagePicture) -> str:
    """`leaves main at 600`, `leaves main` at its end, `starts from late`, an average."""
    if stage.average is not None:
        return f"starts from {stage.average}"
    return f"leaves {stage.parent}" + (f" at {stage.parent_iter}" if stage.leaves_early else "")


@dataclass(frozen=True, slots=True)
class Label:
    """What is written above a place, of these stages; the letters of their sides are in the text."""

    at: float
    text: str
    stages: tuple[StagePicture, ...]


def mark_labels(
    picture: Picture, text: Callable[[Mark], str], place: Callable[[StagePicture, Mark], float]
) -> list[Label]:
    """From left to right. The same text at the same `place` is one label; '' is none."""
    found: dict[tuple[float, str], list[StagePicture]] = {}
    for stage in picture.stages:
        for mark in stage.marks:
            if text(mark):
                found.setdefault((place(stage, mark), text(mark)), []).append(stage)
    labels = []
    for (at, said), stages in sorted(found.items(), key=lambda item: item[0][0]):
        sides = "".join(dict.fromkeys(stage.side for stage in stages))
        labels.append(Label(at, f"{sides} {said}".strip(), tuple(stages)))
    return labels


def on_rows(
    labels: Sequence[Label], extent: Callable[[Label], tuple[float, float]]
) -> tuple[list[list[tuple[float, Label]]], int]:
    """The labels with their begins, on as many rows as it takes up to MOST_ROWS, and how many have no room there. `extent`: where
    a label begins, and where the next one may."""
    rows: list[list[tuple[float, Label]]] = []
    filled: list[float] = []
    left_out = 0
    for label in labels:
        begin, end = extent(label)
        row = next((i for i, taken in enumerate(filled) if taken <= begin), len(rows))
        if row == MOST_ROWS:
            left_out += 1
            continue
        if row == len(rows):
            rows.append([])
            filled.append(0.0)
        rows[row].append((begin, label))
        filled[row] = end
    return rows, left_out


def not_shown(picture: Picture) -> list[str]:
    """The parts of each stage's learning rate that are not drawn, and how the second of two sides looks."""
    found = []
    for stage in picture.stages:
        marked = sum(mark.kind is Kind.STEP for mark in stage.marks)
        if stage.steps > marked:
            found.append(f"{stage.name}: {stage.steps - marked} more steps, which are not marked")
        if stage.earliest_end < stage.iterations:
            found.append(
                f"{stage.name}: {stage.earliest_end} to {stage.iterations} iterations, and the longest is drawn"
            )
        if stage.drops:
            found.append(f"{stage.name}: up to {stage.drops} drops, which depend on the loss, are not drawn")
    return found + [f"{side} is dashed, over {picture.sides[0]}" for side in picture.sides[1:]]


def captions(picture: Picture, scale: Scale, bands: Iterable[Band], left_out: int) -> list[str]:
    """What is said beneath a picture, a paragraph each. `bands`: those of which not all is written where it holds. `left_out`: labels without
    room above the curve."""
    keys = []
    for band in bands:
        more = f" and {len(band.texts) - MOST_SAID} more" if len(band.texts) > MOST_SAID else ""
        keys.append(f"{band.title}, which stages differ in: {'; '.join(band.texts[:MOST_SAID])}{more}")
    rest = ["lines: a stage begins; dotted: a warm-up ends, or the rate steps; x: by what factor it jumps"]
    if any(stage.meetings for stage in picture.stages):
        rest.append("ticks at the foot: replicas are averaged")
    if picture.ensembles:
        rest.append("dots: the members of an ensemble")
    if left_out:
        rest.append(f"{left_out} labels more are too close to others")
    rest += [scale.remark] if scale.remark else []
    return [*keys, "; ".join(rest + not_shown(picture))]
