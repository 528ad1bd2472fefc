"""The images of a schedule as this rank reads them."""

from stagerun.comm import Comm
from stagerun.data.lmdb_source import LmdbSource
from stagerun.data.loader import Loader
from stagerun.data.scratch import stage_in
from stagerun.errors import DataError
from stagerun.recipe import Schedule, Source, Stage
from stagerun.runner.together import everyone
from stagerun.world import World


class Images:
    """Opens the LMDBs, copied to scratch first where the schedule says so. Made after the process was forked."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.train: LmdbSource | None = None
        self.val: LmdbSource | None = None

    def open(self, comm: Comm, world: World) -> None:
        """Collective. One rank of each node copies, the others find the copy. DataError, StorageError, on every rank."""
        if self.schedule.data.scratch is not None:
            everyone(comm, lambda: self._open() if world.local_rank == 0 else None)
        everyone(comm, self._open)

    def _open(self) -> None:
        data = self.schedule.data
        if self.train is None:
            self.train = self._source(data.train)
        if self.val is None and data.val is not None:
            self.val = self._source(data.val)

    def _source(self, source: Source) -> LmdbSource:
        scratch = self.schedule.data.scratch
        path = source.path if scratch is None else stage_in(source.path, scratch)
        return LmdbSource(path, source.images)

    def loader(self, stage: Stage) -> Loader:
        """Training images, from any position on."""
        assert self.train is not None
        return self._loader(self.train, stage, train=True)

    def test_loader(self, stage: Stage) -> Loader | None:
        """Validation images in key order; None without data.val."""
        return None if self.val is None else self._loader(self.val, stage, train=False)

    def _loader(self, records: LmdbSource, stage: Stage, train: bool) -> Loader:
        model, solver = self.schedule.model, stage.solver
        return Loader(
            records,
            solver.transform if train else solver.test_transform,
            train=train,
            channels=model.channels,
            num_classes=model.num_classes,
            seed=solver.random_seed,
            images=len(records),
            shuffle=train and self.schedule.data.shuffle,
        )

    def preflight(self) -> None:
        """Looks at some records of each LMDB as each stage would. DataError with all that is wrong."""
        mistakes: dict[str, DataError] = {}
        for stage in self.schedule.stages:
            for loader in (self.loader(stage), self.test_loader(stage)):
                if loader is None:
                    continue
                try:
                    loader.preflight()
                except DataError as error:
                    mistakes[error.message] = error
        if len(mistakes) == 1:
            raise next(iter(mistakes.values()))
        if mistakes:
            hints = dict.fromkeys(e.hint for e in mistakes.values() if e.hint)
            raise DataError("\n".join(mistakes), "; ".join(hints))


def preflight(schedule: Schedule) -> None:
    """Opens the LMDBs where they are and looks at some records: what can be known before anything is started."""
    images = Images(schedule)
    images.train = LmdbSource(schedule.data.train.path, schedule.data.train.images)
    if schedule.data.val is not None:
        images.val = LmdbSource(schedule.data.val.path, schedule.data.val.images)
    images.preflight()
