"""What each host can do: links, and training steps of the schedule's own model on made-up images."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from stagerun.base.errors import PeerError
from stagerun.base.recipe import Schedule, Stage
from stagerun.comm import Comm, gather_json, make_reducer
from stagerun.comm.reduce import Reducer, SoloReducer
from stagerun.data.stream import Batch
from stagerun.engine.device import synchronize
from stagerun.engine.mixing import Mixing
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.update import update
from stagerun.models import build
from stagerun.schedule import Knobs
from stagerun.schedule.image_size import at_largest
from stagerun.system.host import host_name
from stagerun.system.typed import read_as
from stagerun.system.world import World
from stagerun.tools.rehearse.facts import Facts
from stagerun.tools.rehearse.hosts import HostSpeed, Measured
from stagerun.tools.rehearse.synthetic import synthetic_images
from stagerun.train.agreement import anyone, require_same_code
from stagerun.train.stage_loop import arithmetic_of

_UNTIMED, _STEPS = 2, 5
_MOST_SUM_S = 10.0  # a step whose sum of gradients would take longer is not tried
_ENOUGH_S = 0.15  # a transfer that takes this long can be timed; a larger one is not tried
_FIRST_BYTES, _LARGEST_BYTES = 1 << 18, 1 << 25
_PATIENCE = timedelta(seconds=30)  # for one message: well above what the first takes on 1 Mbit/s


def meet(comm: Comm, world: World, look: Callable[[], Facts]) -> tuple[list[str], dict[str, Facts]]:
    """The name of each rank's host, and the facts of each host: `look()` of one worker there. Collective; StagerunError, on rank 0, where
    hosts have different code.

    Two ranks with the same local rank are on two hosts, even where these call themselves alike; the second is NAME#2.
    """
    require_same_code(comm)
    heard = gather_json(comm, [host_name(), world.local_rank, asdict(look()) if world.local_rank == 0 else None])
    workers = [(host, local) for host, local, _ in heard]
    numbers = [workers[: rank + 1].count(worker) for rank, worker in enumerate(workers)]
    names = [host if number == 1 else f"{host}#{number}" for (host, _), number in zip(workers, numbers, strict=True)]
    sent = {name: facts for name, (_, _, facts) in zip(names, heard, strict=True) if facts is not None}
    return names, {name: read_as(Facts, facts) for name, facts in sent.items()}


def measure(
    schedule: Schedule, comm: Comm, device: torch.device, names: Sequence[str], stop: Callable[[], bool]
) -> Measured | None:
    """Collective; the same on every rank, None if asked to stop. PeerError naming a host that doesn't answer."""

    def asked() -> bool:
        comm.pulse.beat()
        return anyone(comm, stop())

    enabled = [stage for stage in schedule.stages if stage.enabled]
    stage = max(enabled, key=lambda stage: stage.solver.max_iter * stage.solver.batch_size)
    leaders = [names.index(name) for name in dict.fromkeys(names)]
    best = [0.0, 0.0]  # bytes per second that this rank sends and receives
    # Each host with the next two of the circle, one pair after the other: a host is known by the best that it gets with any.
    number = len(leaders)
    pairs = [(host, (host + step) % number) for host in range(number) for step in (1, 2)]
    for a, b in sorted({(min(pair), max(pair)) for pair in pairs}):
        if a != b and comm.rank in (leaders[a], leaders[b]):
            other = leaders[b] if comm.rank == leaders[a] else leaders[a]
            best = list(map(max, best, _link(other, comm.rank == leaders[a], names[other])))
        if asked():  # all begin with a pair together: a host that a slow link held up would seem not to answer
            return None
    state = make_state(build(stage.model), stage.solver, device)
    parameters = [p.tensor for p in state.solver.parameters]
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    alone = _step_seconds(schedule, stage, state, device, SoloReducer(parameters), comm, 1)
    heard = gather_json(comm, [alone, *best])
    if asked():
        return None
    together, slowest_link = None, min((rate for one in heard for rate in one[1:] if rate), default=math.inf)
    if comm.size > 1 and 2 * nbytes / slowest_link <= _MOST_SUM_S:
        reducer = make_reducer(schedule.determinism, parameters, comm, comm.size)
        mine = _step_seconds(schedule, stage, state, device, reducer, comm, comm.size)
        together = max(gather_json(comm, mine))
    hosts = []
    for leader in leaders:
        slowest = [one[0] for one, name in zip(heard, names, strict=True) if name == names[leader]]
        hosts.append(HostSpeed(names[leader], len(slowest), max(slowest), *heard[leader][1:]))
    return Measured(
        stage=stage.name,
        device=device.type,
        workers=comm.size,
        device_batch_size=stage.solver.device_batch_size,
        hosts=tuple(hosts),
        gradient_bytes=nbytes,
        together_seconds=together,
    )


def _link(other: int, first: bool, name: str) -> list[float]:
    """Bytes per second to rank `other`, and from it. Both call it, one as `first`. PeerError."""
    try:
        rates = [_transfer(other, sends) for sends in (first, not first)]
    except RuntimeError as error:
        raise PeerError(
            f"no answer from {name} within {_PATIENCE.total_seconds():.0f} s while the link was measured",
            "look at the network between the two hosts, and at firewalls: all ports above 1024 must be open between them",
        ) from error
    return rates if first else rates[::-1]


def _transfer(other: int, sends: bool) -> float:
    """Messages of twice the size each, until one takes long enough: what a shaped link lets through at once has gone by then. The receiver
    answers how long it took. Tensors on the CPU travel by gloo. RuntimeError."""
    size, taken = _FIRST_BYTES // 2, torch.zeros(1)
    while size < _LARGEST_BYTES and float(taken) < _ENOUGH_S:
        size *= 2
        data, since = torch.zeros(size, dtype=torch.uint8), time.monotonic()
        _wait(dist.isend(data, other) if sends else dist.irecv(data, other))
        taken[0] = time.monotonic() - since
        _wait(dist.irecv(taken, other) if sends else dist.isend(taken, other))
    return size / float(taken)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait(_PATIENCE)


def _step_seconds(
    schedule: Schedule,
    stage: Stage,
    state: TrainState,
    device: torch.device,
    reducer: Reducer,
    comm: Comm,
    workers: int,
) -> float:
    """Median of some updates with a learning rate of 0, on noise that lies in memory, one device batch for each of `workers`; what is slow
    the first times doesn't count. With a reducer of all ranks it is collective."""
    solver, shape = stage.solver, synthetic_images(schedule)
    transform = at_largest(solver.transform)
    side, count, rng = transform.crop_size, solver.device_batch_size, np.random.default_rng(1)
    batch = Batch(
        rng.integers(0, 256, (count, side or shape.height, side or shape.width, stage.model.channels), dtype=np.uint8),
        rng.integers(0, stage.model.num_classes, count, dtype=np.int64),
        np.arange(count, dtype=np.int64),
        np.zeros((count, 4), np.int32) if transform.cutout_size else None,
    )
    how = replace(
        arithmetic_of(
            replace(stage, solver=replace(solver, transform=transform)), device, teacher=schedule.teacher_model(stage)
        ),
        logical_workers=workers,
        forward_seed=lambda position: 1,
        mixing=Mixing(1, solver.mixup_alpha, solver.cutmix_alpha),
    )
    mine, timed = [(comm.rank if workers > 1 else 0, batch, True)], list[float]()
    for _ in range(_UNTIMED + _STEPS):
        began = time.monotonic()
        update(state, mine, Knobs(0.0, solver.momentum, 0.0), reducer, how, lambda: False)
        synchronize(device)
        timed.append(time.monotonic() - began)
        comm.pulse.beat()
    return median(timed[_UNTIMED:])
