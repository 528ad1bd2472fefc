"""The loaders of a stage: its training images, and those of its evaluations, as training reads them and `data show` shows them."""

from stagerun.data.bad_records import BadRecords
from stagerun.data.loader import Augment, Loader
from stagerun.data.memory import Decoded
from stagerun.data.records import Records
from stagerun.data.rectangular import RectangularLoader
from stagerun.recipe import Schedule, Solver


def training_loader(
    records: Records,
    schedule: Schedule,
    solver: Solver,
    *,
    threads: int = 1,
    augment: Augment | None = None,
    memory: Decoded | None = None,
    bad: BadRecords | None = None,
) -> Loader:
    """Training images, from any position on. `augment` is what the transform does to colours."""
    return Loader(
        records,
        solver.transform,
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
    )


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
