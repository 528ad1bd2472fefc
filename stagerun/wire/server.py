"""What rank 0 does for a stage with `method: ASYNC` beside its own replica: it hands out iterations, says whose push is next, and updates the
weights at each push. A replica reads ahead the images of iterations that it has reserved. It begins one when it pulls the weights for it,
and has begun it until its push is applied. Its age is the number of pushes that were applied since its pull."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagerun.base.errors import AGAIN, PeerError
from stagerun.base.events import Iterated, NotFinite
from stagerun.comm.group import Comm, TorchComm, Traffic, peers
from stagerun.engine.codec import decode, encode
from stagerun.engine.loop import StageLoop, failure, iterated
from stagerun.engine.solvers import make_update
from stagerun.engine.state import TrainState, momentum
from stagerun.engine.update import Outcome

# -- a line between two ranks


Message = tuple[Sequence[Any], Sequence[Tensor]]  # words, as JSON holds them, and vectors


class Line:
    """One end of a connection apart from the collectives of `Comm`. Several threads may use a line each at the same time. A lost peer raises
    PeerError on its own line only."""

    def __init__(self, worker: int, group: Any, traffic: Traffic) -> None:
        """`group`: of this rank and `worker`."""
        self.worker, self._group, self._traffic = worker, group, traffic

    def _peer(self, doing: str) -> AbstractContextManager[None]:
        return peers(doing, None, f"worker {self.worker}")

    def send(self, words: Sequence[Any], vectors: Sequence[Tensor]) -> None:
        """Sends a JSON value after its length, then the vectors; nothing is pickled. They may be changed afterwards. Raises PeerError."""
        kinds = [(str(vector.dtype).removeprefix("torch."), len(vector)) for vector in vectors]
        text = torch.frombuffer(bytearray(json.dumps([words, kinds]).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([len(text)]), text, *vectors):
            self._traffic.add(tensor.nbytes)
            with self._peer("send to it"):
                dist.send(tensor.detach().cpu(), self.worker, self._group)

    def receive(self, device: torch.device) -> Message:
        """Returns what the peer sends next. Raises PeerError."""
        size = int(self._received(torch.zeros(1, dtype=torch.int64)))
        words, kinds = json.loads(self._received(torch.zeros(size, dtype=torch.uint8)).numpy().tobytes())
        rooms = [torch.empty(length, dtype=getattr(torch, dtype)) for dtype, length in kinds]
        return words, [self._received(room).to(device) for room in rooms]

    def _received(self, room: Tensor) -> Tensor:
        with self._peer("receive from it"):
            dist.recv(room, self.worker, self._group)
        return room

    def close(self) -> None:
        """Not during a `send` or `receive` here. A peer that waits gets PeerError."""
        dist.destroy_process_group(self._group)
        self._group = None


def open_lines(comm: Comm) -> dict[int, Line]:
    """On rank 0 the lines to all others, by rank; on these theirs to rank 0. Collective. Raises PeerError."""
    assert isinstance(comm, TorchComm)
    lines: dict[int, Line] = {}
    for peer in range(1, comm.size):
        with peers("open lines", comm.pulse):
            group = dist.new_group([comm.ranks[0], comm.ranks[peer]], comm.timeout, "gloo")
        if comm.rank in (0, peer):
            other = peer - comm.rank
            lines[other] = Line(comm.ranks[other], group, comm.traffic)
    return lines


# -- the order of pushes

# The file's tensors, in its first version's terms. A claim numbers a push of its leg; older versions may apply claims in another order.
_TYPES = {
    "legs": torch.int64,  # [n, 5]: first iteration, last, pushes, 0, 0
    "iterations": torch.int64,  # by claim, as are the replicas
    "replicas": torch.int16,
    "0/pushes": torch.int64,  # by leg
    "0/order": torch.int32,  # the claims of a leg, as they were applied
    "0/staleness": torch.int32,
}


@dataclass(slots=True)
class Record:
    """The order of pushes, as snapshots keep it (`train.progress.ARRIVALS`): by it the stage can be trained again to the same bits. Of each push
    of a stage from iteration 0 on, in the order in which they were applied: its iteration, the replica that computed it, and how many updates
    it had not seen. `ends`: the iterations up to which legs went, growing."""

    ends: list[int] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The iteration up to which the order is known."""
        return self.ends[-1] if self.ends else 0

    def until(self, end: int) -> "Record":
        """The legs up to iteration `end`."""
        ends = [iter for iter in self.ends if iter <= end]
        pushes = ends[-1] if ends else 0
        return Record(ends, self.iterations[:pushes], self.replicas[:pushes], self.staleness[:pushes])

    def encoded(self) -> bytes:
        bounds = list(zip([0, *self.ends], self.ends, strict=False))
        found: dict[str, list[int]] = {
            "legs": [n for first, last in bounds for n in (first, last, last - first, 0, 0)],
            "iterations": self.iterations,
            "replicas": self.replicas,
            "0/pushes": [last - first for first, last in bounds],
            "0/order": [claim for first, last in bounds for claim in range(last - first)],
            "0/staleness": self.staleness,
        }
        tensors = {name: torch.tensor(numbers, dtype=_TYPES[name]) for name, numbers in found.items()}
        return encode(tensors | {"legs": tensors["legs"].reshape(-1, 5)})


def record_of(data: bytes) -> Record:
    """ValueError if it is none, or one that no run of this version can have written."""
    found = decode(data)
    if "1/order" in found:
        raise ValueError("it is of several servers, and one server holds the model")
    for name, dtype in _TYPES.items():
        shape = (5,) if name == "legs" else ()
        if name not in found or found[name].dtype != dtype or not found[name].dim() or found[name].shape[1:] != shape:
            raise ValueError(f"not a record of pushes: `{name}` is missing, or not what a run writes")
    legs, iterations, replicas, _, order, staleness = (found[name].tolist() for name in _TYPES)
    record, known = Record(staleness=staleness), {len(iterations), len(replicas), len(order), len(staleness)}
    for first, last, *_ in legs:
        sound = first == record.last < last <= min(known) and sorted(order[first:last]) == list(range(last - first))
        if sound:
            record.iterations += [iterations[first + claim] for claim in order[first:last]]
            record.replicas += [replicas[first + claim] for claim in order[first:last]]
            sound = sorted(record.iterations[first:]) == list(range(first, last))
        if not sound or not all(0 <= behind <= at for at, behind in enumerate(staleness[first:last])):
            raise ValueError(f"not a record of pushes: its leg at iteration {first} is not one that a run has")
        record.ends.append(last)
    if known != {record.last}:
        raise ValueError("not a record of pushes: it has others than those of its legs")
    return record


# -- turns, and who serves them

T = TypeVar("T")
AHEAD = 2  # iterations that a replica has reserved beside the one that it begins
LEAVE = ["leave"]


class Turns:
    """Who trains which iteration, and whose push is applied next. Pure.

    Ages stay at most `max_staleness`. Every replica that has begun must find a turn in time, whatever the others do: sort the ages in
    falling order, then the k-th (from 0) plus k is at most `max_staleness`, after every step. The oldest can always push next: there is
    no deadlock. With a record, replicas take the places of its order in turn, so that each knows beforehand which images it needs; a place
    begins after the pushes that it has to see, and the lowest that has begun can always push next.
    """

    def __init__(self, replicas: int, first: int, last: int, max_staleness: int, recorded: Record | None) -> None:
        """Of the iterations `first` .. `last` - 1."""
        self.replicas, self._max_staleness, self._recorded = replicas, max_staleness, recorded
        self.version = self.limit = first  # pushes that are applied; the present leg ends before place `limit`
        self._top = first  # places from here on have not begun
        self._reserved = [deque[int]() for _ in range(replicas)]
        self._sources = [iter(range(first, last))] * replicas
        if recorded is not None:
            self._sources = [iter(range(first + replica, last, replicas)) for replica in range(replicas)]
        self.begun: dict[int, tuple[int, int]] = {}  # by replica, its place and the version that it sees

    def cut(self) -> None:
        """End the leg as soon as possible: replicas finish what has begun, and all places before it."""
        self.limit = min(self.limit, self._top)

    def begin(self, replica: int) -> list[int] | None:
        """Return the iteration that `replica` begins now, and those that it has reserved. None: it must wait; []: the leg has nothing left
        for it."""
        reserved, known = self._reserved[replica], self._recorded
        reserved.extend(islice(self._sources[replica], AHEAD + 1 - len(reserved)))
        if not reserved or reserved[0] >= self.limit:
            return []
        place = reserved[0]
        seen = self.version if known is None else place - known.staleness[place]
        if seen > self.version or not self._fits([seen, *(seen for _, seen in self.begun.values())]):
            return None
        self.begun[replica] = place, seen
        self._top = max(self._top, place + 1)
        iterations = list(reserved) if known is None else [known.iterations[place] for place in reserved]
        reserved.popleft()
        return iterations

    def push(self, replica: int) -> int | None:
        """Return how many updates the push of `replica`, which is applied now, has not seen. None: it must wait."""
        place, seen = self.begun[replica]
        if self._recorded is not None and place != self.version:
            return None
        if not self._fits([seen - 1 for other, (_, seen) in self.begun.items() if other != replica]):
            return None
        del self.begun[replica]
        self.version += 1
        return self.version - 1 - seen

    def _fits(self, seen: Iterable[int]) -> bool:
        """Whether replicas that see these versions all find a turn in time; a record has shown it of its own."""
        ages = enumerate(sorted(seen))
        return self._recorded is not None or all(self.version - one + k <= self._max_staleness for k, one in ages)


class Server:
    """The weights, what their updates remember, and the turns of all replicas. Any thread may call `turn` and `serve`."""

    def __init__(
        self, state: TrainState, loop: StageLoop, turns: Turns, record: Record, recorded: Record | None
    ) -> None:
        """It begins with the weights and the history of `state`, which stay as they are; BatchNorm's statistics are moved there. `record`
        is of the stage so far; `recorded` the one to go by."""
        self.state, self.loop, self.turns, self.record, self.recorded = state, loop, turns, record, recorded
        self.news: deque[Iterated | NotFinite] = deque()
        trained = state.solver.parameters
        self._weights = torch.cat([flat(p.tensor) for p in trained])
        self._gradient = torch.zeros_like(self._weights)
        own, lengths = [], [p.tensor.numel() for p in trained]
        pieces = zip(trained, self._weights.split(lengths), self._gradient.split(lengths), strict=True)
        for parameter, piece, gradient in pieces:
            tensor = nn.Parameter(piece, requires_grad=False)
            tensor.grad = gradient
            own.append(replace(parameter, tensor=tensor))
        self._update = make_update(own, state.solver.settings)
        remembered = [tensor for kept in self._update.history.values() for tensor in kept.values()]
        self._history = [(flat(a), flat(b)) for a, b in zip(momentum(state).values(), remembered, strict=True)]
        for of_state, ours in self._history:
            ours.copy_(of_state)
        # The newest versions of the weights: in a replay a pull may come late.
        late = max(recorded.staleness, default=0) if recorded is not None else 0
        self._versions = deque([self._weights.clone()], maxlen=1 + late)
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def start(self, limit: int) -> None:
        """Start the leg up to iteration `limit`. No replica may have come for it yet."""
        self._first, self._limit, self.turns.limit = self.turns.version, limit, limit
        # Replicas that have come to the end of the leg; whether one asked for a stop.
        self._met, self._stopped = 0, False
        self._wrong: tuple[str, int] | None = None
        # The leg's own: a thread that has not seen the end of the one before still has that one's.
        self._ends: list[Sequence[Any]] = []
        self._before = time.monotonic()

    def turn(self, replica: int, words: Sequence[Any], vectors: Sequence[Tensor]) -> Message:
        """Apply what `replica` has computed, in its turn; then wait for the next iteration that it begins, or for the end of the leg.
        `words`: whether it asks all to stop, and of its iteration number, loss and what is not finite: '' where all is, and then `vectors`
        are the gradient [n] and BatchNorm's statistics. The answer is ([None, iteration, those reserved after it...], [weights]), or
        ([[iteration at the end, whether it was a stop, [what was not finite, at which iteration] or None]], [])."""
        stop, *done = words
        with self._changed:
            if done:
                self._count(replica, vectors, *done)
            if stop:
                self._stopped = True
                self.turns.cut()
            self._changed.notify_all()
            if iterations := self._until(lambda: self.turns.begin(replica)):
                version = self.turns.begun[replica][1]
                return [None, *iterations], [self._versions[version - self.turns.version - 1]]
            self._met, ends = self._met + 1, self._ends
            if self._met == self.turns.replicas:
                ends.append((self._end(), self._stopped, self._wrong))
            return [self._until(lambda: next(iter(ends), None))], []

    def serve(self, replica: int, line: Line) -> None:
        """Answer a replica, in a thread, until it says that it leaves. An error there ends the run."""
        try:
            while (question := line.receive(self._weights.device))[0] != LEAVE:
                line.send(*self.turn(replica, *question))
        except BaseException as error:
            gone = PeerError(f"worker {replica} is gone", AGAIN) if isinstance(error, PeerError) else error
            with self._changed:  # every caller raises the first error from now on
                self._error = self._error or gone
                self._changed.notify_all()
        finally:  # the replica must not wait for an answer
            line.close()

    def hand_back(self) -> None:
        """Give the state of rank 0 the weights and the history."""
        unpack(self._weights, [p.tensor for p in self.state.solver.parameters])
        for of_state, ours in self._history:
            of_state.copy_(ours)

    def _count(self, replica: int, vectors: Sequence[Tensor], iteration: int, loss: float, wrong: str) -> None:
        """An iteration that is done: apply its push, or end the leg where it is not finite."""
        loop, knobs = self.loop, self.loop.knobs(iteration)
        now = time.monotonic()
        seconds, self._before = now - self._before, now  # since the one before, or the leg's start
        if wrong:
            del self.turns.begun[replica]
            if self._wrong is None:
                self.news.append(failure(loop, 1, wrong, knobs, seconds, iteration))
                self._wrong = wrong, iteration
                self.turns.cut()
            return
        staleness = self._until(lambda: self.turns.push(replica))
        gradient, total = vectors
        self._gradient.copy_(gradient)
        self._update.update(knobs)
        self._versions.append(self._weights.clone())
        self.state.statistics.move(total, loop.arithmetic.logical_workers)
        self.record.iterations.append(iteration)
        self.record.replicas.append(replica)
        self.record.staleness.append(staleness)
        event = iterated(loop, self.turns.version, Outcome(loss, False), knobs, seconds)
        self.news.append(replace(event, staleness=staleness, replica=replica))

    def _end(self) -> int:
        """The iteration at which the leg ends. A leg of a record that a stop has cut is begun anew by the next process."""
        end = self.turns.limit
        if self.recorded is not None:
            end = end if end == self._limit else self._first
            self.record = self.recorded.until(end)
        elif end > self._first and self._wrong is None:
            self.record.ends.append(end)
        return end

    def _until(self, ask: Callable[[], T | None]) -> T:
        """Poll `ask` after each change until it answers."""
        while self._error is None:
            if (answer := ask()) is not None:
                self._changed.notify_all()
                return answer
            self._changed.wait()
        raise self._error


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory: a view [n]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def unpack(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Put the elements back where `flat` has them from."""
    for tensor, piece in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        flat(tensor).copy_(piece)
