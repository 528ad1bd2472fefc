"""Speed of training and time left: the arithmetic of the live line and of `status`. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagerun.base.text import duration, size

if TYPE_CHECKING:  # every command uses `strip`, and the events take 20 ms to import
    from stagerun.base.events import Iterated, StageStarted, Synchronised

# Iterations over which speed and loss are averaged.
WINDOW = 50


@dataclass(frozen=True, slots=True)
class Staleness:
    """Staleness of pushes, in updates; at least one push (`sync_param { method: ASYNC }`)."""

    pushes: int
    mean: float
    largest: int


def staleness_of(pushes: Iterable[int | None]) -> Staleness | None:
    """Summarise the staleness of iterations, each None if it was not a push; None without pushes."""
    stale = [updates for updates in pushes if updates is not None]
    return Staleness(len(stale), sum(stale) / len(stale), max(stale)) if stale else None


@dataclass(frozen=True, slots=True)
class Pace:
    """Means over the last iterations, and the bytes that rank 0 sent per iteration; for replicas, over the last whole synchronisation period."""

    loss: float
    images_per_second: float
    seconds_per_iteration: float
    sent_bytes: float
    staleness: Staleness | None


def pace(window: "Sequence[Iterated]", met: "Synchronised | None" = None) -> Pace:
    """Compute the means over `window`, one to WINDOW iterations of one stage; `met`: its newest Synchronised, for the bytes."""
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
    """Return the bytes that rank 0 sends in an iteration: `12.3 MB sent, 2.1 % of dense`."""
    percent = 100 * sent_bytes / dense_bytes
    return f"{size(sent_bytes)} sent, {percent:{'.0f' if percent >= 100 else '.2g'}} % of dense"


def exchange(stage: "StageStarted", speed: Pace) -> str:
    """Return the exchange of gradients, unless it is plain, with two trailing spaces."""
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
    """Return the live line after the last iteration of `window`, with `left` seconds left in the stage and in all `stages`."""
    now, speed = window[-1], pace(window, met)
    return (
        f"stage {stage.number}/{stages} {now.stage}  {now.iter}/{stage.max_iter}  epoch {now.epoch:.2f}  "
        f"LR {now.lr:.4g}  loss {speed.loss:.4f}  {speed.images_per_second:.0f} images/s  "
        f"{exchange(stage, speed)}{duration(left[0])} left in stage, {duration(left[1])} in all"
    )


DONE, TO_DO, STALE = "ok", "-", "stale"  # marks of stages; a started stage has `62 %`


def share(iter: int, max_iter: int) -> str:
    """Return the mark of a stage with `iter` updates done."""
    return f"{100 * iter // max_iter} %" if max_iter else TO_DO


def colour(mark: str) -> str | None:
    """Return a mark's colour by its name in click and rich."""
    return {DONE: "green", STALE: "red", TO_DO: None}.get(mark, "cyan")


def strip(marks: Mapping[str, str]) -> str:
    """Return `init ok  cyc1 62 %  collapse -` for marks by stage, in the order of the schedule."""
    return "  ".join(f"{name} {mark}" for name, mark in marks.items())
