"""What the workers of a job are to do, how many of them a machine has by default, and how many a schedule can have. No torch, but for
counting several GPUs."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from stagerun.base.errors import DataError, ExitCode, Problem, RecipeError, UsageError, listing
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.text import count
from stagerun.launch.sharing import default_workers
from stagerun.launch.stopping import GRACE_S, StopRequest
from stagerun.system import signals
from stagerun.system.cores import read
from stagerun.system.world import World, launched, started_by

# What a worker does: its exit code.
Job = Callable[[World, StopRequest], int]


@dataclass(frozen=True, slots=True)
class Orders:
    """What all workers do: `stagerun COMMAND...`, with `threads` each (None: the processors shared evenly). `saves`: there is something to
    save, within `grace` seconds from a signal, and rank 0 may save when another worker fails. `watched`: they have monitors."""

    command: tuple[str, ...]
    threads: int | None
    grace: float = GRACE_S
    saves: bool = True
    watched: bool = True

    @property
    def stopped(self) -> ExitCode:
        """The exit code of a signal before anything has started."""
        return ExitCode.SAVED if self.saves else ExitCode.INTERRUPTED


@dataclass(frozen=True, slots=True)
class Wish:
    """How workers are to be bound to cores: `bound` None leaves it to the machine. `threads` of each; None: OMP_NUM_THREADS says it, or the
    plan does."""

    bound: bool | None = None
    comm_cores: int | None = None
    threads: int | None = None


def joined(nproc: int | None) -> bool:
    """Whether a launcher started this process as one of several. UsageError if --nproc says otherwise."""
    if launched() and nproc is not None:
        raise UsageError(
            f"--nproc, but a launcher has started this process as one of several ({started_by()})",
            "leave --nproc out: the launcher says how many workers there are",
        )
    return launched()


def devices(schedule: Schedule | None = None) -> int:
    """One worker per GPU that torch can use here; where there is none, one per NUMA node, as far as the batch of `schedule` has device
    batches for them. Nvidia's driver and the environment tell where there is at most
    one, which spares importing torch; batch systems name GPUs for a torch that was built without them, too.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        listed = 0
    named = listed if visible is None else len([n for n in visible.split(",") if n.strip() not in ("", "-1")])
    found = named
    if named > 1:
        with signals.held():
            import torch

            found = torch.cuda.device_count()
    stages = schedule.stages if schedule is not None else ()
    most = min((stage.solver.logical_workers for stage in stages if stage.enabled), default=None)
    return found or default_workers(replace(read(), gpus=()), most)


def check_workers(schedule: Schedule, nproc: int) -> None:
    """RecipeError with a mistake for each division of a batch into fewer device batches, at the first stage that has it."""
    small: dict[tuple[int, int], list[Stage]] = {}
    for stage in schedule.stages:
        if stage.enabled and nproc > stage.solver.logical_workers:
            small.setdefault((stage.solver.batch_size, stage.solver.device_batch_size), []).append(stage)
    problems = []
    for (batch, device_batch), stages in small.items():
        most = stages[0].solver.logical_workers
        origin = stages[0].origins.get("solver.device_batch_size") or stages[0].origins.get("solver.batch_size")
        span = origin.span if origin and origin.span else stages[0].span
        names = listing([s.name for s in stages], "and")
        problems.append(
            Problem(
                f"{nproc} workers are too many for stage{'s' * (len(stages) > 1)} {names}: batch_size {batch} "
                f"holds {most} device batch{'es' * (most > 1)} of {device_batch}",
                span,
                hint=f"use at most {count(most, 'worker')}, or a smaller device_batch_size",
            )
        )
    if problems:
        raise RecipeError(problems)


def check_short(schedule: Schedule, workers: int, device_batch: int | None, synthetic: bool, does: str) -> None:
    """Whether the schedule can be run cut short. `does`: what a command does then. RecipeError, DataError."""
    if not any(stage.enabled for stage in schedule.stages):
        raise UsageError(f"no stage of {schedule.name} is enabled", "take `enabled: false` out of one of them")
    check_workers(schedule, workers)
    largest = max(stage.solver.device_batch_size for stage in schedule.stages)
    if device_batch is not None and device_batch > largest:
        raise UsageError(
            f"--device-batch {device_batch} is more than the schedule's device_batch_size of {largest}",
            "it is for a machine where the real one does not fit; leave it out",
        )
    if synthetic:
        return
    sources = [s for s in (schedule.data.train, schedule.data.val) if s is not None]
    missing = [s.path for s in sources if not os.path.exists(s.path)]
    if missing:
        raise DataError(
            "\n".join(f"{path}: there is no LMDB on this machine" for path in missing),
            f"`--synthetic` {does} with made-up images of the same kind",
        )
