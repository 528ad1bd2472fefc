"""The right to write into an output folder that other hosts can write to as well: a lease, with a number that fences.

`Lock` decides between the processes of one kernel, and of all hosts where the file system carries locks to them; but not every
one does, and a server may give up the lock of a host it has lost sight of, whose run goes on. So each process life has an
attempt, above all before it, and a file that it writes anew every BEAT_S seconds. A run that finds the newest life without an end
watches its beat, for SILENT_BEATS of them by its own monotonic clock: no clock of one host is compared with another's. If it
moves, the folder is in use. If not, the next attempt begins, and the one before may write no more: `require_held`, asked right
before a snapshot gets its name, before anything is deleted and before a result is written, says so.

What can happen, and why nothing is lost:

- Two take over at once: both want the same number, whose file only one can make as a new one. Should one have looked so long
  ago that it wants a lower number than there is by then, it finds the higher one when it looks again, and ends.
- The taker is stopped while it watches: it counts its looks, not the seconds.
- The holder is stopped, its host suspended, or its server away for a while, and it comes back: its beats ask, as
  `require_held` does, before they write, and find that it is over. What its next beat overwrites is its own file, at most.
- It is stopped between that question and the rename of a snapshot: the snapshot gets its name, with its own lower attempt in
  it, so it takes no one's place; it is whole, and what the other run trains from the same state has the same bits. Between
  the question and a deletion: what it deletes is older than a snapshot that it has itself seen whole, and that the other run
  goes on from, or has a newer one of.
- NFS shows a client an old list of a folder for up to a minute. A file that is opened by its name is looked up at the server,
  so the taker also writes `taken_by` into the files of all lives before it that have not ended: the one right before it may have
  been killed before it could write into its own predecessor's. Should a beat that was under way overwrite that, then it has itself
  changed the folder, and its client forgets the list.
- A file has no name for an instant, on a file system that renames in two steps: absence is silence to who watches, and the
  holder, which asks under the same `_writing` as it beats, looks twice.
- The server is away, for the taker too: the holder's beats hang as its looks do. So a slow look counts for nothing, but behind
  another slow one.
- A life is killed while it makes its file: that gets its name when it is whole, so that what it leaves says whose it was.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from stagerun.base.errors import ExitCode, FolderInUseError, StagerunError, StorageError
from stagerun.store.disk import Disk, LocalDisk, make_folder
from stagerun.store.errors import reporting
from stagerun.store.layout import is_leftover, life_file
from stagerun.store.lives import Life, attempts_of_lives, encode, look_at, newest_life, now_text
from stagerun.store.lock import WAIT, Holder, holder_named
from stagerun.store.write import make_file, replace_file
from stagerun.system.process import Identity, this_process

BEAT_S = 5.0
SILENT_BEATS = 3
LOOKS_PER_BEAT = 5
SILENT_S = SILENT_BEATS * BEAT_S
KEPT = 8  # files of lives; of those before no one needs to know

_TAKEN = (
    "the other run goes on from the newest snapshot; see that one alone is started, or give them folders of their own"
)


class StoppedWaiting(StagerunError):
    """Nothing was started, and the same command waits again."""

    exit_code = ExitCode.SAVED


class Lease:
    """For rank 0, in this order: `wait`, `take`, `keep_beating`; `require_held` at any time, from any thread; `release`."""

    def __init__(
        self,
        disk: Disk,
        out: Path,
        me: Identity | None = None,
        beat_s: float = BEAT_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.disk, self.out, self.beat_s = disk, out, beat_s
        self.beats: Disk = LocalDisk()  # which come when they come: a test's disk counts its calls
        self.me = me or this_process()
        self.lost = ""  # why, once it is known
        self._clock, self._pause = clock, pause
        self._life: Life | None = None
        self._waited_for = 0  # the newest attempt when `wait` returned
        self._writing = threading.Lock()
        self._over = threading.Event()

    def wait(self, locked: bool, say: Callable[[str], None], stop: Callable[[], bool] = lambda: False) -> None:
        """Returns when no one else holds the folder. FolderInUseError, StorageError, PermissionDenied; StoppedWaiting when `stop`
        says so.

        `locked`: `Lock` is held, which settles it for the processes of this machine, the kernel having given up the lock of one
        that is dead. Else, on a file system without locks, the process is looked for. One elsewhere is watched, which
        `say` reports.
        """
        newest = newest_life(self.disk, self.out)
        self._waited_for = newest.attempt if newest else 0
        if newest is not None and not self._is_over(newest, locked):
            say(
                f"{self.out} was last held by {newest}, which has not said that it ended: looking for a sign of life, for "
                f"{SILENT_BEATS * self.beat_s:g} s at most"
            )
            self._watch(newest, locked, stop)

    def take(self, newest: str, above: Iterable[int]) -> int:
        """Starts a life, after `wait`, and returns its attempt, higher than those of `above` and of all lives. `newest` as in Life.

        FolderInUseError if another run is faster; StorageError, PermissionDenied.
        """
        before = newest_life(self.disk, self.out)
        if before is not None and before.attempt > self._waited_for:
            raise _in_use(self.out, before)
        # The same number for all that come from the same wait, so that the making of its file decides between them.
        attempt = max([self._waited_for, *above]) + 1
        life = Life(attempt=attempt, run=uuid.uuid4().hex, process=self.me, begun=now_text(), newest=newest)
        self._make(life)
        self._life = life
        self.require_held()
        older = [number for number in attempts_of_lives(self.disk, self.out) if number < attempt]
        for number in older:
            found = look_at(self.disk, self.out, number)
            if found is not None and found.readable and found.taken_by is None and found.code is None:
                self._put(self.disk, replace(found, taken_by=attempt))
        folder = life_file(self.out, attempt).parent
        with reporting("clear away old process lives", folder):  # and what killed ones left half written
            old = [life_file(self.out, number).name for number in older[: -(KEPT - 1)]]
            for name in [*old, *filter(is_leftover, self.disk.names(folder))]:
                with contextlib.suppress(FileNotFoundError):
                    self.disk.unlink(folder / name)
        return attempt

    def keep_beating(self) -> None:
        """Starts the thread that writes the beats, until `release`."""
        threading.Thread(target=self._beat_on, name="lease", daemon=True).start()

    def require_held(self) -> None:
        """FolderInUseError if another run has taken over; StorageError, PermissionDenied if that can't be known."""
        with self._writing:
            self._ask(self.disk)
        if self.lost and not self.out.is_dir():
            hint = "nothing can be saved: run the same command again, which trains what is not there"
            raise StorageError(f"{self.out} was removed while this run was writing into it", hint)
        if self.lost:
            raise FolderInUseError(self.lost, _TAKEN)

    def beat(self) -> None:
        """One sign of life, unless it is over. StorageError, PermissionDenied."""
        with self._writing:
            if self._over.is_set() or self._life is None or self._ask(self.beats):
                return
            self._life = replace(self._life, beat=self._life.beat + 1)
            self._put(self.beats, self._life)

    def release(self, code: int | None) -> None:
        """Ends the life, with its exit code, or without a word. Nothing is written where another run has taken over."""
        with self._writing:
            self._over.set()
            if self._life is not None and code is not None:
                # A disk that is full or gone, which the run has met before, would only hide what it ended with.
                with contextlib.suppress(StagerunError):
                    if not self._ask(self.disk):
                        self._put(self.disk, replace(self._life, code=code))
            self.lost = self.lost or f"this run has ended, and writes no more into {self.out}"

    def _beat_on(self) -> None:
        while not self._over.wait(self.beat_s) and not self.lost:
            # One that can't be written may cost the lease, where another run wants it, and no more: the fence is read.
            with contextlib.suppress(StagerunError):
                self.beat()

    def _watch(self, first: Life, locked: bool, stop: Callable[[], bool]) -> None:
        """Returns when the life has ended, or nothing was heard of it for SILENT_BEATS. FolderInUseError when it moves.

        Looks are counted, not seconds: one process may stop for a while between two of them. One that took longer than a beat says
        nothing, since the server was away for the holder's beats, too; where every look does, they count.
        """
        silent, slow = 0, False
        while silent < SILENT_BEATS * LOOKS_PER_BEAT:
            self._pause(self.beat_s / LOOKS_PER_BEAT)
            if stop():
                raise StoppedWaiting(f"stopped while waiting to see whether {first} is alive; nothing was started")
            before, was_slow = self._clock(), slow
            now = newest_life(self.disk, self.out)
            slow = self._clock() - before > self.beat_s
            silent += 1 if was_slow or not slow else 0
            if now is None or now.attempt < first.attempt:  # its file is gone, which is not a sign of life
                continue
            if now.attempt == first.attempt and self._is_over(now, locked):
                return
            if now.attempt == first.attempt and now.readable and not first.readable:
                # It was just being written, or the disk has thought better of it.
                first, silent = now, 0
            elif now != first:
                raise _in_use(self.out, now)

    def _is_over(self, life: Life, locked: bool) -> bool:
        """FolderInUseError if it is known to go on."""
        alive = is_alive(life, self.me, locked)
        if alive:
            raise _in_use(self.out, life)
        return alive is False

    def _ask(self, disk: Disk) -> str:
        """Sets `lost`, and returns it."""
        if self.lost:
            return self.lost
        life = self._life
        assert life is not None
        own = look_at(disk, self.out, life.attempt) or look_at(disk, self.out, life.attempt)
        if own is None:
            name = life_file(Path(), life.attempt)
            self.lost = f"this run may not write into {self.out} any more: its {name} is gone"
            return self.lost
        # One that can't be read was torn by a power cut or a bad disk: the next beat mends it.
        by = own if own.readable and own.run != life.run else None
        taker = max([*attempts_of_lives(disk, self.out), own.taken_by or 0])
        if taker > life.attempt:
            by = look_at(disk, self.out, taker) or Life(attempt=taker, run="")
        if by is not None:
            self.lost = (
                f"another run has taken over {self.out}, as nothing was heard of this one: life {by.attempt}, {by}"
            )
        return self.lost

    def _make(self, life: Life) -> None:
        """Writes a new file. FolderInUseError if there is one; StorageError, PermissionDenied, also if it does not read back."""
        path = life_file(self.out, life.attempt)
        failed: OSError | None = None
        with reporting(f"write {path.name}", path.parent):
            make_folder(self.disk, path.parent)
            try:
                make_file(self.disk, path, encode(life))
            except OSError as error:
                failed = error
            # NFS sends a request again when the answer is lost, and the second one fails because the first one was carried out.
            found = look_at(self.disk, self.out, life.attempt) or Life(attempt=life.attempt, run="")
            if found.run != life.run:
                if found.readable or isinstance(failed, FileExistsError):
                    raise _in_use(self.out, found)
                if failed is not None:
                    raise failed
                self._unlink(path)
                raise StorageError(
                    f"{path} was written without an error, but can't be read back",
                    f"see that {path.parent} is a folder, and no link, and what the system's log says (dmesg)",
                )
            try:
                self.disk.sync_folder(path.parent)
            except OSError:
                self._unlink(path)
                raise

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self.disk.unlink(path)

    def _put(self, disk: Disk, life: Life) -> None:
        """Writes the file of a life over the one there is. Not synced: what a power cut takes is the word of a dead process."""
        path = life_file(self.out, life.attempt)
        with reporting(f"write {path.name}", path.parent):
            replace_file(disk, path, encode(life), sync=False)


def _in_use(out: Path, life: Life) -> FolderInUseError:
    return FolderInUseError(f"another run holds {out}: {life}", WAIT)


def is_alive(life: Life, me: Identity, locked: bool = False) -> bool | None:
    """Whether a life goes on; None if that can't be known from here. `locked` as in `Lease.wait`."""
    if life.code is not None:
        return False
    if not life.process.same_machine(me):
        return None
    return not locked and life.process.alive()


def require_free(disk: Disk, out: Path, locked: bool = True) -> None:
    """For what changes a folder, under `Lock`, without starting a life. FolderInUseError if a run holds it, or one elsewhere may,
    which can't be known without waiting; StorageError, PermissionDenied. `locked` as in `Lease.wait`."""
    newest = newest_life(disk, out)
    if newest is None or (alive := is_alive(newest, this_process(), locked)) is False:
        return
    if alive:
        raise _in_use(out, newest)
    raise FolderInUseError(
        f"a run elsewhere may hold {out}: {newest}, which has not said that it ended",
        "stop it; if it is dead, `stagerun run` finds that out, and takes its place",
    )


def last_word(disk: Disk, out: Path) -> tuple[Holder, bool] | None:
    """The process of the newest life, if it has not ended, and whether it is known to live: it runs on this machine. Not whose lock
    the kernel has given up. For a look without waiting, which changes nothing; StorageError, PermissionDenied."""
    newest = newest_life(disk, out)
    if newest is None or (alive := is_alive(newest, this_process())) is False:
        return None
    return holder_named(str(newest), newest.beat if newest.readable else None), bool(alive)
