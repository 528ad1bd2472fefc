"""How fast training goes and how long it will take: the arithmetic of the live line and of `status`. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagerun.base.text import duration, size

if TYPE_CHECKING:  # what every command prints goes by `strip`, and the events take 20 ms to import
    from stagerun.base.events import Iterated, StageStarted, Synchronised

# Iterations over which speed and loss are averaged.
WINDOW = 50


@dataclass(frozen=True, slots=True)
class Staleness:
    """How stale pushes were, in updates; at least one push (`sync_param { method: ASYNC }`)."""

    pushes: int
    mean: float
    largest: int


def staleness_of(pushes: Iterable[int | None]) -> Staleness | None:
    """`pushes`: an iteration's staleness, None if it was no push. Returns None if none was."""
    found = [stale for stale in pushes if stale is not None]
    return Staleness(len(found), sum(found) / len(found), max(found)) if found else None


@dataclass(frozen=True, slots=True)
class Pace:
    """The last iterations: means, and bytes that rank 0 sent in one; those of replicas are since they last met but one."""

    loss: float
    images_per_second: float
    seconds_per_iteration: float
    sent_bytes: float
    staleness: Staleness | None


def pace(window: "Sequence[Iterated]", met: "Synchronised | None" = None) -> Pace:
    """Over `window`, at least one and at most WINDOW iterations of one stage; `met` is its newest Synchronised, which counts for the bytes."""
    n, seconds = len(window), sum(e.seconds for e in window)
    sent, iterations = sum(e.sent_bytes for e in window), n
    if met is not None and met.iterations:
        sent, iterations = met.sent_bytes, met.iterations
    return Pace(
        loss=sum(e.loss for e in window) / n,
        images_per_second=sum(e.images for e in window) / seconds if seconds else 0.0,
        seconds_per_iteration=seconds / n,
        sent_bytes=sent / iterations,
        staleness=staleness_of(e.staleness for e in window),
    )


def sent(sent_bytes: float, dense_bytes: int) -> str:
    """What rank 0 sends in an iteration: `12.3 MB sent, 2.1 % of dense`."""
    percent = 100 * sent_bytes / dense_bytes
    return f"{size(sent_bytes)} sent, {percent:{'.0f' if percent >= 100 else '.2g'}} % of dense"


def exchange(stage: "StageStarted", speed: Pace) -> str:
    """How gradients are exchanged, where that isn't plain, with two spaces behind."""
    text = f"{sent(speed.sent_bytes, stage.dense_bytes)}  " if stage.dense_bytes else ""
    if stale := speed.staleness:
        text += f"staleness {stale.mean:.3g}, at most {stale.largest}  "
    return text


def progress_line(
    stage: "StageStarted",
    stages: int,
    window: "Sequence[Iterated]",
    left: tuple[float, float],
    met: "Synchronised | None" = None,
) -> str:
    """Where training is after the last iteration of `window`, with `left` seconds to go in the stage and in all `stages`."""
    now, speed = window[-1], pace(window, met)
    return (
        f"stage {stage.number}/{stages} {now.stage}  {now.iter}/{stage.max_iter}  epoch {now.epoch:.2f}  "
        f"LR {now.lr:.4g}  loss {speed.loss:.4f}  {speed.images_per_second:.0f} images/s  "
        f"{exchange(stage, speed)}{duration(left[0])} left in stage, {duration(left[1])} in all"
    )


DONE, TO_DO, STALE = "ok", "-", "stale"  # marks of stages; of one that has started it is `62 %`


def share(iter: int, max_iter: int) -> str:
    """The mark of a stage in which `iter` updates are done."""
    return f"{100 * iter // max_iter} %" if max_iter else TO_DO


def colour(mark: str) -> str | None:
    """By the name that click and rich have for it."""
    return {DONE: "green", STALE: "red", TO_DO: None}.get(mark, "cyan")


def strip(marks: Mapping[str, str]) -> str:
    """By stage, in the order of the schedule -> `init ok  cyc1 62 %  collapse -`."""
    return "  ".join(f"{name} {mark}" for name, mark in marks.items())
