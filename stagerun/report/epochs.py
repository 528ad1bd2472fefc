"""A run's history by epochs. Pure."""

import math
from dataclasses import dataclass

from stagerun.report.history import History, Point, StageHistory

# What sums of fractions may be off by: an epoch that ends with an update must not begin one more.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """`number` is 1-based, along the path of ancestors; an update that straddles two epochs counts to the later one.
    `branch` is the first stage of its branch. The accuracies are of the last evaluation, None where there was none.
    `partial`: the stage was not trained to its end, and this is where it stopped.
    """

    number: int
    branch: str
    stages: tuple[str, ...]
    partial: bool
    lr: float
    loss: float
    top1: float | None
    ema_top1: float | None
    images_per_second: float | None
    seconds: float


def epochs(history: History) -> list[Epoch]:
    """Branch after branch. Where one stage alone follows from another, an epoch may hold parts of both."""
    pieces: dict[tuple[str, int], list[tuple[StageHistory, list[Point]]]] = {}
    branches = _branches(history)
    for stage in history.stages:
        for point in stage.points:
            held = pieces.setdefault((branches[stage.name], number_of(point.epoch)), [])
            if not held or held[-1][0] is not stage:
                held.append((stage, []))
            held[-1][1].append(point)
    return [_epoch(number, branch, held) for (branch, number), held in pieces.items()]


def number_of(epoch: float) -> int:
    """The epoch, 1-based, that ends at or after `epoch` epochs."""
    return max(1, math.ceil(epoch - _ROUNDING))


def _branches(history: History) -> dict[str, str]:
    """Stage -> the first stage of its branch: a stage alone in starting from another, at its end, goes on with its branch."""
    begun = [s for s in history.stages if s.points]
    parents = [parent.name for s in begun if (parent := history.follows(s)) is not None]
    found: dict[str, str] = {}
    for stage in begun:
        parent = history.follows(stage)
        alone = parent is not None and parents.count(parent.name) == 1
        found[stage.name] = found.get(parent.name, stage.name) if parent is not None and alone else stage.name
    return found


def _epoch(number: int, branch: str, held: list[tuple[StageHistory, list[Point]]]) -> Epoch:
    points = [point for _, part in held for point in part]
    seconds = sum(p.seconds for p in points)
    top1: dict[bool, float] = {}
    for stage, _ in held:
        top1 |= {test.ema: test.top1 for epoch, test in stage.tests if number_of(epoch) == number}
    last = held[-1][0]
    return Epoch(
        number=number,
        branch=branch,
        partial=last.finished is None and last.iter < last.max_iter and points[-1] is last.points[-1],
        stages=tuple(stage.name for stage, _ in held),
        lr=points[-1].lr,
        loss=sum(p.loss for p in points) / len(points),
        top1=top1.get(False),
        ema_top1=top1.get(True),
        images_per_second=sum(p.images for p in points) / seconds if seconds else None,
        seconds=seconds,
    )
