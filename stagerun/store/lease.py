"""The right to write into an output folder that other hosts can write to as well: a lease, with a number that fences.

`Lock` decides between the processes of one kernel, and of all hosts where the file system carries locks to them; but not every
one does, and a server may give up the lock of a host it has lost sight of, whose run continues. So each process life has an
attempt, above all before it, and a file that it rewrites every BEAT_S seconds. A run that finds the newest life without an end
watches its beat, for SILENT_BEATS of them by its monotonic clock: no clock of one host is compared with another's. If it
moves, the folder is in use. If not, the next attempt begins, and the one before may write no more: `require_held`, asked right
before a snapshot gets its name, before anything is deleted and before a result is written, says so.

What can happen, and why nothing is lost:

- Two take over at once: both want the same number, whose file only one can make as a new one. Should one have looked so long
  ago that it wants a lower number than the highest by then, it finds the higher one when it looks again, and ends.
- The taker is stopped while it watches: it counts its looks, not the seconds.
- The holder is stopped, its host suspended, or its server away for a while, and it comes back: its beats ask, as
  `require_held` does, before they write, and find that it is over. What its next beat overwrites is the holder's file, at most.
- It is stopped between that question and the rename of a snapshot: the snapshot gets its name, with the lower attempt in it, so
  it replaces nothing; it is whole, and what the other run trains from the same state has the same bits. Between the question and
  a deletion: what it deletes is older than a snapshot that it has seen whole, and from which the other run resumes, unless it
  has a newer one.
- NFS shows a client an old list of a folder for up to a minute. A file that is opened by its name is looked up at the server,
  so the taker also writes `taken_by` into the files of all lives before it that have not ended: the one right before it may have
  been killed before it could write into its predecessor's. Should a beat that was under way overwrite that, then the beat has
  changed the folder, and its client forgets the list.
- A file has no name for an instant, on a file system that renames in two steps: absence is silence to who watches, and the
  holder, which asks under the same `_writing` as it beats, looks twice.
- The server is away, for the taker too: the holder's beats hang as its looks do. So a slow look counts for nothing, but behind
  another slow one.
- A life is killed while it makes its file: that gets its name when it is whole, so that what it leaves says whose it was.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stagerun.base.errors import ExitCode, FolderInUseError, StagerunError, StorageError
from stagerun.store.disk import Disk, LocalDisk, make_folder
from stagerun.store.errors import reporting
from stagerun.store.layout import is_leftover, life_file
from stagerun.store.lock import (
    WAIT,
    Holder,
    Life,
    attempts_of_lives,
    encode,
    holder_named,
    look_at,
    newest_life,
    now_text,
)
from stagerun.store.write import abandon, make_file, replace_file
from stagerun.system.process import Identity, this_process

BEAT_S = 5.0
SILENT_BEATS = 3
LOOKS_PER_BEAT = 5
KEPT = 8  # files of lives; older ones are deleted


class StoppedWaiting(StagerunError):
    """Raised by a stop during `wait`, before anything was started."""

    exit_code = ExitCode.SAVED


class Lease:
    """The lease of rank 0. Call `wait`, `take`, `keep_beating`; `require_held` at any time, from any thread; `release`."""

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
        self.beats: Disk = LocalDisk()  # beats come at any time: a test's disk counts its calls
        self.me = me or this_process()
        self.lost = ""  # why the lease was lost
        self._clock, self._pause = clock, pause
        self._life: Life | None = None
        self._waited_for = 0  # the newest attempt when `wait` returned
        self._writing = threading.Lock()
        self._over = threading.Event()

    def wait(self, locked: bool, say: Callable[[str], None], stop: Callable[[], bool] = lambda: False) -> None:
        """Return when no other process holds the folder. FolderInUseError, StorageError, PermissionDenied; StoppedWaiting when
        `stop` says so.

        `locked`: `Lock` is held, which settles it for the processes of this machine: the kernel has released a dead one's lock.
        Without locks, look for the process. A process on another machine is watched, which `say` reports."""
        newest = newest_life(self.disk, self.out)
        self._waited_for = newest.attempt if newest else 0
        if newest is not None and not self._is_over(newest, locked):
            say(
                f"{self.out} was last held by {newest}, which left no exit code: waiting for a sign of life, for "
                f"{SILENT_BEATS * self.beat_s:g} s at most"
            )
            self._watch(newest, locked, stop)

    def take(self, newest: str, above: Iterable[int]) -> int:
        """Start a life after `wait`; return its attempt, higher than `above` and all lives. `newest` as in Life.

        FolderInUseError if another run is faster; StorageError, PermissionDenied."""
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
            life_before = look_at(self.disk, self.out, number)
            if life_before and life_before.readable and life_before.taken_by is None and life_before.code is None:
                self._put(self.disk, replace(life_before, taken_by=attempt))
        folder = life_file(self.out, attempt).parent
        with reporting("clear away old process lives", folder):  # and what killed ones left half written
            old = [life_file(self.out, number).name for number in older[: -(KEPT - 1)]]
            for name in [*old, *filter(is_leftover, self.disk.names(folder))]:
                with suppress(FileNotFoundError):
                    self.disk.unlink(folder / name)
        return attempt

    def keep_beating(self) -> None:
        """Start the thread that writes the beats, until `release`."""
        threading.Thread(target=self._beat_on, name="lease", daemon=True).start()

    def require_held(self) -> None:
        """Raise FolderInUseError if another run has taken over; StorageError, PermissionDenied if that can't be read."""
        with self._writing:
            self._ask(self.disk)
        if self.lost and not self.out.is_dir():
            hint = "nothing can be saved: run the same command again, which retrains what is missing"
            raise StorageError(f"{self.out} was removed while this run was writing into it", hint)
        if self.lost:
            hint = "the other run resumes from the newest snapshot; start only one, or use a folder for each"
            raise FolderInUseError(self.lost, hint)

    def beat(self) -> None:
        """Write a sign of life unless the life is over. StorageError, PermissionDenied."""
        with self._writing:
            if self._over.is_set() or self._life is None or self._ask(self.beats):
                return
            self._life = replace(self._life, beat=self._life.beat + 1)
            self._put(self.beats, self._life)

    def release(self, code: int | None) -> None:
        """End the life with its exit code, if any. Write nothing where another run has taken over."""
        with self._writing:
            self._over.set()
            if self._life is not None and code is not None:
                # An error of a full disk, which the run has met before, would only hide its exit code.
                with suppress(StagerunError):
                    if not self._ask(self.disk):
                        self._put(self.disk, replace(self._life, code=code))
            self.lost = self.lost or f"this run has ended, and writes no more into {self.out}"

    def _beat_on(self) -> None:
        while not self._over.wait(self.beat_s) and not self.lost:
            # A failed beat may cost the lease, where another run wants it, and no more: the fence is read.
            with suppress(StagerunError):
                self.beat()

    def _watch(self, first: Life, locked: bool, stop: Callable[[], bool]) -> None:
        """Return when the life has ended, or was silent for SILENT_BEATS. FolderInUseError when it moves.

        Count looks, not seconds: a process may stop for a while between two of them. A look that took longer than a beat doesn't
        count, since the server was away for the holder's beats, too, unless the look before was as slow."""
        silent, slow = 0, False
        while silent < SILENT_BEATS * LOOKS_PER_BEAT:
            self._pause(self.beat_s / LOOKS_PER_BEAT)
            if stop():
                raise StoppedWaiting(f"stopped while waiting to see whether {first} is alive; nothing was started")
            before, was_slow = self._clock(), slow
            now = newest_life(self.disk, self.out)
            slow = self._clock() - before > self.beat_s
            silent += 1 if was_slow or not slow else 0
            if now is None or now.attempt < first.attempt:  # a missing file is not a sign of life
                continue
            if now.attempt == first.attempt and self._is_over(now, locked):
                return
            if now.attempt == first.attempt and now.readable and not first.readable:
                # It was just being written, or the disk can read it again.
                first, silent = now, 0
            elif now != first:
                raise _in_use(self.out, now)

    def _is_over(self, life: Life, locked: bool) -> bool:
        """Return whether the life has ended, False if unknown. FolderInUseError if it is alive."""
        alive = is_alive(life, self.me, locked)
        if alive:
            raise _in_use(self.out, life)
        return alive is False

    def _ask(self, disk: Disk) -> str:
        """Set `lost` and return it."""
        if self.lost:
            return self.lost
        life = self._life
        assert life is not None
        stored = look_at(disk, self.out, life.attempt) or look_at(disk, self.out, life.attempt)
        if stored is None:
            name = life_file(Path(), life.attempt)
            self.lost = f"this run may not write into {self.out} any more: its {name} is gone"
            return self.lost
        # An unreadable file was torn by a power cut or a bad disk: the next beat mends it.
        by = stored if stored.readable and stored.run != life.run else None
        taker = max([*attempts_of_lives(disk, self.out), stored.taken_by or 0])
        if taker > life.attempt:
            by = look_at(disk, self.out, taker) or Life(attempt=taker, run="")
        if by is not None:
            self.lost = f"another run has taken over {self.out}, since this one was silent: life {by.attempt}, {by}"
        return self.lost

    def _make(self, life: Life) -> None:
        """Write a new file. FolderInUseError if the file exists; StorageError, PermissionDenied, also if it does not read back."""
        path = life_file(self.out, life.attempt)
        failed: OSError | None = None
        with reporting(f"write {path.name}", path.parent):
            make_folder(self.disk, path.parent)
            try:
                make_file(self.disk, path, encode(life))
            except OSError as error:
                failed = error
            # NFS sends a request again when the answer is lost, and the second one fails because the first one was carried out.
            stored = look_at(self.disk, self.out, life.attempt) or Life(attempt=life.attempt, run="")
            if stored.run != life.run:
                if stored.readable or isinstance(failed, FileExistsError):
                    raise _in_use(self.out, stored)
                if failed is not None:
                    raise failed
                abandon(self.disk, path)
                raise StorageError(
                    f"{path} was written without an error, but can't be read back",
                    f"check that {path.parent} is a folder, not a link, and look for errors in the system's log (dmesg)",
                )
            try:
                self.disk.sync_folder(path.parent)
            except OSError:
                abandon(self.disk, path)
                raise

    def _put(self, disk: Disk, life: Life) -> None:
        """Rewrite the file of a life. Not synced: a power cut takes only the word of a dead process."""
        path = life_file(self.out, life.attempt)
        with reporting(f"write {path.name}", path.parent):
            replace_file(disk, path, encode(life), sync=False)


def _in_use(out: Path, life: Life) -> FolderInUseError:
    return FolderInUseError(f"another run holds {out}: {life}", WAIT)


def is_alive(life: Life, me: Identity, locked: bool = False) -> bool | None:
    """Return whether a life continues; None if its process is on another machine. `locked` as in `Lease.wait`."""
    if life.code is not None:
        return False
    if not life.process.same_machine(me):
        return None
    return not locked and life.process.alive()


def last_word(disk: Disk, out: Path) -> tuple[Holder, bool] | None:
    """Return the process of the newest life, unless it has ended, and whether it is alive here. For a look that doesn't wait and changes
    nothing. StorageError, PermissionDenied."""
    newest = newest_life(disk, out)
    if newest is None or (alive := is_alive(newest, this_process())) is False:
        return None
    return holder_named(str(newest), newest.beat if newest.readable else None), bool(alive)
