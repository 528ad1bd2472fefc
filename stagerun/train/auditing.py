"""`audit_param` on one rank: whether all hold the same state and compute the same gradients, and the proofs in the log.

An audit of a gradient lies between the sum of all gradients and the update, where every rank still has the weights that it was computed with.
The other's device batch comes from the loader behind this rank's own. Where replicas have gone their own ways, and where a worker is alone, each
computes one of its own again, which finds what passes, and not what stays.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from stagerun.base.errors import RanksDiffer
from stagerun.base.events import Note, Proof
from stagerun.base.recipe import Audit, OnDifference
from stagerun.base.text import listed
from stagerun.comm import Reducer, gather_json, runs_of
from stagerun.engine.audit import TOLERANCE, Marks, alike, computed_again, heard, mark_of
from stagerun.engine.codec import combined, digest_there
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, due, saves, snapshot_due
from stagerun.engine.state import TrainState, counters, digests_held, digests_there, tensors
from stagerun.engine.update import BROKEN_OFF
from stagerun.plan import State
from stagerun.schedule import audits
from stagerun.schedule.early_stop import NOTHING_YET
from stagerun.system.host import host_name
from stagerun.system.pulse import Section
from stagerun.train.agreement import ToldByAnother, compare, different
from stagerun.train.progress import STATE, progress_of
from stagerun.train.worker import Differed, StageRun

Read = Callable[[Iterable[tuple[int, int]]], AbstractContextManager[Iterator[Batch]]]
_NAMED = 3
_HINT = "nothing of this is saved: the same command goes on from the newest snapshot; if it names that rank again, test memory and processor there"


class Audits:
    """Those of a stage. It is a Reducer around the stage's own once it has `around` it."""

    def __init__(self, run: StageRun, state: TrainState, loop: StageLoop, how: Audit) -> None:
        self.run, self.state, self.loop, self.how = run, state, loop, how
        self.comm = run.worker.comm
        self.exact = run.worker.device.type == "cpu" and not run.worker.others
        self.mark = mark_of(self.exact)
        self.wrong = ""  # what this rank, by itself, has found in this iteration
        self.iter, self.turn = -1, 0  # of the iteration that is computed, and of this rank's replica
        self.heard: Marks = {}
        self.differed: tuple[int, Differed] | None = None  # where it ended because ranks do, the same on all
        self.notes: list[Note] = []  # of what was looked at inside an iteration
        if state.replicas is not None and how.compare_iter and self.comm.size > 1:
            state.replicas.look = self._compare_replicas
        if self.comm.rank == 0:
            self._take_up()

    # -- proofs

    def _take_up(self) -> None:
        files, planned = self.run.step.files, self.run.planned
        known = files is not None and STATE in files and self.run.stage.average is None
        self.run.proof = progress_of(files).proof if known and files is not None else ""
        if planned.state is State.FRESH and self.how.proof_iter:
            self._prove()

    def begins(self) -> Iterator[Proof]:
        """The proof of the state that the stage starts with."""
        if self.run.planned.state is State.FRESH:
            yield from self._proved()

    def _prove(self) -> None:
        replicas = self.state.replicas
        parted = replicas is not None and replicas.parted and replicas.differ(self.state.iter)
        found = self._first(digests_held(self.state, (0,))) if parted else digests_there(self.state)
        # As before any evaluation: one that `early_stop` goes by comes between this and the snapshot.
        now = self.state
        known = counters(now.iter, now.plateau, NOTHING_YET, now.skips, now.skips_in_all, now.rollbacks)
        self._state = f"{combined({**found, **known}):016x}"
        self.run.proof = audits.chained(self.run.proof, self.state.iter, self._state)

    def _first(self, found: Mapping[str, int]) -> Mapping[str, int]:
        """Digests of the first replica alone, which rank 0 holds whatever the number of workers."""
        return {n: d for n, d in found.items() if n.partition("/")[0] in ("0", "counters")}

    def _proved(self) -> Iterator[Proof]:
        if self.comm.rank == 0 and self.how.proof_iter and not self.run.is_piece:
            yield Proof(stage=self.loop.stage, iter=self.state.iter, state=self._state, chain=self.run.proof)

    # -- after an iteration

    def after(self) -> Iterator[Note | Proof]:
        """What is due after the iteration that is over. Collective; RanksDiffer on rank 0, ToldByAnother elsewhere."""
        iter, how = self.state.iter, self.how
        yield from self.notes
        self.notes.clear()
        with self.comm.pulse.section(Section.SAVE):
            if audits.is_due(iter - 1, how.replay_iter) and self._alone(iter - 1):
                self._tell([text for text in gather_json(self.comm, self.wrong) if text])
            snapshot = saves(self.loop, iter)
            before = self.run.differed.get(iter)
            compared = audits.is_due(iter - 1, how.compare_iter) and not snapshot_due(self.loop, iter)
            if self.comm.size > 1 and (compared or before is not None):
                yield from self._compare(iter)
            if before is not None and before.held:
                yield from self._found_out(iter, before)
            if how.proof_iter and (self._proven_there(iter, snapshot) or audits.is_due(iter - 1, how.proof_iter)):
                replicas = self.state.replicas
                if replicas is not None and not replicas.differ(iter):
                    replicas.show()  # the stage ends with their average
                if self.comm.rank == 0:
                    self._prove()
                    yield from self._proved()

    def _proven_there(self, iter: int, snapshot: bool) -> bool:
        """A piece has the links that the stage had when it came by: a snapshot that others now start from it didn't write."""
        loop = self.loop
        tests = loop.tests_first and due(iter, loop.test_interval, 0)
        return tests or due(iter, loop.snapshot, 0) if self.run.is_piece else snapshot

    def _compare(self, iter: int) -> Iterator[Note]:
        if self.state.replicas is not None and self.state.replicas.parted:
            self._compare_replicas(iter)
            return
        notes: list[Note] = []
        agree(self.run, iter, notes, digests_held(self.state))
        yield from notes

    def _compare_replicas(self, iter: int, made: Mapping[str, Tensor] | None = None) -> None:
        """Those that hold the same replica, with each other, and all in what they have in common; or in what a synchronisation has `made`.
        Collective."""
        replicas = self.state.replicas
        assert replicas is not None
        if made:
            agree(self.run, iter, self.notes, {name: digest_there(t) for name, t in made.items()})
            return
        everybody = gather_json(self.comm, [host_name(), digests_held(self.state, replicas.shared)])
        for r in (*map(str, replicas.shared), ""):
            held = [{n: d for n, d in found.items() if _replica_in(n) == r} for _, found in everybody]
            ranks = [rank for rank, found in enumerate(held) if found]
            if any(held[rank] != held[ranks[0]] for rank in ranks) and not self.run.worker.others:
                hosts = [everybody[rank][0] for rank in ranks]
                self._raise(different(_where(self.run, iter), hosts, [held[rank] for rank in ranks], ranks))

    def remember(self, error: RanksDiffer) -> None:
        """The run ends, or goes back. Two workers that differ don't show who is wrong: then what each holds is kept until it is known what is
        right."""
        asked = not error.decided and error.names and self.state.replicas is None
        live = tensors(self.state) if asked else {}
        self.differed = self.state.iter, Differed(error, {name: t.detach().cpu().clone() for name, t in live.items()})

    def _found_out(self, iter: int, before: Differed) -> Iterator[Note]:
        """Who was wrong where workers differed, now that they have come there again and agree. Collective.

        A wrong worker spoils the gradients of all, so that none had the right bits: it is the one that was further away from them by far.
        """
        now = tensors(self.state)
        pairs = [self._apart(before.held[name], now[name]) for name in before.error.names if name in now]
        everybody = gather_json(self.comm, [host_name(), [[str(own), str(first)] for own, first in pairs]])
        distances = [[float(own) for own, _ in its] for _, its in everybody]
        distances[0] = [max(float(its[n][1]) for _, its in everybody) for n in range(len(pairs))]
        wrong = audits.furthest(distances)
        found = [f"rank {rank} on {everybody[rank][0]}" for rank in wrong]
        who = f"wrong was what {listed(found)} held" if found else "who was wrong can't be said"
        text = f"{_where(self.run, iter)}, trained again, all workers hold the same: {who}"
        if self.how.on_difference is OnDifference.STOP:
            self._raise(RanksDiffer(text, _HINT))
        yield Note(text=text, warning=True)

    def _apart(self, held: Tensor, now: Tensor) -> tuple[float, float]:
        """How far what this rank held, and what rank 0 did, are from what is right, where they differ. Collective."""
        first, right = held.clone(), now.detach().cpu().double()
        self.comm.broadcast(first)
        places = held != first
        far = [(its.double() - right)[places].abs() for its in (held, first)]
        return (float(far[0].max()), float(far[1].max())) if bool(places.any()) else (0.0, 0.0)

    # -- the arithmetic of another

    def around(self, reducer: Reducer, read: Read, batches: Iterator[Batch]) -> "Audits":
        self.inner, self.layout, self.read, self.batches = reducer, reducer.layout, read, batches
        return self

    def _alone(self, iter: int) -> bool:
        """Whether no other rank has the weights of this one."""
        replicas = self.state.replicas
        return self.comm.size == 1 or (replicas is not None and iter >= replicas.start)

    def _parts(self, iter: int) -> tuple[int, range]:
        """The last of this rank's replicas and its logical workers in it, counted from the first of all; 0 and all before they part."""
        replicas = self.state.replicas
        if replicas is None or iter < replicas.start:
            return 0, self.loop.run
        r, size = replicas.own[-1], replicas.logical_workers
        return r, range(r * size + replicas.runs[r].start, r * size + replicas.runs[r].stop)

    def _number(self, iter: int) -> int:
        return (iter + 1) // self.how.replay_iter - 1

    def _audited(self, iter: int, rank: int) -> int:
        """The logical worker of a rank whose gradient is audited."""
        number, size = self._number(iter), self.comm.size
        if self._alone(iter):
            return audits.audited_worker(self._parts(iter)[1], number, 1)
        return audits.audited_worker(runs_of(self.how_many, size)[rank], number, size)

    @property
    def how_many(self) -> int:
        return self.loop.arithmetic.logical_workers

    def place(self, iter: int) -> int | None:
        """The position of the device batch that this rank computes again beside its own in the update after `iter` updates."""
        if not audits.is_due(iter, self.how.replay_iter):
            return None
        comm = self.comm
        of = comm.rank if self._alone(iter) else audits.audited(comm.rank, self._number(iter), comm.size)
        return self._position(iter, self._audited(iter, of))

    def _position(self, iter: int, worker: int) -> int:
        return self.loop.start_position + iter * self.loop.batch_size + worker * self._size

    @property
    def _size(self) -> int:
        return self.run.stage.solver.device_batch_size

    def begin(self, iter: int = 0) -> None:
        self.inner.begin(iter)
        self.turn = self.turn + 1 if iter == self.iter else 0
        self.iter = iter
        if not self.turn:
            self.heard, self.wrong = {}, ""

    def _last_turn(self) -> bool:
        replicas = self.state.replicas
        return replicas is None or not replicas.parted or self.turn == len(replicas.own) - 1

    def add(self, loss: Any, logical_worker: int, tail: Any, last: bool) -> None:
        due = audits.is_due(self.iter, self.how.replay_iter) and self._last_turn()
        first = self._parts(self.iter)[0] * self._arithmetic.logical_workers
        if not due or first + logical_worker != self._audited(self.iter, self.comm.rank):
            self.inner.add(loss, logical_worker, tail, last)
            return
        with heard(self.state, self.mark) as self.heard:
            self.inner.add(loss, logical_worker, tail, last)

    def break_off(self, tail: Any) -> None:
        self.inner.break_off(tail)

    def accept(self) -> None:
        self.inner.accept()

    def finish(self) -> Any:
        total = self.inner.finish()
        if audits.is_due(self.iter, self.how.replay_iter) and self._last_turn() and float(total[-1]) < BROKEN_OFF:
            found = computed_again(self.state, next(self.batches), self._arithmetic, self.mark)
            if self._alone(self.iter):
                if not self._same(self.heard, found):
                    self.wrong = self._found_alone(found)
            else:
                self._exchange(found)
        return total

    @property
    def _arithmetic(self) -> Any:
        """As the gradients of this moment are computed."""
        how, replicas = self.loop.arithmetic, self.state.replicas
        parted = replicas is not None and replicas.parted
        return replace(how, logical_workers=replicas.logical_workers) if parted and replicas is not None else how

    def _same(self, a: Marks, b: Marks) -> bool:
        return a == b if self.exact else alike(a, b, TOLERANCE[self.run.stage.solver.precision])

    def _once_more(self, worker: int) -> Marks:
        with self.read([(self._position(self.iter, worker), self._size)]) as batches:
            return computed_again(self.state, next(batches), self._arithmetic, self.mark)

    def _found_alone(self, found: Marks) -> str:
        """What is said of this rank, whose gradient was another when it computed it again."""
        rank, worker = self.comm.rank, self._audited(self.iter, self.comm.rank)
        again = [self._once_more(worker), self._once_more(worker)]
        first = audits.verdict([self.heard, found], again, self._same)
        when = (
            "in training" if first.wrong == (0,) else "when it was audited" if first.wrong == (1,) else "time and again"
        )
        return f"rank {rank} on {host_name()} has computed the gradient of logical worker {worker} wrong {when}"

    def _exchange(self, found: Marks) -> None:
        """Compares what each rank has computed with what its auditor has. Collective."""
        size, number = self.comm.size, self._number(self.iter)
        short = [{"": combined(m)} if self.exact else m for m in (self.heard, found)]
        everybody = gather_json(self.comm, short)
        pairs = [(rank, audits.auditor(rank, number, size)) for rank in range(size)]
        if texts := [
            self._decided(a, b, number, found) for a, b in pairs if not self._same(everybody[a][0], everybody[b][1])
        ]:
            self._tell(texts)

    def _decided(self, rank: int, auditor: int, number: int, found: Marks) -> str:
        """Who of a rank and its auditor is wrong, in words: both, and a third, compute it once more. Collective."""
        me, size, worker = self.comm.rank, self.comm.size, self._audited(self.iter, rank)
        voters = list(dict.fromkeys((rank, auditor, audits.judge(rank, number, size))))
        mine = self._once_more(worker) if me in voters else {}
        everybody = gather_json(self.comm, [host_name(), self.heard if me == rank else found, mine])
        first = [everybody[r][1] for r in (rank, auditor)]
        names = [name for name in first[0] if not self._same({name: first[0][name]}, {name: first[1].get(name)})]
        said = audits.verdict(first, [everybody[r][2] for r in voters], self._same)
        called = [f"rank {r} on {everybody[r][0]}" for r in (rank, auditor)]
        tensors = listed([f"`{name}`" for name in names], _NAMED)
        what = f"the gradient of logical worker {worker} in {tensors}"
        if not said.wrong:
            return f"{called[0]} and {called[1]} compute other bits of {what}, and which is wrong no third can say"
        return "; ".join(
            f"{called[one]} {'computes' if one in said.again else 'has once computed'} {what} wrong"
            for one in said.wrong
        )

    def _tell(self, texts: list[str]) -> None:
        if not texts:
            return
        after = self.iter + 1
        self._raise(RanksDiffer(f"iteration {after} of stage `{self.loop.stage}`: " + "; ".join(texts), _HINT))

    def _raise(self, error: RanksDiffer) -> None:
        self.remember(error)
        raise error if self.comm.rank == 0 else ToldByAnother(error.exit_code)


def _replica_in(name: str) -> str:
    """The replica that a tensor is of; '' of what all have in common."""
    first = name.partition("/")[0]
    return first if first.isdecimal() else ""


def _where(run: StageRun, iter: int) -> str:
    return f"after iteration {iter} of stage `{run.stage.name}`"


def agree(run: StageRun, iter: int, notes: list[Note], found: Mapping[str, int], finite: bool = True) -> bool:
    """Whether the state, of which `found` are this rank's digests, is finite. The others look, which need no copy: so rank 0 stands
    still no longer than it would without digests. Collective; RanksDiffer if not all have the same.

    Ranks that don't compute alike may round differently when they apply an update, and are only warned of.
    """
    good, error = compare(run.worker.comm, _where(run, iter), found, finite)
    if error is None:
        return good
    if not run.worker.others:
        if run.audits is not None:
            run.audits.remember(error)
        raise error if run.worker.comm.rank == 0 else ToldByAnother(error.exit_code)
    if not run.drifted:
        text = f"{error.message}; they don't compute alike ({run.worker.others}), so it may be rounding; snapshots hold what rank 0 has"
        notes.append(Note(text=text, warning=True))
    run.drifted = True
    return good
