"""The images of a schedule as this rank reads them."""

from collections.abc import Callable, Generator, Iterator

import torch

from stagerun.base.events import Note
from stagerun.base.recipe import Cache, Schedule, Source, Stage, Transform
from stagerun.base.wings import ignored_in
from stagerun.comm import Comm
from stagerun.data.loader import Loader, LoaderOptions, PythonTransform
from stagerun.data.loaders import evaluation_loader, evenly, network_input, opened, require_usable, training_loader
from stagerun.data.pictures import Decoded, make_memory
from stagerun.data.records import Records
from stagerun.engine import augment, images
from stagerun.system.world import World
from stagerun.train.agreement import everyone
from stagerun.train.copying import Copying, Importing
from stagerun.train.labels import label_table, with_labels

_CPU = torch.device("cpu")
_MOST_THREADS = 8


def default_loader_threads(device: str, threads: int) -> int:
    """Return one on a CPU, which loads in a few hundredths of the training time; with a GPU all threads of the worker but one, at most
    8."""
    return 1 if device == "cpu" else max(1, min(_MOST_THREADS, threads - 1))


def evaluated(stage: Stage, batches: int, test_iter: int | None) -> list[int]:
    """Return the numbers of the batches of an evaluation: the first `test_iter` of `batches` (None: all); sorted by shape, evenly
    spread ones, since the first would be the tallest images. The same for any number of workers."""
    if test_iter is None or test_iter >= batches:
        return list(range(batches))
    return evenly(batches, test_iter) if stage.solver.test_transform.rectangular else list(range(test_iter))


# The set, and whether numbers of records stand for labels: stages that share it take the same images.
_Key = tuple[str, bool]


def memory_key(stage: Stage) -> _Key:
    return stage.data.train.path, stage.data.train.labels is not None


class Images:
    """Open LMDBs of a schedule, copied to scratch first if the schedule says so. Made after the process was forked."""

    def __init__(self, schedule: Schedule, device: torch.device = _CPU) -> None:
        self.schedule = schedule
        self._records: dict[str, Records] = {}  # by the path of the source
        self._importing = Importing(schedule)
        copied = [source for source in schedule.sources if source.path not in schedule.imports]
        self._copying = Copying(schedule.data, copied) if schedule.data.scratch is not None and copied else None
        self._device = device
        self._threads = schedule.data.loader_threads or default_loader_threads(device.type, torch.get_num_threads())
        self._sharers = 1  # workers of this node
        # Of the training set that a stage asked for last: others make room.
        self._memory: tuple[_Key | None, Decoded | None] = (None, None)
        # Filled by train.resident.
        self.resident: tuple[tuple[_Key, int, int | None] | None, images.Resident | None] = (None, None)
        self._tables: dict[tuple[str, str | None, int], torch.Tensor] = {}  # by images, file and number of classes
        self._python: dict[str, PythonTransform] = {}
        self.looked_at = False  # open and usable

    def open(self, comm: Comm, world: World, stop: Callable[[], bool]) -> Generator[Note, None, bool]:
        """Open the LMDBs, once. Collective. True if asked to stop before all nodes had their copies. DataError, StorageError, on every
        rank."""
        self._sharers = world.local_size
        if (yield from self.imported(comm, stop)):
            return True
        if self._copying is not None and (yield from self._copying.first(comm, stop)):
            return True

        def open_here() -> None:
            copies = self._copying.records() if self._copying is not None else []
            copied = {records.name for records in copies}
            others = [source for source in self.schedule.sources if source.path not in copied]
            self._records = opened(self.schedule, others) | {records.name: records for records in copies}

        everyone(comm, open_here)
        return False

    def imported(self, comm: Comm, stop: Callable[[], bool]) -> Generator[Note, None, bool]:
        """Import folders that are not yet imported. Collective; `open` does it, too. True if asked to stop."""
        return False if self._importing.done else (yield from self._importing.first(comm, stop))

    @property
    def imports(self) -> bool:
        """True if a rank has folders of images to import; set by `imported`."""
        return self._importing.any

    def remove_others(self, comm: Comm, world: World) -> None:
        """Remove earlier states of imported folders, once all ranks have opened theirs. Collective; for the run that has locked OUT.
        StorageError, PermissionDenied."""
        self._importing.remove_others(comm, world.local_rank == 0)

    def copied(self, comm: Comm, all_nodes: bool = False) -> Iterator[Note]:
        """Yield problems with the copies in scratch since the last call: on rank 0's node, or, collectively, on all of them."""
        if self._copying is not None and (all_nodes or comm.rank == 0):
            yield from self._copying.news(comm, all_nodes)

    def training(self, stage: Stage) -> Records:
        """Return the stage's training images, once they are open."""
        return self._records[stage.data.train.path]

    def loader(self, stage: Stage, start: int = 0) -> Loader:
        """Return a loader of training images, from any position on, of a stage that begins at position `start`."""
        return training_loader(
            self.training(stage),
            self.schedule,
            stage,
            options=LoaderOptions(threads=self._threads, memory=self.memory(stage)),
            python=self._python_transform(stage),
            augment=augment.make_augment(stage.solver.transform),
            start=start,
        )

    def _python_transform(self, stage: Stage) -> PythonTransform | None:
        """Import the transform when the first stage needs it. UsageError."""
        name = stage.solver.transform.python
        if name is not None and name not in self._python:
            self._python[name] = PythonTransform(name, self.schedule.python)
        return self._python[name] if name is not None else None

    def whole_images(self, stage: Stage) -> Loader:
        """Return a loader of the stage's training images in key order, unchanged."""
        network = network_input(stage, ignored_in(stage).train, stage.data.train.labels is not None)
        return Loader(self.training(stage), Transform(), network, options=LoaderOptions(threads=self._threads))

    def memory(self, stage: Stage) -> Decoded | None:
        """Return the cache of the stage's decoded training images, shared by all stages that use them; None without a cache."""
        key, memory = self._memory
        if key != memory_key(stage):
            self._memory = (None, None)  # of another set
            cache = stage.data.cache
            if cache is Cache.DEVICE and self._device.type == "cuda":  # cached on the GPU alone
                cache = Cache.DISK
            memory = make_memory(self.training(stage), self.schedule.model.channels, cache, self._sharers)
            self._memory = (memory_key(stage), memory)
        return memory

    def test_loader(self, stage: Stage, val: Source) -> Loader:
        """Return a loader of one of the stage's validation sets, each image once."""
        return evaluation_loader(self._records[val.path], stage, threads=self._threads, numbered=val.labels is not None)

    def labelled(self, batches: Iterator[images.Batch], stage: Stage, source: Source) -> Iterator[images.Batch]:
        """Return batches with the label rows of multi-label images in place of record numbers."""
        if source.labels is None:
            return batches
        return with_labels(batches, self._tables[source.path, source.labels_path, stage.model.num_classes])

    def preflight(self, comm: Comm) -> None:
        """Check some records of each LMDB as each stage would, and read the labels of multi-label images. Collective. DataError,
        RecipeError, UsageError."""
        everyone(comm, lambda: require_usable(self.schedule, self._records, self.memory, self._python_transform))
        for stage in self.schedule.stages:
            for source in (stage.data.train, *stage.data.val) if stage.enabled else ():
                key = source.path, source.labels_path, stage.model.num_classes
                if source.labels is not None and key not in self._tables:
                    self._tables[key] = label_table(self._records[source.path], source, key[2], self._device, comm)
        self.looked_at = True
