"""`stagerun bench scaling`: one stage's training with some of the job's workers, then with more, in turn.

All workers are there from the beginning, and those that are not in a turn wait. So each turn costs no start, and a machine whose speed
drifts slows all numbers of workers alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from stagerun.base.errors import PeerError
from stagerun.base.events import Iterated, Stopped
from stagerun.base.recipe import Method, Schedule
from stagerun.base.spans import Spans, overlap, seconds_of
from stagerun.comm import Comm, gather_json
from stagerun.engine.compression import reducer_of, residual_of
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.timed import timed_train
from stagerun.models import build
from stagerun.plan import PlannedStage, State
from stagerun.system.host import host_name
from stagerun.system.world import World
from stagerun.tools.bench.report import WARM_UP, Share, Turn
from stagerun.train.images import Images
from stagerun.train.resident import training_batches
from stagerun.train.stage import make_loop, requests
from stagerun.train.worker import StageRun, Step, Worker


def scaling(
    schedule: Schedule,
    counts: Sequence[int],
    rounds: int,
    iterations: int,
    comm: Comm,
    device: torch.device,
    images: Images,
    stop: Callable[[], bool],
    watch: Callable[[Turn], None],
) -> list[Turn] | None:
    """`rounds` times a turn of `iterations` for each of `counts`, growing in one round and falling in the next. `schedule` is one of
    `plan.rehearsal.for_speed`, long enough. Collective; every rank gets all turns, None if any was asked to stop. `watch` sees each
    turn on rank 0."""
    stage = schedule.stages[0]
    torch.manual_seed(stage.solver.random_seed)
    state = make_state(build(stage.model), stage.solver, device)
    trials = {workers: _Trial(schedule, workers, comm, device, images, state, stop) for workers in counts}
    turns: list[Turn] = []
    for round in range(rounds):
        for workers in counts if round % 2 == 0 else reversed(counts):
            first = len(turns) * (WARM_UP + iterations)
            mine = trials[workers].turn(first, iterations)
            gathered = gather_json(comm, mine)
            if any(share is None for share in gathered[:workers]):
                return None
            shares = tuple(Share(**share) for share in gathered[:workers])
            turns.append(Turn(round=round, workers=workers, iterations=iterations, shares=shares))
            if comm.rank == 0:
                watch(turns[-1])
    return turns


class _Trial:
    """Training with the first `workers` of the job."""

    def __init__(
        self,
        schedule: Schedule,
        workers: int,
        comm: Comm,
        device: torch.device,
        images: Images,
        state: TrainState,
        stop: Callable[[], bool],
    ) -> None:
        self.comm = comm.first(workers)
        if self.comm is None:
            return
        self.state = state
        planned = PlannedStage(stage=schedule.stages[0], state=State.FRESH, iter=0, position=0)
        worker = Worker(schedule, "", self.comm, World(), device, None, stop, images)
        self.run = StageRun(worker, Step(planned, number=1, iterations_left=0, files=None))
        solver = schedule.stages[0].solver
        if solver.compress is not None and solver.compress.method is Method.AUTO:
            solver = replace(solver, compress=None)  # which it chooses where it trains
        state.residual = residual_of(schedule.determinism, state, solver, self.comm)
        self.reducer = reducer_of(schedule.determinism, state, solver, self.comm)

    def turn(self, first: int, iterations: int) -> dict[str, object] | None:
        """This rank's Share of a turn from iteration `first` on, as JSON holds it; None if asked to stop. A rank without a part in it
        returns an empty one."""
        if self.comm is None:
            return {}
        spans = Spans()
        spans.on, self.state.iter = False, first
        loop, solver = make_loop(self.run), self.run.stage.solver
        asked = requests(loop, first, solver.device_batch_size)
        done, start = 0, 0.0
        self.comm.barrier()
        with training_batches(self.run, None, asked) as fed:
            events = timed_train(
                loop, self.state, fed, self.reducer, self.run.worker.stop, lambda: None, spans, self.run.worker.device
            )
            for event in events:
                if isinstance(event, Stopped):
                    return None
                if isinstance(event, Iterated):
                    done += 1
                if done == WARM_UP and not spans.on:
                    spans.on, self.comm.spans, start = True, spans, spans.clock()
                if done == WARM_UP + iterations:
                    break
        self.comm.spans = None
        seconds = spans.clock() - start
        self.comm.barrier()  # what a thread of the network has still to note is noted by then
        lay = overlap(spans.found)
        parts = seconds_of(spans.found)
        share = Share(host_name(), seconds, parts, lay.sending, lay.hidden)
        return asdict(share)


def require_workers(comm: Comm, counts: Sequence[int]) -> None:
    """PeerError where the job has fewer workers than are to be tried."""
    if comm.size < max(counts):
        raise PeerError(
            f"--workers {','.join(map(str, counts))}, but the launcher has started {comm.size}",
            f"start {max(counts)}, or leave the launcher out: then they are started on this machine",
        )
