"""How the gradients of a stage's workers come together, and what follows for its training and its snapshots."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from stagerun.base.events import Event, Iterated, NotFinite
from stagerun.base.recipe import Determinism, Solver
from stagerun.base.wings import wing
from stagerun.comm import Comm, Reducer, make_reducer
from stagerun.comm.group import Traffic
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, train
from stagerun.engine.state import TrainState
from stagerun.engine.timed import timed_train
from stagerun.engine.update import Arithmetic, Outcome, Pieces, update
from stagerun.schedule import Knobs
from stagerun.system.pulse import beating
from stagerun.train.context import Context, StageRun

# Starts reading the device batches at (position, count).
Read = Callable[[Iterable[tuple[int, int]]], AbstractContextManager[Iterator[Batch]]]

# What a wing has instead, by the field of the solver or the method of `sync_param` that asks for it.
OTHERS = {
    "compress_param": "wire.compressing.Compressing",
    "LOCAL": "wire.replicas.Replicas",
    "DILOCO": "wire.replicas.Replicas",
    "ASYNC": "wire.asynchronous.Asynchronous",
}


class Exchange:
    """One rank's part in it, in one stage. Gradients are summed as they are, at every update; a wing's subclasses do otherwise. What is
    called of it is called on every rank."""

    dense_bytes = 0  # what rank 0 would send in an iteration if they were sent as they are; 0 if they are
    file_bytes = 0  # about what a snapshot has besides the state's own files
    loop: StageLoop
    reducer: Reducer

    def __init__(self, state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> None:
        self.state, self.solver, self.determinism, self.comm = state, solver, determinism, comm

    def words(self, images: int) -> str:
        """How gradients are sent, for people; '' as they are. `images`: of an epoch."""
        return ""

    # -- training

    def begin(self, run: StageRun, loop: StageLoop) -> Generator[Event, None, bool]:
        """Take up what the stage's snapshot has of it, and get ready to train. False after a Stopped; ResumeRefused."""
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
        """As `engine.update.update`."""
        return update(self.state, pieces, knobs, reducer, how, stop, hopeless)

    # -- evaluations and snapshots

    def show(self) -> None:
        """Make the network hold what evaluations and snapshots look at."""

    def gather(self, keep: bool) -> Mapping[str, memoryview]:
        """Files of a snapshot besides the state's own, if this rank is to `keep` them: as they are now, until the next call."""
        return {}

    def digests(self) -> dict[str, int]:
        """Digests of what all ranks hold besides the state, as `gather` has left it."""
        return {}

    def needs_others(self) -> str:
        """What a snapshot would lack that rank 0 wrote alone; '' if nothing."""
        return ""


def exchange_of(state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> Exchange:
    """Make the one that the stage's settings ask for, and give it to `state`. Collective."""
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
    """The events of a loop, each Iterated with what was sent for it. What is sent between two events is not counted."""
    sent, before = 0, traffic.sent
    for event in events:
        sent += traffic.sent - before
        if isinstance(event, Iterated) and sent:
            event = replace(event, sent_bytes=sent)
        if isinstance(event, Iterated | NotFinite):
            sent = 0
        yield event
        before = traffic.sent
