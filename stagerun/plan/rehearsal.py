"""A schedule cut down to a rehearsal: every stage, a handful of iterations, one device batch per worker. Pure."""

import math
from dataclasses import dataclass, replace

from stagerun.base.recipe import Data, Ensemble, Model, Sampling, Schedule, Source, Stage, SyncStart, Transform
from stagerun.language.code import digest
from stagerun.language.networks import known_of
from stagerun.schedule.image_size import at_largest, largest_crop_size


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Images that would do for all stages. `encoded`: as JPEG, since a stage resizes; else raw, all of one size."""

    height: int
    width: int
    channels: int
    encoded: bool

    def __str__(self) -> str:
        return f"{self.height} x {self.width}, {'JPEG' if self.encoded else 'raw'}"


# The side lengths of an average photograph of ImageNet, which has about 110 kB there.
PHOTOGRAPH = (375, 500)


def synthetic_images(schedule: Schedule) -> Synthetic:
    """The shape of images to rehearse with where the real ones are not."""
    transforms = [t for s in schedule.stages for t in (s.solver.transform, s.solver.test_transform)]
    channels = schedule.model.channels
    nets = [stage.model for stage in schedule.stages]
    if any(t.random_aspect_ratio or t.random_resize or t.random_resized_crop for t in transforms):
        most = max([largest_crop_size(t) or 0 for t in transforms] + [min(PHOTOGRAPH)])
        height, width = (side * most // min(PHOTOGRAPH) for side in PHOTOGRAPH)
        return Synthetic(height, width, channels, encoded=True)
    side = max([*(largest_crop_size(t) or 0 for t in transforms), *(max(m.input_shape[1:], default=0) for m in nets)])
    side = side or max(32, *(known_of(s.model).smallest for s in schedule.stages))
    return Synthetic(side, side, channels, encoded=False)


def rehearsal(
    schedule: Schedule, iters: int, workers: int, device_batch: int | None, test_inside: bool = True
) -> Schedule:
    """Every stage with `iters` iterations, or all it has if those are fewer, of one device batch per worker; with replicas of the fewest that
    give each worker and each replica as many. They part, and gradients are compressed, from the first iteration on.
    Stages that start from inside another do so here, as near to its middle as possible.

    Learning rates are scaled with the batch, so that a network that has hardly been trained stays finite. Images are read
    where they are, not copied to scratch; where their size changes within a stage, they have the largest one. Only the last
    weights of a stage are saved. With `test_inside` it is evaluated in its middle, too, on one batch per worker: what an
    evaluation does for the first time is not what it costs.
    """

    def cut(stage: Stage) -> Stage:
        solver = stage.solver
        size = min(device_batch or solver.device_batch_size, solver.device_batch_size)
        if solver.asynchronous:
            batches = 1  # an iteration is one worker's
        else:
            batches = workers if solver.sync is None else math.lcm(workers, solver.sync.replicas)
        share = size * batches / solver.batch_size
        short = replace(
            solver,
            base_lr=solver.base_lr * share,
            warmup_start_lr=solver.warmup_start_lr * share,
            end_lr=solver.end_lr * share,
            policy_start_iter=0,  # beyond the end of a policy that is so short now, there may be no rate
            epoch_iter=None if solver.epoch_iter is None else solver.epoch_iter / share,
            max_iter=min(iters, solver.max_iter),
            batch_size=size * batches,
            device_batch_size=size,
            transform=at_largest(solver.transform),
            sync=None if solver.sync is None else replace(solver.sync, start=SyncStart.STAGE_START),
            compress=None if solver.compress is None else replace(solver.compress, start_iter=0),
            display=0,
            snapshot=0,
            test_interval=max(1, min(iters, solver.max_iter) // 2) if stage.data.val and test_inside else 0,
            test_iter=workers,
            test_batch_size=min(solver.test_batch_size, device_batch or solver.test_batch_size),
            solverstate=None,  # it may be beyond so short an end
        )
        above = schedule.stage(stage.parent).solver.max_iter if stage.parent is not None else 0
        middle = min(iters, above) // 2
        # One iteration has no middle: it is its end.
        leaves = None if stage.parent_iter is None or not middle else min(stage.parent_iter, middle)
        return replace(stage, solver=short, parent_iter=leaves)

    short = schedule.with_data(lambda data: replace(data, scratch=None))
    return replace(
        short,
        stages=tuple(cut(s) for s in short.stages),
        ensembles=tuple(_ensemble_cut(e, schedule, iters) for e in schedule.ensembles),
        keep_snapshots=1,
    )


def _ensemble_cut(ensemble: Ensemble, schedule: Schedule, iters: int) -> Ensemble:
    """Snapshots from before a stage's end are from its middle now, one for all of them; one iteration has no middle: it is its end."""

    def cut(stage: str, iter: int | None) -> str:
        middle = min(iters, schedule.stage(stage).solver.max_iter) // 2
        return stage if iter is None or not middle else f"{stage}@{min(iter, middle)}"

    members = tuple(dict.fromkeys(cut(*point) for point in ensemble.points))
    return replace(ensemble, members=members, batch_norm_iter=min(iters, ensemble.batch_norm_iter))


def with_sources(schedule: Schedule, train: tuple[str, int], val: tuple[str, int]) -> Schedule:
    """The schedule with (folder, number of records) in place of its own images; `val` only where it has some. Every image then comes
    equally often: a few hundred need not have an image of each class."""

    def source(old: Source, place: tuple[str, int]) -> Source:
        made = replace(old, source=place[0], path=place[0], images=place[1])
        return replace(made, labels=None, labels_path=None, labels_digest=None)

    def elsewhere(data: Data) -> Data:
        return replace(data, train=source(data.train, train), val=tuple(source(one, val) for one in data.val))

    moved = schedule.with_data(elsewhere)
    stages = (replace(s, solver=replace(s.solver, sampling=Sampling.UNIFORM)) for s in moved.stages)
    return replace(moved, stages=tuple(stages))


def cost_key(schedule: Schedule, stage: Stage) -> str:
    """What the times of a stage depend on besides machine, workers and length, as text."""
    model, solver = stage.model, stage.solver

    def shape(transform: Transform) -> tuple[object, ...]:
        return (
            transform.pad,
            transform.mirror,
            largest_crop_size(transform),
            transform.random_aspect_ratio,
            transform.random_resize,
            transform.random_resized_crop,
            transform.channel_order,
            transform.cutout_size,
            transform.python,
            transform.color_jitter,
            transform.rand_augment,
            transform.trivial_augment,
            transform.rectangular,
        )

    parts = (
        *_network_key(model),
        solver.device_batch_size,
        solver.test_batch_size,
        tuple(rule for rule in solver.param if rule.lr_mult == 0),  # what is frozen needs no gradient
        solver.type,
        solver.regularization_type,
        solver.local_lr_auto,
        solver.ema_decay is not None,
        solver.precision.value,
        solver.channels_last,
        solver.compile,
        solver.clip_gradients is not None,
        (solver.mixup_alpha > 0, solver.cutmix_alpha > 0),
        shape(solver.transform),
        shape(solver.test_transform),
        schedule.determinism.value,
        (schedule.data.cache.value, schedule.data.loader_threads),
    )
    # What is measured of pushes is the time from one to the next. Figures of other stages are older than they.
    how: list[object] = [part for part in (solver.sync, solver.compress, solver.freeze) if part]
    if solver.loss is not None:
        teacher = schedule.teacher_model(stage)
        taught = _network_key(teacher) if teacher is not None else None
        how.append((solver.loss.type.value, taught, solver.loss.function))
    if (stage.data.train, stage.data.val) != (
        schedule.data.train,
        schedule.data.val,
    ):  # images of another size, perhaps
        how.append([source.path for source in (stage.data.train, *stage.data.val)])
    return " ".join(map(str, (*parts, *how)))


def _network_key(model: Model) -> tuple[object, ...]:
    shape = (model.name, model.num_classes, model.channels, model.blur_pool)
    net = (digest([("net", model.net)]),) if model.net is not None else ()
    return (shape, *net, *((model.args, digest(model.sources.files)) if model.sources is not None else ()))
