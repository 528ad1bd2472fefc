"""Steps of a stage that are timed with different ways to send its gradients, for `method: AUTO`.

They are those of training, on a copy of the state and with a learning rate of 0: what they leave behind is thrown away.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Compression, Determinism, Solver
from stagerun.comm import Comm, Reducer
from stagerun.engine.compression import reducer_of, residual_of
from stagerun.engine.device import synchronize
from stagerun.engine.images import Batch
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.update import Arithmetic, update


@contextmanager
def unseen(comm: Comm) -> Iterator[None]:
    """What is sent within counts for no traffic, and shows in no profile."""
    sent, spans = comm.traffic.sent, comm.spans
    comm.spans = None
    try:
        yield
    finally:
        comm.traffic.sent, comm.spans = sent, spans


class Trial:
    """Steps of a stage on a copy of `state`, whose network is `model`, freshly made. `batch` is every logical worker's."""

    def __init__(
        self,
        model: nn.Module,
        state: TrainState,
        solver: Solver,
        determinism: Determinism,
        how: Arithmetic,
        batch: Batch,
        own: range,
    ) -> None:
        model.load_state_dict(state.model.state_dict())
        # What compiled code takes less, there is less of to hide the sending.
        self.solver = replace(solver, compile=False, ema_decay=None)
        self.state = make_state(model, self.solver, how.normalise.device)
        self.determinism, self.how, self.batch, self.own = determinism, how, batch, own
        self.knobs = Knobs(0.0, solver.momentum, 0.0)

    def step(self, reducer: Reducer) -> float:
        """Seconds of one. Collective, if the reducer is."""
        pieces = ((worker, self.batch, worker == self.own[-1]) for worker in self.own)
        began = time.perf_counter()
        update(self.state, pieces, self.knobs, reducer, self.how, lambda: False)
        synchronize(self.how.normalise.device)
        return time.perf_counter() - began

    def reducer(self, comm: Comm, compress: Compression) -> Reducer:
        """That of training, with a residual of its own."""
        solver = replace(self.solver, compress=replace(compress, start_iter=0))
        self.state.residual = residual_of(self.determinism, self.state, solver, comm)
        return reducer_of(self.determinism, self.state, solver, comm)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """What is drawn within leaves torch's generators as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
