"""`compress_param` applied to a network: which method each parameter has, and the reducer that carries it out."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import Compressed, Event, Iterated, Note
from stagerun.base.recipe import Compression, CompressionRule, Determinism, Memory, Method, ParamKind, Scope, Solver
from stagerun.base.text import count
from stagerun.comm import Comm, Reducer, dense_bytes, runs_of
from stagerun.comm.reduce import Switch
from stagerun.engine.codec import Packed, decode, digest_there
from stagerun.engine.loop import StageLoop
from stagerun.engine.parameters import first_that_fits, kind_of
from stagerun.engine.state import TrainState
from stagerun.engine.update import TAIL
from stagerun.plan import State
from stagerun.train.agreement import rank0
from stagerun.train.context import Context, StageRun
from stagerun.train.exchange import Exchange, Read
from stagerun.train.progress import RESIDUAL
from stagerun.wire.choosing import resolved
from stagerun.wire.operators import BFloat16, Dense, Operator
from stagerun.wire.quantised import Qsgd, TernGrad
from stagerun.wire.reducer import CompressedReducer, Kept, Residual
from stagerun.wire.sparse import PowerSgd, RandomK, Threshold, TopK, saves
from stagerun.wire.values import METHODS, methods_of, sending, settings_of

BASIS = "basis/"
NEEDED = "the residuals or replicas of all workers"


def rule_of(name: str, kind: ParamKind, how: Compression) -> Compression:
    """How one parameter's gradient is compressed: by the first rule that fits, or as all are."""
    rule = first_that_fits(how.param, name, kind)
    if rule is None:
        return how
    return replace(
        how,
        method=rule.method,
        ratio=rule.ratio,
        threshold=rule.threshold,
        qstates=rule.qstates,
        rank=rule.rank,
        memory=rule.memory,
    )


def rules_of(state: TrainState, how: Compression) -> dict[str, Compression]:
    """That of each parameter that is trained, in model order; those that scope ENTIRE_MODEL leaves out come first."""
    model = state.model
    found = {p.name: rule_of(p.name, kind_of(model, p.name), how) for p in state.solver.parameters}
    if how.scope is Scope.ENTIRE_MODEL:
        return dict(sorted(found.items(), key=lambda pair: pair[1] == how))
    return found


# A class for each method, whose docstring is its formula; it is built with `residual` and the settings that it reads. What is known
# without torch is in `wire.values`.
BUILT: Mapping[Method, Callable[..., Operator]] = {
    Method.NONE: Dense,
    Method.TOP_K: TopK,
    Method.RANDOM_K: RandomK,
    Method.THRESHOLD: Threshold,
    Method.TERNGRAD: TernGrad,
    Method.QSGD: Qsgd,
    Method.POWER_SGD: PowerSgd,
    Method.BF16: BFloat16,
}


def operator(how: Compression | CompressionRule, shape: Sequence[int], senders: int = 1) -> Operator:
    """The operator of a tensor of that shape, for gradients that are divided by the number of senders already, as losses are: so is a
    threshold. KeyError for AUTO, which is no operator."""
    settings: dict[str, Any] = settings_of(how.method, how)
    residual = how.memory is Memory.RESIDUAL
    if how.method is Method.THRESHOLD:
        settings["threshold"] /= senders
    if how.method is Method.POWER_SGD:
        settings["shape"] = (shape[0], prod(shape[1:])) if shape else (1, 1)
        if not saves(settings["rank"], settings["shape"]):
            return Dense(residual)
    return BUILT[how.method](residual=residual, **settings)


def senders(determinism: Determinism, logical_workers: int, workers: int) -> list[range]:
    """The senders of each rank: its logical workers with ELASTIC, itself with FIXED."""
    if determinism is Determinism.ELASTIC:
        return runs_of(logical_workers, workers)
    return [range(rank, rank + 1) for rank in range(workers)]


def _remembers(rule: Compression) -> bool:
    return rule.method is Method.POWER_SGD or (rule.memory is Memory.RESIDUAL and not METHODS[rule.method].exact)


class Measured(Exchange):
    """An exchange whose bytes are compared with those of gradients that go as they are."""

    def __init__(self, state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> None:
        super().__init__(state, solver, determinism, comm)
        tensors, tail = [p.tensor for p in state.solver.parameters], state.statistics.n + TAIL
        elements, element_size = sum(t.numel() for t in tensors), tensors[0].element_size()
        self.dense_bytes = dense_bytes(determinism, elements, element_size, comm.size, solver.logical_workers, tail)

    def words(self, images: int) -> str:
        return sending(self.solver, images)


class Compressing(Measured):
    """`compress_param`: every sender's message goes to every rank."""

    residual: Residual | None = None  # what this rank's senders have not sent yet, where they remember it
    packed: Packed | None = None  # that of all senders, in a snapshot

    def __init__(self, state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> None:
        super().__init__(state, solver, determinism, comm)
        how = solver.compress
        assert how is not None
        self.kept = Kept(solver.display if comm.rank == 0 else 0)
        if methods_of(how) == {Method.NONE}:
            self.dense_bytes = 0
        if how.method is not Method.AUTO:
            self._take(how)

    def _take(self, how: Compression) -> None:
        """Gradients are sent by `how`, and nothing is left from before."""
        self.how, self.rules = how, rules_of(self.state, how)
        self.runs = senders(self.determinism, self.solver.logical_workers, self.comm.size)
        self.tensors = {p.name: p.tensor for p in self.state.solver.parameters}
        if any(_remembers(rule) for rule in self.rules.values()):
            bases = {}
            for name, rule in self.rules.items():
                if rule.method is Method.POWER_SGD and (shape := operator(rule, self.tensors[name].shape, 1).basis()):
                    bases[name] = shape
            ordered = {name: self.tensors[name] for name in self.rules}
            self.residual = Residual(ordered, self.runs, self.comm.rank, bases)
            self.file_bytes = sum(t.nbytes for t in _in_file(self.residual).values())

    def begin(self, run: StageRun, loop: StageLoop) -> Generator[Event, None, bool]:
        how = self.solver.compress
        assert how is not None
        if how.method is Method.AUTO:
            chosen = yield from resolved(run, self.state, self._reducer_of)
            if chosen is None:
                return False
            how = chosen
            self._take(how)
        shared_from = 0
        if self.residual is not None and run.planned.state is State.RESUME:
            shared_from = _restore(run, self.residual)
        if how.method is Method.POWER_SGD and (self.residual is None or not self.residual.bases):
            text = (
                f"POWER_SGD of rank {how.rank} makes no layer of `{run.stage.model.name}` smaller: stage `{run.stage.name}` sends "
                "gradients as they are; make `rank` smaller"
            )
            yield Note(text=text, warning=True)
        if self.residual is not None and shared_from not in (0, self.residual.senders):
            text = f"the residuals of {count(shared_from, 'sender')} are shared out evenly over {self.residual.senders}"
            yield Note(text=text)
        return (yield from super().begin(run, loop))

    def _reducer_of(self, state: TrainState, solver: Solver) -> Reducer:
        return Compressing(state, solver, self.determinism, self.comm).make_reducer()

    def make_reducer(self) -> Reducer:
        how, rules, tensors = self.how, self.rules, self.tensors
        if all(rule.method is Method.NONE for rule in rules.values()):
            return super().make_reducer()
        together = sum(rule == how for rule in rules.values()) if how.scope is Scope.ENTIRE_MODEL else 0
        everything = sum(tensors[name].numel() for name, rule in rules.items() if rule == how)
        shapes = {n: (everything,) if together and rule == how else tensors[n].shape for n, rule in rules.items()}
        after = CompressedReducer(
            {name: tensors[name] for name in rules},
            [operator(rule, shapes[name], self.runs[-1].stop) for name, rule in rules.items()],
            self.comm,
            self.runs,
            self.solver.random_seed,
            each=self.determinism is Determinism.ELASTIC,
            whole=together,
            residual=self.residual,
            kept=self.kept,
        )
        return From(how.start_iter, super().make_reducer(), after) if how.start_iter else after

    def train(self, worker: Context, read: Read) -> Generator[Event, None, None]:
        for event in super().train(worker, read):
            yield event
            if isinstance(event, Iterated) and (items := self.kept.take()):
                yield Compressed(stage=event.stage, iter=event.iter, items=items)

    @torch.no_grad()
    def gather(self, keep: bool) -> Mapping[str, memoryview]:
        residual = self.residual
        if residual is None:
            return {}
        if keep and self.packed is None:
            self.packed = Packed(_in_file(residual), residual.empty.device.type == "cuda")
        tensors = self.packed.tensors if self.packed is not None else {}
        for rank, run in enumerate(residual.runs):
            for sender in run:
                vector = residual.room(sender)
                self.comm.broadcast(vector, rank)
                for name, part in residual.by_name(vector).items() if keep else ():
                    tensors[name][sender].copy_(part)
        if self.packed is None:
            return {}
        for name, basis in residual.bases.items():
            tensors[f"{BASIS}{name}"].copy_(basis)
        return {RESIDUAL: self.packed.data}

    def digests(self) -> dict[str, int]:
        bases = self.residual.bases if self.residual is not None else {}
        return {f"{BASIS}{name}": digest_there(basis) for name, basis in bases.items()}

    def needs_others(self) -> str:
        return NEEDED if self.residual is not None and self.comm.size > 1 else ""


class From(Switch):
    """`before` for the first iterations of a stage, `after` from `start` on."""

    def __init__(self, start: int, before: Reducer, after: Reducer) -> None:
        super().__init__(before)
        self.start, self.after = start, after

    def begin(self, iter: int = 0) -> None:
        if iter >= self.start:
            self.now = self.after  # which frees the other one's buffers
        super().begin(iter)


def _in_file(residual: Residual) -> dict[str, torch.Tensor]:
    """Tensors as those of a snapshot's file are: NAME [senders, ...] for each parameter, and BASIS/NAME."""
    one = residual.by_name(residual.empty)
    found = {name: part.expand(residual.senders, *part.shape) for name, part in one.items()}
    return found | {f"{BASIS}{name}": basis for name, basis in residual.bases.items()}


def _restore(run: StageRun, residual: Residual) -> int:
    """Take the residuals from the snapshot; the answer is how many senders they are of. Where there were others, what all of them had left is
    shared out evenly: the sum stays, and with it what the weights are still to get. Collective; ResumeRefused for residuals of another
    network or method."""
    saved: dict[str, torch.Tensor] = {}

    def read() -> int:
        assert run.files is not None
        try:
            saved.update(decode(run.files[RESIDUAL]) if RESIDUAL in run.files else {})
            return _senders_of(saved, residual)
        except ValueError as error:
            raise ResumeRefused(
                f"the residuals in snapshot {run.planned.start.name if run.planned.start else ''} do not fit stage "
                f"`{run.stage.name}`: {error}",
                "they are of another `compress_param`; take `--redo` for the stage, or another --out",
            ) from error

    comm = run.worker.comm
    senders = rank0(comm, read)
    shares: dict[str, torch.Tensor] = {}
    if saved and senders != residual.senders:
        shares = {name: saved[name].sum(0) / residual.senders for name in residual.parameters}
    for sender in range(residual.senders):
        vector = residual.room(sender)
        for name, part in residual.by_name(vector).items() if saved else ():
            part.copy_(shares[name] if shares else saved[name][sender])
        comm.broadcast(vector, 0)
    for name, basis in residual.bases.items():
        if saved:
            basis.copy_(saved[f"{BASIS}{name}"])
        comm.broadcast(basis, 0)
    return senders


def _senders_of(saved: Mapping[str, torch.Tensor], residual: Residual) -> int:
    """How many senders the tensors of a snapshot's file are of. ValueError if they don't fit."""
    like = _in_file(residual)
    numbers = {len(tensor) for name, tensor in saved.items() if not name.startswith(BASIS) and tensor.dim()}
    for name in sorted(like.keys() | saved.keys()):
        there, wanted = saved.get(name), like.get(name)
        first = 0 if name.startswith(BASIS) else 1  # where what doesn't hang on the number of senders begins
        if (
            there is None
            or wanted is None
            or not there.is_floating_point()
            or there.shape[first:] != wanted.shape[first:]
            or not bool(torch.isfinite(there).all())
        ):
            raise ValueError(f"`{name}` is missing, or not as this stage has it")
    if len(numbers) != 1 or 0 in numbers:
        raise ValueError("they are not all of the same senders")
    return numbers.pop()
