"""The training loop of a stage with `method: ASYNC`, instead of `engine.loop.train`. Each rank is a replica; rank 0 serves, too, in a thread for
each other rank: it hands out iterations, decides whose push is next, and updates the weights at each push. A replica reads the images of reserved
iterations ahead. Its iteration begins when it pulls the weights and ends when its push is applied; its age is the number of pushes applied
meanwhile. A leg ends where a snapshot or an evaluation is due: all iterations before are done, none after it has begun, and all ranks
hold the server's state, as in any stage."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagerun.base.errors import AGAIN, PeerError, RanksDiffer, ResumeRefused
from stagerun.base.events import Event, Iterated, Note, NotFinite, Stopped
from stagerun.comm import Comm, Reducer, SoloComm, TorchComm, Traffic, make_reducer, peers
from stagerun.engine.loop import StageLoop, diverged, failure, iterated, overdue, whats_due
from stagerun.engine.solvers import make_update
from stagerun.engine.state import TrainState, momentum, weights
from stagerun.engine.update import Outcome, Stop, clip_summed, not_finite, summed, too_fast
from stagerun.schedule.rates import boundaries
from stagerun.train.agreement import hand_out, rank0
from stagerun.train.context import Context, StageRun
from stagerun.train.exchange import Read, counted
from stagerun.train.progress import ARRIVALS
from stagerun.wire.holding import Measured, flat
from stagerun.wire.replay import Record, Turns, record_of

if TYPE_CHECKING:
    from stagerun.engine.images import Batch

T = TypeVar("T")
LEAVE = ["leave"]
Message = tuple[Sequence[Any], Sequence[Tensor]]  # words, as JSON holds them, and vectors


class Line:
    """An end of a connection apart from the collectives of `Comm`. Several threads may use a line each at the same time. A lost peer raises
    PeerError on its line only."""

    def __init__(self, worker: int, group: Any, traffic: Traffic) -> None:
        """`group` has this rank and `worker`."""
        self.worker, self._group, self._traffic = worker, group, traffic

    def send(self, words: Sequence[Any], vectors: Sequence[Tensor]) -> None:
        """Sends a JSON value after its length, then the vectors; nothing is pickled. They may be changed afterwards. Raises PeerError."""
        kinds = [(str(vector.dtype).removeprefix("torch."), len(vector)) for vector in vectors]
        text = torch.frombuffer(bytearray(json.dumps([words, kinds]).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([len(text)]), text, *vectors):
            self._traffic.add(tensor.nbytes)
            with peers("send to it", None, f"worker {self.worker}"):
                dist.send(tensor.detach().cpu(), self.worker, self._group)

    def receive(self, device: torch.device) -> Message:
        """Returns what the peer sends next. Raises PeerError."""
        size = int(self._received(torch.zeros(1, dtype=torch.int64)))
        words, kinds = json.loads(self._received(torch.zeros(size, dtype=torch.uint8)).numpy().tobytes())
        rooms = [torch.empty(length, dtype=getattr(torch, dtype)) for dtype, length in kinds]
        return words, [self._received(room).to(device) for room in rooms]

    def _received(self, room: Tensor) -> Tensor:
        with peers("receive from it", None, f"worker {self.worker}"):
            dist.recv(room, self.worker, self._group)
        return room

    def close(self) -> None:
        """Close the line; don't call it during a `send` or `receive`. A waiting peer gets PeerError."""
        dist.destroy_process_group(self._group)
        self._group = None


def open_lines(comm: Comm) -> dict[int, Line]:
    """Open a line between rank 0 and each other rank; return this rank's lines by peer. Collective. Raises PeerError."""
    assert isinstance(comm, TorchComm)
    lines: dict[int, Line] = {}
    for peer in range(1, comm.size):
        with peers("open lines", comm.pulse):
            group = dist.new_group([comm.ranks[0], comm.ranks[peer]], comm.timeout, "gloo")
        if comm.rank in (0, peer):
            other = peer - comm.rank
            lines[other] = Line(comm.ranks[other], group, comm.traffic)
    return lines


# -- on rank 0


class Server:
    """The weights, what their updates remember, and the turns of all replicas. Any thread may call `turn` and `serve`."""

    def __init__(
        self, state: TrainState, loop: StageLoop, turns: Turns, record: Record, recorded: Record | None
    ) -> None:
        """Copy weights and history of `state`; BatchNorm's statistics are updated in `state`. `record`: the stage so far; `recorded`: the order to
        replay."""
        self.state, self.loop, self.turns, self.record, self.recorded = state, loop, turns, record, recorded
        self.news: deque[Iterated | NotFinite] = deque()
        trained = state.solver.parameters
        vectors = [flat(p.tensor) for p in trained]
        lengths = list(map(len, vectors))
        self._weights = torch.cat(vectors)
        self._gradient = torch.zeros_like(self._weights)
        pieces = [nn.Parameter(piece, requires_grad=False) for piece in self._weights.split(lengths)]
        for piece, gradient in zip(pieces, self._gradient.split(lengths), strict=True):
            piece.grad = gradient
        copies = [replace(parameter, tensor=piece) for parameter, piece in zip(trained, pieces, strict=True)]
        self._update = make_update(copies, state.solver.settings)
        remembered = [flat(tensor) for kept in self._update.history.values() for tensor in kept.values()]
        # Each vector of the state, and the server's.
        of_state = [*vectors, *map(flat, momentum(state).values())]
        self._vectors = list(zip(of_state, [*pieces, *remembered], strict=True))
        for theirs, ours in self._vectors:
            ours.copy_(theirs)
        # The newest versions of the weights: pulls of a replay may be late.
        late = max(recorded.staleness, default=0) if recorded is not None else 0
        self._versions = deque([self._weights.clone()], maxlen=1 + late)
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def start(self, limit: int) -> None:
        """Start the leg up to iteration `limit`, before any replica asks for it."""
        self._first, self._limit, self.turns.limit = self.turns.version, limit, limit
        # Replicas at the end of the leg; whether one asked for a stop.
        self._met, self._stopped = 0, False
        self._wrong: tuple[str, int] | None = None
        # A new list per leg: a slow thread still reads the previous leg's.
        self._ends: list[Sequence[Any]] = []
        self._before = time.monotonic()

    def turn(self, replica: int, words: Sequence[Any], vectors: Sequence[Tensor]) -> Message:
        """Apply the push of `replica` in its turn; then wait until it may begin another iteration, or the leg ends. `words`: whether it asks all to
        stop; the iteration, its loss, and what is not finite, '' if nothing: then `vectors` are the gradient [n] and BatchNorm's statistics.
        Return ([None, iteration, reserved iterations...], [weights]), or ([[last iteration, stopped, [not finite, at iteration] or None]], [])."""
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
        """Answer a replica, in a thread, until it leaves. An error ends the run."""
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
        """Copy weights and history to the state of rank 0."""
        for theirs, ours in self._vectors:
            theirs.copy_(ours)

    def _count(self, replica: int, vectors: Sequence[Tensor], iteration: int, loss: float, wrong: str) -> None:
        """Apply the push of an iteration, or end the leg if it is not finite."""
        loop, knobs = self.loop, self.loop.knobs(iteration)
        now = time.monotonic()
        seconds, self._before = now - self._before, now  # since the previous one, or the leg's start
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
        """Return the last iteration of the leg. The next process repeats a recorded leg that a stop has cut."""
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


class Asynchronous(Measured):
    """The exchange of a rank. Collective: `open`, and the ends of legs."""

    arrivals: bytes | None = None  # the snapshot file with the order of all pushes, on rank 0

    def begin(self, run: StageRun, loop: StageLoop) -> Generator[Event, None, bool]:
        worker, name = run.worker, run.stage.name
        record, recorded = Record(), None if worker.replay is None else Record()

        def look() -> None:
            """Runs on rank 0."""
            nonlocal record, recorded
            if run.is_piece and worker.replaying is None:  # without its order it can't have the same bits
                text = f"stage `{name}` pushed without waiting (`method: ASYNC`), and its snapshot after {run.planned.until} iterations is missing"
                redo = f"retrain it with `--redo {name}`; `--replay` makes it again in another folder"
                raise ResumeRefused(text, redo)
            try:
                if run.resumes and run.files is not None and ARRIVALS in run.files:
                    self.arrivals = run.files[ARRIVALS]
                    record = record_of(self.arrivals)
                if worker.replaying is not None:
                    recorded = record_of(worker.replaying.records[name].arrivals)
                iter = self.state.iter
                if record.last != iter or (recorded is not None and recorded.until(iter) != record):
                    raise ValueError(f"it doesn't match its snapshot at iteration {iter}")
            except ValueError as error:
                text = f"the recorded order of pushes in stage `{name}` can't be used: {error}"
                raise ResumeRefused(
                    text, "no run has written it, or an older version; take `--redo` for the stage, or another --out"
                ) from error

        rank0(worker.comm, look)
        self.open(replace(loop, logical_workers=range(self.solver.logical_workers)), record, recorded)
        if worker.profile is not None:
            yield Note(text=f"no profile of stage `{name}`: iterations of `method: ASYNC` overlap", warning=True)
        return True

    def open(self, loop: StageLoop, record: Record, recorded: Record | None = None) -> None:
        """`record`: the stage so far. `recorded`: the order to replay, if any. Their contents count on rank 0."""
        solver, state, comm = self.solver, self.state, self.comm
        assert solver.sync is not None
        self.loop, self.replays = loop, recorded is not None
        self.ends = boundaries(solver, loop.branch_points) if recorded is None else recorded.ends
        self.device_batch_size = solver.device_batch_size
        parameters = [p.tensor for p in state.solver.parameters]
        self.trained = list(map(flat, parameters))
        self.reducer: Reducer = make_reducer(self.determinism, parameters, SoloComm(), loop.arithmetic.logical_workers)
        self.ahead: deque[tuple[ExitStack, Iterator[Batch]]] = deque()  # images of reserved iterations
        self.server: Server | None = None
        self.threads: list[threading.Thread] = []
        lines = open_lines(comm) if comm.size > 1 else {}
        if comm.rank == 0:
            turns = Turns(comm.size, state.iter, loop.max_iter, solver.sync.max_staleness or 1, recorded)
            self.server = Server(state, loop, turns, record, recorded)
            for replica in range(1, comm.size):
                served = (replica, lines[replica])
                self.threads.append(threading.Thread(target=self.server.serve, args=served, name="server", daemon=True))
                self.threads[-1].start()
        else:
            self.line = lines[0]

    def train(self, worker: Context, read: Read) -> Generator[Event, None, None]:
        """Train to the end of the stage, or of the record. Rank 0 reports iterations in the order of their pushes; all ranks yield the same
        SnapshotDue, TestDue and Stopped. `read` starts reading the device batches at (position, count)."""
        return counted(self._train(read, worker.stop), self.comm.traffic)

    def _train(self, read: Read, stop: Stop) -> Iterator[Event]:
        state, loop = self.state, self.loop
        yield from overdue(loop, state)
        try:
            while state.iter < loop.max_iter:
                first = state.iter
                # A replay stopped inside a leg is undone: its state matches no iteration.
                began = {k: t.clone() for k, t in weights(state).items()} if self.replays else {}
                if self.server is not None:
                    self.server.start(min(loop.max_iter, next(end for end in self.ends if end > first)))
                self.comm.barrier()  # the leg starts before anyone asks
                state.iter, stopped, wrong = yield from self._leg(read, stop)
                if state.iter > first:
                    self._share()
                for name, tensor in began.items() if state.iter == first else ():
                    weights(state)[name].copy_(tensor)
                if wrong or stopped or state.iter == loop.max_iter:
                    if self.server is None:
                        self.line.send(LEAVE, [])
                    for thread in self.threads:
                        thread.join()
                if wrong:
                    text, iteration = wrong
                    raise diverged(loop, failure(loop, 1, text, loop.knobs(iteration), 0.0, iteration))
                if stopped:
                    yield Stopped(stage=loop.stage, iter=state.iter, reason="asked to stop")
                    return
                yield from whats_due(loop, state)
        finally:
            for stack, _ in self.ahead:
                stack.close()

    def _leg(self, read: Read, stop: Stop) -> Generator[Iterated | NotFinite, None, Any]:
        """Pull, compute and push until the leg is over; return its end, as `Server.turn` answers."""
        loop, size = self.loop, self.device_batch_size
        done: Message = [], []
        while True:
            (end, *iterations), vectors = self._ask([stop(), *done[0]], done[1])
            while self.server is not None and self.server.news:
                yield self.server.news.popleft()
            if end is not None:
                return end
            for tensor, piece in zip(self.trained, vectors[0].split(list(map(len, self.trained))), strict=True):
                tensor.copy_(piece)
            for iteration in iterations[len(self.ahead) :]:
                start, stack = loop.start_position + iteration * loop.batch_size, ExitStack()
                batches = stack.enter_context(read([(start + worker * size, size) for worker in loop.logical_workers]))
                self.ahead.append((stack, batches))
            stack, batches = self.ahead[0]
            with stack:
                pieces = [next(batches) for _ in loop.logical_workers]
            self.ahead.popleft()
            began = time.monotonic()
            done = self._computed(iterations[0], pieces)
            if self.server is None:
                outcome, knobs = Outcome(done[0][1], False), loop.knobs(iterations[0])
                yield iterated(loop, self.state.iter, outcome, knobs, time.monotonic() - began)

    def _ask(self, words: Sequence[Any], vectors: Sequence[Tensor]) -> Message:
        """Ask the server, which may be this rank."""
        self.comm.pulse.wait()
        try:
            if self.server is not None:
                return self.server.turn(0, words, vectors)
            self.line.send(words, vectors)
            return self.line.receive(self.trained[0].device)
        finally:
            self.comm.pulse.go_on()

    def _computed(self, iteration: int, pieces: "list[Batch]") -> Message:
        """Return the words and vectors of an iteration's push."""
        loop, how, state = self.loop, self.loop.arithmetic, self.state
        each = loop.logical_workers
        workers = ((worker, batch, worker == each[-1]) for worker, batch in zip(each, pieces, strict=True))
        state.statistics.to_training()
        result = summed(state, workers, self.reducer, how, lambda: False, lambda done: False)
        loss = result.loss_sum / how.logical_workers
        wrong = not_finite(loss, result.size, result.gradients, result.moved)
        wrong = wrong or too_fast(state, loop.knobs(iteration), loss)
        if wrong and self.replays:  # else all would wait for its push
            text = f"replay: at iteration {iteration} of stage `{loop.stage}` {wrong}, and the recorded run pushed it"
            raise RanksDiffer(text, "the environment differs, or one of the machines computes wrongly")
        if wrong:
            state.statistics.forget()
            return [iteration, loss, wrong], []
        clip_summed(result, how)
        both = [(result.gradients[p.name], p.tensor) for p in state.solver.parameters]
        dense = [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in both]
        return [iteration, loss, ""], [torch.cat([flat(g) for g in dense]), result.total[: state.statistics.n]]

    def gather(self, keep: bool) -> Mapping[str, memoryview]:
        return {ARRIVALS: memoryview(self.arrivals)} if keep and self.arrivals is not None else {}

    def needs_others(self) -> str:
        return "all pushes up to a boundary"

    @torch.no_grad()
    def _share(self) -> None:
        """Share the server's state with all ranks. Collective."""
        if self.server is not None:
            self.server.hand_back()
            self.arrivals = self.server.record.encoded()
        hand_out(self.comm, (*weights(self.state).values(), *momentum(self.state).values()))
