"""Proofs of a stage (`audit_param { proof_iter }`): digests of its state in the log, each chained to the one before."""

from collections.abc import Iterator, Mapping

from stagerun.base.events import Note, Proof
from stagerun.engine.codec import combined
from stagerun.engine.loop import StageLoop, due, saves
from stagerun.engine.state import TrainState, counters, digests_there
from stagerun.plan import State
from stagerun.schedule.early_stop import NOTHING_YET
from stagerun.schedule.proofs import chained
from stagerun.system.pulse import Section
from stagerun.train.agreement import ToldByAnother, compare
from stagerun.train.progress import STATE, progress_of
from stagerun.train.worker import StageRun


class Proofs:
    """The chain of one stage. Every rank has one; rank 0 digests and yields."""

    def __init__(self, run: StageRun, state: TrainState, loop: StageLoop, every: int) -> None:
        self.run, self.state, self.loop, self.every = run, state, loop, every
        files = run.files
        known = files is not None and STATE in files and run.stage.average is None
        run.proof = progress_of(files).proof if known and files is not None else ""

    def at_start(self) -> Iterator[Proof]:
        """Yield the proof of the state that the stage starts with."""
        if self.run.planned.state is State.FRESH:
            yield from self._proof()

    def after_iteration(self) -> Iterator[Proof]:
        """Yield the proof that is due after the last iteration. Collective."""
        iter, loop = self.state.iter, self.loop
        due_here = due(iter, self.every, 0)
        if (
            self.run.is_piece
        ):  # it has the links that the stage had: a snapshot that others now start from is not among them
            due_here |= due(iter, loop.snapshot, 0) or (loop.tests_first and due(iter, loop.test_interval, 0))
        else:
            due_here |= saves(loop, iter)
        if not due_here:
            return
        with self.run.worker.comm.pulse.section(Section.SAVE):
            yield from self._proof()

    def _proof(self) -> Iterator[Proof]:
        run, now = self.run, self.state
        if run.worker.comm.rank != 0:
            return
        found = digests_there(now)
        # As before any evaluation: one that `early_stop` goes by comes between this and the snapshot.
        known = counters(now.iter, now.plateau, NOTHING_YET, now.skips, now.skips_in_all, now.rollbacks)
        state = f"{combined({**found, **known}):016x}"
        run.proof = chained(run.proof, now.iter, state)
        if not run.is_piece:
            yield Proof(stage=self.loop.stage, iter=now.iter, state=state, chain=run.proof)


def agree(run: StageRun, iter: int, notes: list[Note], digests: Mapping[str, int], finite: bool = True) -> bool:
    """Return whether the state, of which `digests` are this rank's, is finite on all ranks. Collective; RanksDiffer on rank 0 and
    ToldByAnother elsewhere if ranks hold different bits.

    The other ranks digest their live state, which needs no copy: rank 0 stands still no longer than it would without digests. Ranks
    that don't compute alike may round differently when they apply an update, and are only warned of.
    """
    good, error = compare(run.worker.comm, f"after iteration {iter} of stage `{run.stage.name}`", digests, finite)
    if error is None:
        return good
    if not run.worker.others:
        raise error if run.worker.comm.rank == 0 else ToldByAnother(error.exit_code)
    if not run.drifted:
        text = f"{error.message}; they don't compute alike ({run.worker.others}), so it may be rounding; snapshots hold what rank 0 has"
        notes.append(Note(text=text, warning=True))
    run.drifted = True
    return good
