"""`rehearse --workers 1,2,4`: one stage's training with some of the job's workers, then with more, in turn, as a table.

All workers are started at the beginning, and those without a part in a turn wait. So no turn includes a start, and a machine whose speed
drifts slows every number of workers alike.
"""

import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace

import torch

from stagerun.base.errors import PeerError
from stagerun.base.events import Iterated, Stopped
from stagerun.base.recipe import Method, Schedule
from stagerun.base.text import columns, count
from stagerun.comm import Comm, gather_json
from stagerun.comm.spans import BACKWARD, DATA, FORWARD, UPDATE, WAIT, Spans, overlap, seconds_of
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.timed import timed_train
from stagerun.models import build
from stagerun.plan import PlannedStage, State
from stagerun.schedule.image_size import at_largest
from stagerun.system.host import host_name
from stagerun.system.world import World
from stagerun.tools.rehearse.measure import made_up_images
from stagerun.tools.rehearse.synthetic import synthetic_images
from stagerun.train.context import Context, StageRun
from stagerun.train.exchange import exchange_of, requests
from stagerun.train.images import Images
from stagerun.train.resident import training_batches
from stagerun.train.stage_loop import make_loop

ROUNDS = 3
# Iterations of a turn that don't count: they are fed by batches made ahead, with the caches full of another turn's data.
WARM_UP = 1


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's seconds of a turn and of its parts; `sending`: seconds in which gradients were on the network, `hidden`: of these,
    while backward went on."""

    host: str
    seconds: float
    parts: dict[str, float]
    sending: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    round: int
    workers: int
    iterations: int
    shares: tuple[Share, ...]  # by rank

    @property
    def step(self) -> float:
        """Seconds of an iteration of the slowest rank."""
        return max(share.seconds for share in self.shares) / self.iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of workers: medians over rounds. `efficiency` is against the fewest workers, in the same round. `computing` (forward,
    backward, update), `communicating` (what is left of the sum of gradients after backward) and `waiting` (for data) are shares of
    an iteration, means over ranks."""

    workers: int
    images_per_second: float
    low: float
    high: float
    efficiency: float
    computing: float
    communicating: float
    waiting: float
    step: float  # seconds
    sending: float  # seconds of an iteration
    hidden: float


def measure(
    schedule: Schedule,
    name: str,
    counts: Sequence[int],
    iterations: int,
    synthetic: bool,
    comm: Comm,
    world: World,
    device: torch.device,
    stop: Callable[[], bool],
    watch: Callable[[str], None],
) -> tuple[list[Row], list[str]] | None:
    """Rows by number of workers, and notes on them, on every rank; None if asked to stop. Collective. `watch` gets lines of progress on
    rank 0. PeerError where the job has fewer workers than are to be tried."""
    if comm.size < max(counts):
        raise PeerError(
            f"--workers {','.join(map(str, counts))}, but the launcher has started {comm.size}",
            f"start {max(counts)}, or leave the launcher out: then they are started on this machine",
        )
    # One iteration more than are run, so that the last one isn't the stage's end.
    short = for_speed(schedule, name, len(counts) * ROUNDS * (WARM_UP + iterations) + 1)
    solver = short.stages[0].solver
    processors, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    turns: list[Turn] = []
    with made_up_images(short, synthetic, comm, world) as source, closing(Images(source, device)) as images:
        for _ in images.open(comm, world, stop):
            pass
        images.preflight(comm)
        stage = source.stages[0]
        torch.manual_seed(solver.random_seed)
        state = make_state(build(stage.model), solver, device)
        trials = {workers: _Trial(source, workers, comm, device, images, state, stop) for workers in counts}
        for number in range(ROUNDS):
            for workers in counts if number % 2 == 0 else reversed(counts):
                share = trials[workers].turn(len(turns) * (WARM_UP + iterations), iterations)
                gathered = gather_json(comm, share)[:workers]
                if None in gathered:
                    return None
                shares = tuple(Share(**one) for one in gathered)
                turns.append(Turn(round=number, workers=workers, iterations=iterations, shares=shares))
                if comm.rank == 0:
                    speed = solver.batch_size / turns[-1].step
                    watch(f"  round {number + 1}, {count(workers, 'worker')}: {speed:.4g} images/s")
    made_up = str(synthetic_images(schedule)) if synthetic else ""
    found = rows(turns, solver.batch_size)
    return found, notes(turns, solver.batch_size, solver.logical_workers, device.type, threads, processors, made_up)


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
        self.comm = comm.part(range(workers))
        if self.comm is None:
            return
        self.state = state
        stage = schedule.stages[0]
        solver = replace(stage.solver, sync=None)  # all workers update together
        if solver.compress is not None and solver.compress.method is Method.AUTO:
            solver = replace(solver, compress=None)  # AUTO chooses in a real run only
        planned = PlannedStage(stage=replace(stage, solver=solver), state=State.FRESH, iter=0, position=0)
        context = Context(schedule, "", self.comm, World(), device, None, stop)
        context.images = images
        self.run = StageRun(context, planned)
        self.reducer = exchange_of(state, solver, schedule.determinism, self.comm).make_reducer()

    def turn(self, first: int, iterations: int) -> dict[str, object] | None:
        """This rank's Share of a turn from iteration `first` on, as JSON holds it; empty on a rank that waits, None if asked to stop."""
        if self.comm is None:
            return {}
        spans = Spans()
        spans.on, self.state.iter = False, first
        loop, solver = make_loop(self.run), self.run.stage.solver
        asked = requests(loop, first, solver.device_batch_size)
        done, start = 0, 0.0
        self.comm.barrier()
        with training_batches(self.run, None, asked) as fed:
            events = timed_train(loop, self.state, fed, self.reducer, self.run.worker.stop, lambda: None, spans)
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
        self.comm.barrier()  # after it, the network's threads have noted all their spans
        sent = overlap(spans.found)
        return asdict(Share(host_name(), seconds, seconds_of(spans.found), sent.sending, sent.hidden))


def rows(turns: Sequence[Turn], batch_size: int) -> list[Row]:
    """One for each number of workers, growing."""
    counts = sorted({turn.workers for turn in turns})
    fewest = {turn.round: turn.step * counts[0] for turn in turns if turn.workers == counts[0]}
    found = []
    for workers in counts:
        of = [turn for turn in turns if turn.workers == workers]
        speeds = [batch_size / turn.step for turn in of]
        shares = [share for turn in of for share in turn.shares]
        done = sum(turn.iterations * len(turn.shares) for turn in of)
        row = Row(
            workers=workers,
            images_per_second=statistics.median(speeds),
            low=min(speeds),
            high=max(speeds),
            efficiency=statistics.median(fewest[turn.round] / (turn.step * workers) for turn in of),
            computing=_part(shares, FORWARD, BACKWARD, UPDATE),
            communicating=_part(shares, WAIT),
            waiting=_part(shares, DATA),
            step=statistics.median(turn.step for turn in of),
            sending=sum(share.sending for share in shares) / done,
            hidden=sum(share.hidden for share in shares) / done,
        )
        found.append(row)
    return found


def _part(shares: Sequence[Share], *names: str) -> float:
    whole = sum(sum(share.parts.values()) for share in shares)
    return sum(share.parts[name] for share in shares for name in names) / whole if whole else 0.0


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("workers", lambda row: str(row.workers)),
    ("images/s", lambda row: f"{row.images_per_second:.4g}"),
    ("range", lambda row: f"{row.low:.4g} - {row.high:.4g}"),
    ("efficiency", lambda row: f"{row.efficiency:.3f}"),
    ("iteration", lambda row: f"{1000 * row.step:.1f} ms"),
    ("computing", lambda row: f"{row.computing:.1%}"),
    ("communicating", lambda row: f"{row.communicating:.1%}"),
    ("waiting for data", lambda row: f"{row.waiting:.1%}"),
    ("hidden", lambda row: f"{row.hidden / row.sending:.0%} of {1000 * row.sending:.1f} ms" if row.sending else ""),
)


def render(found: Sequence[Row], notes: Sequence[str]) -> str:
    table = [[title for title, _ in _COLUMNS], *([text(row) for _, text in _COLUMNS] for row in found)]
    return "\n".join([*columns(table), "", *(f"note: {text}" for text in notes)])


def notes(
    turns: Sequence[Turn],
    batch_size: int,
    logical_workers: int,
    device: str,
    threads: int,
    processors: int,
    synthetic: str,
) -> list[str]:
    """What the figures mean, one sentence each."""
    said = [
        f"strong scaling: an iteration is {batch_size} images for any number of workers, {count(threads, 'thread')} each",
        "communicating: from the end of backward until the gradients are summed, with the wait for slower workers; hidden: the part of "
        "their way that lies within backward; medians and range over rounds, efficiency within each round",
    ]
    counts = sorted({turn.workers for turn in turns})
    if uneven := [workers for workers in counts if logical_workers % workers]:
        said.append(f"{logical_workers} device batches can't be dealt out evenly to {', '.join(map(str, uneven))}")
    sharing = max(max(Counter(share.host for share in turn.shares).values()) for turn in turns)
    if sharing > 1 and device == "cpu":
        fewer = f", fewer than their {sharing * threads} threads" if sharing * threads > processors else ""
        said.append(
            f"up to {count(sharing, 'worker')} share the {count(processors, 'processor')} of one machine{fewer}: a cluster behaves otherwise"
        )
    if synthetic:
        said.append(f"synthetic images ({synthetic}), in memory: real ones make another wait for data")
    return said


def for_speed(schedule: Schedule, name: str, iters: int) -> Schedule:
    """The schedule with one stage alone, from the seed, of so many whole iterations, and nothing but training in it: whatever its weights
    are, they stay finite, since they hardly move."""
    stage = schedule.stage(name)
    still = replace(
        stage.solver,
        base_lr=1e-9,
        lr_policy="fixed",
        warmup_iter=0,
        warmup_start_lr=0.0,
        policy_start_iter=0,
        max_iter=iters,
        transform=at_largest(stage.solver.transform),
        display=0,
        snapshot=0,
        test_interval=0,
        solverstate=None,
    )
    alone = replace(
        schedule, stages=(replace(stage, solver=still, parent=None, parent_iter=None, average=None),), ensembles=()
    )
    return alone.with_data(lambda data: replace(data, scratch=None, val=()))
