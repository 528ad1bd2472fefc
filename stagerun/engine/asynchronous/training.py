"""The training loop of a stage with `method: ASYNC`, on one rank: in the place of `engine.loop.train`.

Each rank is a replica; the first ones serve, too, in threads. Where a snapshot or an evaluation is due, a leg ends: all
iterations before are done, none after it has begun, and all ranks hold what the servers have. So a snapshot needs nothing that is under
way, and what the engine does there is what it does in any stage.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stagerun.base.errors import PeerError, RanksDiffer
from stagerun.base.events import Iterated, NotFinite, SnapshotDue, Stopped, TestDue
from stagerun.base.recipe import Determinism, Solver
from stagerun.comm import Comm, SoloComm, gather_json, make_reducer
from stagerun.comm.group import AGAIN
from stagerun.comm.line import line
from stagerun.engine.asynchronous.hub import Done, Hub, LegEnd
from stagerun.engine.asynchronous.lines import Message, Wire, hear, say, serve
from stagerun.engine.asynchronous.record import Arrived, Leg, Record
from stagerun.engine.asynchronous.servers import Server, Shards
from stagerun.engine.asynchronous.tickets import Recorded, Tickets, Work
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, diverged, failed, iterated, overdue, whats_due
from stagerun.engine.state import TrainState
from stagerun.engine.update import Outcome, Summed, clip_summed, not_finite, summed, too_fast
from stagerun.schedule.sync import boundaries

Read = Callable[[Iterable[tuple[int, int]]], AbstractContextManager[Iterator[Batch]]]


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
        self.rank, self.device_batch_size = comm.rank, solver.device_batch_size
        # The rank of each server; a rank has several where there are more servers than ranks.
        self.hosts = [s % comm.size for s in range(solver.sync.servers)]
        self.shards = Shards(state.solver.parameters, len(self.hosts), solver)
        parameters = [p.tensor for p in state.solver.parameters]
        self.tensors: list[Tensor] = list(parameters)
        self.device = self.tensors[0].device
        self.reducer = make_reducer(determinism, parameters, SoloComm(), loop.arithmetic.logical_workers)
        self.own: dict[int, Server] = {}  # of the present leg
        self.error: BaseException | None = None  # of a thread that serves
        self.ahead: deque[tuple[ExitStack, Iterator[Batch]]] = deque()  # images of reserved iterations
        self.hub: Hub | None = None
        if self.rank == 0:
            order: Tickets | Recorded = Tickets(state.iter, self.last, solver.sync.max_staleness or 1)
            if recorded is not None:
                order = Recorded([leg for leg in recorded.legs if leg.first >= state.iter])
            self.hub = Hub(comm.size, order)
        self.wires: dict[int, Wire] = {}  # by host
        self.threads = []
        # A stage may start twice in a process, at the same iteration: where its newest snapshot is damaged.
        start = comm.broadcast_bytes(os.urandom(8) if self.rank == 0 else None).hex()
        for host in sorted(set(self.hosts)):
            for replica in range(comm.size):
                if replica == host or self.rank not in (host, replica):
                    continue
                wire = line(comm, replica if self.rank == host else host, f"{loop.stage}/{start}/{host}-{replica}")
                if self.rank == host:
                    answer, lost = partial(self._answer, replica), partial(self._failed, replica)
                    self.threads.append(serve(wire, self.device, answer, lost))
                else:
                    self.wires[host] = wire

    # -- questions

    def _ask(self, host: int, *words: Any, vectors: Sequence[Tensor] = ()) -> Message:
        """Ask the rank that serves, or this one itself."""
        self.comm.pulse.wait()
        try:
            if host == self.rank:
                return self._answer(host, words, vectors)
            say(self.wires[host], words, vectors)
            return hear(self.wires[host], self.device)
        finally:
            self.comm.pulse.go_on()

    def _answer(self, replica: int, words: Sequence[Any], vectors: Sequence[Tensor]) -> Message:
        question, *rest = words
        if question == "pull":
            s, claim = rest
            version, vector = self.own[s].pull(claim)
            return [version], [vector]
        if question == "push":
            s, claim, seen, iteration = rest
            return [self.own[s].push(claim, seen, iteration, *vectors)], []
        if self.hub is None:
            raise ValueError(f"question {question!r} of worker {replica}")
        if question == "claim":
            return [self.hub.claim(replica, *rest)], []
        stop, done = rest
        return [asdict(self.hub.begin(replica, stop, None if done is None else Done(**done)))], []

    def _failed(self, replica: int, error: BaseException) -> None:
        """Called by a thread that serves: a dead replica ends the run."""
        if isinstance(error, PeerError):
            error = PeerError(f"worker {replica} is gone", AGAIN)
        self.error = self.error or error
        for server in list(self.own.values()):
            server.fail(self.error)
        if self.hub is not None:
            self.hub.fail(self.error)

    # -- the loop

    def train(
        self, read: Read, stop: Callable[[], bool]
    ) -> Iterator[Iterated | NotFinite | SnapshotDue | TestDue | Stopped]:
        """Takes the state to the end of the stage, or of the record. Rank 0 reports iterations, in the order of claims; all ranks yield the
        same SnapshotDue, TestDue and Stopped. `read` starts reading the device batches at (position, count)."""
        state, loop = self.state, self.loop
        yield from overdue(loop, state)
        try:
            while state.iter < self.last:
                first = state.iter
                self._open()
                ended = yield from self._leg(read, stop)
                self._close(first, ended)
                if ended.wrong is not None:
                    text, iteration = ended.wrong
                    self._leave()
                    raise diverged(loop, failed(loop, 1, text, loop.knobs(iteration), 0.0, iteration))
                if ended.stopped:
                    self._leave()
                    yield Stopped(stage=loop.stage, iter=state.iter, reason="asked to stop")
                    return
                yield from whats_due(loop, state)
            self._leave()
        finally:
            for stack, _ in self.ahead:
                stack.close()

    def _open(self) -> None:
        """Start the leg from the present iteration on."""
        state, loop = self.state, self.loop
        recorded = self.recorded.leg(state.iter) if self.recorded is not None else None

        def move(total: Tensor) -> None:
            state.statistics.move(total, loop.arithmetic.logical_workers)

        for s, host in enumerate(self.hosts):
            if host == self.rank:
                arrived = recorded.servers[s] if recorded is not None else None
                self.own[s] = Server(s, self.shards, state.solver, loop.knobs, move, arrived)
        # A replay that is stopped half way goes back: what it has is not the state after any iteration.
        self.began = {k: t.clone() for k, t in self._live().items()} if recorded is not None else {}
        self.before = time.monotonic()
        if self.hub is not None:
            limit = min(self.last, next(at for at in self.boundaries if at > state.iter))
            self.hub.start(state.iter, limit)
        self.comm.barrier()  # hub and servers are open before anyone comes

    def _leg(self, read: Read, stop: Callable[[], bool]) -> Generator[Iterated | NotFinite, None, LegEnd]:
        done: Done | None = None
        while True:
            if self.error is not None:
                raise self.error
            (answer,), _ = self._ask(0, "begin", stop(), None if done is None else asdict(done))
            yield from self._news()
            if "iter" in answer:
                return LegEnd(**answer)
            work = Work(**answer)
            for iteration in [work.iteration, *work.reserved][len(self.ahead) :]:
                stack = ExitStack()
                self.ahead.append((stack, stack.enter_context(read(self._places(iteration)))))
            with self.ahead[0][0]:
                batches = self.ahead[0][1]
                pieces = [next(batches) for _ in self.loop.run]
            self.ahead.popleft()
            done = self._iterate(work, pieces)
            if self.hub is None:
                yield self._event(done, done.seconds)

    def _places(self, iteration: int) -> Iterator[tuple[int, int]]:
        """(position, count) of each device batch of an iteration."""
        start = self.loop.start_position + iteration * self.loop.batch_size
        for worker in self.loop.run:
            yield start + worker * self.device_batch_size, self.device_batch_size

    def _iterate(self, work: Work, pieces: list[Batch]) -> Done:
        """Pull, compute, push."""
        began, iteration, seen = time.monotonic(), work.iteration, []
        for s, host in enumerate(self.hosts):
            (version,), (vector,) = self._ask(host, "pull", s, work.claim)
            self.shards.unpack(s, vector, self.tensors)
            seen.append(version)
        found = self._summed(pieces)
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
            return done
        clip_summed(found, how)
        claim = work.claim
        if claim < 0:
            (claim,), _ = self._ask(0, "claim", iteration)
        gradients, staleness = self.shards.gradients(found.gradients), list[int]()
        for s, host in enumerate(self.hosts):
            vectors = [self.shards.packed(s, gradients)]
            if s == 0:
                vectors.append(found.total[: self.state.statistics.n])
            staleness += self._ask(host, "push", s, claim, seen[s], iteration, vectors=vectors)[0]
        return replace(done, claim=claim, staleness=staleness[0])

    def _summed(self, pieces: list[Batch]) -> Summed:
        run = self.loop.run
        workers = ((worker, batch, worker == run[-1]) for worker, batch in zip(run, pieces, strict=True))
        self.state.to_training()
        return summed(self.state, workers, self.reducer, self.loop.arithmetic, lambda: False, lambda done: False)

    # -- the end of a leg

    @torch.no_grad()
    def _close(self, first: int, end: LegEnd) -> None:
        """Give all ranks the state of the servers, or, where a replay was stopped half way, that of the leg's start. Collective."""
        state, update, live = self.state, self.state.solver, self._live()
        state.iter = end.iter
        if end.iter == first:
            for name, begun in self.began.items():
                live[name].copy_(begun)
            return
        # Weights and history come from the servers, the rest of the network from rank 0.
        kinds = [[kept[p.name] for p in update.parameters] for slot, kept in update.history.items() if slot != "t"]
        for s, host in enumerate(self.hosts):
            size = sum(self.shards.lengths[s])
            if not size:
                continue
            own = [self.own[s].vector, *self.own[s].remembered()] if host == self.rank else []
            for n, tensors in enumerate([self.tensors, *kinds]):
                vector = own[n] if own else tensors[0].new_empty(size)
                self.comm.broadcast(vector, host)
                self.shards.unpack(s, vector, tensors)
        trained = {p.name for p in update.parameters}
        for name, tensor in live.items():
            if name not in trained:
                whole = tensor.contiguous()
                self.comm.broadcast(whole)
                tensor.copy_(whole)
        told = gather_json(self.comm, [(s, server.order, server.staleness) for s, server in self.own.items()])
        servers = tuple(
            Arrived(tuple(order), tuple(stale)) for _, order, stale in sorted(one for own in told for one in own)
        )
        update.t.add_(len(servers[0].order))
        if self.hub is not None:
            iterations, replicas = zip(*self.hub.claims, strict=True) if self.hub.claims else ((), ())
            leg = Leg(first, end.iter, iterations, replicas, servers)
            self.record.legs.append(leg if self.recorded is None else self.recorded.leg(first))
            state.arrivals = self.record.encoded()

    def _leave(self) -> None:
        """End the threads that served this rank, and wait for those that serve others here."""
        for wire in self.wires.values():
            say(wire, ["leave"])
        for thread in self.threads:
            thread.join()

    def _live(self) -> dict[str, Tensor]:
        return dict(self.state.model.state_dict())

    # -- what is told of it

    def _news(self) -> Iterator[Iterated | NotFinite]:
        state, loop = self.state, self.loop
        while self.hub is not None and self.hub.news:
            done, at = self.hub.news.popleft()
            seconds, self.before = at - self.before, at
            if done.wrong:
                yield failed(loop, 1, done.wrong, loop.knobs(done.iteration), seconds, done.iteration)
            else:
                state.iter += 1
                yield self._event(done, seconds)

    def _event(self, done: Done, seconds: float) -> Iterated:
        outcome = Outcome(done.loss, False, 0.0)
        event = iterated(self.loop, self.state.iter, outcome, self.loop.knobs(done.iteration), seconds)
        return replace(event, staleness=done.staleness, replica=done.replica)
