"""When the replicas of a stage meet, or that they never do, in words. Pure."""

from stagerun.base.recipe import Schedule, Solver, Stage, SyncMethod, SyncMomentum, SyncRule
from stagerun.base.text import count
from stagerun.schedule import boundaries, parting, synchronisations

# So many of a stage's synchronisations are named.
NAMED = 5


def replicas(solver: Solver) -> str:
    """`4, LOCAL, by QSR with alpha 0.2 every 4 or more iterations, from iteration 780: 312 synchronisations, every 26.3 iterations on
    average: 784, 788, ...`; the average is that of QSR alone"""
    sync = solver.sync
    assert sync is not None and sync.period is not None
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


def pushes(schedule: Schedule, stage: Stage) -> list[str]:
    """The same of a stage with `ASYNC`, a line each: who pushes what; the boundaries; what the bits hang on."""
    solver, sync = stage.solver, stage.solver.sync
    assert sync is not None
    found = boundaries(solver, schedule.branch_points(stage.name))
    named = ", ".join(map(str, found[:NAMED])) + (", ..." if len(found) > NAMED else "")
    return [
        f"replicas: {sync.replicas}, ASYNC: each pushes iterations of {count(solver.batch_size, 'image')}, at most "
        f"{count(sync.max_staleness or 0, 'update')} behind",
        f"all iterations before are applied, and none after has started, at {named}",
        "the order of pushes isn't known beforehand, and bits hang on it: `run --replay OUT` trains in that of OUT again",
    ]


def starts_between(schedule: Schedule, stage: Stage) -> str:
    """What a stage starts from whose parent's replicas haven't met there; '' for any other."""
    if stage.parent is None:
        return ""
    solver, at = schedule.stage(stage.parent).solver, schedule.start_iter(stage)
    if solver.sync is None or solver.asynchronous or at <= parting(solver) or at in synchronisations(solver):
        return ""
    met = max((i for i in synchronisations(solver) if i < at), default=parting(solver))
    return f"starts from the average of {solver.sync.replicas} replicas, {count(at - met, 'iteration')} after they last met"
