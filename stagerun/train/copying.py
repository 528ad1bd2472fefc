"""Copies of the images on the nodes' own disks, made before training while all ranks wait together.

Every rank asks for the copies, in a thread; which rank of a node makes them is settled by locks on the node's disk, so it
doesn't matter how ranks are numbered. The ranks meanwhile meet once a second: no one stays in a collective for as long as a
copy takes, a request to stop reaches all, and rank 0 knows how far each node is.
"""

import enum
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from stagerun.base.errors import DataError, PeerError
from stagerun.base.events import Note
from stagerun.base.recipe import Data, Source
from stagerun.base.text import count, duration, size
from stagerun.comm import Comm, gather_json
from stagerun.data.records import SwitchingRecords
from stagerun.data.scratch import Copy, CopyStopped, Found, How, Original, Progress, look, stage
from stagerun.system.host import host_name
from stagerun.system.pulse import Section
from stagerun.train.agreement import everyone, hosts_of

_MOST_NODES_NAMED = 8


class Status(enum.IntEnum):
    """What a rank's copier is doing, or how it ended."""

    RUNNING = 0
    WAITING = 1  # for another process that makes the copies, of this run or another
    DONE = 2
    STOPPED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank has to say: how many bytes it has copied itself, in how long; or `text`."""

    host: str
    bytes: int = 0
    seconds: float = 0.0
    text: str = ""
    warning: bool = True


def progress_text(ranks: Sequence[tuple[str, Status, int, int]], scratch: str, elapsed: float) -> str:
    """`ranks`: (host, status, bytes done, bytes in all, 0 where that isn't known yet) of each rank."""
    head = f"copying the images to {scratch}"
    everybody = {host for host, *_ in ranks}
    copying = {host: (done, total) for host, status, done, total in ranks if status is Status.RUNNING and total}
    ended = {host for host, status, *_ in ranks if status is Status.DONE}  # with one rank of a node all of them
    if not copying:
        waiting = {host for host, status, _, total in ranks if status is Status.WAITING and total} - ended
        names = sorted(waiting)
        if names:
            return f"{head}: {_names(names)} wait{'s' if len(names) == 1 else ''} for a copy that another run makes"
        return f"{head}: {len(ended)} of {count(len(everybody), 'node')} done"
    share = {host: done / total for host, (done, total) in copying.items()}
    slowest = min(share, key=lambda host: (share[host], host))
    done, total = copying[slowest]
    text = f"{size(done)} of {size(total)}, {size(done / elapsed)}/s"
    if done:
        text += f", {duration((total - done) * elapsed / done)} left"
    if len(everybody) == 1:
        return f"{head}: {text}"
    each = ""
    if len(copying) <= _MOST_NODES_NAMED:
        each = ": " + ", ".join(f"{host} {100 * share[host]:.0f} %" for host in sorted(share))
    return f"{head} of {len(copying)} of {count(len(everybody), 'node')}{each}; slowest {slowest}: {text}"


def as_notes(outcomes: Sequence[Outcome], scratch: str) -> list[Note]:
    """One note about all copies, and one for each thing else, with the nodes where it was so."""
    notes = []
    done = [one for one in outcomes if not one.text]
    if done:
        notes.append(Note(text=_ended(done, scratch)))
    for text, warning in dict.fromkeys((one.text, one.warning) for one in outcomes if one.text):
        hosts = list(dict.fromkeys(one.host for one in outcomes if one.text == text))
        notes.append(Note(text=f"{_names(hosts)}: {text}", warning=warning))
    return notes


def _ended(done: Sequence[Outcome], scratch: str) -> str:
    hosts = {one.host for one in done}
    # Of a node's ranks one has copied.
    copied = {one.host: one for one in done if one.bytes}
    if not copied:
        return f"the images are in {scratch}" + (f" of all {len(hosts)} nodes" if len(hosts) > 1 else "")
    slowest = max(copied.values(), key=lambda one: (one.seconds, one.host))
    text = f"{size(slowest.bytes)} in {duration(slowest.seconds)}"
    if slowest.seconds:
        text += f", {size(slowest.bytes / slowest.seconds)}/s"
    if len(hosts) == 1:
        return f"the images were copied to {scratch}: {text}"
    there = f"; {count(len(hosts) - len(copied), 'node')} had them" if len(hosts) > len(copied) else ""
    return f"the images were copied to {scratch} of {count(len(copied), 'node')}, slowest {slowest.host}: {text}{there}"


def copies_differ(path: str, digests: Mapping[str, str]) -> str:
    """`digests`: of the copy, by host, '' where there is none."""
    alike: dict[str, list[str]] = {}
    for host, digest in digests.items():
        if digest:
            alike.setdefault(digest, []).append(host)
    groups = sorted(alike.values(), key=lambda hosts: (len(hosts), hosts))
    return f"{path}: its copies on {' and on '.join(map(_names, groups))} have different bytes"


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - _MOST_NODES_NAMED
    return ", ".join(hosts[:_MOST_NODES_NAMED]) + (f" and {more} more" if more > 0 else "")


_MEET_EVERY_S = 1.0
# A note on progress: the first after 5 seconds, then less and less often, once a minute in the end.
_FIRST_NOTE_S, _RARELY_S = 5.0, 60.0
# How long a copy that is asked to stop may take. It asks between two pieces of 4 MB; a file server that hangs may never answer,
# and then the thread is left behind.
_PATIENCE_S = 10.0


class Task(threading.Thread):
    """What every rank does for the images of its node while all ranks wait (`meet`), or waits for another process to do."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self.progress = Progress(0, 0, waiting=True)
        self._stop_asked = threading.Event()
        self._stopped_at = 0.0

    def work(self) -> None:
        """In the thread. CopyStopped if asked to stop; what else is raised belongs to the rank."""
        raise NotImplementedError

    def told(self, ranks: Sequence[tuple[str, "Status", int, int]], elapsed: float) -> str:
        """How far all are, as of `progress_text`."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # whatever it is, it belongs to the rank
            self.error = error

    def watch(self, progress: Progress) -> None:
        self.progress = progress

    def stop(self) -> None:
        if not self._stop_asked.is_set():
            self._stopped_at = time.monotonic()
            self._stop_asked.set()

    @property
    def stopping(self) -> bool:
        return self._stop_asked.is_set()

    def status(self) -> Status:
        if self.is_alive():
            late = self._stop_asked.is_set() and time.monotonic() > self._stopped_at + _PATIENCE_S
            return Status.STOPPED if late else Status.WAITING if self.progress.waiting else Status.RUNNING
        if self.error is not None:
            return Status.STOPPED if isinstance(self.error, CopyStopped) else Status.FAILED
        return Status.DONE

    def close(self) -> None:
        """Ends it."""
        self.stop()
        if self.ident is not None:
            self.join(_PATIENCE_S)


class Copier(Task):
    """Has the copies of this node made, or waits for another process that makes them."""

    def __init__(self, originals: Sequence[Original], data: Data) -> None:
        super().__init__("copier")
        assert data.scratch is not None
        self.scratch: str = data.scratch
        self.copies: list[Copy] | None = None
        self.removed: list[Found] = []
        self._originals, self._reserve = originals, data.scratch_reserve

    def work(self) -> None:
        self.copies = stage(
            self._originals,
            self.scratch,
            self._reserve,
            stop=self._stop_asked.is_set,
            watch=self.watch,
            removed=self.removed.append,
        )

    def told(self, ranks: Sequence[tuple[str, Status, int, int]], elapsed: float) -> str:
        return progress_text(ranks, self.scratch, elapsed)

    def close(self) -> None:
        """Ends it, and lets go of the copies."""
        super().close()
        for copy in self.copies or ():
            copy.close()


class Copying:
    """The copies of a schedule's LMDBs on this rank's node, for a run."""

    def __init__(self, data: Data, sources: Sequence[Source]) -> None:
        self._data, self._sources = data, sources
        self._host = host_name()
        self._originals: list[Original] = []
        self._copier: Copier | None = None
        self._records: list[SwitchingRecords] = []
        self._said: set[tuple[str, str]] = set()  # (host, text) of what was reported

    def first(self, comm: Comm, stop: Callable[[], bool]) -> Generator[Note, None, bool]:
        """Have every node's copies made; True if asked to stop meanwhile. Collective. DataError, StorageError, PermissionDenied."""
        everyone(comm, self._look)
        hosts = hosts_of(comm)
        self._copier = copier = Copier(self._originals, self._data)
        with comm.pulse.section(Section.COPY):
            stopped = yield from meet(copier, comm, stop, hosts)
        everyone(comm, lambda: raise_unless_stopped(copier.error))
        if stopped:
            return True
        yield from as_notes(_gathered(comm, self._results()), copier.scratch)
        self._compare(comm, hosts)
        return False

    def records(self) -> list[SwitchingRecords]:
        """What to read, of each source. DataError, StorageError."""
        copies = self._copier.copies if self._copier is not None else None
        self._records = [
            SwitchingRecords(original, source.images, copies[n] if copies else None)
            for n, (original, source) in enumerate(zip(self._originals, self._sources, strict=True))
        ]
        return self._records

    def news(self) -> list[Note]:
        """What has happened on this rank's node since the last call."""
        return self._notes(self._news())

    def news_of_all(self, comm: Comm) -> list[Note]:
        """What has happened on all nodes since the last call. Collective."""
        return self._notes(_gathered(comm, self._news()))

    def _notes(self, outcomes: list[Outcome]) -> list[Note]:
        """Passes on the first one heard of a node's ranks, which all say how it went."""
        new = [one for one in outcomes if (one.host, one.text) not in self._said]
        self._said |= {(one.host, one.text) for one in new}
        return as_notes(new, str(self._data.scratch))

    def close(self) -> None:
        """Stops what is still being copied; the next run goes on from there."""
        if self._copier is not None:
            self._copier.close()

    def _look(self) -> None:
        self._originals = [look(source.path) for source in self._sources]

    def _compare(self, comm: Comm, hosts: Sequence[str]) -> None:
        """DataError on all ranks where nodes have copies of one state of an LMDB that differ: some would train on other images."""
        assert self._copier is not None and self._copier.copies is not None
        digests = gather_json(comm, {copy.original.name: copy.digest for copy in self._copier.copies})

        def same() -> None:
            for original in self._originals:
                found = {host: str(own.get(original.name, "")) for host, own in zip(hosts, digests, strict=True)}
                kinds = {digest for digest in found.values() if digest}
                if len(kinds) > 1:
                    raise DataError(
                        copies_differ(original.path, found), "remove its copies from scratch there, then run again"
                    )

        everyone(comm, same)

    def _results(self) -> list[Outcome]:
        assert self._copier is not None and self._copier.copies is not None
        copies = self._copier.copies
        done = Outcome(
            host=self._host,
            bytes=sum(copy.bytes for copy in copies),
            seconds=sum(copy.seconds for copy in copies),
        )
        removed = [
            f"removed {found.folder}, to make room: a copy of {found.manifest.source}" for found in self._copier.removed
        ]
        return [done, *(Outcome(host=self._host, text=text, warning=False) for text in removed), *self._mended()]

    def _mended(self) -> list[Outcome]:
        copies = self._copier.copies or () if self._copier is not None else ()
        return [
            Outcome(host=self._host, text=f"{copy.path}: {copy.how.value}") for copy in copies if copy.how is How.MENDED
        ]

    def _news(self) -> list[Outcome]:
        found = list[Outcome]()
        for records in self._records:
            while records.trouble:
                found.append(Outcome(host=self._host, text=records.trouble.pop(0)))
        return found


def raise_unless_stopped(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, CopyStopped):
        raise error


def _gathered(comm: Comm, mine: list[Outcome]) -> list[Outcome]:
    return [Outcome(**one) for rank in gather_json(comm, [asdict(one) for one in mine]) for one in rank]


def meet(copier: Task, comm: Comm, stop: Callable[[], bool], hosts: Sequence[str]) -> Generator[Note, None, bool]:
    """Until every rank's copier has ended, one way or another. Collective. True if it was a request to stop.

    One rank's error, or request, ends all.
    """
    began = time.monotonic()
    next_note, pause = _FIRST_NOTE_S, 0.02
    copied = -1
    copier.start()
    while True:
        copier.join(pause)
        # Whoever copies shows that it gets on; whoever is done, or waits for another run's copy, that it is there.
        if copier.status() is not Status.RUNNING or copier.progress.done != copied:
            copied = copier.progress.done
            comm.pulse.beat()
        pause = min(_MEET_EVERY_S, 2 * pause)
        # What a rank tells the others: its status, bytes done, bytes in all, whether its own process was asked to stop.
        progress = copier.progress
        row = [int(copier.status()), progress.done, progress.total, int(stop())]
        rows = _added_up(comm, row)
        states = {row[0] for row in rows}
        if not states & {Status.RUNNING, Status.WAITING}:
            return Status.STOPPED in states and Status.FAILED not in states
        if Status.FAILED in states or any(row[3] for row in rows):
            copier.stop()
        elapsed = time.monotonic() - began
        if comm.rank == 0 and elapsed > next_note:
            next_note = elapsed + min(_RARELY_S, max(_FIRST_NOTE_S, elapsed / 4))
            ranks = [(host, Status(row[0]), row[1], row[2]) for host, row in zip(hosts, rows, strict=True)]
            yield Note(text=copier.told(ranks, elapsed))


def _added_up(comm: Comm, row: Sequence[int]) -> list[list[int]]:
    """Every rank's row, by rank. Collective; PeerError."""
    table = torch.zeros((comm.size, len(row)), dtype=torch.int64)
    table[comm.rank] = torch.tensor(row)
    try:
        comm.all_reduce(table)()
    except PeerError as error:
        raise PeerError(
            f"lost the other workers while images were copied: {error.message.rpartition(': ')[2]}",
            "run the same command again: the copy goes on where it was",
        ) from error
    return table.tolist()
