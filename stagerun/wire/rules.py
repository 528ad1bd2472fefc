"""Errors of meaning in `compress_param` and `sync_param`, and the values that `compress_param` makes. Pure."""

from dataclasses import replace
from typing import Any

from stagerun.base.errors import listing
from stagerun.base.recipe import Compression, CompressionRule, Memory, Method
from stagerun.base.text import count
from stagerun.language.rules.rule import Found, Message, Rule, excludes, needs, read_by, wrong
from stagerun.language.values import build
from stagerun.language.view import View
from stagerun.wire.values import ALLOWED, METHODS, SETTINGS, settings_of, settings_read

# -- compress_param


def compression(view: View) -> Compression:
    """The value, with the defaults that follow from the method: its settings, its memory, and those of the rules."""
    written = build(Compression, view, memory=Memory.NONE, param=())
    method, memory = written.method, view.text("memory")
    allow = written.allow or (ALLOWED if method is Method.AUTO else ())

    def completed(one: Any, *around: Compression) -> Any:
        kept = Memory(memory) if memory else METHODS[one.method].memory
        settings: dict[str, Any] = settings_of(one.method, one, *around, allow=allow)
        return replace(one, **settings, memory=kept)

    param = tuple(completed(build(CompressionRule, rule), written) for rule in view.views("param"))
    return replace(completed(written), allow=allow, param=param)


def _unread_settings(m: Message) -> Found:
    """What is written and not read, in the message itself and in each entry of `param`."""
    auto = m.method == "AUTO"
    allow = tuple(map(Method, m.allow)) if auto and "allow" in m.view.block.entries else ()
    for name in SETTINGS:
        if name in m.view.block.entries and name not in settings_read(Method(m.method), allow):
            readers = listing([method.value for method, known in METHODS.items() if name in known.reads])
            chosen = " with what it may choose here" if auto else ""
            text = f"method `{m.method}` does not read `{name}`{chosen}"
            yield m.place(name), text, f"remove it, or write method {readers}"


def _allow(m: Message) -> Found:
    """`allow` names methods that AUTO can choose, each once."""
    seen = set()
    for value in m.view.block.entries["allow"].values if m.method == "AUTO" else ():
        if value.value == "AUTO":
            yield value.span, "`AUTO` can't choose `AUTO`", "name methods that it may choose, or leave `allow` out"
        elif value.value == "NONE":
            yield value.span, "`allow` names `NONE`, which is always allowed", "remove it"
        elif value.value in seen:
            yield value.span, f"`allow` names `{value.value}` twice", "remove one of them"
        seen.add(value.value)


def _entire_model(m: Message) -> Found:
    """One vector of all parameters has one method, and no rows and columns."""
    hint = "write `scope: LAYERWISE`"
    why = "with `scope: ENTIRE_MODEL`: a vector of all parameters is not a matrix"
    if m.scope != "ENTIRE_MODEL":
        return
    if m.method == "POWER_SGD":
        yield m.place("method"), f"method `POWER_SGD` {why}", hint
    for value in m.view.block.entries["allow"].values if m.allow else ():
        if value.value == "POWER_SGD":
            yield value.span, f"`allow: POWER_SGD` {why}", hint
    for rule in m.param:
        if rule.method not in ("NONE", "AUTO"):
            text = f"method `{rule.method}` for some parameters with `scope: ENTIRE_MODEL`, which makes all of them one vector"
            yield rule.place("method"), text, f"write `method: NONE`, which leaves them out of it, or {hint[6:]}"


def _loses_nothing(m: Message) -> bool:
    """Something must be lost for a residual to be left."""
    return all(METHODS[Method(one.method)].exact for one in (m, *m.param) if one is m or one.method != "AUTO")


# -- sync_param


def _replicas(m: Message) -> Found:
    """Each replica has as many device batches as any other."""
    batch, device = m.settings.batch_size, m.settings.device_batch_size
    logical = batch // device
    if m.method != "ASYNC" and batch % device == 0 and logical % m.replicas:
        fits = [str(n) for n in range(2, logical + 1) if logical % n == 0]
        hint = f"`replicas` can be {listing(fits)}" if fits else "make device_batch_size smaller"
        text = f"{count(m.replicas, 'replica')} can't share out a batch evenly: batch_size / device_batch_size is {logical}"
        yield m.place("replicas"), text, f"{hint} (batch_size {batch}, device_batch_size {device})"


def _warm_up_left(m: Message) -> int:
    """Iterations of the stage after its warm-up."""
    left: int = m.settings.max_iter - m.settings.warmup_iter + m.settings.policy_start_iter
    return left


_ASYNC, _PLATEAU = "sync_param.method: ASYNC", 'Solver.lr_policy: "plateau"'
_LATE = "pushes after the one that failed are applied already"
_UNKNOWN = "the next learning rate is needed before the last losses are known"
_PROOF = "between synchronisations there is no one state to prove"
_AVERAGE = "an average follows every update, and replicas meet only at some"
RULES = (
    Rule("CompressionParameter", _unread_settings),
    Rule("CompressionRule", _unread_settings),
    wrong(
        "CompressionParameter.allow", "`allow` goes with method `AUTO`, not with `{method}`",
        "remove it, or write `method: AUTO`",
        lambda m: m.method != "AUTO",
    ),
    Rule("CompressionParameter.allow", _allow),
    wrong(
        "CompressionRule.method: AUTO", "method `AUTO` can't be for some parameters only",
        "write `method: AUTO` outside `param`",
    ),
    Rule("CompressionParameter.scope", _entire_model),
    wrong(
        "CompressionParameter.memory: RESIDUAL", "`memory: RESIDUAL` with method `{method}`, which loses nothing",
        "remove it", _loses_nothing,
    ),
    wrong(
        "CompressionParameter.start_iter",
        "compression would start at iteration {start_iter}, and the stage ends after {settings.max_iter}",
        lambda m: f"stage `{m.stage}`: {m.settings.view.origin('max_iter')}",
        lambda m: m.start_iter >= m.settings.max_iter,
    ),
    *read_by("SyncParameter", "method", {
        "rule": "LOCAL", "alpha": "LOCAL", "momentum": "LOCAL", "outer": "DILOCO", "period": "LOCAL DILOCO",
        "start": "LOCAL DILOCO",
        "max_staleness": "ASYNC",
    }),
    needs("SyncParameter.method: LOCAL", "period", "", "write `period: 8`, say"),
    needs("SyncParameter.method: DILOCO", "period", "", "write `period: 64`, say"),
    needs("SyncParameter.method: ASYNC", "max_staleness", "", "write `max_staleness: 4`, say"),
    wrong(
        "SyncParameter.rule: QSR", "`rule: QSR` without `alpha`", "write `alpha: 0.2`, say, of SGD",
        lambda m: m.method == "LOCAL" and "alpha" not in m,
    ),
    wrong(
        "SyncParameter.alpha", "`alpha` without `rule: QSR`, which alone reads it", "write `rule: QSR`, or remove it",
        lambda m: m.method == "LOCAL" and m.rule != "QSR",
    ),
    Rule("SyncParameter.replicas", _replicas),
    wrong(
        "Solver.sync_param.start: WARMUP_END",
        "the replicas would start at the end of the warm-up, and the stage ends with it, after {max_iter} iterations",
        "write `start: STAGE_START`, or remove `sync_param`",
        lambda m: m.sync_param.method != "ASYNC" and m.warmup_iter and _warm_up_left(m) <= 0,
    ),
    excludes(
        "SyncParameter.replicas: 1", "method: ASYNC", "one has nobody to wait for",
        "write `replicas: 2` or more, or remove `sync_param`",
    ),
    excludes("Solver.on_nan: ROLLBACK", _ASYNC, _LATE, "write `on_nan: STOP`"),
    excludes("Solver.on_nan: SKIP", _ASYNC, _LATE, "write `on_nan: STOP`"),
    excludes(_PLATEAU, _ASYNC, _UNKNOWN, "take another lr_policy, or `method: LOCAL`"),
    excludes(
        _PLATEAU, "sync_param.rule: QSR", "its learning rates are not known beforehand",
        "write `rule: CONSTANT`, or another lr_policy",
    ),
    excludes(
        "Solver.audit_param", "sync_param", _PROOF,
        'remove it, or leave it out of this stage: `clear: "audit_param"`',
    ),
    wrong(
        "Solver.sync_param", "`sync_param` with `compress_param`: replicas send their weights as they are, and seldom",
        'remove one of them from stage `{stage}`: `clear: "compress_param"` leaves it out there',
        lambda m: "compress_param" in m,
    ),
    excludes("Solver.ema_decay", "sync_param", _AVERAGE),
)  # fmt: skip
