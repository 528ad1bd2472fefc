"""Rules about replicas (`sync_param`). Pure."""

from collections.abc import Iterator

from stagerun.base.recipe import Schedule, Stage
from stagerun.base.text import count
from stagerun.schedule import parting
from stagerun.tools.lint.finding import Found, place_of


def one_replica(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """One replica is its own average: plain training, which is only slower. With `DILOCO` it is Lookahead (arXiv:1907.08610), which one
    may want."""
    sync = stage.solver.sync
    if sync is not None and sync.replicas == 1 and sync.outer is None:
        text = f"stage `{stage.name}` has one replica, whose average it is itself: it trains as without `sync_param`"
        hint = "write `replicas: 2` or more, or remove `sync_param`"
        yield text, place_of(stage, "sync_param.replicas"), hint


def period_beyond(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """The first synchronisation would come after the stage's end, so there is one at its end alone."""
    sync = stage.solver.sync
    if sync is None or sync.period is None:
        return
    left = stage.solver.max_iter - parting(stage.solver)
    if sync.period > left:
        text = f"`period` {sync.period} is never over: the replicas of stage `{stage.name}` go apart for {count(left, 'iteration')}"
        hint = f"they meet at the stage's end alone; `period: {left}` says the same"
        yield text, place_of(stage, "sync_param.period"), hint


def staleness_waits(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """While one replica computes, each of the others pushes once or more: with equal speeds staleness is replicas - 1."""
    sync = stage.solver.sync
    if sync is not None and sync.max_staleness is not None and sync.max_staleness < sync.replicas - 1:
        text = (
            f"`max_staleness` {sync.max_staleness} keeps replicas of stage `{stage.name}` waiting: "
            f"{sync.replicas} of equal speed make each other {sync.replicas - 1} updates stale"
        )
        hint = f"write `max_staleness: {sync.replicas - 1}` or more, or fewer `replicas`"
        yield text, place_of(stage, "sync_param.max_staleness"), hint
