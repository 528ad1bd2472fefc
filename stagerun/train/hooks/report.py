"""The first hook, which adds the iterations up, and the last, which makes the events of the log."""

from collections.abc import Iterator
from dataclasses import replace

from stagerun.base.events import Iterated, Note, NotFinite, Retraced, Synchronised
from stagerun.base.recipe import OnNan
from stagerun.data.index import printable
from stagerun.data.loaders import order_of
from stagerun.train.context import StageRun
from stagerun.train.hooks import Seen


class Counted:
    """Adds up the losses and seconds of the stage, and sends the monitor a heartbeat. Yields the monitor's messages to the user."""

    def __init__(self, run: StageRun) -> None:
        self.run = run

    def on(self, event: Seen) -> Iterator[Seen]:
        if isinstance(event, Iterated):
            self.run.losses.append(event.loss)
            yield from self._count(event.iter, event.seconds)
        elif isinstance(event, NotFinite) and event.done == OnNan.SKIP.value:
            yield from self._count(event.iter + 1, event.seconds)
        yield event

    def _count(self, iter: int, seconds: float) -> Iterator[Note]:
        pulse = self.run.worker.comm.pulse
        self.run.seconds += seconds
        pulse.iterated(iter, seconds)
        while pulse.news:
            yield Note(text=pulse.news.popleft(), warning=True)


class Reported:
    """Turns the events into those of the log."""

    def __init__(self, run: StageRun) -> None:
        self.run = run

    def on(self, event: Seen) -> Iterator[Seen]:
        until = self.run.planned.until
        match event:
            case Iterated() if until is not None:
                same = ("stage", "iter", "lr", "loss", "images", "seconds", "sent_bytes")
                yield Retraced(until=until, **{name: getattr(event, name) for name in same})
            case Synchronised() if until is not None:
                pass
            case NotFinite():
                yield replace(event, keys=keys_of(self.run, event), until=until)
            case _:
                yield event


def keys_of(run: StageRun, failed: NotFinite) -> tuple[str, ...]:
    """The keys of the iteration's images, over all ranks, in the order of their positions; on rank 0, which alone reports them."""
    if run.worker.comm.rank != 0:
        return ()
    records = run.worker.images.training(run.stage)
    indices = order_of(records, run.worker.schedule, run.stage).at(failed.position, failed.images)
    return tuple(printable(records.key(int(i))) for i in indices)
