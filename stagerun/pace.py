"""How fast training goes and how long it will take: the arithmetic of the live line and of `status`. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.events import Iterated, StageStarted
from stagerun.text import duration

# Iterations over which speed and loss are averaged.
WINDOW = 50


@dataclass(frozen=True, slots=True)
class Pace:
    """Of the last iterations: mean loss, images per second, seconds per iteration."""

    loss: float
    images_per_second: float
    seconds_per_iteration: float


def pace(window: Sequence[Iterated]) -> Pace:
    """Over `window`, at least one and at most WINDOW iterations of one stage."""
    seconds = sum(e.seconds for e in window)
    images = sum(e.images for e in window)
    loss = sum(e.loss for e in window) / len(window)
    return Pace(loss, images / seconds if seconds else 0.0, seconds / len(window))


def progress_line(stage: StageStarted, stages: int, window: Sequence[Iterated], left: int) -> str:
    """Where training is after the last iteration of `window`, with `left` iterations to go in all `stages`."""
    now, speed = window[-1], pace(window)
    return (
        f"stage {stage.number}/{stages} {now.stage}  {now.iter}/{stage.max_iter}  epoch {now.epoch:.2f}  "
        f"LR {now.lr:.4g}  loss {speed.loss:.4f}  {speed.images_per_second:.0f} images/s  "
        f"{duration((stage.max_iter - now.iter) * speed.seconds_per_iteration)} left in stage, "
        f"{duration(left * speed.seconds_per_iteration)} in all"
    )
