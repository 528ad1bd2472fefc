"""When the replicas of a stage meet, in words. Pure."""

from stagerun.base.recipe import Schedule, Solver, Stage, SyncMethod, SyncMomentum, SyncRule
from stagerun.base.text import count
from stagerun.schedule import parting, synchronisations

# So many of a stage's synchronisations are named.
NAMED = 5


def replicas(solver: Solver) -> str:
    """`4, LOCAL, by QSR with alpha 0.2 every 4 or more iterations, from iteration 780: 312 synchronisations, every 26.3 iterations on
    average: 784, 788, ...`; the average is that of QSR alone"""
    sync = solver.sync
    assert sync is not None
    every = f"every {count(sync.period, 'iteration')}"
    if sync.rule is SyncRule.QSR:
        every = f"by QSR with alpha {sync.alpha:g} every {sync.period} or more iterations"
    parts = [str(sync.replicas), sync.method.value, every]
    parts += ["momentum averaged"] if sync.momentum is SyncMomentum.AVERAGE else []
    if sync.method is SyncMethod.DILOCO and sync.outer is not None:
        parts.append(f"outer {sync.outer.type} at {sync.outer.base_lr:g} with momentum {sync.outer.momentum:g}")
    start, found = parting(solver), synchronisations(solver)
    parts += [f"from iteration {start}"] if start else []
    mean = (solver.max_iter - start) / max(len(found), 1)
    named = ", ".join(map(str, found[:NAMED])) + (", ..." if len(found) > NAMED else "")
    mostly = f", every {mean:.4g} iterations on average" if sync.rule is SyncRule.QSR else ""
    often = f"{count(len(found), 'synchronisation')}{mostly}: {named}"
    return f"{', '.join(parts)}: {often}"


def starts_between(schedule: Schedule, stage: Stage) -> str:
    """What a stage starts from whose parent's replicas haven't met there; '' for any other."""
    if stage.parent is None:
        return ""
    solver, at = schedule.stage(stage.parent).solver, schedule.start_iter(stage)
    if solver.sync is None or at <= parting(solver) or at in synchronisations(solver):
        return ""
    met = max((i for i in synchronisations(solver) if i < at), default=parting(solver))
    return f"starts from the average of {solver.sync.replicas} replicas, {count(at - met, 'iteration')} after they last met"
