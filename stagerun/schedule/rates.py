"""The learning rate of a Solver as a function of the iteration; the table of solver types; the synchronisations of replicas. Pure, stdlib
only."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from inspect import getfullargspec
from math import floor

from stagerun.base.recipe import DecayFrom, MomentumForm, Solver, Sync, SyncRule, SyncStart
from stagerun.schedule.policies import POLICIES

# Fields that a policy reads and every stage has.
SHARED = ("base_lr", "max_iter", "epoch_iter")


@cache
def policy_fields(lr_policy: str) -> tuple[str, ...]:
    """Return the fields of Solver that a policy reads. KeyError for an unknown policy."""
    return tuple(getfullargspec(POLICIES[lr_policy].formula).args[1:])


def own_fields(lr_policy: str) -> tuple[str, ...]:
    """Return the fields that only some policies read. KeyError for an unknown policy."""
    return tuple(name for name in policy_fields(lr_policy) if name not in SHARED)


def learning_rate(solver: Solver, drops: int = 0) -> Callable[[int], float]:
    """Return the stage's learning rate as a function of its iteration. `drops`: the drops of `plateau` so far.

    In a warm-up it is (iter * base_lr + (warmup_iter - iter) * warmup_start_lr) / warmup_iter. After it, the policy counts from the stage's start,
    so that a falling rate jumps down at the end of the warm-up (SURFsara's rule), or with `decay_from: WARMUP_END` from the end of the
    warm-up.

    >>> solver = Solver(base_lr=1.0, lr_policy="poly", power=1.0, max_iter=10, warmup_iter=2, batch_size=1, device_batch_size=1,
    ...                 random_seed=0, test_batch_size=1)
    >>> [learning_rate(solver)(i) for i in (0, 1, 2)]
    [0.0, 0.5, 0.8]
    """
    formula = POLICIES[solver.lr_policy].formula
    start = solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0
    settings = {name: getattr(solver, name) for name in policy_fields(solver.lr_policy)}
    if "max_iter" in settings:
        settings["max_iter"] -= start
    if solver.lr_policy == "plateau":
        settings["drops"] = drops

    def rate(iter: int) -> float:
        at = iter + solver.policy_start_iter
        if at < solver.warmup_iter:
            ramp = at * solver.base_lr + (solver.warmup_iter - at) * solver.warmup_start_lr
            return ramp / solver.warmup_iter
        return formula(at - start, **settings)

    return rate


def warm_up_end(solver: Solver) -> int:
    """Return the first iteration with the policy's rate; 0 without a warm-up, max_iter if all is warm-up."""
    return min(max(solver.warmup_iter - solver.policy_start_iter, 0), solver.max_iter)


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings of one weight update: learning rate, momentum, factor of the L2 term (before multipliers)."""

    lr: float
    momentum: float
    weight_decay: float


def make_knobs(solver: Solver) -> Callable[..., Knobs]:
    """Return `knobs(iter, drops=0)`: the settings of the update from `iter` to `iter + 1`, 0 <= iter < max_iter. `drops`: the drops of `plateau`
    so far, which depend on the loss."""
    most = len(solver.plateau_winsize) if solver.lr_policy == "plateau" else 0
    rates = [learning_rate(solver, n) for n in range(most + 1)]

    def knobs(iter: int, drops: int = 0) -> Knobs:
        return Knobs(lr=rates[drops](iter), momentum=solver.momentum, weight_decay=solver.weight_decay)

    return knobs


# -- the facts of each solver type, in a literal table without torch. `engine.solvers` has the arithmetic, one class per type


@dataclass(frozen=True, slots=True)
class SolverType:
    """A type. `reads`: the fields of Solver that not every type reads, and `adapt` of ParamSpec. `slots`: the state between updates; () if it
    depends on momentum_form. `l2_alone`: published only with the L2 term. `divides`: by 0 if delta is 0. `momentum_is`: the meaning of
    momentum, and its usual value, if 0 would defeat the type."""

    reads: tuple[str, ...]
    slots: tuple[str, ...] = ()
    l2_alone: bool = False
    divides: bool = False
    momentum_is: tuple[str, float] | None = None


# The V of a type with momentum: in Caffe's form it holds steps, in torch's gradients.
MOMENTUM_SLOT = {MomentumForm.CAFFE: "steps", MomentumForm.TORCH: "gradients"}
_ADAMS = ("momentum", "momentum2", "delta")
# Running averages of the gradient and its square, and the number of their updates.
_AVERAGES = ("mean", "squares", "t")
_BETA1 = ("beta1", 0.9)
_BOTH = ("the decay of both its averages", 0.95)

SOLVER_TYPES: dict[str, SolverType] = {
    "SGD": SolverType(("momentum", "momentum_form", "local_lr_auto")),
    "Nesterov": SolverType(("momentum", "momentum_form")),
    "AdaGrad": SolverType(("delta",), ("sum_of_squares",), divides=True),
    "RMSProp": SolverType(("rms_decay", "delta"), ("squares",), divides=True),
    "AdaDelta": SolverType(("momentum", "delta"), ("squares", "squared_steps"), divides=True, momentum_is=_BOTH),
    "Adam": SolverType(_ADAMS, _AVERAGES, divides=True, momentum_is=_BETA1),
    "AdamW": SolverType(_ADAMS, _AVERAGES, l2_alone=True, divides=True, momentum_is=_BETA1),
    "LARS": SolverType(("momentum", "momentum_form", "local_gw_ratio", "delta", "adapt"), l2_alone=True),
    "LAMB": SolverType((*_ADAMS, "adapt"), _AVERAGES, l2_alone=True, divides=True, momentum_is=_BETA1),
}


def slots_of(type: str, form: MomentumForm) -> tuple[str, ...]:
    """Return the state that the type keeps. Types with the same slots can continue from each other's state."""
    return SOLVER_TYPES[type].slots or (MOMENTUM_SLOT[form],)


def fields_read(solver: Solver) -> frozenset[str]:
    """Return the fields in the table that this stage reads."""
    read = set(SOLVER_TYPES[solver.type].reads)
    if solver.type == "SGD" and solver.local_lr_auto:
        read |= {"local_gw_ratio", "local_lr_passes", "adapt"}
    return frozenset(read)


# -- the synchronisations of replicas (`sync_param`), which follow from the learning rates; and the boundaries of asynchronous stages

FOR_EVER = 1 << 62  # iterations


def parting(solver: Solver) -> int:
    """Return the iteration from which on replicas are updated separately."""
    assert solver.sync is not None
    return warm_up_end(solver) if solver.sync.start is SyncStart.WARMUP_END else 0


@lru_cache(maxsize=64)
def synchronisations(solver: Solver) -> tuple[int, ...]:
    """Return the updates after which the replicas are averaged, ascending, the last at the stage's end; () without replicas and with `ASYNC`.
    Excludes branch points: a stage's bits don't depend on the stages that start from it."""
    sync = solver.sync
    if sync is None or solver.asynchronous:
        return ()
    assert sync.period is not None
    rate = learning_rate(solver) if sync.rule is SyncRule.QSR else None
    iters, at = [], parting(solver)
    while at < solver.max_iter:
        length = sync.period if rate is None else qsr(sync, rate(at))
        at = min(at + length, solver.max_iter)
        iters.append(at)
    return tuple(iters)


def boundaries(solver: Solver, branch_points: Collection[int]) -> tuple[int, ...]:
    """Return the iterations of a stage with `ASYNC` at which all pushes are applied and none is in flight, ascending, the last at its end.

    >>> from stagerun.base.recipe import SyncMethod
    >>> how = Sync(method=SyncMethod.ASYNC, replicas=4, max_staleness=4)
    >>> rest = dict(base_lr=0.1, lr_policy="fixed", device_batch_size=1, batch_size=1, test_batch_size=1, random_seed=1, sync=how)
    >>> boundaries(Solver(max_iter=10, snapshot=4, test_interval=5, **rest), {7})
    (4, 5, 7, 8, 10)
    """
    every = [n for n in (solver.snapshot, solver.test_interval) if n]
    iters = {i for n in every for i in range(n, solver.max_iter, n)} | set(branch_points)
    return (*sorted(i for i in iters if i < solver.max_iter), solver.max_iter)


def qsr(sync: Sync, lr: float) -> int:
    """Return the iterations until the next synchronisation, by the quadratic rule: max(period, floor((alpha / lr)^2)), Gu, Lyu, Arora, Zhang
    and Huang, A Quadratic Synchronization Rule for Distributed Deep Learning (arXiv:2310.14423), algorithm 2. `lr`: of the next update.

    Exact for decimal numbers: 0.3 / 0.1 is 3.

    >>> from stagerun.base.recipe import SyncMethod
    >>> how = Sync(method=SyncMethod.LOCAL, replicas=4, rule=SyncRule.QSR, period=4, alpha=0.3)
    >>> [qsr(how, lr) for lr in (0.3, 0.1, 0.07)]
    [4, 9, 18]
    """
    assert sync.alpha is not None and sync.period is not None
    if lr == 0:
        return FOR_EVER
    return max(sync.period, min(FOR_EVER, floor((Fraction(repr(sync.alpha)) / Fraction(repr(lr))) ** 2)))
