"""Snapshots behind training: rank 0 copies the state, and a thread writes the copy while the next iterations run."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from stagerun import store
from stagerun.base.errors import Diverged, StagerunError, StorageError
from stagerun.base.events import Note, SnapshotFailed, SnapshotWritten
from stagerun.base.snapshots import SnapshotRef
from stagerun.engine.state import Capture, TrainState
from stagerun.train.keeper import Keeper, Lineage
from stagerun.train.progress import AVERAGE, MOMENTUM, WEIGHTS, Progress

# Snapshots that may fail one after the other before training stops: more would train what no one can keep.
FAILURES_IN_A_ROW = 3

News = SnapshotWritten | SnapshotFailed | Note


class Snapshotter:
    """Rank 0 only, for one stage. One snapshot is in flight at a time; a second one waits for the first. None is left out: stages
    start from them and rollbacks return to them, so which snapshots exist must not depend on the speed of a disk."""

    def __init__(self, keeper: Keeper, lineage: Lineage, state: TrainState, piece: bool = False) -> None:
        self.keeper, self.lineage, self.stage, self.state = keeper, lineage, lineage.stage, state
        self.spared = keeper.before_piece(lineage.stage) if piece else None
        self.capture = Capture(state)
        self.thread: threading.Thread | None = None
        self.done: list[News] = []
        self.failures = 0
        self.slowest = 0.0  # seconds, of those written
        self.error: StagerunError | None = None
        self.newest: SnapshotRef | None = None

    def start(
        self,
        iter: int,
        progress: Progress,
        agree: Callable[[Mapping[str, int]], bool] | None = None,
        gather: Callable[[], Mapping[str, memoryview]] = dict,
    ) -> list[News]:
        """Copy the state and start to write it. Return what became of the previous snapshot, if it was still under way.

        `gather` gives the files besides those of the state, whose memory stays as it is until the next call.

        `agree` is asked with the digests of the copy, where there are other ranks: it raises if they hold another state, and says
        whether it is finite. Diverged if a weight is not finite; StorageError after FAILURES_IN_A_ROW. Then `wait` says what became of it.
        """
        began = time.monotonic()
        events = self.wait()
        self.done = events  # which `wait` gives where this raises
        if self.failures >= FAILURES_IN_A_ROW:
            assert self.error is not None
            raise StorageError(
                f"{self.failures} snapshots in a row could not be written; the last: {self.error.message}",
                self.error.hint or "the newest complete snapshot is unharmed; make room and run the same command again",
            )
        cpu = time.thread_time()
        digests: dict[str, int] | None = {} if agree is not None else None
        self.capture.take(self.state, digests)
        beside = gather()
        finite = agree(digests) if agree is not None and digests is not None else self.capture.finite()
        if not finite:
            raise Diverged(
                f"a weight of stage `{self.stage.name}`, or what is remembered of its updates, is not finite after iteration {iter}",
                "lower base_lr, lengthen the warm-up or set clip_gradients; earlier snapshots are unharmed",
            )
        cpu = time.thread_time() - cpu
        blocked, self.done = time.monotonic() - began, []
        work = partial(self._write, iter, beside, progress, blocked, cpu)
        self.thread = threading.Thread(target=work, name="snapshot", daemon=False)
        self.thread.start()
        return events

    def _write(
        self, iter: int, beside: Mapping[str, memoryview], progress: Progress, blocked: float, cpu: float
    ) -> None:
        began = time.monotonic()
        try:
            made = zip((WEIGHTS, MOMENTUM, AVERAGE), self.capture.files(), strict=True)
            files = {**{name: data for name, data in made if data is not None}, **beside}
            ref = self.keeper.commit(self.lineage, iter, files, progress)
        except BaseException as error:  # a bug of ours must not end the thread in silence
            if not isinstance(error, StagerunError):
                error = StagerunError(f"writing a snapshot failed: {type(error).__name__}: {error}")
            self._failed(iter, error)
            return
        self.newest, self.failures, self.error = ref, 0, None
        self.slowest = max(self.slowest, blocked + time.monotonic() - began)
        place, seconds = len(self.done), time.monotonic() - began
        times = {"blocked_seconds": blocked, "seconds": seconds}
        written = SnapshotWritten(stage=self.stage.name, iter=iter, name=ref.name, bytes=ref.bytes, **times)
        self.done.append(written)
        self._retain(ref)
        # It is read only after this thread has ended.
        self.done[place] = replace(written, cpu_seconds=cpu + time.thread_time())

    def _retain(self, ref: SnapshotRef) -> None:
        try:
            self.keeper.retain(ref, self.spared)
        except store.Damaged as error:  # nothing older was dropped for it
            self.newest, place = None, store.parse_name(error.name)
            self._failed(place.iter if place else 0, store.not_as_written(error))
        except Exception as error:  # the disk holds more than it should, and nothing is lost
            why = error.message if isinstance(error, StagerunError) else f"{type(error).__name__}: {error}"
            self.done.append(Note(text=f"an old snapshot could not be deleted: {why}", warning=True))

    def _failed(self, iter: int, error: StagerunError) -> None:
        self.error, self.failures = error, self.failures + 1
        self.done.append(SnapshotFailed(stage=self.stage.name, iter=iter, message=error.render()))

    def finished(self) -> list[News]:
        """Return what became of a snapshot whose writing is over, without waiting."""
        return [] if self.thread is None or self.thread.is_alive() else self.wait()

    def wait(self) -> list[News]:
        """Wait for the snapshot under way, if any, and return what became of it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        done, self.done = self.done, []
        return done

    def require(self, iter: int) -> SnapshotRef:
        """Return the snapshot of `iter`, or raise the error that kept it from the disk."""
        if self.newest is not None and self.newest.iter == iter and self.newest.stage == self.stage.name:
            return self.newest
        raise self.error or StorageError(f"the snapshot of `{self.stage.name}` at {iter} was not written")
