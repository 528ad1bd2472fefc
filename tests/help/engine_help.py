"""What the tests of engine and comm share: batches, small nets, and a job of several workers inside one process."""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from facade import (
    Arithmetic,
    Determinism,
    Knobs,
    Normalise,
    Outcome,
    PeerError,
    Precision,
    Solver,
    TrainState,
    Transform,
    exchange_of,
    losses,
    make_state,
    momentum,
)
from torch import Tensor, nn

from stagerun.comm import Comm, runs_of
from stagerun.comm.group import GRADIENTS
from stagerun.engine.losses import Mixing
from stagerun.models import BatchNorm2d

CPU = torch.device("cpu")
T = TypeVar("T")

SOLVER = Solver(
    base_lr=0.1,
    lr_policy="fixed",
    max_iter=10,
    batch_size=8,
    device_batch_size=2,
    momentum=0.9,
    weight_decay=0.01,
    transform=Transform(scale=0.01, mean_value=(100.0,)),
    test_batch_size=4,
    random_seed=1,
    precision=Precision.FP64,
)
KNOBS = Knobs(0.1, 0.9, 0.01)


@dataclass
class Batch:
    images: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    cutout: np.ndarray | None = None
    crop: np.ndarray | None = None


def dataset(n: int, size: int = 6, channels: int = 1, classes: int = 3, seed: int = 0) -> Batch:
    """n images of size x size, in positions 0 .. n-1."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, size, size, channels), dtype=np.uint8)
    return Batch(images, rng.integers(0, classes, n), np.arange(n))


def cut(data: Batch, start: int, stop: int) -> Batch:
    return Batch(data.images[start:stop], data.labels[start:stop], data.positions[start:stop])


class Linear(nn.Module):
    """A linear classifier, whose gradient is known in closed form."""

    def __init__(self, inputs: int = 36, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


class ConvNet(nn.Module):
    """Convolutions with 3x3 weights, BatchNorm, dropout, and a parameter in the middle that no output depends on."""

    def __init__(self, dropout: float = 0.0, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.bn1 = BatchNorm2d(4, 0.8)
        self.unused = nn.Linear(3, 3)
        self.conv2 = nn.Conv2d(4, 5, 3, stride=2, padding=1, bias=False)
        self.bn2 = BatchNorm2d(5, 0.8)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(self.dropout(x.mean((2, 3))))


def arithmetic(solver: Solver, **changes: object) -> Arithmetic:
    dtype = torch.float64 if solver.precision is Precision.FP64 else torch.float32
    how = Arithmetic(
        logical_workers=solver.logical_workers,
        normalise=Normalise(solver.transform, 1, CPU, dtype, solver.channels_last),
        precision=solver.precision,
        clip_gradients=solver.clip_gradients,
        forward_seed=lambda position: position,
        mixing=Mixing(solver.random_seed, solver.mixup_alpha, solver.cutmix_alpha),
        loss=losses.loss_of(solver),
    )
    return replace(how, **changes)


def started(model: nn.Module, solver: Solver, comm: Comm, determinism: Determinism = Determinism.FIXED) -> TrainState:
    """As a stage begins: with the residuals of `compress_param` and the replicas of `sync_param`."""
    state = make_state(model, solver, CPU)
    exchange_of(state, solver, determinism, comm)
    return state


def updates(
    model: nn.Module,
    solver: Solver,
    global_batches: Sequence[Batch],
    comm: Comm,
    determinism: Determinism = Determinism.FIXED,
    knobs: Callable[[int], Knobs] = lambda i: KNOBS,
    state: TrainState | None = None,
    broken_off: Callable[[int], bool] | None = None,
) -> tuple[TrainState, list[Outcome]]:
    """One update per global batch, on this rank; the state and the outcomes. `state`: where to go on from. `broken_off`: of the number
    of device batches that are done in an iteration."""
    state = state or started(model, solver, comm, determinism)
    reducer = (state.exchange or exchange_of(state, solver, determinism, comm)).make_reducer()
    run = runs_of(solver.logical_workers, comm.size)[comm.rank]
    size = solver.device_batch_size
    outcomes = []
    for i, whole in enumerate(global_batches, state.iter):
        pieces = ((k, cut(whole, k * size, (k + 1) * size), k == run[-1]) for k in run)
        more = () if broken_off is None else (broken_off,)
        outcomes.append(state.exchange.update(pieces, knobs(i), reducer, arithmetic(solver), lambda: False, *more))
    state.show()
    return state, outcomes


def tensors(state: TrainState) -> dict[str, Tensor]:
    """Weights, statistics and momentum, copied."""
    whole = {**state.model.state_dict(), **{f"V {k}": v for k, v in momentum(state).items()}}
    return {k: v.clone() for k, v in whole.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Equal to a relative `tolerance`, of each tensor's largest value; 0: the same bits."""
    assert a.keys() == b.keys()
    for name, x in a.items():
        if tolerance:
            assert (x - b[name]).abs().max() <= tolerance * max(1e-3, float(x.abs().max())), name
        else:
            assert torch.equal(x, b[name]), name


def peer_error(do: Callable[[], object]) -> str:
    """The message of its PeerError; '' without one."""
    try:
        do()
    except PeerError as error:
        return error.message
    return ""


class Threads:
    """W workers as threads of this process, of which only one runs at a time: it hands over where a collective waits.

    So torch's global random state is each worker's own between two collectives, as in processes.
    """

    def __init__(self, size: int, turn: Any = None) -> None:
        self.size = size
        self.turn = turn or threading.Lock()
        self.parts: dict[tuple[int, ...], Threads] = {}
        self.met = threading.Barrier(size)
        self.calls: dict[int, dict[int, Any]] = {}

    def run(self, work: Callable[["ThreadComm"], T]) -> list[T]:
        """`work(comm)` of each rank. The first error of a rank is raised here."""
        answers: list[T | None] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            with self.turn:
                try:
                    answers[rank] = work(ThreadComm(rank, self))
                except BaseException as error:
                    errors.append(error)
                    for group in (self, *self.parts.values()):
                        group.met.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return answers

    def meet(self) -> None:
        self.turn.release()
        try:
            self.met.wait(30)
        finally:
            self.turn.acquire()


class ThreadComm(Comm):
    """One worker's Comm. Sums are taken in order of rank; what is sent is counted as `TorchComm` counts it."""

    def __init__(self, rank: int, together: Threads) -> None:
        super().__init__()
        self.rank, self.size, self.together, self.count = rank, together.size, together, 0

    def _collective(self, mine: T, carry_out: Callable[[dict[int, T]], None]) -> Callable[[], None]:
        """The answer does it once all ranks are there: with what they brought, by rank, one of them does it for all."""
        number, self.count = self.count, self.count + 1
        self.together.calls.setdefault(number, {})[self.rank] = mine

        def wait() -> None:
            self.together.meet()
            parts = self.together.calls.pop(number, None)
            if parts is not None:  # the first to come back from the meeting
                carry_out(parts)
            self.together.meet()

        return wait

    def part(self, ranks: Sequence[int]) -> "ThreadComm | None":
        key = tuple(ranks)
        if self.rank not in key:
            return None
        if key not in self.together.parts:
            self.together.parts[key] = Threads(len(key), self.together.turn)
        found = copy.copy(self)
        found.rank, found.size, found.together, found.count = (
            key.index(self.rank),
            len(key),
            self.together.parts[key],
            0,
        )
        return found

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        if doing == GRADIENTS:
            self.traffic.sent += 2 * (self.size - 1) * tensor.nbytes // self.size

        def add_up(parts: dict[int, Tensor]) -> None:
            assert len({part.shape for part in parts.values()}) == 1
            total = parts[0].clone()
            for rank in range(1, self.size):
                total += parts[rank]
            for part in parts.values():
                part.copy_(total)

        return self._collective(tensor, add_up)

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        self.traffic.sent += (sum(sent_sizes) - sent_sizes[self.rank]) * sent.element_size()

        def hand_out(parts: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
            for target, (_, places) in parts.items():
                for source, place in enumerate(places):
                    place.copy_(parts[source][0][target])

        both = list(sent.split(list(sent_sizes))), list(received.split(list(received_sizes)))
        return self._collective(both, hand_out)

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        self.traffic.sent += (self.size - 1) * pieces[self.rank].nbytes

        def fill(parts: dict[int, Sequence[Tensor]]) -> None:
            for target in parts.values():
                for source, piece in enumerate(target):
                    piece.copy_(parts[source][source])

        return self._collective(pieces, fill)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        if self.rank != src:
            tensor.zero_()
        self.all_reduce(tensor, "hand out a tensor")()

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        return self.gather_bytes(data or b"")[src]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        mine = [data]

        def give(parts: dict[int, list[bytes]]) -> None:
            told = [parts[rank][0] for rank in range(self.size)]
            for part in parts.values():
                part[:] = told

        self._collective(mine, give)()
        return mine

    def barrier(self) -> None:
        self.together.meet()
