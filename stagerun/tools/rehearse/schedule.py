"""Schedules cut down to what a measurement trains, and images for them where the real ones are missing."""

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from stagerun.base.recipe import Data, Ensemble, Method, OnNan, Sampling, Schedule, Source, Stage, SyncStart
from stagerun.data import index
from stagerun.language.networks import known_of
from stagerun.language.proto import caffe_pb2
from stagerun.plan.planned import label, points_averaged
from stagerun.schedule.image_size import at_largest, largest_crop_size
from stagerun.tools.data.records import build, write_lmdb


def part_of(schedule: Schedule, names: Collection[str]) -> Schedule:
    """Keep these stages, what they start from and are taught by, and the ensembles that one of them starts from."""
    needed: set[str | None] = set(names)
    for stage in reversed(schedule.stages):  # children first
        if stage.name in needed:
            averaged = {name for name, _ in points_averaged(schedule, stage)}
            needed |= averaged | {stage.parent, stage.solver.teacher}
    stages = tuple(stage for stage in schedule.stages if stage.name in needed)
    averages = {stage.average for stage in stages}
    return replace(schedule, stages=stages, ensembles=tuple(e for e in schedule.ensembles if e.name in averages))


def rehearsal(schedule: Schedule, iters: int, workers: int, device_batch: int | None) -> Schedule:
    """Cut every stage to `iters` iterations, or all it has if fewer, of one device batch per worker; replicas get the fewest that give each
    worker and each replica equally many. They part, and gradients are compressed, from the first iteration on.

    Stages that start inside another do so as near to its middle as possible, and ensembles are made of that. Learning rates are scaled with
    the batch, so that a network that has hardly been trained stays finite. Images are read in place, not copied to scratch; where their size
    changes within a stage, they have the largest. Only the last weights of a stage are saved. Each stage is evaluated in its middle, too, on
    one batch per worker: the first evaluation takes longer than the others.
    """

    def inside(stage: str, iter: int | None) -> int | None:
        """Return the middle; the end, None, of a stage that has none."""
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
            policy_start_iter=0,  # beyond the end of a policy that is so short now, a rate may be missing
            epoch_iter=solver.epoch_iter and solver.epoch_iter / share,
            max_iter=length,
            batch_size=size * batches,
            device_batch_size=size,
            transform=at_largest(solver.transform),
            sync=solver.sync and replace(solver.sync, start=SyncStart.STAGE_START),
            compress=solver.compress and replace(solver.compress, start_iter=0),
            display=0,
            snapshot=0,
            test_interval=max(1, length // 2) if stage.data.val else 0,
            test_iter=workers,
            test_batch_size=min(solver.test_batch_size, device_batch or solver.test_batch_size),
            solverstate=None,  # its iteration may be beyond so short an end
        )
        leaves = inside(stage.parent, stage.parent_iter) if stage.parent is not None else None
        return replace(stage, solver=short, parent_iter=leaves)

    def cut_ensemble(one: Ensemble) -> Ensemble:
        members = tuple(dict.fromkeys(label(stage, inside(stage, iter)) for stage, iter in one.points))
        return replace(one, members=members, batch_norm_iter=min(iters, one.batch_norm_iter))

    uncopied = schedule.with_data(lambda data: replace(data, scratch=None))
    return replace(
        uncopied,
        stages=tuple(map(cut, uncopied.stages)),
        ensembles=tuple(map(cut_ensemble, uncopied.ensembles)),
        keep_snapshots=1,
    )


def alone(schedule: Schedule, name: str, iterations: int, rate: float, growth: float) -> Schedule:
    """Keep one stage, of plain updates with nothing between them, at rates that grow by a factor each; and what it starts from."""
    stage = schedule.stage(name)
    compress = stage.solver.compress
    cut = replace(
        stage.solver,
        base_lr=rate,
        lr_policy="exp",
        gamma=growth,
        warmup_iter=0,
        warmup_start_lr=0.0,
        policy_start_iter=0,
        max_iter=iterations,
        sync=None,
        compress=None if compress is not None and compress.method is Method.AUTO else compress,
        loss=None if stage.solver.teacher is not None else stage.solver.loss,
        early_stop=None,
        solverstate=None,
        on_nan=OnNan.STOP,
        display=0,
        snapshot=0,
        test_interval=0,
    )
    identity = {**stage.identity, "swept": name}  # snapshots of the stage itself don't count
    swept = replace(stage, solver=cut, identity=identity)
    stages = tuple(swept if one is stage else one for one in schedule.stages)
    part = replace(part_of(replace(schedule, stages=stages), [name]), ensembles=())
    return part.with_data(lambda data: replace(data, scratch=None, val=()))


# -- images

# Different pictures; further records repeat them. Decoding takes as long, and an LMDB of this size stays in memory, unlike a slow disk's.
PICTURES, RECORDS = 32, 512
PHOTOGRAPH = 375  # shorter side of an average photograph of ImageNet


def synthetic_images(schedule: Schedule) -> tuple[int, int]:
    """Return height and width of images that serve all stages."""
    transforms = [t for s in schedule.stages for t in (s.solver.transform, s.solver.test_transform)]
    side = max(largest_crop_size(t) or 0 for t in transforms)
    if any(t.random_aspect_ratio or t.random_resize or t.random_resized_crop for t in transforms):
        side = max(side, PHOTOGRAPH)
        return side, side * 4 // 3
    models = [stage.model for stage in schedule.stages]
    side = side or max(max(model.input_shape[1:], default=known_of(model).smallest) for model in models)
    return max(side, 32), max(side, 32)


def make_images(schedule: Schedule, folder: Path) -> None:
    """Write LMDBs of JPEGs, with the side files that some transforms need. Errors of `write_lmdb`, `build` and `index.save`."""
    (height, width), channels = synthetic_images(schedule), schedule.model.channels
    classes, rng = min(stage.model.num_classes for stage in schedule.stages), np.random.default_rng(1)
    # Large soft spots and fine grain: JPEG of quality 90 takes about 4.5 bits per pixel for them, as for photographs of ImageNet.
    spots = rng.integers(0, 256, (PICTURES, height // 24 + 2, width // 24 + 2, channels), dtype=np.uint8)
    soft = [cv2.resize(one, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, -1) for one in spots]
    noisy = [np.clip(one + rng.normal(0, 20, one.shape), 0, 255).astype(np.uint8) for one in soft]
    jpegs = [cv2.imencode(".jpg", one, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes() for one in noisy]
    labels = rng.integers(classes, size=RECORDS).tolist()

    def datum(i: int) -> bytes:
        record = caffe_pb2.Datum(channels=channels, height=height, width=width, encoded=True, label=labels[i])
        record.data = jpegs[i % PICTURES]
        return record.SerializeToString()

    for kind in ("train", "val"):
        lmdb = str(folder / kind)
        write_lmdb(lmdb, map(datum, range(RECORDS)))
        index.save(build(lmdb, pixels=False), lmdb)


def with_synthetic(schedule: Schedule, folder: Path) -> Schedule:
    """Use the images that `make_images` makes in `folder`. Every image comes equally often: a few hundred need not have each class."""

    def source(old: Source, kind: str) -> Source:
        lmdb = str(folder / kind)
        return replace(old, source=lmdb, path=lmdb, images=RECORDS, labels=None, labels_path=None, labels_digest=None)

    def moved(data: Data) -> Data:
        return replace(data, train=source(data.train, "train"), val=tuple(source(one, "val") for one in data.val))

    uniform = (replace(s, solver=replace(s.solver, sampling=Sampling.UNIFORM)) for s in schedule.stages)
    return replace(schedule, stages=tuple(uniform)).with_data(moved)
