"""The loaders of a stage: its training images, and those of its evaluations, as training reads them and `data show` shows them."""

from collections.abc import Callable

from stagerun.data.bad_records import BadRecords
from stagerun.data.loader import Augment, Loader
from stagerun.data.memory import Decoded
from stagerun.data.records import Records
from stagerun.data.rectangular import RectangularLoader
from stagerun.recipe import Schedule, Solver
from stagerun.schedule.image_size import at_largest, crop_size


def training_loader(
    records: Records,
    schedule: Schedule,
    solver: Solver,
    *,
    threads: int = 1,
    augment: Augment | None = None,
    memory: Decoded | None = None,
    bad: BadRecords | None = None,
    start: int = 0,
) -> Loader:
    """Training images, from any position on. `augment` is what the transform does to colours; `start` the position at which the
    stage begins, which is looked at where the size of the images changes within it."""
    return Loader(
        records,
        at_largest(solver.transform),
        train=True,
        channels=schedule.model.channels,
        num_classes=schedule.model.num_classes,
        seed=solver.random_seed,
        images=len(records),
        shuffle=schedule.data.shuffle,
        threads=threads,
        augment=augment,
        memory=memory,
        bad=bad,
        side=side_at(solver, start) if solver.transform.crop_size_ramp else None,
    )


def side_at(solver: Solver, start: int) -> Callable[[int], int | None]:
    """The crop_size of the training images at a position, in a stage that begins at position `start`. A device batch lies in one
    update, so that its first image speaks for all."""
    return lambda position: crop_size(solver, (position - start) // solver.batch_size)


def evaluation_loader(records: Records, schedule: Schedule, solver: Solver, *, threads: int = 1) -> Loader:
    """The images of an evaluation, each once: in key order, or by their shape where the transform is `rectangular`.

    Rectangles are those of batches of test_batch_size, whatever is asked for at a time: they are part of the result.
    """
    channels, num_classes = schedule.model.channels, schedule.model.num_classes
    if solver.test_transform.rectangular:
        return RectangularLoader(
            records,
            solver.test_transform,
            batch_size=solver.test_batch_size,
            channels=channels,
            num_classes=num_classes,
            threads=threads,
        )
    return Loader(
        records,
        solver.test_transform,
        train=False,
        channels=channels,
        num_classes=num_classes,
        seed=solver.random_seed,
        images=len(records),
        shuffle=False,
        threads=threads,
    )
