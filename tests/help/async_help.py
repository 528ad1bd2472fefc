"""A stage with `sync_param { method: ASYNC }` in threads of one process: replicas with networks of their own, and lines that are queues."""

import json
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_help import CPU, SOLVER, Batch, ConvNet, ThreadComm, Threads, arithmetic, cut, dataset, tensors
from facade import Determinism, Event, Knobs, PeerError, Solver, StageLoop, Sync, SyncMethod, TrainState, make_state
from torch import Tensor, nn

from stagerun.comm import SoloComm
from stagerun.engine.images import Ahead
from stagerun.wire import asynchronous
from stagerun.wire.asynchronous import Asynchronous
from stagerun.wire.replay import Record

LONG_S = 20.0
ITERATIONS, SNAPSHOT = 24, 10


class Killed(BaseException):
    """What a replica meets in the place of SIGKILL."""


class Wire:
    """One end of a line. What was sent before the other end is gone still arrives."""

    def __init__(self, out: "queue.Queue[Any]", into: "queue.Queue[Any]", gone: threading.Event) -> None:
        self.out, self.into, self.gone = out, into, gone

    def send(self, words: Sequence[Any], vectors: Sequence[Tensor]) -> None:
        if self.gone.is_set():
            raise PeerError("lost the other end")
        self.out.put((json.dumps(words), [vector.detach().clone() for vector in vectors]))

    def receive(self, device: torch.device) -> Any:
        end = time.monotonic() + LONG_S
        while True:
            try:
                words, vectors = self.into.get(timeout=0.01)
            except queue.Empty:
                if self.gone.is_set():
                    raise PeerError("lost the other end") from None
                assert time.monotonic() < end, "nothing came"
                continue
            return json.loads(words), vectors

    def close(self) -> None:
        self.gone.set()


def wires() -> tuple[Wire, Wire]:
    a: queue.Queue[Any] = queue.Queue()
    b: queue.Queue[Any] = queue.Queue()
    gone = threading.Event()
    return Wire(a, b, gone), Wire(b, a, gone)


class Job(Threads):
    """All threads run at a time."""

    def __init__(self, size: int) -> None:
        super().__init__(size, threading.Semaphore(size))
        self.lock = threading.Lock()
        self.lines: dict[tuple[int, int], tuple[Wire, Wire]] = {}

    def open(self, comm: "JobComm") -> dict[int, Wire]:
        return {peer: self.line(comm, peer) for peer in (range(1, comm.size) if comm.rank == 0 else [0])}

    def line(self, comm: "JobComm", peer: int) -> Wire:
        both = (min(comm.rank, peer), max(comm.rank, peer))
        with self.lock:
            return self.lines.setdefault(both, wires())[comm.rank > peer]

    def kill(self, worker: int) -> None:
        with self.lock:
            for both, (end, _) in self.lines.items():
                if worker in both:
                    end.close()


class JobComm(ThreadComm):
    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        def give(parts: dict[int, Tensor]) -> None:
            for part in parts.values():
                part.copy_(parts[src])

        self._collective(tensor, give)()


class Uneven(Asynchronous):
    """Iterations take different times."""

    rnd: random.Random

    def _computed(self, iteration: int, pieces: list[Batch]) -> Any:
        time.sleep(self.rnd.random() * 0.004)
        return super()._computed(iteration, pieces)


@dataclass
class Found:
    """What one replica ends with; a dead one has nothing. `record` is known on rank 0."""

    state: TrainState
    events: list[Event]
    record: Record
    comm: Any

    def tensors(self) -> dict[str, Tensor]:
        return tensors(self.state)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class Stage:
    """`make` gives a network with the stage's first weights. `prepare` is called for each replica before it begins; `stop` with the events
    so far of a rank."""

    max_staleness: int = 3
    solver: Solver = SOLVER
    make: Callable[[], nn.Module] = ConvNet
    data: Batch = field(default_factory=lambda: dataset(8 * ITERATIONS))
    prepare: Callable[[Asynchronous], None] = lambda pushing: None
    stop: Callable[[int, list[Event]], bool] = lambda rank, events: False
    seed: int = 0

    def __post_init__(self) -> None:
        sync = Sync(method=SyncMethod.ASYNC, replicas=8, max_staleness=self.max_staleness)
        self.solver = replace(self.solver, sync=sync, device_batch_size=2, max_iter=ITERATIONS, snapshot=SNAPSHOT)

    def stage_loop(self) -> StageLoop:
        return StageLoop(
            stage="main",
            max_iter=ITERATIONS,
            batch_size=8,
            epoch_images=8 * ITERATIONS,
            start_position=0,
            logical_workers=range(4),
            knobs=lambda i: Knobs(0.05 / (i + 1), 0.9 - 0.01 * i, 0.001 * i),
            snapshot=SNAPSHOT,
            test_interval=0,
            arithmetic=arithmetic(self.solver),
        )

    def batches(self, places: Iterator[tuple[int, int]]) -> Iterator[Batch]:
        for position, count in places:
            yield cut(self.data, position, position + count)

    def work(self, comm: Any, state: TrainState, record: Record, recorded: Record | None) -> Found:
        loop = self.stage_loop()
        if recorded is not None:
            loop = replace(loop, max_iter=recorded.last)
        pushing = Uneven(state, self.solver, Determinism.FIXED, comm)
        pushing.open(loop, record, recorded)
        pushing.rnd = random.Random(100 * self.seed + comm.rank)
        self.prepare(pushing)
        events: list[Event] = []

        def read(places: Iterable[tuple[int, int]]) -> AbstractContextManager[Iterator[Batch]]:
            return Ahead(self.batches(iter(places)))

        worker = SimpleNamespace(stop=lambda: self.stop(comm.rank, events))
        for event in pushing.train(worker, read):
            events.append(event)
        return Found(state, events, pushing.server.record if pushing.server is not None else Record(), comm)

    def run(
        self,
        replicas: int,
        *,
        recorded: Record | None = None,
        state: Callable[[], TrainState] | None = None,
        record: Record | None = None,
    ) -> list[Found | None]:
        """What each replica has at the end; None of one that was killed. `state`: what each begins with, and `record` up to there."""
        torch.set_num_threads(1)
        job, begun = Job(replicas), state or (lambda: make_state(self.make(), self.solver, CPU))
        begins = [begun() for _ in range(replicas)]  # torch's random state is one for all

        def one(comm: ThreadComm) -> Found | None:
            own = JobComm(comm.rank, job) if replicas > 1 else SoloComm()
            try:
                return self.work(own, begins[comm.rank], deepcopy(record) if record is not None else Record(), recorded)
            except Killed:
                job.kill(comm.rank)
                return None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asynchronous, "open_lines", job.open)
            return job.run(one)

    def replay(self, recorded: Record, replicas: int, **rest: Any) -> list[Found | None]:
        return replace(self, seed=self.seed + 7, prepare=lambda pushing: None).run(replicas, recorded=recorded, **rest)


def survivors(found: Sequence[Found | None]) -> list[Found]:
    return [one for one in found if one is not None]
