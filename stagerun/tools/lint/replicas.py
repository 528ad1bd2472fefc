"""Rules about replicas (`sync_param`). Pure."""

from collections.abc import Iterator

from stagerun.base.recipe import Schedule, Stage, Sync
from stagerun.base.text import count
from stagerun.schedule import parting
from stagerun.tools.lint.finding import Finding, place_of


def _with_replicas(schedule: Schedule) -> Iterator[tuple[Stage, Sync]]:
    for stage in schedule.stages:
        if stage.solver.sync is not None:
            yield stage, stage.solver.sync


def one_replica(schedule: Schedule) -> Iterator[Finding]:
    """One replica is its own average: plain training, which is only slower. With `DILOCO` it is Lookahead (arXiv:1907.08610), which one
    may want."""
    for stage, sync in _with_replicas(schedule):
        if sync.replicas == 1 and sync.outer is None:
            text = (
                f"stage `{stage.name}` has one replica, whose average it is itself: it trains as without `sync_param`"
            )
            hint = "write `replicas: 2` or more, or remove `sync_param`"
            yield Finding("one-replica", text, place_of(stage, "sync_param.replicas"), hint)


def period_beyond(schedule: Schedule) -> Iterator[Finding]:
    """The first synchronisation would come after the stage's end, so there is one at its end alone."""
    for stage, sync in _with_replicas(schedule):
        if sync.period is None:
            continue
        left = stage.solver.max_iter - parting(stage.solver)
        if sync.period > left:
            text = f"`period` {sync.period} is never over: the replicas of stage `{stage.name}` go apart for {count(left, 'iteration')}"
            hint = f"they meet at the stage's end alone; `period: {left}` says the same"
            yield Finding("period-beyond", text, place_of(stage, "sync_param.period"), hint)


def staleness_waits(schedule: Schedule) -> Iterator[Finding]:
    """While one replica computes, each of the others pushes once or more: with equal speeds staleness is replicas - 1."""
    for stage, sync in _with_replicas(schedule):
        if sync.max_staleness is not None and sync.max_staleness < sync.replicas - 1:
            text = (
                f"`max_staleness` {sync.max_staleness} keeps replicas of stage `{stage.name}` waiting: "
                f"{sync.replicas} of equal speed make each other {sync.replicas - 1} updates stale"
            )
            hint = f"write `max_staleness: {sync.replicas - 1}` or more, or fewer `replicas`"
            yield Finding("staleness-waits", text, place_of(stage, "sync_param.max_staleness"), hint)
