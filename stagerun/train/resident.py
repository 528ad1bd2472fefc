"""Training images kept on a GPU, if they fit and `cache` of Data allows it, and the batches made from them. Each worker has a copy and
decides alone: the images of a batch are the same either way."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import torch

from stagerun.base import order
from stagerun.base.errors import DataError, UsageError
from stagerun.base.events import Note
from stagerun.base.recipe import Cache, PadMode, Solver
from stagerun.base.text import size as size_text
from stagerun.base.wings import ignored_in
from stagerun.data import transform
from stagerun.data.loaders import order_of, side_at
from stagerun.data.transform import draw_crops, only_crops
from stagerun.engine.images import Batch, Cut, Resident, feed, read_all
from stagerun.system.pulse import beating
from stagerun.train.context import StageRun
from stagerun.train.images import memory_key

AUTO_SHARE = 8  # AUTO takes at most one part of so many of what is free
_AT_ONCE = 256  # images that are copied to the device together


def images_on_device(run: StageRun) -> Generator[Note, None, Resident | None]:
    """Return the training images on the stage's device, filled when the first stage wants them; None if they come from the loader:
    without a GPU, with another `cache`, or with a transform that changes more than positions.

    UsageError if they don't fit despite `cache: DEVICE`; errors of the loader.
    """
    cache, images = run.stage.data.cache, run.worker.images
    # The labels were checked on reading: labels that one stage ignores may be invalid in another.
    key = memory_key(run.stage), run.stage.model.num_classes, ignored_in(run.stage).train
    wanted = cache in (Cache.AUTO, Cache.DEVICE) and run.worker.device.type == "cuda"
    if not (wanted and only_crops(run.stage.solver.transform)):
        return None
    if images.resident[0] != key:
        if images.resident[1] is not None:
            images.resident = (None, None)  # make room
            torch.cuda.empty_cache()
        resident = yield from _fill(run, torch.cuda.mem_get_info(run.worker.device)[0])
        images.resident = (None if run.worker.stop() else key, resident)
    return images.resident[1]


def _fill(run: StageRun, free: int) -> Generator[Note, None, Resident | None]:
    """Read and decode every record once. None if they can't be kept; errors as of `images_on_device`."""
    worker, cache = run.worker, run.stage.data.cache
    loader = worker.images.whole_images(run.stage)
    records = len(loader.records)
    requests = ((first, min(_AT_ONCE, records - first)) for first in range(0, records, _AT_ONCE))
    try:
        with loader.stream(requests) as batches:
            resident = read_all(
                beating(batches, worker.comm.pulse),
                records,
                worker.device,
                lambda needed: room(cache, needed, free),
                worker.stop,
            )
    except DataError:
        if cache is Cache.DEVICE:
            raise
        return None
    if resident is not None:
        yield Note(text=f"the training images are kept on the GPU: {size_text(resident.images.numel())}")
    return resident


def room(cache: Cache, needed: int, free: int) -> bool:
    """Return whether `needed` bytes of `free` may be taken. UsageError if the schedule insists and they don't fit."""
    if cache is Cache.AUTO:
        return needed * AUTO_SHARE <= free
    if needed > free:
        raise UsageError(
            f"the training images take {size_text(needed)} on each GPU, and {size_text(free)} are free",
            "write `cache: AUTO` under `data` in schedule.prototxt",
        )
    return True


@contextmanager
def training_batches(
    run: StageRun, resident: Resident | None, asked: Iterable[tuple[int, int]]
) -> Iterator[Iterator[Batch]]:
    """Yield the stage's batches at (position, count), made on the device of `resident`, or by the loader and copied there."""
    # `crop_size_ramp_param` grows with the iterations of the stage, and doesn't jump over skipped images.
    start = run.planned.position + run.planned.skipped
    if resident is None:
        with (
            run.worker.images.loader(run.stage, start).stream(asked) as batches,
            feed(batches, run.worker.device) as fed,
        ):
            yield run.worker.images.labelled(fed, run.stage, run.stage.data.train)
        return
    solver = run.stage.solver
    records = run.worker.images.training(run.stage)
    drawn = cuts(solver, order_of(records, run.worker.schedule, run.stage), resident, asked, start)
    reflect = solver.transform.pad_mode is PadMode.REFLECT
    with closing(resident.batches(drawn, solver.transform.pad, reflect)) as made:
        yield run.worker.images.labelled(made, run.stage, run.stage.data.train)


def cuts(
    solver: Solver, sampling: order.Order, resident: Resident, asked: Iterable[tuple[int, int]], start: int = 0
) -> Iterator[Cut]:
    """Yield what the loader would draw at (position, count), in a stage that begins at position `start`."""
    height, width = resident.images.shape[1:3]
    needed, side = transform.numbers_needed(solver.transform), side_at(solver, start)
    for position, count in asked:
        positions = np.arange(position, position + count, dtype=np.int64)
        numbers = order.draws(solver.random_seed, positions, needed)
        cut = draw_crops(replace(solver.transform, crop_size=side(position)), numbers, height, width)
        yield Cut(
            indices=sampling.at(position, count),
            top=cut.top,
            left=cut.left,
            mirror=cut.mirror,
            height=cut.height,
            width=cut.width,
            positions=positions,
            cutout=cut.cutout,
        )
