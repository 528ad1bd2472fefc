"""Snapshots of one stage: when one is due, at a stop, at the end, and after a failure."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from stagerun import store
from stagerun.base.errors import Diverged, ExitCode, StagerunError, StorageError
from stagerun.base.events import Event, Iterated, Note, NotFinite, SnapshotDue, SnapshotFailed, SnapshotWritten, Stopped
from stagerun.base.recipe import OnNan
from stagerun.base.snapshots import SnapshotRef
from stagerun.engine.loop import overdue
from stagerun.engine.state import Capture, TrainState, digests, finite
from stagerun.system.pulse import Section
from stagerun.train.agreement import ToldByAnother, compare, rank0
from stagerun.train.context import StageRun
from stagerun.train.hooks import Proofs, Seen
from stagerun.train.keeper import Keeper, Lineage
from stagerun.train.progress import AVERAGE, MOMENTUM, WEIGHTS, Progress
from stagerun.train.stage_start import Started


class Snapshots:
    """Every rank has this hook, since the ranks compare their states before a snapshot. Rank 0 writes it, with `writer`. `saved`:
    iteration of the newest snapshot requested, -1 before the first. `saved_ended`: that snapshot has the flag that `early_stop` ended
    the stage."""

    def __init__(self, run: StageRun, started: Started, proofs: Proofs) -> None:
        self.run, self.state, self.exchange, self.proofs = run, started.state, started.exchange, proofs
        self.comm, self.loop = run.worker.comm, started.loop
        planned, keeper = run.planned, run.worker.keeper
        resumes = run.resumes
        self.saved = self.state.iter if resumes else -1  # a stop before the first update has nothing to write
        self.saved_ended = False
        self.writer: Snapshotter | None = None
        if keeper is not None:
            lineage = Lineage(run.stage, run.parent_id, started.bits, planned.id_stage, planned.skipped)
            self.writer = Snapshotter(keeper, lineage, self.state, run.is_piece)
            self.writer.newest = planned.start if resumes else None
            size = sum(part.nbytes for part in self.writer.capture.files() if part is not None)
            run.worker.stopping.expect(size + self.exchange.file_bytes)

    def on(self, event: Seen) -> Iterator[Seen]:
        if isinstance(event, Stopped):
            yield from self._stop(event)
            return
        yield event
        if isinstance(event, SnapshotDue):
            yield from self._begin()
        elif self.writer is not None and isinstance(event, Iterated | NotFinite):
            if isinstance(event, Iterated):
                yield from self.writer.finished()
                stopping = self.run.worker.stopping
                stopping.snapshot_s = max(stopping.snapshot_s, self.writer.slowest)
            self.writer.keeper.require_not_lost()  # the others then find rank 0 gone

    def save(self) -> Generator[Event, None, str]:
        """Write the snapshot of the current iteration, wait until it is on disk, and return its name. Collective; StorageError on rank 0."""
        state, writer = self.state, self.writer
        # A snapshot written by a stop lacks the stage-ended flag; rewrite it.
        lacks_end = state.best.ended and not self.saved_ended
        if lacks_end and writer is not None:
            writer.newest = None
        if lacks_end or self.saved != state.iter:
            yield from self._begin()
        yield from self.wait()
        return rank0(self.comm, lambda: writer.require(state.iter).name if writer is not None else "")

    def wait(self) -> Iterator[Event]:
        """Wait for the snapshot that is being written, and yield its outcome."""
        if self.writer is not None:
            with self.comm.pulse.section(Section.SAVE):
                yield from self.writer.wait()

    def rescue(self) -> Iterator[Event]:
        """Save the current state on rank 0, after unusable images, a failing disk, or the loss of a peer.

        The state is the one after the last complete update, since an update is applied only after all images were read and all
        gradients summed. No rank waits for another here. If this snapshot fails too, the first error still counts.

        Nothing is saved if the snapshot needs the state of other ranks: the run would resume to other bits than from the previous
        snapshot. RuntimeError is torch's, of a GPU.
        """
        run, state = self.run, self.state
        if self.writer is None or state.iter in (self.saved, run.planned.iter) or self._lacks_test():
            return
        if needed := self.exchange.needs_others():
            at = max(self.saved, run.planned.iter)
            yield Note(text=f"the training since iteration {at} is not saved: it needs {needed}", warning=True)
            return
        with suppress(StagerunError, RuntimeError):
            yield from self._begin(alone=True)
            yield from self.wait()

    def _stop(self, event: Stopped) -> Iterator[Event]:
        """Save the state, and yield where the run stops."""
        iter, reason, lost = self.state.iter, event.reason, ""
        if self._lacks_test():
            lost = "the evaluation at the end is missing, so later iterations are not kept"
        elif self.run.stage.solver.on_nan is OnNan.ROLLBACK and not finite(self.state):
            # The update overflowed, and no loss has shown it yet. Don't save: the next process retrains this stretch from the previous
            # snapshot, and rolls back too.
            lost = "later iterations overflowed, and are not kept"
        if lost:
            iter, reason = max(self.saved, self.run.planned.iter), f"{reason}; {lost}"
            yield from self.wait()
            if self.writer is not None:
                iter = self.writer.newest.iter if self.writer.newest is not None else self.run.planned.iter
        elif iter:
            yield from self.save()
        yield replace(event, iter=iter, reason=reason)

    def _lacks_test(self) -> bool:
        """Return whether the evaluation of the last iteration is missing: a snapshot there would end the stage without it."""
        return self.state.iter == self.loop.max_iter and any(overdue(self.loop, self.state))

    def _begin(self, alone: bool = False) -> Iterator[Event]:
        """Compare the states of the ranks, and start to write a snapshot. Collective, unless `alone`: then the other ranks may be gone."""
        state, writer, notes = self.state, self.writer, list[Note]()

        def agreed(digests: Mapping[str, int]) -> bool:
            # The other ranks check the same state, unless they may differ.
            good = writer is None or not self.run.worker.others or writer.capture.finite()
            return self._agreed(notes, digests, good)

        with self.comm.pulse.section(Section.SAVE):
            self.exchange.show()
            if writer is None:
                self._hand_in(notes)
            else:
                compared, gather = (
                    None if alone or self.comm.size == 1 else agreed,
                    partial(self.exchange.gather, keep=True),
                )
                try:
                    yield from writer.start(state.iter, self._progress(), compared, gather)
                except StagerunError:
                    yield from writer.wait()
                    raise
        self.saved_ended = state.best.ended
        self.saved = state.iter  # only now: if a peer dies during the comparison, this is still to be saved
        yield from notes

    def _hand_in(self, notes: list[Note]) -> None:
        """Take part in a snapshot that rank 0 writes, on another rank."""
        self.exchange.gather(keep=False)
        if not self._agreed(notes, digests(self.state), finite(self.state)):
            raise ToldByAnother(ExitCode.DIVERGED)

    def _agreed(self, notes: list[Note], digests: Mapping[str, int], good: bool) -> bool:
        """Return whether the state, with this rank's `digests`, is finite (`good`) on all ranks. Collective; RanksDiffer on rank 0 and
        ToldByAnother elsewhere if ranks hold different bits.

        The other ranks digest their live state, which needs no copy, so rank 0 loses no time. Ranks on different machines may round
        differently when they apply an update, and only get a warning.
        """
        run, state = self.run, self.state
        where = f"after iteration {state.iter} of stage `{run.stage.name}`"
        good, error = compare(self.comm, where, {**digests, **self.exchange.digests()}, good)
        if error is None:
            return good
        others = run.worker.others
        if not others:
            raise error if self.comm.rank == 0 else ToldByAnother(error.exit_code)
        if not run.drifted:
            text = f"{error.message}; their machines differ ({others}), so it may be rounding; snapshots hold the state of rank 0"
            notes.append(Note(text=text, warning=True))
        run.drifted = True
        return good

    def _progress(self) -> Progress:
        run, state, solver = self.run, self.state, self.run.stage.solver
        return Progress(
            run.planned.position + run.planned.skipped + state.iter * solver.batch_size,
            run.seconds,
            list(run.losses),
            plateau=state.plateau if solver.lr_policy == "plateau" else None,
            skips=state.skips,
            skips_in_all=state.skips_in_all,
            rollbacks=state.rollbacks,
            choice=dict(run.choice),
            weights=run.weights,
            best=state.best if run.worker.schedule.followed(run.stage) is not None else None,
            proof=self.proofs.newest,
            tested=state.tested,
        )


# Snapshots that may fail one after the other before training stops: more would train without saving.
FAILURES_IN_A_ROW = 3

News = SnapshotWritten | SnapshotFailed | Note


class Snapshotter:
    """Writer of one stage's snapshots, on rank 0: it copies the state, and a thread writes the copy while the next iterations run. One
    snapshot is in flight at a time; a second one waits for the first. None is skipped: stages start from snapshots and rollbacks return
    to them, so which ones exist must not depend on the speed of a disk."""

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
        """Copy the state and start to write it. Return the events of the previous snapshot, if it was still being written.

        `gather` returns files besides those of the state, unchanged until the next call. `agree` gets the digests of the copy, if there
        are other ranks: it raises if they hold another state, and returns whether it is finite. Diverged if a weight is not finite;
        StorageError after FAILURES_IN_A_ROW. Then `wait` returns the outcome.
        """
        began = time.monotonic()
        events = self.wait()
        self.done = events  # which `wait` gives where this raises
        if self.failures >= FAILURES_IN_A_ROW:
            assert self.error is not None
            raise StorageError(
                f"{self.failures} snapshots in a row could not be written; the last: {self.error.message}",
                self.error.hint
                or "the newest complete snapshot is unharmed; make room and run the same command again to resume",
            )
        cpu = time.thread_time()
        digests: dict[str, int] | None = {} if agree is not None else None
        self.capture.take(self.state, digests)
        extra = gather()
        finite = agree(digests) if agree is not None and digests is not None else self.capture.finite()
        if not finite:
            raise Diverged(
                f"a weight of stage `{self.stage.name}`, or its momentum, is not finite after iteration {iter}",
                "lower base_lr, lengthen the warm-up or set clip_gradients; earlier snapshots are unharmed",
            )
        cpu = time.thread_time() - cpu
        blocked, self.done = time.monotonic() - began, []
        work = partial(self._write, iter, extra, progress, blocked, cpu)
        self.thread = threading.Thread(target=work, name="snapshot", daemon=False)
        self.thread.start()
        return events

    def _write(
        self, iter: int, extra: Mapping[str, memoryview], progress: Progress, blocked: float, cpu: float
    ) -> None:
        began = time.monotonic()
        try:
            made = zip((WEIGHTS, MOMENTUM, AVERAGE), self.capture.files(), strict=True)
            files = {**{name: data for name, data in made if data is not None}, **extra}
            ref = self.keeper.commit(self.lineage, iter, files, progress)
        except BaseException as error:  # a bug of ours must not end the thread in silence
            if not isinstance(error, StagerunError):
                error = StagerunError(f"writing a snapshot failed: {type(error).__name__}: {error}")
            self._failed(iter, error)
            return
        self.newest, self.failures, self.error = ref, 0, None
        self.slowest = max(self.slowest, blocked + time.monotonic() - began)
        index, seconds = len(self.done), time.monotonic() - began
        times = {"blocked_seconds": blocked, "seconds": seconds}
        written = SnapshotWritten(stage=self.stage.name, iter=iter, name=ref.name, bytes=ref.bytes, **times)
        self.done.append(written)
        self._retain(ref)
        # It is read only after this thread has ended.
        self.done[index] = replace(written, cpu_seconds=cpu + time.thread_time())

    def _retain(self, ref: SnapshotRef) -> None:
        try:
            self.keeper.retain(ref, self.spared)
        except store.Damaged as error:  # nothing older was dropped for it
            self.newest, point = None, store.parse_name(error.name)
            self._failed(point.iter if point else 0, store.not_as_written(error))
        except Exception as error:  # the disk holds more than it should, and nothing is lost
            why = error.message if isinstance(error, StagerunError) else f"{type(error).__name__}: {error}"
            self.done.append(Note(text=f"an old snapshot could not be deleted: {why}", warning=True))

    def _failed(self, iter: int, error: StagerunError) -> None:
        self.error, self.failures = error, self.failures + 1
        self.done.append(SnapshotFailed(stage=self.stage.name, iter=iter, message=error.render()))

    def finished(self) -> list[News]:
        """Return the events of a snapshot that is written, without waiting."""
        return [] if self.thread is None or self.thread.is_alive() else self.wait()

    def wait(self) -> list[News]:
        """Wait for the snapshot being written, if any, and return its events."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        done, self.done = self.done, []
        return done

    def require(self, iter: int) -> SnapshotRef:
        """Return the snapshot of `iter`, or raise the error that prevented it."""
        if self.newest is not None and self.newest.iter == iter and self.newest.stage == self.stage.name:
            return self.newest
        raise self.error or StorageError(f"the snapshot of `{self.stage.name}` at {iter} was not written")
