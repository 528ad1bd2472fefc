"""What a job would cost per step on these hosts, and which of them is slow: measured with the schedule's own model, on made-up images."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stagerun.base.errors import PeerError
from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Schedule, Stage
from stagerun.comm import Comm, gather_json, make_reducer
from stagerun.comm.reduce import CHUNK_BYTES, Reducer, SoloReducer
from stagerun.data.python_transform import PythonTransform
from stagerun.data.stream import Batch
from stagerun.engine.device import synchronize
from stagerun.engine.mixing import Mixing
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.update import update
from stagerun.launch.compare import unlike
from stagerun.launch.facts import Facts, from_json
from stagerun.models import build
from stagerun.plan.rehearsal import synthetic_images
from stagerun.schedule.image_size import at_largest
from stagerun.system.host import host_name
from stagerun.system.world import World
from stagerun.tools.rehearse.hosts_page import HostTimes, Link, Measured, rounds
from stagerun.train.agreement import anyone, everyone, refuse
from stagerun.train.images import default_loader_threads
from stagerun.train.stage_start import arithmetic_of

# Steps that are timed: as many as take STEPS_S, after one (with `compile` two) that is not.
LEAST_STEPS, MOST_STEPS, STEPS_S = 3, 50, 2.0
# Images that a function of the user's gets, and the longest that it may take for them.
PYTHON_IMAGES, PYTHON_S = 50, 1.0
# Longest that the gradients' sum may take in all; what would take longer is extrapolated from fewer bytes.
ALL_REDUCE_S, ALL_REDUCE_TIMES = 6.0, 3
_FIRST_BYTES = 1 << 18
# A step together whose sum alone would take longer is not tried.
MOST_TOGETHER_S = 10.0

# A message that takes longer is not to come: the link is cut. Well above what FIRST_MESSAGE takes on 1 Mbit/s.
PATIENCE = timedelta(seconds=30)
# Bytes of the first message, and of the last.
FIRST_MESSAGE, LARGEST_MESSAGE = 1 << 18, 1 << 25
# A transfer that takes this long is long enough to be timed; a larger one is not tried.
ENOUGH_S = 0.15
PINGS, PINGS_S = 20, 0.5


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
    mine = {"host": os.environ.get("STAGERUN_HOST") or host_name(), "local": world.local_rank}
    if world.local_rank == 0:
        mine["facts"] = look().as_json()
    heard = gather_json(comm, mine)
    names = named([(one["host"], one["local"]) for one in heard])
    leaders = tuple(rank for rank, one in enumerate(heard) if one["local"] == 0)
    facts = {names[rank]: heard[rank]["facts"] for rank in leaders}
    try:
        return Hosts(names, leaders), {name: from_json(one) for name, one in facts.items()}
    except ValueError:
        refuse(comm, unlike(facts))


def named(heard: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """A name for each rank's host, of (what the host calls itself, local rank): two ranks of one number on one host are on two hosts
    that call themselves alike, and the second is NAME#2."""
    seen: dict[tuple[str, int], int] = {}
    found = []
    for host, local in heard:
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
    state = make_state(build(stage.model), stage.solver, device)
    parameters = [p.tensor for p in state.solver.parameters]
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    reduced, seconds = _all_reduce(comm, device, nbytes)
    if _asked(comm, stop):
        return None
    alone = _Steps(schedule, stage, state, device, 1, 0)
    timed = alone.run(SoloReducer(parameters), comm, None)
    heard = gather_json(comm, (*timed, _python_seconds(schedule, stage, comm)))
    if _asked(comm, stop):
        return None
    together = None
    if comm.size > 1 and seconds <= MOST_TOGETHER_S:
        steps = _Steps(schedule, stage, state, device, comm.size, comm.rank)
        reducer = make_reducer(schedule.determinism, parameters, comm, comm.size)
        number = max(LEAST_STEPS, min(MOST_STEPS, round(STEPS_S / max(t[0] + t[1] + seconds for t in heard))))
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
        hosts=tuple(_of_hosts(hosts, heard)),
        links=links,
        gradient_bytes=nbytes,
        all_reduce_bytes=reduced,
        all_reduce_seconds=seconds,
        together_seconds=together,
        python=stage.solver.transform.python or "",
        loader_threads=schedule.data.loader_threads or default_loader_threads(device.type, torch.get_num_threads()),
    )


def _python_seconds(schedule: Schedule, stage: Stage, comm: Comm) -> float:
    """Seconds that the stage's function takes for one made-up image, all workers of the host busy; 0 without one. Collective. UsageError."""
    name = stage.solver.transform.python
    if name is None:
        return 0.0
    shape = synthetic_images(schedule)
    image = np.random.default_rng(1).integers(0, 256, (shape.height, shape.width, shape.channels), dtype=np.uint8)

    def timed() -> float:
        function = PythonTransform(name, schedule.python)
        function(image, 0, 0, lambda: "a made-up image")  # what is slow the first time
        before, began, position = function.seconds, time.monotonic(), 1
        while position <= PYTHON_IMAGES and time.monotonic() - began < PYTHON_S:
            function(image, 0, position, lambda: "a made-up image")
            position += 1
        return (function.seconds - before) / (position - 1)

    found = everyone(comm, timed)
    comm.pulse.beat()
    return found


def dearest(schedule: Schedule) -> Stage:
    """The stage that most images go through, of those that are enabled."""
    return max(
        (stage for stage in schedule.stages if stage.enabled),
        key=lambda stage: stage.solver.max_iter * stage.solver.batch_size,
    )


def _of_hosts(hosts: Hosts, heard: Sequence[Sequence[float]]) -> Iterator[HostTimes]:
    for leader in hosts.leaders:
        name = hosts.of(leader)
        here = [heard[rank] for rank in range(len(heard)) if hosts.of(rank) == name]
        slowest = max(here, key=lambda one: one[0] + one[1])
        python = max(one[2] for one in here)
        yield HostTimes(
            host=name,
            workers=len(here),
            pass_seconds=slowest[0],
            update_seconds=slowest[1],
            python_seconds=python,
        )


def _asked(comm: Comm, stop: Callable[[], bool]) -> bool:
    asked = anyone(comm, stop())
    comm.pulse.beat()
    return asked


# -- links


def _links(comm: Comm, hosts: Hosts, stop: Callable[[], bool]) -> tuple[Link, ...] | None:
    """Between one rank of each host; None if asked to stop. Collective. The pairs of a round are measured at once, and no host is in two of
    them. All begin a round together: otherwise a host that a slow link held up would seem not to answer."""
    mine = []
    me = hosts.leaders.index(comm.rank) if comm.rank in hosts.leaders else None
    for one_round in rounds(len(hosts.leaders)):
        for a, b in one_round:
            if me in (a, b):
                other = hosts.leaders[b if me == a else a]
                rate, trip = measure_link(other, me == a, hosts.of(other))
                mine.append([other, rate, trip])
        if _asked(comm, stop):
            return None
    heard = gather_json(comm, mine)
    trips = {frozenset((rank, other)): trip for rank, rows in enumerate(heard) for other, _, trip in rows if trip}
    return tuple(
        Link(sender=hosts.of(rank), receiver=hosts.of(other), rate=rate, round_trip=trips[frozenset((rank, other))])
        for rank, rows in enumerate(heard)
        for other, rate, _ in rows
    )


# -- one link: two ranks among all, one message at a time. Tensors are on the CPU, so that gloo carries them.


def _send(data: Tensor, to: int) -> None:
    """RuntimeError if the rank is gone or does not take it within PATIENCE: then all links of this process are closed."""
    work = dist.isend(data, to)
    assert work is not None
    work.wait(PATIENCE)


def _receive(data: Tensor, source: int) -> None:
    """Fills `data`. RuntimeError as of `_send`."""
    work = dist.irecv(data, source)
    assert work is not None
    work.wait(PATIENCE)


def measure_link(other: int, first: bool, name: str) -> tuple[float, float]:
    """(bytes per second from here to rank `other`, seconds of a round trip). Both call it, one as `first`. It takes less than two
    seconds on links of 10 Mbit/s or more. PeerError, with the `name` of that host, if it doesn't answer."""
    try:
        if first:
            trip = _pings(other)
            rate = _push(other)
            _pull(other)
        else:
            _echo(other)
            _pull(other)
            rate, trip = _push(other), 0.0
        return rate, trip
    except RuntimeError as error:
        raise PeerError(
            f"no answer from {name} within {PATIENCE.total_seconds():.0f} s while the link was measured",
            "look at the network between the two hosts, and at firewalls: all ports above 1024 must be open between them",
        ) from error


def _pings(other: int) -> float:
    """The fastest of some round trips, in seconds. Each message says whether another one follows."""
    word, trips, began = torch.ones(1, dtype=torch.int64), list[float](), time.monotonic()
    while int(word):
        word[0] = int(len(trips) + 1 < PINGS and time.monotonic() - began < PINGS_S)
        since = time.monotonic()
        _send(word, other)
        _receive(word, other)
        trips.append(time.monotonic() - since)
    return min(trips)


def _echo(other: int) -> None:
    word = torch.ones(1, dtype=torch.int64)
    while int(word):
        _receive(word, other)
        _send(word, other)


def _push(other: int) -> float:
    """Messages of twice the size each, until one takes long enough: bytes per second of that one. What a shaped link lets through at once
    has gone with those before it."""
    size, rate, seconds = FIRST_MESSAGE, 0.0, 0.0
    said = torch.zeros(1, dtype=torch.int64)
    while size <= LARGEST_MESSAGE and seconds < ENOUGH_S:
        data = torch.zeros(size, dtype=torch.uint8)
        said[0] = size
        since = time.monotonic()
        _send(said, other)
        _send(data, other)
        _receive(said, other)  # what is sent may still lie in this host's buffers
        seconds = time.monotonic() - since
        rate = size / seconds
        size *= 2
    said[0] = 0
    _send(said, other)
    return rate


def _pull(other: int) -> None:
    said = torch.zeros(1, dtype=torch.int64)
    while True:
        _receive(said, other)
        if not int(said):
            return
        _receive(torch.empty(int(said), dtype=torch.uint8), other)
        _send(said, other)


# -- the sum of the gradients


def _all_reduce(comm: Comm, device: torch.device, nbytes: int) -> tuple[int, float]:
    """(bytes that were added up, seconds for all `nbytes` of the gradients), in pieces as training sends them. Collective."""
    if comm.size == 1:
        return nbytes, 0.0

    def timed(size: int) -> float:
        flat = torch.zeros(max(1, size // 4), device=device)
        pieces = flat.split(CHUNK_BYTES // 4)
        comm.barrier()
        began = time.monotonic()
        for wait in [comm.all_reduce(piece) for piece in pieces]:
            wait()
        synchronize(device)
        seconds = torch.tensor([time.monotonic() - began if comm.rank == 0 else 0.0])
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
            rng.integers(0, 256, (count, *size, stage.model.channels), dtype=np.uint8),
            rng.integers(0, stage.model.num_classes, count, dtype=np.int64),
            np.arange(count, dtype=np.int64),
            np.zeros((count, 3), np.float32) if transform.lighting_std else None,
            np.zeros((count, 4), np.int32) if transform.cutout_size else None,
        )
        self.how = replace(
            arithmetic_of(
                stage.model, replace(solver, transform=transform), device, teacher=schedule.teacher_model(stage)
            ),
            logical_workers=workers,
            forward_seed=lambda position: 1,
            mixing=Mixing(1, solver.mixup_alpha, solver.cutmix_alpha),
        )
        self.knobs = Knobs(0.0, solver.momentum, 0.0)
        self.state, self.device, self.rank = state, device, rank
        self.first = 2 if solver.compile else 1

    def run(self, reducer: Reducer, comm: Comm, steps: int | None) -> tuple[float, float]:
        """Medians of (seconds until backward is done, seconds from there to the end of the update). `steps` None: as many as take
        STEPS_S on this rank alone. With a reducer of all ranks it is collective."""
        for _ in range(self.first):
            self._one(reducer)
            comm.pulse.beat()
        timed, began = list[tuple[float, float]](), time.monotonic()
        most = MOST_STEPS if steps is None else steps
        while len(timed) < most:
            timed.append(self._one(reducer))
            comm.pulse.beat()
            if steps is None and len(timed) >= LEAST_STEPS and time.monotonic() - began > STEPS_S:
                break
        return median(t[0] for t in timed), median(t[1] for t in timed)

    def _one(self, reducer: Reducer) -> tuple[float, float]:
        began = time.monotonic()
        outcome = update(self.state, [(self.rank, self.batch, True)], self.knobs, reducer, self.how, lambda: False)
        synchronize(self.device)
        seconds = time.monotonic() - began
        return seconds - outcome.seconds, outcome.seconds
