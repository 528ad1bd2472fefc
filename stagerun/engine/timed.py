"""The training loop with clocks around its parts. They sit in what goes in and out of the loop, so that the loop itself has none, and costs
nothing more without them.

On a GPU each clock waits for the device, so that it measures what a part computes and not what it queues: the parts are right, and the
iteration is slower than without clocks.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from stagerun.base.events import Event, Iterated, NotFinite
from stagerun.comm import Reducer
from stagerun.comm.reduce import Switch
from stagerun.comm.spans import BACKWARD, DATA, FORWARD, UPDATE, WAIT, Spans
from stagerun.engine.device import synchronize
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, train
from stagerun.engine.state import TrainState


def timed_train(
    loop: StageLoop,
    state: TrainState,
    batches: Iterator[Batch],
    reducer: Reducer,
    stop: Callable[[], bool],
    left: Callable[[], float | None],
    spans: Spans,
) -> Iterator[Event]:
    """As `train`, with the parts of each iteration in `spans`."""
    clocks = _Clocks(reducer, spans, state)
    spans.stage = loop.stage
    for event in train(loop, state, clocks.batches(batches), clocks, stop, left):
        if isinstance(event, Iterated | NotFinite):
            clocks.part(UPDATE)
        yield event


class _Clocks(Switch):
    """A reducer that notes when a part ends: between a batch and `add` lies the forward pass."""

    def __init__(self, reducer: Reducer, spans: Spans, state: TrainState) -> None:
        super().__init__(reducer)
        self.spans, self.state, self.device = spans, state, next(state.model.parameters()).device
        self.last = 0.0

    def time(self) -> float:
        if not self.spans.on:
            return 0.0
        synchronize(self.device)
        return self.spans.clock()

    def part(self, name: str) -> None:
        """The part that ends here."""
        started, self.last = self.last, self.time()
        self.spans.add(name, started, self.last)

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.part(DATA)
            yield batch
            # What went before, the backward pass of another batch or the preparations of the iteration, is noted already.
            self.last = self.time()

    def begin(self, iter: int = 0) -> None:
        self.spans.iter = self.state.iter
        super().begin(iter)
        self.last = self.time()

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self.part(FORWARD)
        super().add(loss, logical_worker, tail, last)
        self.part(BACKWARD)

    def finish(self) -> Tensor:
        self.last = self.time()
        total = super().finish()
        self.part(WAIT)
        return total
