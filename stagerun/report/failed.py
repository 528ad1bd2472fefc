"""What is told of an iteration whose loss or gradients are not finite. Pure."""

from stagerun.events import NotFinite
from stagerun.recipe import OnNan
from stagerun.text import count

MOST_KEYS = 3


def failed_line(event: NotFinite) -> str:
    """Which it was, what is done about it, and its first images; log.jsonl names all of them."""
    keys = ", ".join(f"`{key}`" for key in event.keys[:MOST_KEYS])
    more = f" and {event.images - MOST_KEYS} more" if event.images > MOST_KEYS else ""
    images = f"; its images: {keys}{more}" if keys else ""
    return f"{event.stage}: {event.what} at iteration {event.iter}, LR {event.lr:.4g}: {_done(event)}{images}"


def _done(event: NotFinite) -> str:
    if event.done == OnNan.SKIP.value:
        return f"skipped, {event.number} of at most {event.most} in a row"
    if event.done == OnNan.ROLLBACK.value and event.back_to is not None:
        left_out = (event.iter + 1 - event.back_to) * event.images
        return (
            f"back to {event.back_to} ({event.snapshot}), from where on {count(left_out, 'image')} are left out; rollback "
            f"{event.number} of at most {event.most}"
        )
    return "the run ends"
