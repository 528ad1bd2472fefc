"""Images made on the nodes' disks before training: copies of LMDBs in scratch, and LMDBs of folders of class folders.

Every rank asks for them, in a thread; locks on the node's disk settle which rank of a node makes them. The ranks meanwhile meet once a
second: a request to stop reaches all, and rank 0 learns the progress of each node.

Every node imports folders into its scratch. Into OUT/data rank 0's node imports first, and then the others look: they use the LMDBs
that a shared file system shows them, and nodes with a local disk each import.
"""

import enum
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch

from stagerun.base.errors import DataError, PeerError
from stagerun.base.events import Note
from stagerun.base.recipe import Data, Schedule, Source
from stagerun.base.text import duration, listed, size
from stagerun.comm import Comm, gather_json
from stagerun.data.importing import have, remove_others
from stagerun.data.records import SwitchingRecords
from stagerun.data.scratch import Copy, CopyStopped, Original, Progress, look, stage
from stagerun.language import require_folders
from stagerun.system.host import host_name
from stagerun.system.image_folder import is_class_folder
from stagerun.system.pulse import Section
from stagerun.train.agreement import everyone, hosts_of

_MEET_EVERY_S = 1.0
# A note on progress: the first after 5 seconds, then less and less often, once a minute in the end.
_FIRST_NOTE_S, _RARELY_S = 5.0, 60.0
# How long a copy that is asked to stop may take. It asks between two pieces of 4 MB; a file server that hangs may never answer,
# and then the thread is left behind.
_PATIENCE_S = 10.0
_MOST_NODES_NAMED = 8

Stop = Callable[[], bool]
Watch = Callable[[Progress], None]
Work = Callable[[Stop, Watch], None]


class Status(enum.IntEnum):
    """State of a rank's thread."""

    RUNNING = 0
    WAITING = 1  # for another process that does the same, of this run or another
    DONE = 2
    STOPPED = 3
    FAILED = 4


class Task(threading.Thread):
    """`work` in a thread, which polls for a stop (CopyStopped then) and reports progress."""

    def __init__(self, work: Work) -> None:
        super().__init__(name="images", daemon=True)
        self.progress = Progress(0, 0, waiting=True)
        self._work, self._stop_asked, self._stopped_at = work, threading.Event(), 0.0
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work(self._stop_asked.is_set, partial(setattr, self, "progress"))
        except BaseException as error:  # the rank raises it
            self._error = error

    def stop(self) -> None:
        if not self._stop_asked.is_set():
            self._stopped_at = time.monotonic()
            self._stop_asked.set()

    def status(self) -> Status:
        if self.is_alive():
            late = self._stop_asked.is_set() and time.monotonic() > self._stopped_at + _PATIENCE_S
            return Status.STOPPED if late else Status.WAITING if self.progress.waiting else Status.RUNNING
        if self._error is None:
            return Status.DONE
        return Status.STOPPED if isinstance(self._error, CopyStopped) else Status.FAILED

    def require_done(self) -> None:
        """Raise the error of the thread; a stop counts as success."""
        if self._error is not None and not isinstance(self._error, CopyStopped):
            raise self._error

    def close(self) -> None:
        """Stop, and wait at most `_PATIENCE_S` from the request on."""
        self.stop()
        self.join(max(0.0, self._stopped_at + _PATIENCE_S - time.monotonic()))


def meet(work: Work, comm: Comm, stop: Stop, what: str, show: Callable[[int], str]) -> Generator[Note, None, bool]:
    """Do the work in a thread until every rank's has ended. Collective. True if it was a request to stop; one rank's error, or request,
    ends all. The notes show the progress of the slowest node; `show` formats amounts."""
    began, hosts = time.monotonic(), hosts_of(comm)
    next_note, pause, seen = _FIRST_NOTE_S, 0.02, -1
    before: dict[int, int] = {}  # progress when a rank first reported: made by an earlier process
    with comm.pulse.section(Section.COPY), closing(Task(work)) as task:
        task.start()
        while True:
            task.join(pause)
            pause, progress, status = min(_MEET_EVERY_S, 2 * pause), task.progress, task.status()
            # A heartbeat after progress while copying; otherwise always.
            if status is not Status.RUNNING or progress.done != seen:
                seen = progress.done
                comm.pulse.beat()
            rows = _all_rows(comm, [int(status), progress.done, progress.total, int(stop())])
            states = {row[0] for row in rows}
            if not states & {Status.RUNNING, Status.WAITING}:
                break
            if Status.FAILED in states or any(row[3] for row in rows):
                task.stop()
            running = {n: row for n, row in enumerate(rows) if row[0] == Status.RUNNING and row[2]}
            before = {n: row[1] for n, row in running.items()} | before
            elapsed = time.monotonic() - began
            if comm.rank == 0 and elapsed > next_note:
                next_note = elapsed + min(_RARELY_S, max(_FIRST_NOTE_S, elapsed / 4))
                if not running:
                    yield Note(text=f"{what}: waiting for another run that does the same")
                    continue
                n = min(running, key=lambda n: running[n][1] / running[n][2])
                _, done, total, _ = running[n]
                new = done - before[n]
                text = f"{what}: {show(done)} of {show(total)}, {show(round(new / elapsed))}/s"
                text += f", {duration((total - done) * elapsed / new)} left" if new else ""
                yield Note(text=text + (f", slowest {hosts[n]}" if len(set(hosts)) > 1 else ""))
    everyone(comm, task.require_done)
    return Status.STOPPED in states


def _all_rows(comm: Comm, row: Sequence[int]) -> list[list[int]]:
    """Return every rank's row, by rank. Collective; PeerError."""
    table = torch.zeros((comm.size, len(row)), dtype=torch.int64)
    table[comm.rank] = torch.tensor(row)
    try:
        comm.all_reduce(table)()
    except PeerError as error:
        raise PeerError(
            f"lost the other workers while images were copied: {error.message.rpartition(': ')[2]}",
            "run the same command again to resume the copy",
        ) from error
    return table.tolist()


def _heard(comm: Comm, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (host, text) of the texts of all ranks. Collective."""
    return [(host, text) for host, all_texts in gather_json(comm, [host_name(), texts]) for text in all_texts]


def _notes(heard: Sequence[tuple[str, str]], named: bool = True, warning: bool = False) -> Iterator[Note]:
    """Yield each text of (host, text) once; if `named`, after its hosts."""
    for text in dict.fromkeys(text for _, text in heard):
        hosts = list(dict.fromkeys(host for host, other in heard if other == text))
        yield Note(text=f"{listed(hosts, _MOST_NODES_NAMED)}: {text}" if named else text, warning=warning)


class Copying:
    """The copies of a schedule's LMDBs on this rank's node, for a run."""

    def __init__(self, data: Data, sources: Sequence[Source]) -> None:
        assert data.scratch is not None
        self._data, self._scratch, self._sources = data, data.scratch, sources
        self._originals: list[Original] = []
        self._copies: list[Copy] = []
        self._records: list[SwitchingRecords] = []
        self._reported: set[tuple[str, str]] = set()  # (host, text)

    def first(self, comm: Comm, stop: Stop) -> Generator[Note, None, bool]:
        """Copy on every node; True if asked to stop meanwhile. Collective. DataError, StorageError, PermissionDenied."""
        self._originals = everyone(comm, lambda: [look(source.path) for source in self._sources])

        def copy(stop: Stop, watch: Watch) -> None:
            self._copies = stage(self._originals, self._scratch, self._data.scratch_reserve, stop=stop, watch=watch)

        if (yield from meet(copy, comm, stop, f"copying the images to {self._scratch}", size)):
            return True
        yield from self._result(comm)
        self._require_same(comm)
        return False

    def _result(self, comm: Comm) -> Iterator[Note]:
        seconds, copied = sum(copy.seconds for copy in self._copies), sum(copy.bytes for copy in self._copies)
        ranks = gather_json(comm, [host_name(), seconds, copied])
        # One rank of each node has copied.
        host, seconds, copied = max(ranks, key=lambda rank: rank[1] if rank[2] else -1)
        text = f"the images are in {self._scratch}"
        if copied:
            text = f"the images were copied to {self._scratch}: {size(copied)} in {duration(seconds)}"
            text += f", {size(copied / seconds)}/s" if seconds else ""
            text += f", slowest {host}" if len({rank[0] for rank in ranks}) > 1 else ""
        yield Note(text=text)

    def _require_same(self, comm: Comm) -> None:
        """Raise DataError on all ranks if copies of one LMDB differ between nodes: some would train on other images."""
        ranks = gather_json(comm, [host_name(), {copy.original.name: copy.digest for copy in self._copies}])

        def same() -> None:
            for original in self._originals:
                alike: dict[str, list[str]] = {}
                for host, digests in ranks:
                    if digest := digests.get(original.name):
                        alike.setdefault(digest, []).append(host)
                if len(alike) > 1:
                    groups = sorted(alike.values(), key=lambda hosts: (len(hosts), hosts))
                    nodes = " and on ".join(listed(hosts, _MOST_NODES_NAMED) for hosts in groups)
                    text = f"{original.path}: its copies on {nodes} have different bytes"
                    raise DataError(text, "remove its copies from scratch there, then run again")

        everyone(comm, same)

    def records(self) -> list[SwitchingRecords]:
        """Return the records to read, of each source. DataError, StorageError."""
        copies: Sequence[Copy | None] = self._copies or [None] * len(self._originals)
        self._records = [
            SwitchingRecords(original, source.images, copy)
            for original, source, copy in zip(self._originals, self._sources, copies, strict=True)
        ]
        return self._records

    def news(self, comm: Comm, all_nodes: bool) -> Iterator[Note]:
        """Yield problems since the last call, on rank 0's node or, collectively, on all of them."""
        texts = list[str]()
        for records in self._records:
            texts += records.trouble
            records.trouble.clear()
        heard = _heard(comm, texts) if all_nodes else [(host_name(), text) for text in texts]
        new = [one for one in heard if one not in self._reported]  # all ranks of a node report the same
        self._reported |= set(new)
        yield from _notes(new, warning=True)


class Importing:
    """The folders of a schedule on this rank's node, for a run."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.done = self.any = False  # any: some rank's node has folders

    def first(self, comm: Comm, stop: Stop) -> Generator[Note, None, bool]:
        """Import every node's images; True if asked to stop meanwhile. Collective. RecipeError, DataError, StorageError,
        PermissionDenied."""
        schedule = self._schedule
        # A folder that can't be used has no import, and `_require` says why.
        here = [n for n, s in enumerate(schedule.sources) if s.path in schedule.imports or is_class_folder(s.path)]
        needed = sorted({n for one in gather_json(comm, here) for n in one})
        self.any = bool(needed)
        if needed:
            everyone(comm, lambda: self._require(needed))
            # A file system that all share may have locks that hold on one node alone.
            alone = schedule.data.scratch is None
            for turn in (range(1), range(1, comm.size)) if alone else (range(comm.size),):
                if turn and (yield from self._turn(turn, comm, stop)):
                    return True
        self.done = True
        return False

    def _require(self, needed: Sequence[int]) -> None:
        """Raise RecipeError for mistakes in the folders; DataError if this node lacks a folder that another has."""
        require_folders(self._schedule)
        for path in (self._schedule.sources[n].path for n in needed):
            if path not in self._schedule.imports:
                text = f"{path} is not a folder of class folders on {host_name()}, unlike on another host"
                raise DataError(text, "copy the same images to all hosts")

    def _turn(self, ranks: range, comm: Comm, stop: Stop) -> Generator[Note, None, bool]:
        """Import on these ranks; the result as `first`."""
        imports, imported = self._schedule.imports, list[str]()
        folders = [source.path for source in self._schedule.sources if source.path in imports]
        total = sum(imports[folder].images for folder in folders)

        def work(stop: Stop, watch: Watch) -> None:
            before = 0
            for folder in folders if comm.rank in ranks else ():

                def report(one: Progress, before: int = before) -> None:
                    watch(Progress(before + one.done, total, one.waiting))

                imported.extend(have(folder, imports[folder], self._schedule.data, stop, report))
                before += imports[folder].images

        if (yield from meet(work, comm, stop, "importing the images", str)):
            return True
        heard = _heard(comm, imported)
        yield from _notes(heard, named=len(set(hosts_of(comm))) > 1)
        return False

    def remove_others(self, comm: Comm, first: bool) -> None:
        """Remove earlier states of the folders from OUT/data, in one process of each node (`first`), once all have opened their LMDBs.
        Collective; for the run that has locked OUT. StorageError, PermissionDenied."""
        if self.any and self._schedule.data.scratch is None:
            imports = list(self._schedule.imports.values())
            keep = [lmdb for lmdbs in gather_json(comm, [one.lmdb for one in imports]) for lmdb in lmdbs]

            def remove() -> None:
                for one in imports if first else ():
                    remove_others(one, keep)

            everyone(comm, remove)
