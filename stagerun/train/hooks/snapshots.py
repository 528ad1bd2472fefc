"""Snapshots of one stage: when one is due, at a stop, at the end, and after a failure."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from stagerun.base.errors import ExitCode, StagerunError
from stagerun.base.events import Event, Iterated, Note, NotFinite, SnapshotDue, Stopped
from stagerun.base.recipe import OnNan
from stagerun.engine.state import digests, finite
from stagerun.system.pulse import Section
from stagerun.train.agreement import ToldByAnother, compare, rank0
from stagerun.train.context import StageRun
from stagerun.train.hooks import Seen
from stagerun.train.hooks.proofs import Proofs
from stagerun.train.keeper import Lineage
from stagerun.train.progress import Progress
from stagerun.train.snapshotter import Snapshotter
from stagerun.train.stage_start import Started


class Snapshots:
    """Every rank has this hook, since the ranks compare their states before a snapshot. Rank 0 writes it, with `writer`.

    `saved`: the iteration of the newest snapshot asked for, -1 before the first. `said_ended`: that one says that `early_stop` ends the stage."""

    def __init__(self, run: StageRun, started: Started, proofs: Proofs) -> None:
        self.run, self.state, self.exchange, self.proofs = run, started.state, started.exchange, proofs
        self.comm = run.worker.comm
        planned, keeper = run.planned, run.worker.keeper
        resumes = run.resumes
        self.saved = self.state.iter if resumes else -1  # a stop before the first update has nothing to write
        self.said_ended = False
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
        lacks_end = state.best.ended and not self.said_ended
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
        """Save the current state on rank 0, after images that can't be used, a failing disk, or the loss of a peer.

        The state is that of the last complete update, since nothing is applied before all images were read and all gradients summed. No rank
        waits for another here. If this snapshot fails too, the first error still counts.

        Nothing is saved if the snapshot needs what other ranks hold: without that, the run would resume to other bits than from the snapshot
        before. RuntimeError is torch's, of a GPU.
        """
        run, state = self.run, self.state
        if self.writer is None or state.iter in (self.saved, run.planned.iter):
            return
        if needed := self.exchange.needs_others():
            at = max(self.saved, run.planned.iter)
            yield Note(text=f"what was trained since iteration {at} is not saved: it needs {needed}", warning=True)
            return
        with suppress(StagerunError, RuntimeError):
            yield from self._begin(alone=True)
            yield from self.wait()

    def _stop(self, event: Stopped) -> Iterator[Event]:
        """Save the state, and yield where the run stops."""
        iter, reason = self.state.iter, event.reason
        if self.run.stage.solver.on_nan is OnNan.ROLLBACK and not finite(self.state):
            # The update overflowed, and no loss has shown it yet. Don't save: the next process retrains this stretch from the snapshot
            # before, and rolls back too.
            iter = max(self.saved, self.run.planned.iter)
            reason = f"{reason}; what came after it has overflowed, and is not kept"
            yield from self.wait()
            if self.writer is not None:
                iter = self.writer.newest.iter if self.writer.newest is not None else self.run.planned.iter
        elif iter:
            yield from self.save()
        yield replace(event, iter=iter, reason=reason)

    def _begin(self, alone: bool = False) -> Iterator[Event]:
        """Compare the states of the ranks, and start to write a snapshot. Collective, unless `alone`: then the other ranks may be gone."""
        state, writer, notes = self.state, self.writer, list[Note]()

        def agreed(found: Mapping[str, int]) -> bool:
            # What the others look at is what rank 0 has, unless their states may differ.
            good = writer is None or not self.run.worker.others or writer.capture.finite()
            return self._agreed(notes, found, good)

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
        self.said_ended = state.best.ended
        self.saved = state.iter  # only now: if a peer dies during the comparison, this is still to be saved
        yield from notes

    def _hand_in(self, notes: list[Note]) -> None:
        """What the other ranks do for a snapshot that rank 0 writes."""
        self.exchange.gather(keep=False)
        if not self._agreed(notes, digests(self.state), finite(self.state)):
            raise ToldByAnother(ExitCode.DIVERGED)

    def _agreed(self, notes: list[Note], found: Mapping[str, int], good: bool) -> bool:
        """Return whether the state, of which `found` are this rank's digests, is finite (`good`) on all ranks. Collective; RanksDiffer on
        rank 0 and ToldByAnother elsewhere if ranks hold different bits.

        The other ranks digest their live state, which needs no copy: rank 0 stands still no longer than it would without digests. Ranks
        that don't compute alike may round differently when they apply an update, and are only warned of.
        """
        run, state = self.run, self.state
        where = f"after iteration {state.iter} of stage `{run.stage.name}`"
        good, error = compare(self.comm, where, {**found, **self.exchange.digests()}, good)
        if error is None:
            return good
        others = run.worker.others
        if not others:
            raise error if self.comm.rank == 0 else ToldByAnother(error.exit_code)
        if not run.drifted:
            text = f"{error.message}; they don't compute alike ({others}), so it may be rounding; snapshots hold what rank 0 has"
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
            best=state.best if solver.early_stop is not None else None,
            proof=self.proofs.newest,
            tested=state.tested,
        )
