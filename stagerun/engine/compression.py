"""`compress_param` applied to a network: which method each parameter has, and the reducer that carries it out."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor

from stagerun.base.compression import METHODS
from stagerun.base.recipe import Compression, Determinism, Memory, Method, ParamKind, Scope, Solver
from stagerun.comm import Comm, Reducer, dense_bytes, make_reducer, runs_of
from stagerun.comm.compressed import CompressedReducer, Residual
from stagerun.comm.compression import Operator, make
from stagerun.comm.kept import Kept
from stagerun.engine.parameters import kind_of
from stagerun.engine.state import TrainState
from stagerun.engine.update import TAIL


def rule_of(name: str, kind: ParamKind, how: Compression) -> Compression:
    """How one parameter's gradient is compressed: by the first rule that fits, or as all are."""
    for rule in how.param:
        if fnmatchcase(name, rule.name) and rule.kind in (ParamKind.ANY, kind):
            return replace(
                how,
                method=rule.method,
                ratio=rule.ratio,
                threshold=rule.threshold,
                qstates=rule.qstates,
                rank=rule.rank,
            )
    return how


def rules_of(state: TrainState, how: Compression) -> dict[str, Compression]:
    """That of each parameter that is trained, in model order; those that scope ENTIRE_MODEL leaves out come first."""
    model = state.model
    found = {p.name: rule_of(p.name, kind_of(model, p.name), how) for p in state.solver.parameters}
    if how.scope is Scope.ENTIRE_MODEL:
        return dict(sorted(found.items(), key=lambda pair: pair[1] == how))
    return found


def operator(how: Compression, shape: Sequence[int]) -> Operator:
    return make(
        how.method,
        shape,
        ratio=how.ratio,
        threshold=how.threshold,
        qstates=how.qstates,
        rank=how.rank,
        memory=how.memory,
        as_released=how.as_released,
    )


def senders(determinism: Determinism, logical_workers: int, workers: int) -> list[range]:
    """Of each rank: its logical workers with ELASTIC, itself with FIXED."""
    if determinism is Determinism.ELASTIC:
        return runs_of(logical_workers, workers)
    return [range(rank, rank + 1) for rank in range(workers)]


def residual_of(determinism: Determinism, state: TrainState, solver: Solver, comm: Comm) -> Residual | None:
    """Zeros, where the stage's compression remembers anything."""
    if solver.compress is None:
        return None
    rules = rules_of(state, solver.compress)
    if not any(_remembers(rule) for rule in rules.values()):
        return None
    tensors = {p.name: p.tensor for p in state.solver.parameters}
    runs = senders(determinism, solver.logical_workers, comm.size)
    return Residual({name: tensors[name] for name in rules}, runs, comm.rank)


def _remembers(rule: Compression) -> bool:
    return rule.method is Method.POWER_SGD or (rule.memory is Memory.RESIDUAL and not METHODS[rule.method].exact)


def dense_bytes_of(determinism: Determinism, state: TrainState, solver: Solver, comm: Comm) -> int:
    """Bytes that rank 0 would send in an iteration of the stage without compression; 0 where there is none, and with one worker."""
    if not compresses(solver):
        return 0
    tensors = [p.tensor for p in state.solver.parameters]
    elements, tail = sum(t.numel() for t in tensors), state.statistics.n + TAIL
    return dense_bytes(determinism, elements, tensors[0].element_size(), comm.size, solver.logical_workers, tail)


def compresses(solver: Solver) -> bool:
    return solver.compress is not None and solver.compress.method is not Method.NONE


def reducer_of(
    determinism: Determinism, state: TrainState, solver: Solver, comm: Comm, kept: Kept | None = None
) -> Reducer:
    """The way to add up the gradients of a stage. `kept` is filled where they are compressed."""
    how = solver.compress
    tensors = {p.name: p.tensor for p in state.solver.parameters}

    def dense(comm: Comm) -> Reducer:
        return make_reducer(determinism, list(tensors.values()), comm, solver.logical_workers)

    if how is None or not compresses(solver):
        return dense(comm)
    rules = rules_of(state, how)
    together = sum(rule == how for rule in rules.values()) if how.scope is Scope.ENTIRE_MODEL else 0
    everything = sum(tensors[name].numel() for name, rule in rules.items() if rule == how)
    shapes = {name: (everything,) if together and rule == how else tensors[name].shape for name, rule in rules.items()}
    operators = [operator(rule, shapes[name]) for name, rule in rules.items()]
    compressed = CompressedReducer(
        {name: tensors[name] for name in rules},
        operators,
        comm,
        senders(determinism, solver.logical_workers, comm.size),
        solver.random_seed,
        each=determinism is Determinism.ELASTIC,
        whole=together,
        residual=state.residual,
        kept=kept,
    )
    return From(how.start_iter, dense(comm), compressed) if how.start_iter else compressed


class From:
    """`before` for the first iterations of a stage, `after` from `start` on."""

    def __init__(self, start: int, before: Reducer, after: Reducer) -> None:
        self.start, self.before, self.after = start, before, after
        self.now, self.layout = before, after.layout

    def begin(self, iter: int = 0) -> None:
        self.now = self.before if iter < self.start else self.after
        self.now.begin(iter)

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self.now.add(loss, logical_worker, tail, last)

    def break_off(self, tail: Tensor) -> None:
        self.now.break_off(tail)

    def finish(self) -> Tensor:
        return self.now.finish()

    def accept(self) -> None:
        self.now.accept()
