"""Snapshots behind training: rank 0 copies the state, and a thread writes the copy while the next iterations run."""

import threading
import time
from collections.abc import Mapping

from stagerun.engine.codec import encode
from stagerun.engine.state import Capture, TrainState
from stagerun.errors import Diverged, StagerunError, StorageError
from stagerun.events import Note, SnapshotFailed, SnapshotWritten
from stagerun.recipe import Stage
from stagerun.runner.keeper import AVERAGE, MOMENTUM, WEIGHTS, Keeper, Progress
from stagerun.snapshots import SnapshotRef

# Snapshots that may fail one after the other before training stops: more would train what nobody can keep.
FAILURES_IN_A_ROW = 3


class Snapshotter:
    """Rank 0 only, for one stage. One snapshot is in flight at a time; a second one waits for the first."""

    def __init__(
        self,
        keeper: Keeper,
        stage: Stage,
        parent: str,
        state: TrainState,
        environment: Mapping[str, str],
        piece: bool = False,
        id_stage: str = "",
    ) -> None:
        self.keeper, self.stage, self.parent, self.environment = keeper, stage, parent, environment
        self.spared = keeper.before_piece(stage) if piece else None
        self.id_stage = id_stage
        self.state = state
        self.capture = Capture(state)
        self.thread: threading.Thread | None = None
        self.done: list[SnapshotWritten | SnapshotFailed | Note] = []
        self.failures = 0
        self.error: StagerunError | None = None
        self.newest: SnapshotRef | None = None

    def start(self, iter: int, progress: Progress) -> list[SnapshotWritten | SnapshotFailed | Note]:
        """Copies the state and starts writing it. What became of the snapshot before, if it was still under way.

        Diverged if a weight is not finite; StorageError after FAILURES_IN_A_ROW.
        """
        begun = time.monotonic()
        events = self.wait()
        if self.failures >= FAILURES_IN_A_ROW:
            assert self.error is not None
            raise StorageError(
                f"{self.failures} snapshots in a row could not be written; the last: {self.error.message}",
                self.error.hint or "the newest complete snapshot is unharmed; make room and run the same command again",
            )
        self.capture.take(self.state)
        if not self.capture.finite():
            raise Diverged(
                f"a weight of stage `{self.stage.name}` is not finite after iteration {iter}",
                "lower base_lr, lengthen the warm-up or set clip_gradients; the last snapshot is unharmed",
            )
        blocked = time.monotonic() - begun
        self.thread = threading.Thread(
            target=self._write, args=(iter, progress, blocked), name="snapshot", daemon=False
        )
        self.thread.start()
        return events

    def _write(self, iter: int, progress: Progress, blocked: float) -> None:
        begun = time.monotonic()
        try:
            files = {WEIGHTS: encode(self.capture.weights), MOMENTUM: encode(self.capture.momentum)}
            if self.capture.average:
                files[AVERAGE] = encode(self.capture.average)
            ref = self.keeper.commit(self.stage, iter, self.parent, files, progress, self.environment, self.id_stage)
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
        self.done.append(
            SnapshotWritten(
                stage=self.stage.name,
                iter=iter,
                name=ref.name,
                bytes=ref.bytes,
                blocked_seconds=blocked,
                seconds=time.monotonic() - begun,
            )
        )
        try:
            self.keeper.retain(ref, self.spared)
        except StagerunError as error:  # the disk holds more than it should, and nothing is lost
            self.done.append(Note(text=f"an old snapshot could not be deleted: {error.message}", warning=True))

    def finished(self) -> list[SnapshotWritten | SnapshotFailed | Note]:
        """What became of a snapshot that is no longer under way. Doesn't wait."""
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
