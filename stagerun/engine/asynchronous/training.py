"""The training loop of a stage with `method: ASYNC`, on one rank: in the place of `engine.loop.train`.

Each rank is a replica; the first ones serve, too, in threads. Where a snapshot or an evaluation is due, a leg ends: all
iterations before are done, none after it has begun, and all ranks hold what the servers have. So a snapshot needs nothing that is under
way, and what the engine does there is what it does in any stage.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from stagerun.base.errors import Diverged, PeerError, RanksDiffer
from stagerun.base.events import Iterated, Note, NotFinite, SnapshotDue, Stopped, TestDue
from stagerun.base.recipe import Determinism, OnNan, Solver
from stagerun.comm import Comm, SoloComm, make_reducer
from stagerun.comm.group import AGAIN
from stagerun.comm.line import line
from stagerun.engine.asynchronous.boundary import arrivals, assemble
from stagerun.engine.asynchronous.desk import Desk, Done, LegEnd, Work
from stagerun.engine.asynchronous.hub import Hub
from stagerun.engine.asynchronous.lines import Clerk, RemoteDesk, RemoteServer
from stagerun.engine.asynchronous.record import Record
from stagerun.engine.asynchronous.replay import Replay
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
        """`record`: of the stage so far. `recorded`: goes by that one, up to its end."""
        assert solver.sync is not None
        self.loop, self.state, self.comm, self.record, self.recorded = loop, state, comm, record, recorded
        self.last = loop.max_iter if recorded is None else min(recorded.last, loop.max_iter)
        self.boundaries = boundaries(solver, loop.branch_points)
        self.rank, self.servers = comm.rank, solver.sync.servers
        # The ranks that serve; of few workers each serves more.
        self.hosts = [s % comm.size for s in range(self.servers)]
        # By rank of `comm`, which changes when one is lost; those of the stage's start go on to be the replicas' names.
        self.names, self.workers = list(range(comm.size)), list(comm.workers)
        self.shards = Shards(state.solver.parameters, self.servers, needs_whole(solver))
        self.tensors: list[Tensor] = [p.tensor for p in state.solver.parameters]
        parameters = [p.tensor for p in state.solver.parameters]
        self.reducer = make_reducer(determinism, parameters, SoloComm(), loop.arithmetic.logical_workers)
        self.own: dict[int, Server] = {}  # of the present leg
        self.max_staleness = solver.sync.max_staleness or 1
        self.leg = state.iter  # the present one's first iteration
        self.iteration_s = 0.0  # what a replica took for the one that was reported last; rank 0 knows
        self.hub = self._hub() if self.rank == 0 else None
        self.error: BaseException | None = None  # of a thread that serves
        self.asked: deque[int] = deque()  # by the loader, and not begun
        self._connect()

    def _hub(self) -> Hub | Replay:
        if self.recorded is not None:
            legs = [leg for leg in self.recorded.legs if leg.first >= self.state.iter]
            return Replay(legs, self.names)
        most = self.loop.max_nan if self.loop.on_nan is OnNan.SKIP else 0

        def explained(done: Done, number: int) -> str:
            return diverged(self.loop, self._not_finite(done, number, 0.0)).message

        def void(claim: int) -> int:
            return self.own[0].void(claim)

        tickets = Tickets(self.state.iter, self.last, self.max_staleness)
        return Hub(tickets, self.names, void, most, explained, needed=self.hosts)

    def _connect(self) -> None:
        """A line to each server, one more to the hub, and on a server a thread for each of the others."""
        like = self.tensors[0]
        # A stage may start twice in a process life, at the same iteration: where the snapshot that it has come to is damaged.
        start = self.comm.broadcast_bytes(os.urandom(8) if self.rank == 0 else None).hex()
        self.desk: Desk | None = self.hub
        self.remote: dict[int, RemoteServer] = {}
        clerks = []
        for s, host in enumerate(self.hosts):
            for r in self.names:
                if r == host or self.rank not in (host, r):
                    continue
                other = r if self.rank == host else host
                name = f"{self.loop.stage}/{start}/{s}-{r}"
                wire = line(self.comm, other, name)
                asks = line(self.comm, other, f"{name}/asks") if s == 0 else None
                if self.rank == host:
                    clerks += [(one, r, s) for one in (wire, asks) if one is not None]
                    continue
                self.remote[s] = RemoteServer(wire, like.detach(), self.shards.sizes[s])
                if asks is not None:
                    self.desk = RemoteDesk(wire, asks)
        self.clerks = [
            Clerk(wire, r, self.hub if s == 0 else None, partial(self.own.__getitem__, s), self._lost, self._failed)
            for wire, r, s in clerks
        ]

    def _lost(self, replica: int) -> None:
        if self.recorded is not None:  # what it was to push may be waited for
            self._fail_servers(PeerError(f"worker {self.workers[replica]} is gone", AGAIN))
        if self.hub is None:
            return
        if replica in self.hosts:
            text = f"worker {self.workers[replica]} is gone, and with it what it served of the weights"
            self.hub.fail(PeerError(text, AGAIN))
        else:
            self.hub.lost(replica)

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self._fail_servers(error)
        if self.hub is not None:
            self.hub.fail(error)

    def _fail_servers(self, error: BaseException) -> None:
        for server in list(self.own.values()):
            server.fail(error)

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
        """Those of an iteration: what was read ahead, or read now. What was given to others is thrown away, so that the loader comes to ask
        for more."""
        found = None
        while self.asked and (self.asked[0] < work.own_from or (found is None and work.iteration in self.asked)):
            pieces = [next(batches) for _ in self.loop.run]
            if self.asked.popleft() == work.iteration:
                found = pieces
        return read(work.iteration) if found is None else found

    # -- the loop

    def train(
        self,
        batches: Iterator[Batch],
        read: Batches,
        stop: Callable[[], bool],
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[Iterated | NotFinite | SnapshotDue | TestDue | Stopped | Note]:
        """Takes the state to the end of the stage, or of the record. Rank 0 tells of iterations, in the order of claims; all ranks yield the same
        SnapshotDue, TestDue and Stopped. `batches` are those of `requests`; `read` reads those of one iteration. `within`: entered for each
        leg, where the others go on without a rank that doesn't serve; not for what is between legs."""
        state, loop = self.state, self.loop
        yield from overdue(loop, state)
        while state.iter < self.last:
            first = state.iter
            self._open(self._limit())
            with within():
                ended = yield from self._leg(batches, read, stop)
            yield from self._close(first, ended)
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
                break
            pieces = self._batches(work, batches, read)
            own = self._iterate(work, pieces)
            if own is not None and self.hub is None:
                yield self._event(own, own.seconds)
            yield from self._news()
        if self.rank in work.gone:
            raise PeerError("this worker was away for too long, and the others went on without it", AGAIN)
        yield from self._news()
        return work

    def _open(self, limit: int) -> None:
        state, loop = self.state, self.loop
        self.leg = state.iter
        recorded = self.recorded.leg(state.iter) if self.recorded is not None else None

        def move(total: Tensor) -> None:
            state.statistics.move(total, loop.arithmetic.logical_workers)

        for s, host in enumerate(self.hosts):
            if host == self.rank:
                arrived = recorded.servers[s] if recorded is not None else None
                most = self.max_staleness
                self.own[s] = Server(s, self.shards, state.solver, loop.knobs, move, most, self.leg, arrived)
        # A replay that is stopped half way goes back: what it has is not the state after any iteration.
        self.began = {k: t.clone() for k, t in self._live().items()} if self.recorded is not None else {}
        self.before = time.monotonic()
        if self.hub is not None:
            self.hub.start(state.iter, limit, state.skips, state.skips_in_all)
        self.comm.barrier()  # hub and servers are open before anyone comes

    def _iterate(self, work: Work, pieces: list[Batch]) -> Done | None:
        """Pull, compute, push. None where it came too late."""
        began, desk, iteration = time.monotonic(), self.desk, work.iteration
        assert desk is not None
        seen = self._pull(work)
        found = self._summed(iteration, pieces)
        how = self.loop.arithmetic
        loss = found.loss_sum / how.logical_workers
        wrong = not_finite(loss, found.size, found.gradients, found.moved)
        wrong = wrong or too_fast(self.state, self.loop.knobs(iteration), loss)
        seconds = time.monotonic() - began
        if wrong and self.recorded is not None:  # and the servers would wait for its push
            text = f"replay: at iteration {iteration} of stage `{self.loop.stage}` {wrong}, and it was pushed in the run that is recorded"
            raise RanksDiffer(text, "it was made in another environment, or one of the machines computes wrongly")
        if wrong:
            self.state.statistics.forget()
            done = Done(iteration, self.rank, loss, seconds, wrong=wrong)
            desk.done(self.rank, done)
            return done
        clip_summed(found, how)
        done = Done(iteration, self.rank, loss, seconds)
        with self._waiting():
            claim = desk.claim(self.rank, seen, done)
        staleness = self._push(claim, iteration, seen, found) if claim >= 0 else -1
        if staleness < 0:
            return None
        done = replace(done, staleness=staleness)
        desk.done(self.rank, done)
        return done

    def _pull(self, work: Work) -> list[int]:
        """The versions that were seen, by server."""
        seen = []
        for s in range(self.servers):
            with self._waiting():
                version, vector = self._server(s).pull(work.claim, self.leg, work.floor)
            self.shards.unpack(s, vector, self.tensors)
            seen.append(version)
        return seen

    def _push(self, claim: int, iteration: int, seen: list[int], found: Summed) -> int:
        """How many updates the gradient had not seen, at server 0. -1: it came too late there, and goes to no other; what server 0 has
        counts, whether the others still take it or not."""
        gradients, staleness = self.shards.gradients(found.gradients), 0
        total = found.total[: self.state.statistics.n]
        for s in range(self.servers):
            vector = self.shards.packed(s, gradients)
            with self._waiting():
                push = Push(claim, iteration, seen[s], vector, total if s == 0 else None, self.leg)
                behind = self._server(s).push(push)
            if s == 0 and behind < 0:
                return -1
            staleness = behind if s == 0 else staleness
        return staleness

    def _server(self, number: int) -> Server | RemoteServer:
        return self.own[number] if number in self.own else self.remote[number]

    def _summed(self, iteration: int, pieces: list[Batch]) -> Summed:
        run = self.loop.run
        workers = ((worker, batch, worker == run[-1]) for worker, batch in zip(run, pieces, strict=True))
        self.state.to_training()
        return summed(self.state, workers, self.reducer, self.loop.arithmetic, lambda: False, lambda done: False)

    # -- the end of a leg

    def _close(self, first: int, end: LegEnd) -> Iterator[Note]:
        """All ranks that are left have the state of the servers, or, where a replay was stopped half way, that of the leg's start. Collective."""
        yield from self._without(end.gone)
        state = self.state
        arrived = {s: server.close() for s, server in self.own.items()}
        state.iter, state.skips, state.skips_in_all = end.iter, end.skips, end.skips_in_all
        if end.iter == first:
            for name, begun in self.began.items():
                self._live()[name].copy_(begun)
            return
        assemble(self.comm, state, self.shards, self.own, self.hosts)
        everywhere = arrivals(self.comm, arrived, self.hosts)
        if self.hub is not None:
            self.record.legs.append(self.hub.noted(first, end, everywhere))
            state.arrivals = self.record.encoded()

    def _without(self, gone: tuple[int, ...]) -> Iterator[Note]:
        lost = [name for name in self.names if name in gone]
        if lost:
            self.comm.without([self.names.index(name) for name in lost])
            self.names = [name for name in self.names if name not in gone]
            who = ", ".join(str(self.workers[name]) for name in lost)
            yield Note(
                text=f"lost worker {who}; the other {len(self.names)} go on, and do its iterations", warning=True
            )

    def _leave(self) -> None:
        """Ends the threads that served this rank, and waits for those that serve others here, but for who was left behind."""
        if isinstance(self.desk, RemoteDesk):
            self.desk.leave()
        for s, server in self.remote.items():
            if s > 0:  # that of the hub has the hub's line
                server.leave()
        for clerk in self.clerks:
            if clerk.replica in self.names:
                clerk.thread.join()

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
        return replace(event, staleness=done.staleness, replica=self.workers[done.replica])

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
