"""How fast training goes and how long it will take: the arithmetic of the live line and of `status`. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagerun.base.text import duration, size

if TYPE_CHECKING:  # what every command prints goes by `strip`, and the events take 20 ms to import
    from stagerun.base.events import Iterated, StageStarted, Synchronised

# Iterations over which speed and loss are averaged.
WINDOW = 50
_LEAST_BAR, _LONGEST_BAR = 6, 40


@dataclass(frozen=True, slots=True)
class Pace:
    """The last iterations: mean loss, images per second, seconds per iteration, bytes that rank 0 sent in one; those of
    replicas are since they last met but one."""

    loss: float
    images_per_second: float
    seconds_per_iteration: float
    sent_bytes: float


def pace(window: "Sequence[Iterated]", met: "Synchronised | None" = None) -> Pace:
    """Over `window`, at least one and at most WINDOW iterations of one stage; `met` is its newest Synchronised, which counts for the bytes."""
    seconds = sum(e.seconds for e in window)
    images = sum(e.images for e in window)
    loss = sum(e.loss for e in window) / len(window)
    sent = sum(e.sent_bytes for e in window) / len(window)
    if met is not None and met.iterations:
        sent = met.sent_bytes / met.iterations
    return Pace(loss, images / seconds if seconds else 0.0, seconds / len(window), sent)


def sent(sent_bytes: float, dense_bytes: int) -> str:
    """What rank 0 sends in an iteration: `12.3 MB sent, 2.1 % of dense`."""
    percent = 100 * sent_bytes / dense_bytes
    return f"{size(sent_bytes)} sent, {percent:{'.0f' if percent >= 100 else '.2g'}} % of dense"


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
        f"{_sent(stage, speed)}{_behind(window)}{duration(left[0])} left in stage, {duration(left[1])} in all"
    )


def _sent(stage: "StageStarted", speed: Pace) -> str:
    return f"{sent(speed.sent_bytes, stage.dense_bytes)}  " if stage.dense_bytes else ""


def _behind(window: "Sequence[Iterated]") -> str:
    stale = staleness_of(e.staleness for e in window)
    return f"staleness {stale.mean:.3g}, at most {stale.largest}  " if stale else ""


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


def live_line(
    marks: Mapping[str, str],
    stage: "StageStarted",
    window: "Sequence[Iterated]",
    left: tuple[float, float],
    width: int,
    met: "Synchronised | None" = None,
) -> tuple[dict[str, str], int, str]:
    """As `progress_line`, in at most `width` characters if that can be: the marks to show, how long a bar, 0 for none, and the rest,
    with two spaces between them. A narrow terminal leaves out first epoch, LR and bytes, or other stages, then the bar."""
    now, speed = window[-1], pace(window, met)
    times = f"{duration(left[0])} of {duration(left[1])} left"
    done, loss = f"{now.iter}/{stage.max_iter}", f"loss {speed.loss:.4f}"
    short = f"{done}  {speed.images_per_second:.0f} img/s  {loss}  {times}"
    long = f"{done}  epoch {now.epoch:.2f}  LR {now.lr:.4g}  {speed.images_per_second:.0f} images/s  {loss}  {_sent(stage, speed)}{_behind(window)}{times}"
    own = {now.stage: share(now.iter, stage.max_iter)}
    for shown, rest in ((dict(marks), long), (dict(marks), short), (own, long), (own, short)):
        bar = width - len(strip(shown)) - len(rest) - 4
        if bar >= _LEAST_BAR:
            return shown, min(bar, _LONGEST_BAR), rest
    return own if bar >= -2 else {now.stage: ""}, 0, short
