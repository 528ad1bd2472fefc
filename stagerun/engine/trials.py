"""What the choice of a compression goes by: the link's speed, what compressing costs here, and steps that are tried.

Steps are those of training, on a copy of the state and with a learning rate of 0: what they leave behind is thrown away.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Compression, Determinism, Solver
from stagerun.comm import Comm, Reducer, gather_json
from stagerun.comm.compression import Draw, Operator
from stagerun.comm.planes import Codec, most_bytes
from stagerun.comm.reduce import CHUNK_BYTES, SoloReducer
from stagerun.engine.compression import reducer_of, residual_of
from stagerun.engine.device import synchronize
from stagerun.engine.images import Batch
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.update import Arithmetic, update

_TINY = 1024  # bytes of a collective that takes the latency alone
_SMALL = 1024 * 1024  # of the first that shows the bandwidth
_FAST = 0.05  # seconds; a link that takes less for that is measured with a whole chunk
_TIMES = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """A kind of collective: seconds of one that carries next to nothing, and bytes per second that a worker sends."""

    latency: float
    bandwidth: float


@contextmanager
def unseen(comm: Comm) -> Iterator[None]:
    """What is sent within counts for no traffic, and shows in no profile."""
    sent, spans = comm.traffic.sent, comm.spans
    comm.spans = None
    try:
        yield
    finally:
        comm.traffic.sent, comm.spans = sent, spans


def measure_link(comm: Comm, device: torch.device) -> tuple[Measured, Measured]:
    """Sums over a ring, and messages from each worker to all. Collective; every rank has its own times."""

    def summed(size: int) -> tuple[Callable[[], None], float]:
        tensor = torch.zeros(size // 4, device=device)
        return lambda: comm.all_reduce(tensor)(), 2 * (comm.size - 1) / comm.size * size

    def shared(size: int) -> tuple[Callable[[], None], float]:
        pieces = [torch.zeros(size // comm.size, dtype=torch.uint8, device=device) for _ in range(comm.size)]
        return lambda: comm.complete(pieces)(), (comm.size - 1) * (size // comm.size)

    ring, messages = (_measure(comm, device, kind) for kind in (summed, shared))
    return ring, messages


def _measure(comm: Comm, device: torch.device, kind: Callable[[int], tuple[Callable[[], None], float]]) -> Measured:
    latency = statistics.median(_seconds(comm, device, kind(_TINY)[0]) for _ in range(_TIMES))
    size = _SMALL
    if gather_json(comm, _seconds(comm, device, kind(size)[0]))[0] < _FAST:
        size = CHUNK_BYTES
        _seconds(comm, device, kind(size)[0])
    do, sent = kind(size)
    taken = statistics.median(_seconds(comm, device, do) for _ in range(3))
    return Measured(latency, sent / max(taken - latency, 1e-9))


def _seconds(comm: Comm, device: torch.device, do: Callable[[], None]) -> float:
    comm.barrier()
    synchronize(device)
    began = time.perf_counter()
    do()
    synchronize(device)
    return time.perf_counter() - began


@torch.no_grad()
def cost_of(operator: Operator, gradient: Tensor) -> tuple[list[int], float, float]:
    """Bytes of a message in each round, and seconds to make one and to add one up: of a vector."""
    if (dtype := operator.wire(gradient.dtype)) is not None:
        began = _now(gradient)
        row = gradient.to(dtype, copy=True)
        made = _now(gradient)
        torch.zeros_like(gradient).add_(row)
        return [row.nbytes], made - began, _now(gradient) - made
    own, out = [gradient.clone()], torch.zeros_like(gradient)
    steps = operator.steps(own, range(1), Draw(0, 0, -1, 0), out)
    sizes: list[int] = []
    began, encoding = _now(gradient), 0.0
    messages = next(steps)
    while True:
        now = _now(gradient)
        encoding, began = encoding + now - began, now
        sizes.append(messages[0].numel())
        try:
            messages = steps.send(messages)
        except StopIteration:
            return sizes, encoding, _now(gradient) - began


_SAMPLE = 1 << 20  # numbers of each tensor, at most, that the lossless code is measured with


def lossless_cost(gradients: Iterable[Tensor]) -> tuple[float, float, float] | None:
    """Seconds per number to code and to decode without loss, and its bytes; None without zstandard, and of other numbers than float32."""
    parts = [g[:_SAMPLE].cpu().numpy() for g in gradients if g.dtype == torch.float32]
    if importlib.util.find_spec("zstandard") is None or not parts:
        return None
    codec, taken = Codec(), [0.0, 0.0, 0.0]
    for values in parts:
        room, out = np.empty(most_bytes(len(values)), np.uint8), np.empty_like(values)
        began = time.perf_counter()
        size = codec.encode(values, room)
        coded = time.perf_counter()
        codec.decode(room[:size], out)
        spent = (coded - began, time.perf_counter() - coded, float(size))
        taken = [a + b for a, b in zip(taken, spent, strict=True)]
    encode, decode, length = (each / sum(map(len, parts)) for each in taken)
    return encode, decode, length


def _now(like: Tensor) -> float:
    synchronize(like.device)
    return time.perf_counter()


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

    def alone(self) -> float:
        """Seconds of a step of which nothing is sent. The first is left out: it makes room, and chooses algorithms."""
        reducer = SoloReducer([p.tensor for p in self.state.solver.parameters])
        self.step(reducer)
        return min(self.step(reducer) for _ in range(2))

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step."""
        return {p.name: p.tensor.grad.detach() for p in self.state.solver.parameters if p.tensor.grad is not None}

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


def vectors(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.reshape(-1).contiguous() for name, gradient in gradients.items()}
