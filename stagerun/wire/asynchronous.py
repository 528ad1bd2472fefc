"""The training loop of a stage with `method: ASYNC`, on one rank: in the place of `engine.loop.train`. Each rank is a replica; rank 0 serves,
too, in a thread for each of the others. Where a snapshot or an evaluation is due, a leg ends: all iterations before are done, none after it
has begun, and all ranks hold what the server has, as in any stage."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stagerun.base.errors import RanksDiffer, ResumeRefused
from stagerun.base.events import Event, Iterated, Note, NotFinite, Stopped
from stagerun.comm import Reducer, SoloComm, make_reducer
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, diverged, failure, iterated, overdue, whats_due
from stagerun.engine.state import momentum, weights
from stagerun.engine.update import Outcome, clip_summed, not_finite, summed, too_fast
from stagerun.schedule.sync import boundaries
from stagerun.train.agreement import rank0
from stagerun.train.context import Context, StageRun
from stagerun.train.exchange import Read, counted
from stagerun.train.progress import ARRIVALS
from stagerun.wire.holding import Measured
from stagerun.wire.server import LEAVE, Message, Record, Server, Turns, flat, open_lines, record_of, unpack


class Asynchronous(Measured):
    """One rank's part in the stage. Collective: `open`, and the ends of legs."""

    arrivals: bytes | None = None  # the file in which snapshots keep the order of all pushes so far; on rank 0

    def begin(self, run: StageRun, loop: StageLoop) -> Generator[Event, None, bool]:
        worker, name = run.worker, run.stage.name
        record, known = Record(), None if worker.replay is None else Record()

        def look() -> None:
            """On rank 0."""
            nonlocal record, known
            if run.is_piece and worker.replaying is None:  # what others start from has no order of its own
                text = f"stage `{name}` pushed without waiting (`method: ASYNC`), and its snapshot after {run.planned.until} iterations is gone"
                redo = f"train it anew with `--redo {name}`; `--replay` makes it once more in another folder"
                raise ResumeRefused(text, redo)
            try:
                if run.resumes and run.files is not None and ARRIVALS in run.files:
                    self.arrivals = run.files[ARRIVALS]
                    record = record_of(self.arrivals)
                if worker.replaying is not None:
                    known = record_of(worker.replaying.records[name].arrivals)
                if record.last != self.state.iter or (known is not None and known.until(self.state.iter) != record):
                    raise ValueError(f"it doesn't match its snapshot at iteration {self.state.iter}")
            except ValueError as error:
                text = f"the recorded order of pushes in stage `{name}` can't be used: {error}"
                raise ResumeRefused(
                    text, "no run has written it, or an older version; take `--redo` for the stage, or another --out"
                ) from error

        rank0(worker.comm, look)
        self.open(replace(loop, logical_workers=range(self.solver.logical_workers)), record, known)
        if worker.profile is not None:
            yield Note(text=f"no profile of stage `{name}`: iterations of `method: ASYNC` overlap", warning=True)
        return True

    def open(self, loop: StageLoop, record: Record, recorded: Record | None = None) -> None:
        """`record`: of the stage so far. `recorded`: the record to replay, None in a run of its own. What is in them counts on rank 0."""
        solver, state, comm = self.solver, self.state, self.comm
        assert solver.sync is not None
        self.loop, self.replays = loop, recorded is not None
        self.ends = boundaries(solver, loop.branch_points) if recorded is None else recorded.ends
        self.device_batch_size = solver.device_batch_size
        parameters = [p.tensor for p in state.solver.parameters]
        self.trained: list[Tensor] = [*parameters]
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
        """Takes the state to the end of the stage, or of the record. Rank 0 reports iterations, in the order of their pushes; all ranks yield
        the same SnapshotDue, TestDue and Stopped. `read` starts reading the device batches at (position, count)."""
        return counted(self._train(read, worker.stop), self.comm.traffic)

    def _train(self, read: Read, stop: Callable[[], bool]) -> Iterator[Event]:
        state, loop = self.state, self.loop
        yield from overdue(loop, state)
        try:
            while state.iter < loop.max_iter:
                first = state.iter
                # A replay that is stopped half way goes back: what it has is not the state after any iteration.
                began = {k: t.clone() for k, t in weights(state).items()} if self.replays else {}
                if self.server is not None:
                    self.server.start(min(loop.max_iter, next(end for end in self.ends if end > first)))
                self.comm.barrier()  # the leg has started before anyone comes
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

    def _leg(self, read: Read, stop: Callable[[], bool]) -> Generator[Iterated | NotFinite, None, Any]:
        """Pull, compute and push until the leg is over; return its end, as `Server.turn` answers."""
        loop, size = self.loop, self.device_batch_size
        done: Message = [], []
        while True:
            (end, *iterations), vectors = self._ask([stop(), *done[0]], done[1])
            while self.server is not None and self.server.news:
                yield self.server.news.popleft()
            if end is not None:
                return end
            unpack(vectors[0], self.trained)
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
        """Ask the rank that serves, which may be this one."""
        self.comm.pulse.wait()
        try:
            if self.server is not None:
                return self.server.turn(0, words, vectors)
            self.line.send(words, vectors)
            return self.line.receive(self.trained[0].device)
        finally:
            self.comm.pulse.go_on()

    def _computed(self, iteration: int, pieces: list[Batch]) -> Message:
        """What the server is told of an iteration, and the vectors of its push."""
        loop, how, state = self.loop, self.loop.arithmetic, self.state
        each = loop.logical_workers
        workers = ((worker, batch, worker == each[-1]) for worker, batch in zip(each, pieces, strict=True))
        state.statistics.to_training()
        found = summed(state, workers, self.reducer, how, lambda: False, lambda done: False)
        loss = found.loss_sum / how.logical_workers
        wrong = not_finite(loss, found.size, found.gradients, found.moved)
        wrong = wrong or too_fast(state, loop.knobs(iteration), loss)
        if wrong and self.replays:  # and all would wait for its push
            text = f"replay: at iteration {iteration} of stage `{loop.stage}` {wrong}, and it was pushed in the run that is recorded"
            raise RanksDiffer(text, "it was made in another environment, or one of the machines computes wrongly")
        if wrong:
            state.statistics.forget()
            return [iteration, loss, wrong], []
        clip_summed(found, how)
        both = [(found.gradients[p.name], p.tensor) for p in state.solver.parameters]
        laid_out = [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in both]
        return [iteration, loss, ""], [torch.cat([flat(g) for g in laid_out]), found.total[: state.statistics.n]]

    def gather(self, keep: bool) -> Mapping[str, memoryview]:
        return {ARRIVALS: memoryview(self.arrivals)} if keep and self.arrivals is not None else {}

    def needs_others(self) -> str:
        return "all pushes up to a boundary"

    @torch.no_grad()
    def _share(self) -> None:
        """Give all ranks the state of the server. Collective."""
        if self.server is not None:
            self.server.hand_back()
            self.arrivals = self.server.record.encoded()
        for tensor in (*weights(self.state).values(), *momentum(self.state).values()):
            whole = tensor.contiguous()
            self.comm.broadcast(whole)
            tensor.copy_(whole)
