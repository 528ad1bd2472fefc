"""Snapshots behind training: rank 0 copies the state, and a thread writes the copy while the next iterations run."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from stagerun import store
from stagerun.base.errors import Diverged, StagerunError, StorageError
from stagerun.base.events import Note, SnapshotFailed, SnapshotWritten
from stagerun.base.snapshots import SnapshotRef
from stagerun.engine.state import Capture, TrainState
from stagerun.train.keeper import Keeper, Lineage
from stagerun.train.progress import ARRIVALS, AVERAGE, MOMENTUM, REPLICAS, RESIDUAL, WEIGHTS, Progress

# Snapshots that may fail one after the other before training stops: more would train what no one can keep.
FAILURES_IN_A_ROW = 3

# Seconds that training may stand still for a snapshot that is not on disk yet when the next is due, before the user hears of it.
PATIENCE = 1.0


class Snapshotter:
    """Rank 0 only, for one stage. One snapshot is in flight at a time; a second one waits for the first: none is left out, since
    a stage may start from it, and a rollback go back to it, and which those are must not hang on the speed of a disk."""

    def __init__(self, keeper: Keeper, lineage: Lineage, state: TrainState, piece: bool = False) -> None:
        self.keeper, self.lineage, self.stage, self.state = keeper, lineage, lineage.stage, state
        self.spared = keeper.before_piece(lineage.stage) if piece else None
        self.capture = Capture(state)
        self.thread: threading.Thread | None = None
        self.done: list[SnapshotWritten | SnapshotFailed | Note] = []
        self.failures = 0
        self.slowest = 0.0  # seconds, of those written
        self.error: StagerunError | None = None
        self.newest: SnapshotRef | None = None
        self.waited = self.reported = 0.0  # seconds that training stood still since a snapshot was not on disk yet

    def start(
        self,
        iter: int,
        progress: Progress,
        agree: Callable[[Mapping[str, int]], bool] | None = None,
        gather: Callable[[], None] = lambda: None,
    ) -> list[SnapshotWritten | SnapshotFailed | Note]:
        """Copies the state and starts writing it. What became of the snapshot before, if it was still under way.

        `gather` copies the other ranks' residuals or replicas in.

        `agree` is asked with the digests of the copy, where there are other ranks: it raises if they hold another state, and says
        whether it is finite. Diverged if a weight is not finite; StorageError after FAILURES_IN_A_ROW. Then `wait` says what became of it.
        """
        began = time.monotonic()
        events = self.wait()
        events += self._slow(time.monotonic() - began, iter)
        if self.failures >= FAILURES_IN_A_ROW:
            assert self.error is not None
            self.done = events
            raise StorageError(
                f"{self.failures} snapshots in a row could not be written; the last: {self.error.message}",
                self.error.hint or "the newest complete snapshot is unharmed; make room and run the same command again",
            )
        cpu = time.thread_time()
        digests: dict[str, int] | None = {} if agree is not None else None
        self.capture.take(self.state, digests)
        try:
            gather()
            finite = agree(digests) if agree is not None and digests is not None else self.capture.finite()
        except StagerunError:
            self.done = events
            raise
        if not finite:
            self.done = events
            raise Diverged(
                f"a weight of stage `{self.stage.name}`, or what is remembered of its updates, is not finite after iteration {iter}",
                "lower base_lr, lengthen the warm-up or set clip_gradients; earlier snapshots are unharmed",
            )
        cpu = time.thread_time() - cpu
        blocked = time.monotonic() - began
        self.thread = threading.Thread(
            target=self._write, args=(iter, progress, blocked, cpu), name="snapshot", daemon=False
        )
        self.thread.start()
        return events

    def _slow(self, waited: float, iter: int) -> list[SnapshotWritten | SnapshotFailed | Note]:
        """Says that the disk holds training up: the first time, and whenever that has doubled since."""
        self.waited += waited
        if waited < PATIENCE or self.waited < 2 * self.reported:
            return []
        self.reported = self.waited
        text = (
            f"the disk is slow: at iteration {iter} of stage `{self.stage.name}` training waited {waited:.1f} s for the snapshot before"
            f" ({self.waited:.1f} s in all): make `snapshot` larger, or choose a faster disk with --out"
        )
        return [Note(text=text, warning=True)]

    def _write(self, iter: int, progress: Progress, blocked: float, cpu: float) -> None:
        began = time.monotonic()
        try:
            names = (WEIGHTS, MOMENTUM, AVERAGE, RESIDUAL, REPLICAS, ARRIVALS)
            made = zip(names, self.capture.files(), strict=True)
            files = {name: data for name, data in made if data is not None}
            ref = self._commit(iter, files, progress)
        except StagerunError as error:
            self.error = error
            self.failures += 1
            self.done.append(SnapshotFailed(stage=self.stage.name, iter=iter, message=error.render()))
            return
        except BaseException as error:  # a bug of ours must not end the thread in silence
            self.error = StagerunError(f"writing a snapshot failed: {type(error).__name__}: {error}")
            self.failures += 1
            self.done.append(SnapshotFailed(stage=self.stage.name, iter=iter, message=self.error.message))
            return
        self.newest, self.failures, self.error = ref, 0, None
        self.slowest = max(self.slowest, blocked + time.monotonic() - began)
        written = SnapshotWritten(
            stage=self.stage.name,
            iter=iter,
            name=ref.name,
            bytes=ref.bytes,
            blocked_seconds=blocked,
            seconds=time.monotonic() - began,
        )
        place = len(self.done)
        self.done.append(written)
        self._retain(ref)
        # It is read only after this thread has ended.
        self.done[place] = replace(written, cpu_seconds=cpu + time.thread_time())

    def _retain(self, ref: SnapshotRef) -> None:
        try:
            self.keeper.retain(ref, self.spared)
        except store.Damaged as error:  # nothing older was dropped for it
            self._is_wrong(error)
        except StagerunError as error:  # the disk holds more than it should, and nothing is lost
            self.done.append(Note(text=f"an old snapshot could not be deleted: {error.message}", warning=True))
        except Exception as error:  # a bug of ours must not end the thread in silence, and what was written is there
            text = f"an old snapshot could not be deleted: {type(error).__name__}: {error}"
            self.done.append(Note(text=text, warning=True))

    def _commit(self, iter: int, files: Mapping[str, memoryview], progress: Progress) -> SnapshotRef:
        """Once more, where the disk is full and older snapshots could be spared for it. StorageError, PermissionDenied."""
        try:
            return self.keeper.commit(self.lineage, iter, files, progress)
        except StorageError as error:
            if not store.is_full(error):
                raise
            try:
                spared = self.keeper.make_room(self.stage, self.spared)
            except StagerunError:
                raise error from None
            if not spared:
                raise
            names = f"{', '.join(spared)} {'was' if len(spared) == 1 else 'were'}"
            text = (
                f"the disk is full: {names} deleted to make room, each older than one that was read back and is whole"
            )
            self.done.append(Note(text=text, warning=True))
        return self.keeper.commit(self.lineage, iter, files, progress)

    def _is_wrong(self, error: store.Damaged) -> None:
        self.newest, self.failures = None, self.failures + 1
        self.error = store.not_as_written(error)
        place = store.parse_name(error.name)
        self.done.append(
            SnapshotFailed(stage=self.stage.name, iter=place.iter if place else 0, message=self.error.render())
        )

    def finished(self) -> list[SnapshotWritten | SnapshotFailed | Note]:
        """What became of a snapshot whose writing is over. Doesn't wait."""
        if self.thread is None or self.thread.is_alive():
            return []
        return self.wait()

    def wait(self) -> list[SnapshotWritten | SnapshotFailed | Note]:
        """Waits for the snapshot under way, if any, and says what became of it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        done, self.done = self.done, []
        return done

    def require(self, iter: int) -> SnapshotRef:
        """The snapshot of `iter`, which must be on disk by now. The error that prevented it otherwise."""
        if self.newest is not None and self.newest.iter == iter and self.newest.stage == self.stage.name:
            return self.newest
        raise self.error or StorageError(f"the snapshot of `{self.stage.name}` at {iter} was not written")
