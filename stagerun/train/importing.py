"""Folders of class folders become LMDBs when a run first uses them, while all ranks wait together as they do for copies.

Into scratch every node imports for itself: locks on its disk settle which rank. Into OUT/data rank 0's node comes first, and then the
others look: what a shared file system shows them is there, and nodes with a disk of their own each import.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType

from stagerun.base.errors import DataError
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule
from stagerun.base.text import count, duration
from stagerun.comm import Comm, gather_json
from stagerun.data.importing.first_use import Imported, have, remove_others
from stagerun.data.scratch import Progress
from stagerun.language import require_folders
from stagerun.system.host import host_name
from stagerun.system.image_folder import is_class_folder
from stagerun.system.pulse import Section
from stagerun.train.agreement import everyone, hosts_of
from stagerun.train.copying import Status, Task, meet, raise_unless_stopped


class Importer(Task):
    """Has the images of this node imported, one folder after the other, or waits for another process that does it."""

    def __init__(self, schedule: Schedule, folders: Sequence[str]) -> None:
        super().__init__("importer")
        self.found: list[Imported] = []
        self._first: dict[int, int] = {}  # images done when a rank was first heard of: of an earlier process
        self._schedule, self._folders = schedule, folders

    def work(self) -> None:
        imports = self._schedule.imports
        before, total = 0, sum(imports[folder].images for folder in self._folders)
        for folder in self._folders:

            def watch(one: Progress, before: int = before) -> None:
                self.watch(Progress(before + one.done, total, one.waiting))

            self.found.append(have(folder, imports[folder], self._schedule.data, self._stop_asked.is_set, watch))
            before += imports[folder].images

    def told(self, ranks: Sequence[tuple[str, Status, int, int]], elapsed: float) -> str:
        for n, (_, status, done, total) in enumerate(ranks):
            if status is Status.RUNNING and total:
                self._first.setdefault(n, done)
        return imported_text(ranks, elapsed, self._first)

    def close(self) -> None:
        """Ends it, and lets go of the LMDBs."""
        super().close()
        for one in self.found:
            one.close()


def imported_text(
    ranks: Sequence[tuple[str, Status, int, int]], elapsed: float, first: Mapping[int, int] = MappingProxyType({})
) -> str:
    """`ranks`: (host, status, images done, images in all) of each rank, of which `first` were done before. The text is about
    the slowest one that imports."""
    working = [
        (done, total, host, done - first.get(n, 0))
        for n, (host, status, done, total) in enumerate(ranks)
        if status is Status.RUNNING and total
    ]
    if not working:
        return "importing the images: waiting for another run that imports them"
    done, total, host, new = min(working, key=lambda one: one[0] / one[1])
    text = f"importing the images: {done} of {total}, {new / elapsed:.0f} images/s"
    if new:
        text += f", {duration((total - done) * elapsed / new)} left"
    return text + (f", slowest {host}" if len({one[2] for one in working}) > 1 else "")


class Importing:
    """The folders of a schedule on this rank's node, for a run."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._importers: list[Importer] = []
        self.done = self._any = False
        self.new = False  # something was imported now, by some rank

    def first(self, comm: Comm, stop: Callable[[], bool]) -> Generator[Note, None, bool]:
        """Has every node's images imported; True if asked to stop meanwhile. Collective. RecipeError, DataError, StorageError,
        PermissionDenied."""
        schedule = self._schedule
        # One that can't be used has no import, and `_require` says why.
        here = [n for n, s in enumerate(schedule.sources) if s.path in schedule.imports or is_class_folder(s.path)]
        needed = sorted({n for one in gather_json(comm, here) for n in one})
        self._any = bool(needed)
        if needed:
            everyone(comm, lambda: self._require(needed))
            hosts = hosts_of(comm)
            # A file system that all share may have locks that hold on one node alone.
            alone = self._schedule.data.scratch is None
            for turn in (range(1), range(1, comm.size)) if alone else (range(comm.size),):
                if turn and (yield from self._turn(turn, comm, stop, hosts)):
                    return True
        self.done = True
        return False

    def _turn(
        self, ranks: range, comm: Comm, stop: Callable[[], bool], hosts: Sequence[str]
    ) -> Generator[Note, None, bool]:
        """These ranks have theirs; as `first`."""
        folders = [source.path for source in self._schedule.sources if source.path in self._schedule.imports]
        importer = Importer(self._schedule, folders if comm.rank in ranks else ())
        self._importers.append(importer)
        with comm.pulse.section(Section.COPY):
            stopped = yield from meet(importer, comm, stop, hosts)
        everyone(comm, lambda: raise_unless_stopped(importer.error))
        if not stopped:
            yield from self._notes(comm, hosts, [text for one in importer.found for text in one.said])
        return stopped

    def remove_others(self, comm: Comm, first: bool) -> None:
        """Removes earlier states of the folders from OUT/data, in one process of each node (`first`), once all have opened theirs.
        Collective; for the run that has locked OUT. StorageError, PermissionDenied."""
        if not self._any or self._schedule.data.scratch is not None:
            return
        imports = list(self._schedule.imports.values())
        keep = [lmdb for lmdbs in gather_json(comm, [one.lmdb for one in imports]) for lmdb in lmdbs]

        def remove() -> None:
            for one in imports if first else ():
                remove_others(one, keep)

        everyone(comm, remove)

    def _require(self, needed: Sequence[int]) -> None:
        """RecipeError for what is wrong with the folders; DataError where this node lacks one that another has."""
        require_folders(self._schedule)
        for path in (self._schedule.sources[n].path for n in needed):
            if path not in self._schedule.imports:
                text = f"{path} is not a folder of class folders on {host_name()}, and is one on another host"
                raise DataError(text, "copy the same images to all hosts")

    def _notes(self, comm: Comm, hosts: Sequence[str], said: Sequence[str]) -> Generator[Note, None, None]:
        heard = [
            (host, text) for host, texts in zip(hosts, gather_json(comm, list(said)), strict=True) for text in texts
        ]
        self.new = self.new or bool(heard)
        for text in dict.fromkeys(text for _, text in heard):
            where = [host for host, one in heard if one == text]
            yield Note(text=text + (f" on {count(len(where), 'host')}" if len(set(hosts)) > 1 else ""))

    def close(self) -> None:
        for importer in self._importers:
            importer.close()
