"""The training loop of a stage with `method: ASYNC`, on one rank: in the place of `engine.loop.train`.

Each rank is a replica; the first ones serve, too, in threads. Where a snapshot or an evaluation is due, a leg ends: all
iterations before are done, none after it has begun, and all ranks hold what the servers have. So a snapshot needs nothing that is under
way, and what the engine does there is what it does in any stage.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stagerun.base.errors import Diverged, PeerError, RanksDiffer
from stagerun.base.events import Iterated, NotFinite, SnapshotDue, Stopped, TestDue
from stagerun.base.recipe import Determinism, OnNan, Solver
from stagerun.comm import Comm, SoloComm, make_reducer
from stagerun.comm.group import AGAIN
from stagerun.comm.line import line
from stagerun.engine.asynchronous.hub import Done, Hub, LegEnd, Replay, Work
from stagerun.engine.asynchronous.lines import RemoteDesk, RemoteServer, serve
from stagerun.engine.asynchronous.record import Arrived, Record
from stagerun.engine.asynchronous.servers import Push, Server
from stagerun.engine.asynchronous.shards import Shards, needs_whole
from stagerun.engine.asynchronous.tickets import Tickets
from stagerun.engine.images import Batch
from stagerun.engine.loop import NOT_FINITE_HINT, StageLoop, all_skipped, diverged, failed, iterated, overdue, whats_due
from stagerun.engine.state import TrainState
from stagerun.engine.update import Outcome, Summed, clip_summed, not_finite, summed, too_fast
from stagerun.schedule.sync import boundaries

Batches = Callable[[int], list[Batch]]


class Asynchronous:
    """One rank's part in the stage. Collective: `__init__`, and the ends of legs."""

    def __init__(
        self,
        loop: StageLoop,
        state: TrainState,
        solver: Solver,
        determinism: Determinism,
        comm: Comm,
        record: Record,
        recorded: Record | None = None,
    ) -> None:
        """`record`: of the stage so far. `recorded`: the record to replay, up to its end."""
        assert solver.sync is not None
        self.loop, self.state, self.comm, self.record, self.recorded = loop, state, comm, record, recorded
        self.last = loop.max_iter if recorded is None else min(recorded.last, loop.max_iter)
        self.boundaries = boundaries(solver, loop.branch_points)
        self.rank, self.servers = comm.rank, solver.sync.servers
        # The rank of each server; a rank has several where there are more servers than ranks.
        self.hosts = [s % comm.size for s in range(self.servers)]
        self.shards = Shards(state.solver.parameters, self.servers, needs_whole(solver))
        self.tensors: list[Tensor] = [p.tensor for p in state.solver.parameters]
        parameters = [p.tensor for p in state.solver.parameters]
        self.reducer = make_reducer(determinism, parameters, SoloComm(), loop.arithmetic.logical_workers)
        self.own: dict[int, Server] = {}  # of the present leg
        self.iteration_s = 0.0  # what a replica took for the iteration that was reported last; rank 0 knows
        self.hub = self._hub(solver.sync.max_staleness or 1) if self.rank == 0 else None
        self.error: BaseException | None = None  # of a thread that serves
        self.asked: deque[int] = deque()  # by the loader, and not begun
        self._connect()

    def _hub(self, max_staleness: int) -> Hub:
        if self.recorded is not None:
            return Replay(self.comm.size, [leg for leg in self.recorded.legs if leg.first >= self.state.iter])

        def explained(done: Done, number: int) -> str:
            return diverged(self.loop, self._not_finite(done, number, 0.0)).message

        most_skips = self.loop.max_nan if self.loop.on_nan is OnNan.SKIP else 0
        return Hub(self.comm.size, Tickets(self.state.iter, self.last, max_staleness), most_skips, explained)

    def _connect(self) -> None:
        """A line to each server, one more to the hub, and on a server a thread for each of the others."""
        # A stage may start twice in a process, at the same iteration: where its newest snapshot is damaged.
        start = self.comm.broadcast_bytes(os.urandom(8) if self.rank == 0 else None).hex()
        self.desk: Hub | RemoteDesk | None = self.hub
        self.remote: dict[int, RemoteServer] = {}
        self.threads = []
        for s, host in enumerate(self.hosts):
            for replica in range(self.comm.size):
                if replica == host or self.rank not in (host, replica):
                    continue
                other = replica if self.rank == host else host
                name = f"{self.loop.stage}/{start}/{s}-{replica}"
                wires = [line(self.comm, other, f"{name}/{use}") for use in ("calls", "asks")[: 1 if s else 2]]
                if self.rank == host:
                    hub, server = None if s else self.hub, partial(self.own.__getitem__, s)
                    self.threads += [serve(wire, replica, hub, server, self._failed) for wire in wires]
                    continue
                self.remote[s] = RemoteServer(wires[0], self.tensors[0].detach(), self.shards.sizes[s])
                if s == 0:
                    self.desk = RemoteDesk(*wires)

    def _failed(self, replica: int, error: BaseException) -> None:
        """Called by a thread that serves: a dead replica ends the run."""
        if isinstance(error, PeerError):
            error = PeerError(f"worker {replica} is gone", AGAIN)
        self.error = self.error or error
        for server in list(self.own.values()):
            server.fail(self.error)
        if self.hub is not None:
            self.hub.fail(self.error)

    # -- images

    def requests(self, device_batch_size: int) -> Iterator[tuple[int, int]]:
        """(position, count) of each device batch of the iterations that this rank gets. Walked by the loader's threads, ahead."""
        assert self.desk is not None
        while (iteration := self.desk.ask(self.rank)) is not None:
            self.asked.append(iteration)
            yield from self.places(iteration, device_batch_size)

    def places(self, iteration: int, device_batch_size: int) -> Iterator[tuple[int, int]]:
        start = self.loop.start_position + iteration * self.loop.batch_size
        for worker in self.loop.run:
            yield start + worker * device_batch_size, device_batch_size

    def _batches(self, work: Work, batches: Iterator[Batch], read: Batches) -> list[Batch]:
        """Batches of an iteration that the loader has read ahead, or that are read now."""
        while work.iteration in self.asked:
            pieces = [next(batches) for _ in self.loop.run]
            if self.asked.popleft() == work.iteration:
                return pieces
        return read(work.iteration)

    # -- the loop

    def train(
        self, batches: Iterator[Batch], read: Batches, stop: Callable[[], bool]
    ) -> Iterator[Iterated | NotFinite | SnapshotDue | TestDue | Stopped]:
        """Takes the state to the end of the stage, or of the record. Rank 0 reports iterations, in the order of claims; all ranks yield the
        same SnapshotDue, TestDue and Stopped. `batches` are those of `requests`; `read` reads those of one iteration."""
        state, loop = self.state, self.loop
        yield from overdue(loop, state)
        while state.iter < self.last:
            first = state.iter
            self._open(self._limit())
            ended = yield from self._leg(batches, read, stop)
            self._close(first, ended)
            if ended.wrong:
                self._leave()
                raise Diverged(ended.wrong, NOT_FINITE_HINT)
            if state.iter == loop.max_iter and state.skips_in_all >= state.iter and not loop.is_piece:
                self._leave()
                raise all_skipped(loop.stage, state.iter)  # before a stop, which would save it as finished
            if ended.stopped:
                self._leave()
                yield Stopped(stage=loop.stage, iter=state.iter, reason="asked to stop")
                return
            yield from whats_due(loop, state)
        self._leave()

    def _limit(self) -> int:
        """Where the leg from the present iteration on ends."""
        if self.recorded is not None:
            leg = self.recorded.leg(self.state.iter)
            assert leg is not None
            return leg.last
        return min(self.last, next(at for at in self.boundaries if at > self.state.iter))

    def _leg(
        self, batches: Iterator[Batch], read: Batches, stop: Callable[[], bool]
    ) -> Generator[Iterated | NotFinite, None, LegEnd]:
        desk = self.desk
        assert desk is not None
        while True:
            if self.error is not None:
                raise self.error
            with self._waiting():
                work = desk.begin(self.rank, stop())
            if isinstance(work, LegEnd):
                yield from self._news()
                return work
            own = self._iterate(work, self._batches(work, batches, read))
            if self.hub is None:
                yield self._event(own, own.seconds)
            yield from self._news()

    def _open(self, limit: int) -> None:
        state, loop = self.state, self.loop
        recorded = self.recorded.leg(state.iter) if self.recorded is not None else None

        def move(total: Tensor) -> None:
            state.statistics.move(total, loop.arithmetic.logical_workers)

        for s, host in enumerate(self.hosts):
            if host == self.rank:
                arrived = recorded.servers[s] if recorded is not None else None
                self.own[s] = Server(s, self.shards, state.solver, loop.knobs, move, arrived)
        # A replay that is stopped half way goes back: what it has is not the state after any iteration.
        self.began = {k: t.clone() for k, t in self._live().items()} if self.recorded is not None else {}
        self.before = time.monotonic()
        if self.hub is not None:
            self.hub.start(state.iter, limit, state.skips, state.skips_in_all)
        self.comm.barrier()  # hub and servers are open before anyone comes

    def _iterate(self, work: Work, pieces: list[Batch]) -> Done:
        """Pull, compute, push."""
        began, desk, iteration = time.monotonic(), self.desk, work.iteration
        assert desk is not None
        seen = self._pull(work.claim)
        found = self._summed(iteration, pieces)
        how = self.loop.arithmetic
        loss = found.loss_sum / how.logical_workers
        wrong = not_finite(loss, found.size, found.gradients, found.moved)
        wrong = wrong or too_fast(self.state, self.loop.knobs(iteration), loss)
        done = Done(iteration, self.rank, loss, time.monotonic() - began, wrong=wrong)
        if wrong and self.recorded is not None:  # and the servers would wait for its push
            text = f"replay: at iteration {iteration} of stage `{self.loop.stage}` {wrong}, and it was pushed in the run that is recorded"
            raise RanksDiffer(text, "it was made in another environment, or one of the machines computes wrongly")
        if wrong:
            self.state.statistics.forget()
        else:
            clip_summed(found, how)
            with self._waiting():
                claim = desk.claim(self.rank, iteration)
            done = replace(done, staleness=self._push(claim, iteration, seen, found))
        desk.done(self.rank, done)
        return done

    def _pull(self, claim: int) -> list[int]:
        """The versions that were seen, by server."""
        seen = []
        for s in range(self.servers):
            with self._waiting():
                version, vector = self._server(s).pull(claim)
            self.shards.unpack(s, vector, self.tensors)
            seen.append(version)
        return seen

    def _push(self, claim: int, iteration: int, seen: list[int], found: Summed) -> int:
        """How many updates the gradient had not seen, at server 0."""
        gradients, staleness = self.shards.gradients(found.gradients), []
        total = found.total[: self.state.statistics.n]
        for s in range(self.servers):
            push = Push(claim, iteration, seen[s], self.shards.packed(s, gradients), None if s else total)
            with self._waiting():
                staleness.append(self._server(s).push(push))
        return staleness[0]

    def _server(self, number: int) -> Server | RemoteServer:
        return self.own[number] if number in self.own else self.remote[number]

    def _summed(self, iteration: int, pieces: list[Batch]) -> Summed:
        run = self.loop.run
        workers = ((worker, batch, worker == run[-1]) for worker, batch in zip(run, pieces, strict=True))
        self.state.to_training()
        return summed(self.state, workers, self.reducer, self.loop.arithmetic, lambda: False, lambda done: False)

    # -- the end of a leg

    def _close(self, first: int, end: LegEnd) -> None:
        """Give all ranks the state of the servers, or, where a replay was stopped half way, that of the leg's start. Collective."""
        state = self.state
        state.iter, state.skips, state.skips_in_all = end.iter, end.skips, end.skips_in_all
        if end.iter == first:
            for name, begun in self.began.items():
                self._live()[name].copy_(begun)
            return
        self._assemble()
        arrived = self._arrived()
        if self.hub is not None:
            self.record.legs.append(self.hub.noted(first, end, arrived))
            state.arrivals = self.record.encoded()

    @torch.no_grad()
    def _assemble(self) -> None:
        """Weights and history come from the servers, the rest of the network from rank 0."""
        shards, update = self.shards, self.state.solver
        for s, host in enumerate(self.hosts):
            own = self.own.get(s)
            vector = own.vector if own is not None else self.tensors[0].new_empty(shards.sizes[s])
            if len(vector):
                self.comm.broadcast(vector, host)
                shards.unpack(s, vector, self.tensors)
            for slot, kept in update.history.items():
                size = len(shards.parts[s]) if slot == "t" else shards.sizes[s]
                if not size:
                    continue
                tensors = [kept[p.name] for p in update.parameters]
                whole = own.remembered()[slot] if own is not None else tensors[0].new_empty(size)
                self.comm.broadcast(whole, host)
                if slot != "t":
                    shards.unpack(s, whole, tensors)
                    continue
                for part, count in zip(shards.parts[s], whole, strict=True):
                    if part.begin == 0:
                        tensors[part.index].copy_(count)
        trained = {p.name for p in update.parameters}
        for name, tensor in self._live().items():
            if name not in trained:
                whole = tensor.contiguous()
                self.comm.broadcast(whole)
                tensor.copy_(whole)

    def _arrived(self) -> list[Arrived]:
        """What each server has applied."""
        found = []
        for s, host in enumerate(self.hosts):
            own = self.own[s].arrived() if s in self.own else None
            data = torch.tensor([own.order, own.staleness], dtype=torch.int32).numpy().tobytes() if own else None
            heard = self.comm.broadcast_bytes(data, host)
            numbers = torch.frombuffer(bytearray(heard), dtype=torch.int32).tolist() if heard else []
            half = len(numbers) // 2
            found.append(Arrived(tuple(numbers[:half]), tuple(numbers[half:])))
        return found

    def _leave(self) -> None:
        """End the threads that served this rank, and wait for those that serve others here."""
        if isinstance(self.desk, RemoteDesk):
            self.desk.leave()
        for s, server in self.remote.items():
            if s > 0:  # server 0 shares the hub's line
                server.leave()
        for thread in self.threads:
            thread.join()

    def _live(self) -> dict[str, Tensor]:
        return dict(self.state.model.state_dict())

    # -- what is told of it

    def _news(self) -> Iterator[Iterated | NotFinite]:
        while self.hub is not None and self.hub.news:
            done, at = self.hub.news.popleft()
            self.iteration_s = done.seconds
            if done.wrong:
                yield self._skipped(done, at - self.before)
            else:
                self.state.iter, self.state.skips = self.state.iter + 1, 0
                yield self._event(done, at - self.before)
            self.before = at

    def _event(self, done: Done, seconds: float) -> Iterated:
        outcome = Outcome(done.loss, False, 0.0)
        event = iterated(self.loop, self.state.iter, outcome, self.loop.knobs(done.iteration), seconds)
        return replace(event, staleness=done.staleness, replica=done.replica)

    def _skipped(self, done: Done, seconds: float) -> NotFinite:
        """The next push has its number, since a replay knows only that there was one in the leg."""
        self.state.skips += 1
        return self._not_finite(done, self.state.skips, seconds)

    def _not_finite(self, done: Done, number: int, seconds: float) -> NotFinite:
        return failed(self.loop, number, done.wrong, self.loop.knobs(done.iteration), seconds, done.iteration)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.comm.pulse.wait()
        try:
            yield
        finally:
            self.comm.pulse.go_on()
