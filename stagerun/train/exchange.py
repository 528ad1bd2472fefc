"""The exchange of gradients between a stage's workers, and its effect on training and snapshots."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from stagerun.base.events import Event, Iterated, NotFinite
from stagerun.base.recipe import Determinism, Solver
from stagerun.base.wings import wing
from stagerun.comm import Comm, Reducer, make_reducer
from stagerun.comm.group import Traffic
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, timed_train, train
from stagerun.engine.state import TrainState
from stagerun.engine.update import Arithmetic, Outcome, Pieces, update
from stagerun.schedule import Knobs
from stagerun.system.pulse import beating
from stagerun.train.context import Context, StageRun

# Starts reading the device batches at (position, count).
Read = Callable[[Iterable[tuple[int, int]]], AbstractContextManager[Iterator[Batch]]]

# Subclasses in a wing, by the field of the solver or the method of `sync_param`.
OTHERS = {
    "compress_param": "wire.compressing.Compressing",
    "LOCAL": "wire.replicas.Replicas",
    "DILOCO": "wire.replicas.Replicas",
    "ASYNC": "wire.asynchronous.Asynchronous",
}


class Exchange:
    """A rank's part of the exchange in one stage. Gradients are summed unchanged at every update; subclasses of a wing replace that.
    Each method is called on every rank."""

    dense_bytes = 0  # bytes that rank 0 would send in an iteration without compression; 0 if uncompressed
    file_bytes = 0  # approximate bytes of a snapshot besides the files of the state
    loop: StageLoop
    reducer: Reducer

    def __init__(self, state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> None:
        self.state, self.solver, self.determinism, self.comm = state, solver, determinism, comm

    def words(self, images: int) -> str:
        """Describe how gradients are sent; '' if unchanged. `images`: of an epoch."""
        return ""

    # -- training

    def begin(self, run: StageRun, loop: StageLoop) -> Generator[Event, None, bool]:
        """Restore the state of the exchange from the stage's snapshot, and get ready to train. False after a Stopped; ResumeRefused."""
        self.loop, self.reducer = loop, self.make_reducer()
        yield from ()
        return True

    def make_reducer(self) -> Reducer:
        parameters = [p.tensor for p in self.state.solver.parameters]
        return make_reducer(self.determinism, parameters, self.comm, self.solver.logical_workers)

    def train(self, worker: Context, read: Read) -> Generator[Event, None, None]:
        """Train to the end of the loop, or until a Stopped or a NotFinite to go back from."""
        loop, state, stop, left = self.loop, self.state, worker.stop, worker.stopping.left
        with read(requests(loop, state.iter, self.solver.device_batch_size)) as fed:
            batches = beating(fed, self.comm.pulse)
            profile = worker.profile
            if profile is None or profile.over:
                events: Iterator[Event] = train(loop, state, batches, self.reducer, stop, left)
            else:
                events = timed_train(loop, state, batches, self.reducer, stop, left, profile.spans)
            yield from counted(events, self.comm.traffic)

    def update(
        self,
        pieces: Pieces,
        knobs: Knobs | Callable[[float], Knobs],
        reducer: Reducer,
        how: Arithmetic,
        stop: Callable[[], bool],
        hopeless: Callable[[int], bool] = lambda done: False,
    ) -> Outcome:
        """Call `engine.update.update`."""
        return update(self.state, pieces, knobs, reducer, how, stop, hopeless)

    # -- evaluations and snapshots

    def show(self) -> None:
        """Update the network that evaluations and snapshots read."""

    def gather(self, keep: bool) -> Mapping[str, memoryview]:
        """Return files of a snapshot besides those of the state, if this rank is to `keep` them: unchanged until the next call."""
        return {}

    def digests(self) -> dict[str, int]:
        """Return digests of what all ranks hold besides the state, as of the last `gather`."""
        return {}

    def needs_others(self) -> str:
        """Name the content that a snapshot written by rank 0 alone would lack; '' if complete."""
        return ""


def exchange_of(state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> Exchange:
    """Make the exchange that the stage's settings ask for, and attach it to `state`. Collective."""
    kind = Exchange
    if solver.sync is not None:
        kind = wing(OTHERS[solver.sync.method.value])
    elif solver.compress is not None:
        kind = wing(OTHERS["compress_param"])
    state.exchange = exchange = kind(state, solver, determinism, comm)
    return exchange


def requests(loop: StageLoop, iter: int, device_batch_size: int) -> Iterator[tuple[int, int]]:
    """Yield (position, count) of each device batch of this rank, from iteration `iter` of the stage on."""
    for i in range(iter, loop.max_iter):
        for worker in loop.logical_workers:
            yield loop.start_position + i * loop.batch_size + worker * device_batch_size, device_batch_size


def counted(events: Iterator[Event], traffic: Traffic) -> Generator[Event, None, None]:
    """Yield the events of a loop, each Iterated with the bytes sent for it; bytes sent between two events are not counted."""
    sent, before = 0, traffic.sent
    for event in events:
        sent += traffic.sent - before
        if isinstance(event, Iterated) and sent:
            event = replace(event, sent_bytes=sent)
        if isinstance(event, Iterated | NotFinite):
            sent = 0
        yield event
        before = traffic.sent
