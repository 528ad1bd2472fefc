"""Bytes that rank 0 sends for gradients and replicas, by the formulas of those who send them: `Comm.traffic` counts as much."""

from stagerun.base.recipe import Determinism, Solver, SyncMomentum
from stagerun.comm import Comm, dense_bytes
from stagerun.comm.average import average_bytes
from stagerun.engine.apart import numbers_agreed_on
from stagerun.engine.compression import compresses
from stagerun.engine.replicas import holders_of, shares_of
from stagerun.engine.state import TrainState, momentum, still, weights
from stagerun.engine.update import TAIL


def dense_bytes_of(determinism: Determinism, state: TrainState, solver: Solver, comm: Comm) -> int:
    """For an iteration of the stage without compression and replicas; 0 where it has neither, and with one worker."""
    if not compresses(solver) and solver.sync is None:
        return 0
    return every_iteration(determinism, state, solver, comm.size)


def every_iteration(determinism: Determinism, state: TrainState, solver: Solver, workers: int) -> int:
    """For an iteration in which all workers add up their gradients as they are."""
    elements, element_size = _sizes(state)
    return dense_bytes(determinism, elements, element_size, workers, solver.logical_workers, state.statistics.n + TAIL)


def apart(determinism: Determinism, state: TrainState, solver: Solver, workers: int) -> int:
    """For an iteration of replicas that have parted and don't meet: gradients within those that several ranks share, and what all agree on."""
    assert solver.sync is not None
    count, shares = solver.sync.replicas, shares_of(solver, workers)
    ranks, (elements, element_size) = holders_of(shares, count), _sizes(state)
    found = 2 * (workers - 1) * 8 * numbers_agreed_on(count) // workers
    for r, run in shares[0].items():
        found += dense_bytes(
            determinism,
            elements,
            element_size,
            len(ranks[r]),
            solver.logical_workers // count,
            state.statistics.n + TAIL,
            run,
        )
    return found


def meeting(state: TrainState, solver: Solver, workers: int, compressed: bool = False) -> int:
    """Bytes for what a synchronisation averages, beside what that iteration sends anyway; `compressed`: without the weights that are trained.
    What is frozen is not sent."""
    assert solver.sync is not None
    joined = weights(state) | (momentum(state) if solver.sync.momentum is SyncMomentum.AVERAGE else {})
    left_out = still(state, solver).union(p.name for p in state.solver.parameters if compressed)
    own = sum(ranks[0] == 0 for ranks in holders_of(shares_of(solver, workers), solver.sync.replicas))
    averaged = [t for name, t in joined.items() if t.is_floating_point() and name not in left_out]
    return average_bytes(workers, own, averaged)


def _sizes(state: TrainState) -> tuple[int, int]:
    tensors = [p.tensor for p in state.solver.parameters]
    return sum(t.numel() for t in tensors), tensors[0].element_size()
