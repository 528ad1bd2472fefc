"""`compress_param` applied to a network: which method each parameter has, and the reducer that carries it out."""

from collections.abc import Sequence
from dataclasses import replace

from stagerun.base.compression import METHODS, methods_of
from stagerun.base.recipe import Compression, Determinism, Memory, Method, ParamKind, Scope, Solver
from stagerun.comm import Comm, Reducer, dense_bytes, make_reducer, runs_of
from stagerun.comm.compressed import CompressedReducer
from stagerun.comm.compression import Operator, make
from stagerun.comm.kept import Kept
from stagerun.comm.reduce import Switch
from stagerun.comm.residual import Residual
from stagerun.engine.parameters import first_that_fits, kind_of
from stagerun.engine.state import TrainState
from stagerun.engine.update import TAIL


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


def operator(how: Compression, shape: Sequence[int], senders: int) -> Operator:
    """For gradients that are divided by the number of senders already, as losses are: so is a threshold."""
    return make(
        how.method,
        shape,
        ratio=how.ratio,
        threshold=None if how.threshold is None else how.threshold / senders,
        qstates=how.qstates,
        rank=how.rank,
        memory=how.memory,
    )


def senders(determinism: Determinism, logical_workers: int, workers: int) -> list[range]:
    """The senders of each rank: its logical workers with ELASTIC, itself with FIXED."""
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
    bases = {}
    for name, rule in rules.items():
        if rule.method is Method.POWER_SGD and (shape := operator(rule, tensors[name].shape, 1).basis()):
            bases[name] = shape
    runs = senders(determinism, solver.logical_workers, comm.size)
    return Residual({name: tensors[name] for name in rules}, runs, comm.rank, bases)


def _remembers(rule: Compression) -> bool:
    return rule.method is Method.POWER_SGD or (rule.memory is Memory.RESIDUAL and not METHODS[rule.method].exact)


def dense_bytes_of(determinism: Determinism, state: TrainState, solver: Solver, comm: Comm) -> int:
    """What rank 0 sends in an iteration of the stage without compression and replicas; 0 where it has neither, and with one worker."""
    compressed = solver.compress is not None and methods_of(solver.compress) != {Method.NONE}
    if not compressed and solver.sync is None:
        return 0
    tensors, tail = [p.tensor for p in state.solver.parameters], state.statistics.n + TAIL
    elements, element_size = sum(t.numel() for t in tensors), tensors[0].element_size()
    return dense_bytes(determinism, elements, element_size, comm.size, solver.logical_workers, tail)


def reducer_of(
    determinism: Determinism, state: TrainState, solver: Solver, comm: Comm, kept: Kept | None = None
) -> Reducer:
    """The way to add up the gradients of a stage. `kept` is filled where they are compressed."""
    how = solver.compress

    def dense() -> Reducer:
        return make_reducer(determinism, [p.tensor for p in state.solver.parameters], comm, solver.logical_workers)

    if state.replicas is not None:
        return state.replicas.around(dense, state.iter)
    rules = rules_of(state, how) if how is not None else {}
    if how is None or all(rule.method is Method.NONE for rule in rules.values()):
        return dense()
    runs, tensors = (
        senders(determinism, solver.logical_workers, comm.size),
        {p.name: p.tensor for p in state.solver.parameters},
    )
    together = sum(rule == how for rule in rules.values()) if how.scope is Scope.ENTIRE_MODEL else 0
    everything = sum(tensors[name].numel() for name, rule in rules.items() if rule == how)
    shapes = {name: (everything,) if together and rule == how else tensors[name].shape for name, rule in rules.items()}
    after = CompressedReducer(
        {name: tensors[name] for name in rules},
        [operator(rule, shapes[name], runs[-1].stop) for name, rule in rules.items()],
        comm,
        runs,
        solver.random_seed,
        each=determinism is Determinism.ELASTIC,
        whole=together,
        residual=state.residual,
        kept=kept,
    )
    return From(how.start_iter, dense(), after) if how.start_iter else after


class From(Switch):
    """`before` for the first iterations of a stage, `after` from `start` on."""

    def __init__(self, start: int, before: Reducer, after: Reducer) -> None:
        super().__init__(before)
        self.start, self.after = start, after

    def begin(self, iter: int = 0) -> None:
        if iter >= self.start:
            self.now = self.after  # which frees the other one's buffers
        super().begin(iter)
