"""A schedule cut down to a rehearsal: every stage, a handful of iterations, one device batch per worker. Pure."""

import math
from dataclasses import replace

from stagerun.base.recipe import Ensemble, Schedule, Stage, SyncStart
from stagerun.plan.planned import label
from stagerun.schedule.image_size import at_largest


def rehearsal(
    schedule: Schedule, iters: int, workers: int, device_batch: int | None, test_inside: bool = True
) -> Schedule:
    """Every stage with `iters` iterations, or all it has if those are fewer, of one device batch per worker; with replicas of the fewest that
    give each worker and each replica as many. They part, and gradients are compressed, from the first iteration on.
    Stages that start from inside another do so here, as near to its middle as possible, and ensembles are made from there.

    Learning rates are scaled with the batch, so that a network that has hardly been trained stays finite. Images are read
    where they are, not copied to scratch; where their size changes within a stage, they have the largest one. Only the last
    weights of a stage are saved. With `test_inside` it is evaluated in its middle, too, on one batch per worker: what an
    evaluation does for the first time is not what it costs.
    """

    def inside(stage: str, iter: int | None) -> int | None:
        """One iteration has no middle: it is its end."""
        middle = min(iters, schedule.stage(stage).solver.max_iter) // 2
        return min(iter, middle) if iter is not None and middle else None

    def cut(stage: Stage) -> Stage:
        solver = stage.solver
        size = min(device_batch or solver.device_batch_size, solver.device_batch_size)
        batches = workers if solver.sync is None else math.lcm(workers, solver.sync.replicas)
        batches = 1 if solver.asynchronous else batches  # an iteration is one worker's
        share, length = size * batches / solver.batch_size, min(iters, solver.max_iter)
        short = replace(
            solver,
            base_lr=solver.base_lr * share,
            warmup_start_lr=solver.warmup_start_lr * share,
            end_lr=solver.end_lr * share,
            policy_start_iter=0,  # beyond the end of a policy that is so short now, there may be no rate
            epoch_iter=solver.epoch_iter and solver.epoch_iter / share,
            max_iter=length,
            batch_size=size * batches,
            device_batch_size=size,
            transform=at_largest(solver.transform),
            sync=solver.sync and replace(solver.sync, start=SyncStart.STAGE_START),
            compress=solver.compress and replace(solver.compress, start_iter=0),
            display=0,
            snapshot=0,
            test_interval=max(1, length // 2) if stage.data.val and test_inside else 0,
            test_iter=workers,
            test_batch_size=min(solver.test_batch_size, device_batch or solver.test_batch_size),
            solverstate=None,  # it may be beyond so short an end
        )
        leaves = inside(stage.parent, stage.parent_iter) if stage.parent is not None else None
        return replace(stage, solver=short, parent_iter=leaves)

    def cut_ensemble(one: Ensemble) -> Ensemble:
        members = tuple(dict.fromkeys(label(stage, inside(stage, iter)) for stage, iter in one.points))
        return replace(one, members=members, batch_norm_iter=min(iters, one.batch_norm_iter))

    at_once = schedule.with_data(lambda data: replace(data, scratch=None))
    return replace(
        at_once,
        stages=tuple(map(cut, at_once.stages)),
        ensembles=tuple(map(cut_ensemble, schedule.ensembles)),
        keep_snapshots=1,
    )
