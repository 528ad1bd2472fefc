"""Rules about what workers send each other: compressed gradients (`compress_param`), replicas (`sync_param`). Pure."""

from collections.abc import Callable

from stagerun.base.recipe import Compression, Determinism, Memory, Method
from stagerun.base.text import count
from stagerun.language.rules.rule import Found
from stagerun.schedule import parting
from stagerun.tools.lint.looked import Looked, warning

# Bytes of a message, as a share of those of the vector in float32: of methods for which that follows from the settings. TOP_K says which
# numbers it sends by a place of a byte or more each, or by a bit for every number.
_SHARES: dict[Method, Callable[[Compression], float]] = {
    Method.TOP_K: lambda how: (how.ratio or 0.0) + min((how.ratio or 0.0) / 4, 1 / 32),
    Method.RANDOM_K: lambda how: how.ratio or 0.0,
    Method.TERNGRAD: lambda how: 1 / 16,
}
# With `determinism: ELASTIC`, how many times more must be sent: dense sums need more than a ring's bytes where numbers are not powers of 2.
_SURELY = 2.0


def compress_alone(it: Looked) -> Found:
    """Compression in a stage whose update is one device batch: no second worker can take part, and nothing is ever sent. What the
    compression leaves out is left out all the same."""
    how = it.solver.compress
    if how is not None and how.method is not Method.NONE and it.solver.logical_workers == 1:
        text = f"{it.name} compresses gradients, and its update is one device batch: one worker sends nothing"
        hint = "a smaller `device_batch_size` gives more workers something to do; or remove `compress_param`"
        yield it.place("compress_param.method"), text, hint


def compress_more(it: Looked) -> Found:
    """Messages that take no fewer bytes, in all, than dense gradients. A message, a share s of the vector, goes to each of the other
    workers: s (W-1), where a dense sum takes 2 (W-1)/W. So s = 1 is too much for two workers already, and less for more. With
    `determinism: ELASTIC` each logical worker sends one: s (W-1) L/W.
    """
    how, senders = it.solver.compress, it.solver.logical_workers
    if how is None or how.method not in _SHARES or senders == 1:
        return
    share = _SHARES[how.method](how)
    elastic = it.schedule.determinism is Determinism.ELASTIC
    times = share * (senders if elastic else 2) / 2
    about, least, hint = "", 1.0, "a smaller `ratio`, or remove `compress_param`"
    if elastic:
        about, least = "about ", _SURELY
        hint = f"each of {senders} logical workers sends a message of its own: a larger `device_batch_size` makes fewer"
    if times >= least:
        text = f"{how.method.value} of {it.name} sends {about}{times:.3g} times the bytes of dense gradients, or more"
        yield it.place("compress_param.ratio", "compress_param.method"), text, hint


# Methods that leave out or distort the same part of the gradient again and again where nothing remembers it, and who shows it.
_FORGETFUL = {
    Method.TOP_K: "arXiv:1809.07599",
    Method.THRESHOLD: "arXiv:1809.07599",
    Method.POWER_SGD: "arXiv:1905.13727",
}


def no_memory(it: Looked) -> Found:
    """A biased method without memory: what it leaves out is lost in every update, and training may not converge, or to worse weights."""
    how = it.solver.compress
    if how is not None and how.method in _FORGETFUL and how.memory is Memory.NONE:
        text = f"{how.method.value} of {it.name} has no memory: what it leaves out of a gradient is lost"
        hint = f"write `memory: RESIDUAL`, which costs no bytes; {_FORGETFUL[how.method]} shows why"
        yield it.place("compress_param.memory", "compress_param.method"), text, hint


# -- replicas


def one_replica(it: Looked) -> Found:
    """One replica is its own average: plain training, which is only slower. With `DILOCO` it is Lookahead (arXiv:1907.08610), which one
    may want."""
    sync = it.solver.sync
    if sync is not None and sync.replicas == 1 and sync.outer is None:
        text = f"{it.name} has one replica, whose average it is itself: it trains as without `sync_param`"
        hint = "write `replicas: 2` or more, or remove `sync_param`"
        yield it.place("sync_param.replicas"), text, hint


def period_beyond(it: Looked) -> Found:
    """The first synchronisation would come after the stage's end, so there is one at its end alone."""
    sync = it.solver.sync
    if sync is None or sync.period is None:
        return
    left = it.solver.max_iter - parting(it.solver)
    if sync.period > left:
        text = (
            f"`period` {sync.period} is never over: the replicas of {it.name} go apart for {count(left, 'iteration')}"
        )
        hint = f"they meet at the stage's end alone; `period: {left}` says the same"
        yield it.place("sync_param.period"), text, hint


def staleness_waits(it: Looked) -> Found:
    """While one replica computes, each of the others pushes once or more: with equal speeds staleness is replicas - 1."""
    sync = it.solver.sync
    if sync is not None and sync.max_staleness is not None and sync.max_staleness < sync.replicas - 1:
        text = (
            f"`max_staleness` {sync.max_staleness} keeps replicas of {it.name} waiting: "
            f"{sync.replicas} of equal speed make each other {sync.replicas - 1} updates stale"
        )
        hint = f"write `max_staleness: {sync.replicas - 1}` or more, or fewer `replicas`"
        yield it.place("sync_param.max_staleness"), text, hint


RULES = (
    warning("compress-alone", compress_alone, "gradients are compressed that one worker alone can't send"),
    warning("compress-more", compress_more, "compressed gradients that take more bytes than dense ones"),
    warning("no-memory", no_memory, "a compression that loses the same part of each gradient, since it has no memory"),
    warning("one-replica", one_replica, "a network whose replicas meet, and which has one"),
    warning(
        "period-beyond", period_beyond, "replicas that meet at the stage's end alone, since their period is longer"
    ),
    warning(
        "staleness-waits", staleness_waits, "a bound on staleness that keeps replicas of `ASYNC` waiting for each other"
    ),
)
