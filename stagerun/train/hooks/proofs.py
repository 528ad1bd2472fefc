"""Proofs of a stage (`audit_param { proof_iter }`): digests of its state in the log, each chained to the one before."""

from collections.abc import Iterator

from stagerun.base.events import Iterated, NotFinite, Proof, chained
from stagerun.base.recipe import OnNan
from stagerun.engine.codec import combined
from stagerun.engine.loop import StageLoop, due, saves
from stagerun.engine.state import TrainState, counters, digests_there
from stagerun.plan import State
from stagerun.schedule.early_stop import NOTHING_YET
from stagerun.system.pulse import Section
from stagerun.train.context import StageRun
from stagerun.train.hooks import Seen
from stagerun.train.progress import STATE, progress_of


class Proofs:
    """The chain of one stage. Every rank has this hook; rank 0 digests and yields. `newest`: the newest link, on rank 0."""

    def __init__(self, run: StageRun, state: TrainState, loop: StageLoop) -> None:
        self.run, self.state, self.loop = run, state, loop
        files, audit = run.files, run.stage.solver.audit
        self.every = audit.proof_iter if audit is not None else 0
        goes_on = self.every and run.stage.average is None  # a stage without proofs starts no chain, and continues none
        self.newest = progress_of(files).proof if goes_on and files is not None and STATE in files else ""

    def at_start(self) -> Iterator[Proof]:
        """Yield the proof of the state that the stage starts with."""
        if self.every and self.run.planned.state is State.FRESH:
            yield from self._proof()

    def on(self, event: Seen) -> Iterator[Seen]:
        if isinstance(event, NotFinite) and event.done == OnNan.SKIP.value:
            yield from self._if_due()
        yield event
        if isinstance(event, Iterated):
            yield from self._if_due()

    def _if_due(self) -> Iterator[Proof]:
        iter, loop = self.state.iter, self.loop
        if not self.every:
            return
        due_here = due(iter, self.every, 0)
        if self.run.is_piece:
            # It has the links that the stage had: a snapshot that others now start from is not among them.
            due_here |= due(iter, loop.snapshot, 0) or (loop.tests_first and due(iter, loop.test_interval, 0))
        else:
            due_here |= saves(loop, iter)
        if due_here:
            with self.run.worker.comm.pulse.section(Section.SAVE):
                yield from self._proof()

    def _proof(self) -> Iterator[Proof]:
        now = self.state
        if self.run.worker.comm.rank != 0:
            return
        # As before any evaluation: one that `early_stop` goes by comes between this and the snapshot.
        known = counters(now.iter, now.plateau, NOTHING_YET, now.skips, now.skips_in_all, now.rollbacks)
        state = f"{combined({**digests_there(now), **known}):016x}"
        self.newest = chained(self.newest, now.iter, state)
        if not self.run.is_piece:
            yield Proof(stage=self.loop.stage, iter=now.iter, state=state, chain=self.newest)
