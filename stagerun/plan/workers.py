"""How many workers a schedule can have."""

import os

from stagerun.base.errors import DataError, Problem, RecipeError, UsageError, listing
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.text import count


def most_workers(schedule: Schedule) -> int | None:
    """Workers that the smallest batch has device batches for; None where no stage is enabled."""
    return min((stage.solver.most_workers for stage in schedule.stages if stage.enabled), default=None)


def check_workers(schedule: Schedule, nproc: int) -> None:
    """RecipeError with a mistake for each division of a batch into fewer device batches, at the first stage that has it; and for each
    stage with `ASYNC` and fewer replicas."""
    small: dict[tuple[int, int], list[Stage]] = {}
    problems = []
    for stage in schedule.stages:
        if not stage.enabled or nproc <= (most := stage.solver.most_workers):
            continue
        if stage.solver.asynchronous:
            text = f"{nproc} workers are too many for stage {stage.name}: `method: ASYNC` has {count(most, 'replica')}"
            hint = f"use at most {count(most, 'worker')}, or write `replicas: {nproc}`, which trains otherwise"
            problems.append(Problem(text, stage.written("solver.sync_param.replicas") or stage.span, hint=hint))
        else:
            small.setdefault((stage.solver.batch_size, stage.solver.device_batch_size), []).append(stage)
    for (batch, device_batch), stages in small.items():
        most = stages[0].solver.logical_workers
        span = stages[0].written("solver.device_batch_size", "solver.batch_size") or stages[0].span
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
    missing = [s.path for s in schedule.sources if not os.path.exists(s.path)]
    if missing:
        raise DataError(
            "\n".join(f"{path}: this machine has no such LMDB" for path in missing),
            f"`--synthetic` {does} with made-up images of the same kind",
        )
