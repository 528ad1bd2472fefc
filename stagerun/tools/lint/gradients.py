"""Rules about compressed gradients (`compress_param`). Pure."""

from collections.abc import Callable, Iterator

from stagerun.base.recipe import Compression, Determinism, Memory, Method, Schedule, Stage
from stagerun.tools.lint.finding import Found, place_of

# Bytes of a message, as a share of those of the vector in float32: of methods for which that follows from the settings. TOP_K says which
# numbers it sends by a place of a byte or more each, or by a bit for every number.
_SHARES: dict[Method, Callable[[Compression], float]] = {
    Method.TOP_K: lambda how: (how.ratio or 0.0) + min((how.ratio or 0.0) / 4, 1 / 32),
    Method.RANDOM_K: lambda how: how.ratio or 0.0,
    Method.TERNGRAD: lambda how: 1 / 16,
}
# With `determinism: ELASTIC`, how many times more must be sent: dense sums need more than a ring's bytes where numbers are not powers of 2.
_SURELY = 2.0


def compress_alone(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """Compression in a stage whose update is one device batch: no second worker can take part, and nothing is ever sent. What the
    compression leaves out is left out all the same."""
    how = stage.solver.compress
    if how is not None and how.method is not Method.NONE and stage.solver.logical_workers == 1:
        text = (
            f"stage `{stage.name}` compresses gradients, and its update is one device batch: one worker sends nothing"
        )
        hint = "a smaller `device_batch_size` gives more workers something to do; or remove `compress_param`"
        yield text, place_of(stage, "compress_param.method"), hint


def compress_more(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """Messages that take no fewer bytes, in all, than dense gradients. A message, a share s of the vector, goes to each of the other
    workers: s (W-1), where a dense sum takes 2 (W-1)/W. So s = 1 is too much for two workers already, and less for more. With
    `determinism: ELASTIC` each logical worker sends one: s (W-1) L/W.
    """
    how, senders = stage.solver.compress, stage.solver.logical_workers
    if how is None or how.method not in _SHARES or senders == 1:
        return
    share = _SHARES[how.method](how)
    elastic = schedule.determinism is Determinism.ELASTIC
    times = share * (senders if elastic else 2) / 2
    if times < (_SURELY if elastic else 1.0):
        return
    about = "about " * elastic
    text = f"{how.method.value} of stage `{stage.name}` sends {about}{times:.3g} times the bytes of dense gradients, or more"
    hint = "a smaller `ratio`, or remove `compress_param`"
    if elastic:
        hint = f"each of {senders} logical workers sends a message of its own: a larger `device_batch_size` makes fewer"
    yield text, place_of(stage, "compress_param.ratio", "compress_param.method"), hint


# Methods that leave out or distort the same part of the gradient again and again where nothing remembers it, and who shows it.
_FORGETFUL = {
    Method.TOP_K: "arXiv:1809.07599",
    Method.THRESHOLD: "arXiv:1809.07599",
    Method.POWER_SGD: "arXiv:1905.13727",
}


def no_memory(schedule: Schedule, stage: Stage) -> Iterator[Found]:
    """A biased method without memory: what it leaves out is lost in every update, and training may not converge, or to worse weights."""
    how = stage.solver.compress
    if how is not None and how.method in _FORGETFUL and how.memory is Memory.NONE:
        text = f"{how.method.value} of stage `{stage.name}` has no memory: what it leaves out of a gradient is lost"
        hint = f"write `memory: RESIDUAL`, which costs no bytes; {_FORGETFUL[how.method]} shows why"
        yield text, place_of(stage, "compress_param.memory", "compress_param.method"), hint
