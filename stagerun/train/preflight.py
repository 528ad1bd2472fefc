"""What a job would cost per step on these hosts, and which of them is slow: measured with the schedule's own model, on made-up images."""

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from stagerun.comm import Comm, gather_json, make_reducer, pairs
from stagerun.comm.reduce import CHUNK_BYTES, Reducer, SoloReducer
from stagerun.data.batch import Batch
from stagerun.engine.device import synchronize
from stagerun.engine.mixture import Mixing
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.update import update
from stagerun.knobs import Knobs
from stagerun.models import build
from stagerun.plan.rehearsal import synthetic_images
from stagerun.preflight.compare import unlike
from stagerun.preflight.facts import Facts, from_json
from stagerun.preflight.measured import HostTimes, Link, Measured, rounds
from stagerun.recipe import Schedule, Stage
from stagerun.schedule.image_size import at_largest
from stagerun.train.agreement import anyone, refuse
from stagerun.train.start import arithmetic_of
from stagerun.world import World

# Steps that are timed: so many as take STEPS_S, after one (with `compile` two) that is not.
LEAST_STEPS, MOST_STEPS, STEPS_S = 3, 50, 2.0
# Longest that the gradients' sum may take in all; what would take longer is extrapolated from fewer bytes.
ALL_REDUCE_S, ALL_REDUCE_TIMES = 6.0, 3
_FIRST_BYTES = 1 << 18
# A step together whose sum alone would take longer is not tried.
MOST_TOGETHER_S = 10.0


@dataclass(frozen=True, slots=True)
class Hosts:
    """Who is where: the name of each rank's host, and the ranks that lead one, in order."""

    names: tuple[str, ...]
    leaders: tuple[int, ...]

    def of(self, rank: int) -> str:
        return self.names[rank]


def meet(comm: Comm, world: World, look: Callable[[], Facts]) -> tuple[Hosts, dict[str, Facts]]:
    """The hosts of the job, and their facts by name: `look()` of one worker of each. Collective; StagerunError, on rank 0, where they
    have stageruns that don't know each other's facts."""
    mine = {"host": os.environ.get("STAGERUN_HOST") or socket.gethostname(), "local": world.local_rank}
    if world.local_rank == 0:
        mine["facts"] = look().as_json()
    told = gather_json(comm, mine)
    names = named([(one["host"], one["local"]) for one in told])
    leaders = tuple(rank for rank, one in enumerate(told) if one["local"] == 0)
    facts = {names[rank]: told[rank]["facts"] for rank in leaders}
    try:
        return Hosts(names, leaders), {name: from_json(one) for name, one in facts.items()}
    except ValueError:
        refuse(comm, unlike(facts))


def named(told: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """A name for each rank's host, of (what the host calls itself, local rank): two ranks of one number on one host are on two hosts
    that call themselves alike, and the second is NAME#2."""
    seen: dict[tuple[str, int], int] = {}
    found = []
    for host, local in told:
        number = seen[host, local] = seen.get((host, local), 0) + 1
        found.append(host if number == 1 else f"{host}#{number}")
    return tuple(found)


def measure(
    schedule: Schedule, comm: Comm, device: torch.device, hosts: Hosts, stop: Callable[[], bool]
) -> Measured | None:
    """Collective; the same on every rank, None if asked to stop. PeerError naming a host that doesn't answer."""
    stage = dearest(schedule)
    links = _links(comm, hosts, stop)
    if links is None:
        return None
    state = make_state(build(schedule.model), stage.solver, device)
    parameters = [p.tensor for p in state.solver.parameters]
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    reduced, seconds = _all_reduce(comm, device, nbytes)
    if _asked(comm, stop):
        return None
    alone = _Steps(schedule, stage, state, device, 1, 0)
    timed = alone.run(SoloReducer(parameters), comm, None)
    told = gather_json(comm, timed)
    if _asked(comm, stop):
        return None
    together = None
    if comm.size > 1 and seconds <= MOST_TOGETHER_S:
        steps = _Steps(schedule, stage, state, device, comm.size, comm.rank)
        reducer = make_reducer(schedule.determinism, parameters, comm, comm.size)
        number = max(LEAST_STEPS, min(MOST_STEPS, round(STEPS_S / max(sum(t) + seconds for t in told))))
        mine = sum(steps.run(reducer, comm, number))
        together = max(gather_json(comm, mine))
    solver = stage.solver
    return Measured(
        stage=stage.name,
        device=str(device.type),
        workers=comm.size,
        device_batch_size=solver.device_batch_size,
        batch_size=solver.batch_size,
        passes=math.ceil(solver.logical_workers / comm.size),
        hosts=tuple(_of_hosts(hosts, told)),
        links=links,
        gradient_bytes=nbytes,
        all_reduce_bytes=reduced,
        all_reduce_seconds=seconds,
        together_seconds=together,
    )


def dearest(schedule: Schedule) -> Stage:
    """The stage that most images go through, of those that are enabled."""
    return max(
        (stage for stage in schedule.stages if stage.enabled),
        key=lambda stage: stage.solver.max_iter * stage.solver.batch_size,
    )


def _of_hosts(hosts: Hosts, told: Sequence[Sequence[float]]) -> Iterator[HostTimes]:
    for leader in hosts.leaders:
        name = hosts.of(leader)
        here = [told[rank] for rank in range(len(told)) if hosts.of(rank) == name]
        slowest = max(here, key=sum)
        yield HostTimes(host=name, workers=len(here), pass_seconds=slowest[0], update_seconds=slowest[1])


def _asked(comm: Comm, stop: Callable[[], bool]) -> bool:
    asked = anyone(comm, stop())
    comm.pulse.beat()
    return asked


# -- links


def _links(comm: Comm, hosts: Hosts, stop: Callable[[], bool]) -> tuple[Link, ...] | None:
    """Between one rank of each host; None if asked to stop. Collective. The pairs of a round are measured at once, and no host is in two of
    them. All begin a round together: who is paired with a host that a slow link held up would take it for one that doesn't answer."""
    mine = []
    me = hosts.leaders.index(comm.rank) if comm.rank in hosts.leaders else None
    for one_round in rounds(len(hosts.leaders)):
        for a, b in one_round:
            if me in (a, b):
                other = hosts.leaders[b if me == a else a]
                rate, trip = pairs.measure(other, me == a, hosts.of(other))
                mine.append([other, rate, trip])
        if _asked(comm, stop):
            return None
    told = gather_json(comm, mine)
    trips = {frozenset((rank, other)): trip for rank, rows in enumerate(told) for other, _, trip in rows if trip}
    return tuple(
        Link(sender=hosts.of(rank), receiver=hosts.of(other), rate=rate, round_trip=trips[frozenset((rank, other))])
        for rank, rows in enumerate(told)
        for other, rate, _ in rows
    )


def _all_reduce(comm: Comm, device: torch.device, nbytes: int) -> tuple[int, float]:
    """(bytes that were added up, seconds for all `nbytes` of the gradients), in pieces as training sends them. Collective."""
    if comm.size == 1:
        return nbytes, 0.0

    def timed(size: int) -> float:
        flat = torch.zeros(max(1, size // 4), device=device)
        pieces = flat.split(CHUNK_BYTES // 4)
        comm.barrier()
        begun = time.monotonic()
        for wait in [comm.all_reduce(piece) for piece in pieces]:
            wait()
        synchronize(device)
        seconds = torch.tensor([time.monotonic() - begun if comm.rank == 0 else 0.0])
        comm.broadcast(seconds)
        comm.pulse.beat()
        return float(seconds)

    # By steps of four, so that what a slow link takes is known before much is sent over it. The first is not timed: buffers are made.
    size = min(nbytes, _FIRST_BYTES)
    timed(size)
    seconds = timed(size)
    while size < nbytes and 4 * seconds * ALL_REDUCE_TIMES < ALL_REDUCE_S:
        size = min(nbytes, 4 * size)
        seconds = timed(size)
    if seconds * ALL_REDUCE_TIMES < ALL_REDUCE_S:
        seconds = median([seconds, *(timed(size) for _ in range(ALL_REDUCE_TIMES - 1))])
    return size, seconds * nbytes / size


# -- steps


class _Steps:
    """Updates of `state` with a learning rate of 0, one device batch for each of `workers`, on images of noise that lie in memory."""

    def __init__(
        self, schedule: Schedule, stage: Stage, state: TrainState, device: torch.device, workers: int, rank: int
    ) -> None:
        solver = stage.solver
        transform = at_largest(solver.transform)
        shape, side, count = synthetic_images(schedule), transform.crop_size, solver.device_batch_size
        size = (side, side) if side else (shape.height, shape.width)
        rng = np.random.default_rng(1)
        self.batch = Batch(
            rng.integers(0, 256, (count, *size, schedule.model.channels), dtype=np.uint8),
            rng.integers(0, schedule.model.num_classes, count, dtype=np.int64),
            np.arange(count, dtype=np.int64),
            np.zeros((count, 3), np.float32) if transform.lighting_std else None,
            np.zeros((count, 4), np.int32) if transform.cutout_size else None,
        )
        self.how = replace(
            arithmetic_of(schedule.model, replace(solver, transform=transform), device),
            logical_workers=workers,
            forward_seed=lambda position: 1,
            mixing=Mixing(1, solver.mixup_alpha, solver.cutmix_alpha),
        )
        self.knobs = Knobs(0.0, solver.momentum, 0.0)
        self.state, self.device, self.rank = state, device, rank
        self.first = 2 if solver.compile else 1

    def run(self, reducer: Reducer, comm: Comm, steps: int | None) -> tuple[float, float]:
        """Medians of (seconds until backward is done, seconds from there to the end of the update). `steps` None: as many as take
        STEPS_S on this rank alone. Of a reducer of all ranks it is collective."""
        for _ in range(self.first):
            self._one(reducer)
            comm.pulse.beat()
        timed, begun = list[tuple[float, float]](), time.monotonic()
        most = MOST_STEPS if steps is None else steps
        while len(timed) < most:
            timed.append(self._one(reducer))
            comm.pulse.beat()
            if steps is None and len(timed) >= LEAST_STEPS and time.monotonic() - begun > STEPS_S:
                break
        return median(t[0] for t in timed), median(t[1] for t in timed)

    def _one(self, reducer: Reducer) -> tuple[float, float]:
        begun = time.monotonic()
        outcome = update(self.state, [(self.rank, self.batch, True)], self.knobs, reducer, self.how, lambda: False)
        synchronize(self.device)
        seconds = time.monotonic() - begun
        return seconds - outcome.seconds, outcome.seconds
