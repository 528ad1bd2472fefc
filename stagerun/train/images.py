"""The images of a schedule as this rank reads them, and the bad training records that are replaced (`on_bad_record`)."""

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from stagerun.base.events import Note
from stagerun.base.recipe import Cache, Data, OnBadRecord, Schedule, Source, Stage, Transform
from stagerun.comm import Comm, gather_json
from stagerun.data.bad_records import Bad, BadRecords, allowed, check, listed
from stagerun.data.loader import Loader
from stagerun.data.loaders import evaluation_loader, evenly, training_loader
from stagerun.data.pictures import Decoded, make_memory
from stagerun.data.preflight import opened, require_usable
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import Records
from stagerun.data.synthetic import write_synthetic
from stagerun.engine.augment import make_augment
from stagerun.engine.feed import Resident
from stagerun.engine.images import Batch
from stagerun.language.nets import ignored_in
from stagerun.plan.rehearsal import synthetic_images, with_sources
from stagerun.system.world import World
from stagerun.train.agreement import everyone, rank0
from stagerun.train.copying import Copying
from stagerun.train.importing import Importing
from stagerun.train.labels import Table, with_labels


class Replacing:
    """Bad records on one rank, for one life of a run. Where a bad record stops the run, `met` is None, and there is nothing to report.

    Each rank meets its own, and all are counted together: the ranks tell each other at every snapshot, where they stop, and before a
    stage's end is saved. A snapshot knows all that was met up to it, so that the count goes on where the next process does.
    """

    def __init__(self, data: Data) -> None:
        self._most = allowed(data.train.images)
        self.met = BadRecords(data.train.images) if data.on_bad_record is OnBadRecord.REPLACE else None

    def too_many(self) -> bool:
        """Whether this rank alone knows of more than there may be: all must stop, and `news_of_all` then raises."""
        return self.met is not None and self.met.too_many()

    def recall(self, comm: Comm, known: Iterable[Iterable[int | str]], is_bad: Callable[[int], bool]) -> None:
        """Counts those that a snapshot knows of and that still are bad: an LMDB can be mended. Collective.

        `known` is rank 0's, as the method `known` gave it. DataError when they are too many.
        """
        met = self.met
        if met is None:
            return

        def count() -> None:
            found = [Bad(int(index), int(position), str(text)) for index, position, text in known]
            met.learn([bad for bad in found if is_bad(bad.index)])
            check(met.all(), self._most)

        everyone(comm, count)

    def known(self) -> list[tuple[int, int, str]]:
        """[index, position, text] of each bad record, for a snapshot."""
        return [(bad.index, bad.position, bad.text) for bad in self.met.all()] if self.met is not None else []

    def news(self) -> Iterator[Note]:
        """A warning for each bad record that this rank has met and replaced since the last call.

        When they are too many the error that follows names them, and no one reads thousands.
        """
        if self.met is not None and not self.met.too_many():
            yield from map(_note, self.met.fresh())

    def news_of_all(self, comm: Comm) -> Iterator[Note]:
        """The same of all ranks, which from then on know of the same ones. Collective. DataError when they are too many, though
        no rank alone has met as many."""
        if self.met is None:
            return
        rows = gather_json(comm, self.known())
        all_met: dict[int, Bad] = {}
        for index, position, text in (row for rank in rows for row in rank):
            all_met.setdefault(index, Bad(index, position, text))
        new = self.met.learn(all_met.values())
        # Not what this rank knows by now: its threads read ahead, and all are to say the same.
        everyone(comm, lambda: check(list(all_met.values()), self._most))
        yield from map(_note, [*self.met.fresh(), *new])

    def summary(self) -> Note | None:
        """All of them, up to now."""
        if self.met is None or not (known := self.met.all()):
            return None
        return Note(text=f"bad training records replaced so far: {len(known)}\n  {listed(known)}", warning=True)


def _note(bad: Bad) -> Note:
    return Note(text=f"another record is taken in the place of a bad one: {bad.text}", warning=True)


BadRow: TypeAlias = tuple[int, int, str]  # index, position, text, as `Replacing.known` has them

_CPU = torch.device("cpu")
_MOST_THREADS = 8
SYNTHETIC_IMAGES = 512


def default_loader_threads(device: str, threads: int) -> int:
    """On a CPU one, which is a few hundredths of what training takes; beside a GPU all of the worker's threads but the one that
    feeds it, 8 at most."""
    return 1 if device == "cpu" else max(1, min(_MOST_THREADS, threads - 1))


def evaluated(stage: Stage, batches: int, test_iter: int | None) -> list[int]:
    """Which of an evaluation's `batches`, by number, are `test_iter` of them (None: all): the first ones; sorted by shape, where
    these would be the tallest images alone, evenly spread ones. The same for any number of workers."""
    if test_iter is None or test_iter >= batches:
        return list(range(batches))
    return evenly(batches, test_iter) if stage.solver.test_transform.rectangular else list(range(test_iter))


_Key = tuple[str, bool]


def memory_key(stage: Stage) -> _Key:
    """What two stages have in common that take the same images from memory: the set, and whether numbers of records stand for labels."""
    return stage.data.train.path, stage.data.train.labels is not None


class Images:
    """Opens the LMDBs, copied to scratch first where the schedule says so. Made after the process was forked."""

    def __init__(self, schedule: Schedule, device: torch.device = _CPU) -> None:
        self.schedule = schedule
        self._records: dict[str, Records] = {}  # by the path of the source
        self._importing = Importing(schedule)
        copied = [source for source in schedule.sources if source.path not in schedule.imports]
        self._copying = Copying(schedule.data, copied) if schedule.data.scratch is not None and copied else None
        self._device = device
        self._replacing: dict[str, Replacing] = {}
        self._recalled: dict[str, list[BadRow]] = {}
        self._threads = schedule.data.loader_threads or default_loader_threads(device.type, torch.get_num_threads())
        self._sharers = 1  # workers of this node
        # Of the training set that a stage asked for last: others make room.
        self._memory: tuple[_Key | None, Decoded | None] = (None, None)
        self.resident: tuple[tuple[_Key, int, int | None] | None, Resident | None] = (
            None,
            None,
        )  # filled by train.resident
        self._tables: dict[tuple[str, str | None, int], Table] = {}  # by images, file and number of classes
        self._python: dict[str, PythonTransform] = {}
        self.looked_at = False  # open, and found usable

    def open(self, comm: Comm, world: World, stop: Callable[[], bool]) -> Generator[Note, None, bool]:
        """Collective; once. True if asked to stop before all nodes had their copies. DataError, StorageError, on every rank."""
        self._sharers = world.local_size
        if (yield from self.imported(comm, stop)):
            return True
        if self._copying is not None:
            stopped = yield from self._copying.first(comm, stop)
            if stopped:
                return True
        everyone(comm, self.open_here)
        return False

    def open_here(self) -> None:
        """Opens the LMDBs where they are, or the copies that were made. DataError, StorageError."""
        if self._copying is None:
            self._records = opened(self.schedule)
            return
        copies: dict[str, Records] = {records.name: records for records in self._copying.records()}
        imports = [source for source in self.schedule.sources if source.path in self.schedule.imports]
        self._records = copies | opened(self.schedule, imports)

    def imported(self, comm: Comm, stop: Callable[[], bool]) -> Generator[Note, None, bool]:
        """Imports what is not yet imported. Collective; `open` does it, too. True if asked to stop."""
        return False if self._importing.done else (yield from self._importing.first(comm, stop))

    @property
    def new(self) -> bool:
        """Whether folders were imported now, by some rank: what they hold is known only since."""
        return self._importing.new

    def remove_others(self, comm: Comm, world: World) -> None:
        """Earlier states of imported folders, once all ranks have opened theirs. Collective; for the run that has locked OUT. StorageError,
        PermissionDenied."""
        self._importing.remove_others(comm, world.local_rank == 0)

    def copied(self, comm: Comm, all_nodes: bool = False) -> Iterator[Note]:
        """What became of the copies in scratch since the last call: on rank 0's node, or, collectively, on all of them."""
        if self._copying is not None and all_nodes:
            yield from self._copying.news_of_all(comm)
        elif self._copying is not None and comm.rank == 0:
            yield from self._copying.news()

    def close(self) -> None:
        """Ends what is still being copied, and lets go of the copies."""
        self._importing.close()
        if self._copying is not None:
            self._copying.close()

    def training(self, stage: Stage) -> Records:
        """The stage's training images, once they are open."""
        return self._records[stage.data.train.path]

    def replacing(self, stage: Stage) -> Replacing:
        """What is known of bad records among the stage's training images."""
        return self._replacing.setdefault(stage.data.train.path, Replacing(stage.data))

    def recall_beside(self, known: Mapping[str, Sequence[BadRow]]) -> None:
        """What a snapshot knows of bad records, by the path of their set: rank 0's to keep for stages that return to one."""
        self._recalled |= {path: list(rows) for path, rows in known.items()}

    def known_of(self, path: str) -> list[BadRow]:
        """The bad records of a training set that this process, or a snapshot that it read, has met."""
        met = self._replacing[path].known() if path in self._replacing else []
        return list({row[0]: row for row in (*self._recalled.get(path, ()), *met)}.values())

    def bad_beside(self, stage: Stage) -> dict[str, list[BadRow]]:
        """Those of the sets other than the stage's, for a snapshot."""
        paths = sorted({*self._recalled, *self._replacing} - {stage.data.train.path})
        return {path: rows for path in paths if (rows := self.known_of(path))}

    def loader(self, stage: Stage, start: int = 0) -> Loader:
        """Training images, from any position on, of a stage that begins at position `start`."""
        return training_loader(
            self.training(stage),
            self.schedule,
            stage,
            threads=self._threads,
            python=self._python_transform(stage),
            augment=make_augment(stage.solver.transform),
            memory=self.memory(stage),
            bad=self.replacing(stage).met,
            start=start,
        )

    def _python_transform(self, stage: Stage) -> PythonTransform | None:
        """Imported when the first stage wants it. UsageError."""
        name = stage.solver.transform.python
        if name is None:
            return None
        if name not in self._python:
            self._python[name] = PythonTransform(name, self.schedule.python)
        return self._python[name]

    def whole_images(self, stage: Stage) -> Loader:
        """The stage's training images in key order, as they are in the LMDB."""
        model = stage.model
        return Loader(
            self.training(stage),
            Transform(),
            train=False,
            channels=model.channels,
            num_classes=model.num_classes,
            threads=self._threads,
            numbered=stage.data.train.labels is not None,
            ignored=ignored_in(stage).train,
        )

    def memory(self, stage: Stage) -> Decoded | None:
        """Where the stage's training images stay once they are decoded, the same for all stages that have them; None if they don't."""
        key, memory = self._memory
        if key != memory_key(stage):
            self._memory = (None, None)  # those of another set go first
            cache = stage.data.cache
            if cache is Cache.DEVICE and self._device.type == "cuda":  # they stay there, and take no room here
                cache = Cache.DISK
            memory = make_memory(self.training(stage), self.schedule.model.channels, cache, self._sharers)
            self._memory = (memory_key(stage), memory)
        return memory

    def test_loader(self, stage: Stage, val: Source) -> Loader:
        """The images of one of the stage's validation sets, each once."""
        return evaluation_loader(self._records[val.path], stage, threads=self._threads, numbered=val.labels is not None)

    def labelled(self, batches: Iterator[Batch], stage: Stage, source: Source) -> Iterator[Batch]:
        """The stage's batches of one of its sets; where images have several labels, with these in place of the numbers of records."""
        if source.labels is None:
            return batches
        return with_labels(batches, self._tables[source.path, source.labels_path, stage.model.num_classes])

    def preflight(self, comm: Comm) -> None:
        """Looks at some records of each LMDB as each stage would, and reads the labels of images that have several. Collective. DataError,
        RecipeError, UsageError."""
        everyone(comm, self._look)
        for stage in self.schedule.stages:
            for source in (stage.data.train, *stage.data.val) if stage.enabled else ():
                key = source.path, source.labels_path, stage.model.num_classes
                if source.labels is not None and key not in self._tables:
                    self._tables[key] = Table(self._records[source.path], source, key[2], self._device, comm)
        self.looked_at = True

    def _look(self) -> None:
        bad = lambda stage: self.replacing(stage).met  # noqa: E731
        require_usable(self.schedule, self._records, self.memory, bad, self._python_transform)


@dataclass(slots=True)
class KeptImages:
    """Images that stay open from one run of a schedule to the next, in one process."""

    images: Images | None = None

    def close(self) -> None:
        if self.images is not None:
            self.images.close()
        self.images = None


def _seen(schedule: Schedule) -> tuple[object, ...]:
    """The schedule, and what was found on disk of its images: equal schedules may have other ones."""
    return schedule, schedule.sets, schedule.class_sizes, schedule.imports


@contextmanager
def opened_images(schedule: Schedule, device: torch.device, kept: KeptImages | None) -> Iterator[Images]:
    """The images of a run. `kept`, which its owner closes, keeps them open for the next run unless this one fails."""
    holder = kept if kept is not None else KeptImages()
    if holder.images is None or _seen(holder.images.schedule) != _seen(schedule):
        holder.close()
        holder.images = Images(schedule, device)
    try:
        yield holder.images
    except BaseException:
        holder.close()
        raise
    if kept is None:
        holder.close()


@contextmanager
def made_up_images(schedule: Schedule, synthetic: bool, comm: Comm, world: World) -> Iterator[Schedule]:
    """The schedule with synthetic images, made in a temporary folder of each node and removed at the end; or as it is."""
    if not synthetic:
        yield schedule
        return
    # The same name on every node, which no other rehearsal has.
    name = rank0(comm, lambda: f"stagerun-rehearsal-{os.getuid()}-{os.urandom(8).hex()}")
    folder = Path(tempfile.gettempdir()) / name
    try:
        everyone(comm, lambda: _make_images(schedule, folder) if world.local_rank == 0 else None)
        train, val = ((str(folder / kind), SYNTHETIC_IMAGES) for kind in ("train", "val"))
        yield with_sources(schedule, train, val)
    finally:
        if world.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # processes that have it open keep what they opened


def _make_images(schedule: Schedule, folder: Path) -> None:
    shape, classes = synthetic_images(schedule), min(stage.model.num_classes for stage in schedule.stages)
    for kind in ("train", "val"):
        write_synthetic(
            str(folder / kind), SYNTHETIC_IMAGES, shape.height, shape.width, shape.channels, classes, shape.encoded
        )
