"""Errors of meaning in `compress_param` and `sync_param`, and the values that `compress_param` makes. Pure.

A rule yields mistakes, each with its place, text and hint; it is left out where a value that it needs could not be read.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from stagerun.base.errors import Problems, Span, listing
from stagerun.base.recipe import Compression, CompressionRule, Memory, Method
from stagerun.base.text import count
from stagerun.language.values import build
from stagerun.language.view import Doubtful, View
from stagerun.wire.values import ALLOWED, METHODS, SETTINGS, settings_of, settings_read

Mistakes = Iterator[tuple[Span, str, str]]


def check_compression(stage: str, view: View, problems: Problems) -> None:
    """Report all mistakes in one stage's `compress_param`."""
    _check(COMPRESSION, view.inside("compress_param"), stage, view, problems)


def check_sync(stage: str, view: View, problems: Problems) -> None:
    """Report all mistakes in one stage's `sync_param`."""
    _check(SYNC, view.inside("sync_param"), stage, view, problems)


def _check(
    rules: tuple[Callable[[View, View, str], Mistakes], ...], message: View, stage: str, view: View, problems: Problems
) -> None:
    for rule in rules:
        with contextlib.suppress(Doubtful):
            for place, text, hint in rule(message, view, stage):
                problems.add(place, text, hint)


# -- compress_param


def _method(view: View) -> Method:
    """The method of a CompressionParameter or of an entry of `param`. Doubtful where it is missing, which is reported as such."""
    name = view.text("method")
    if name is None:
        raise Doubtful("method")
    return Method(name)


def _rules(message: View) -> Iterator[tuple[View, Method]]:
    """The entries of `param` whose method is known."""
    for rule in message.views("param"):
        with contextlib.suppress(Doubtful):
            yield rule, _method(rule)


def _unread_settings(message: View, view: View, stage: str) -> Mistakes:
    """What is written and not read, in the message itself and in each entry of `param`."""
    allow = tuple(Method(name) for name in message.texts("allow"))
    rules = [(rule, method) for rule, method in _rules(message) if method is not Method.AUTO]
    for part, method in [(message, _method(message)), *rules]:
        for name in SETTINGS:
            if name in part.block.entries and name not in settings_read(method, allow):
                readers = listing([m.value for m, known in METHODS.items() if name in known.reads], "or")
                chosen = " with what it may choose here" if method is Method.AUTO else ""
                text = f"method `{method.value}` does not read `{name}`{chosen}"
                yield part.place(name), text, f"remove it, or write method {readers}"


def _allow(message: View, view: View, stage: str) -> Mistakes:
    """`allow` is for AUTO, and names methods that it can choose, each once."""
    method, seen = _method(message), set()
    if not message.has("allow"):
        return
    if method is not Method.AUTO:
        text = f"`allow` goes with method `AUTO`, not with `{method.value}`"
        yield message.place("allow"), text, "remove it, or write `method: AUTO`"
        return
    for value in message.block.entries["allow"].values:
        if value.value == "AUTO":
            yield value.span, "`AUTO` can't choose `AUTO`", "name methods that it may choose, or leave `allow` out"
        elif value.value == "NONE":
            yield value.span, "`allow` names `NONE`, which is always allowed", "remove it"
        elif value.value in seen:
            yield value.span, f"`allow` names `{value.value}` twice", "remove one of them"
        seen.add(value.value)


def _auto_for_some(message: View, view: View, stage: str) -> Mistakes:
    for rule, method in _rules(message):
        if method is Method.AUTO:
            text = "method `AUTO` can't be for some parameters only"
            yield rule.place("method"), text, "write `method: AUTO` outside `param`"


def _scope(message: View, view: View, stage: str) -> Mistakes:
    """One vector of all parameters has one method, and no rows and columns."""
    if message.text("scope") != "ENTIRE_MODEL":
        return
    method, hint = _method(message), "write `scope: LAYERWISE`"
    why = "with `scope: ENTIRE_MODEL`: a vector of all parameters is not a matrix"
    if method is Method.POWER_SGD:
        yield message.place("method"), f"method `POWER_SGD` {why}", hint
    for value in message.block.entries["allow"].values if message.has("allow") else ():
        if value.value == "POWER_SGD":
            yield value.span, f"`allow: POWER_SGD` {why}", hint
    for rule, own in _rules(message):
        if own not in (Method.NONE, Method.AUTO):
            text = f"method `{own.value}` for some parameters with `scope: ENTIRE_MODEL`, which makes all of them one vector"
            yield rule.place("method"), text, f"write `method: NONE`, which leaves them out of it, or {hint[6:]}"


def _memory(message: View, view: View, stage: str) -> Mistakes:
    """Something must be lost for a residual to be left."""
    method = _method(message)
    lossy = any(not METHODS[own].exact for _, own in _rules(message) if own is not Method.AUTO)
    if message.text("memory") == "RESIDUAL" and METHODS[method].exact and not lossy:
        text = f"`memory: RESIDUAL` with method `{method.value}`, which loses nothing"
        yield message.place("memory"), text, "remove it"


def _compression_starts(message: View, view: View, stage: str) -> Mistakes:
    """Compression begins before the stage ends."""
    start, length = message.whole("start_iter"), view.whole("max_iter")
    if start and length and start >= length:
        text = f"compression would start at iteration {start}, and the stage ends after {length}"
        yield message.place("start_iter"), text, f"stage `{stage}`: {view.origin('max_iter')}"


COMPRESSION = _unread_settings, _allow, _auto_for_some, _scope, _memory, _compression_starts


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


# -- sync_param

# The methods that read a field which another does not.
_READERS = {
    "rule": ("LOCAL",),
    "alpha": ("LOCAL",),
    "momentum": ("LOCAL",),
    "outer": ("DILOCO",),
    "period": ("LOCAL", "DILOCO"),
    "start": ("LOCAL", "DILOCO"),
    "max_staleness": ("ASYNC",),
}
# What a method can't do without, and what to write.
_NEEDED = {"LOCAL": ("period", "8"), "DILOCO": ("period", "64"), "ASYNC": ("max_staleness", "4")}


def _fields(message: View, view: View, stage: str) -> Mistakes:
    """A method reads some fields, and can't do without one of them."""
    method = message.text("method")
    if method is None:
        return
    for name, readers in _READERS.items():
        if method not in readers and message.has(name):
            other = listing([f"method: {reader}" for reader in readers], "or")
            yield message.place(name), f"method `{method}` does not read `{name}`", f"remove it, or write {other}"
    name, value = _NEEDED[method]
    if not message.has(name):
        yield message.place("method"), f"method `{method}` lacks `{name}`", f"write `{name}: {value}`, say"


def _alpha(message: View, view: View, stage: str) -> Mistakes:
    """`alpha` and `rule: QSR` go together."""
    if message.text("method") != "LOCAL":
        return
    if message.text("rule") == "QSR" and not message.has("alpha"):
        yield message.place("rule"), "`rule: QSR` without `alpha`", "write `alpha: 0.2`, say, of SGD"
    elif message.text("rule") != "QSR" and message.has("alpha"):
        text = "`alpha` without `rule: QSR`, which alone reads it"
        yield message.place("alpha"), text, "write `rule: QSR`, or remove it"


def _replicas(message: View, view: View, stage: str) -> Mistakes:
    """Each replica has as many device batches as any other."""
    replicas, batch, device_batch = message.whole("replicas"), view.whole("batch_size"), view.whole("device_batch_size")
    if not replicas or not batch or not device_batch or batch % device_batch or message.text("method") == "ASYNC":
        return
    logical = batch // device_batch
    if logical % replicas:
        text = f"{count(replicas, 'replica')} can't share out a batch evenly: batch_size / device_batch_size is"
        fits = [str(n) for n in range(2, logical + 1) if logical % n == 0]
        hint = f"`replicas` can be {listing(fits, 'or')}" if fits else "make device_batch_size smaller"
        sizes = f"(batch_size {batch}, device_batch_size {device_batch})"
        yield message.place("replicas"), f"{text} {logical}", f"{hint} {sizes}"


def _asynchronous(message: View, view: View, stage: str) -> Mistakes:
    """Several replicas push; nothing follows each update of all, or goes back."""
    if message.text("method") != "ASYNC":
        return
    if message.whole("replicas") == 1:
        text = "`method: ASYNC` with one replica, which has nobody to wait for"
        yield message.place("replicas"), text, "write `replicas: 2` or more, or remove `sync_param`"
    if (on_nan := view.text("on_nan")) in ("ROLLBACK", "SKIP"):
        text = f"`on_nan: {on_nan}` with `method: ASYNC`: pushes after the one that failed are applied already"
        yield view.place("on_nan"), text, "write `on_nan: STOP`"
    if view.text("lr_policy") == "plateau":
        text = "lr_policy `plateau` with `method: ASYNC`: the next learning rate is needed before the last losses are known"
        yield view.place("lr_policy"), text, "take another lr_policy, or `method: LOCAL`"


def _replicas_start(message: View, view: View, stage: str) -> Mistakes:
    """Something is left after the warm-up."""
    warm_up, length = view.whole("warmup_iter"), view.whole("max_iter")
    skipped = view.whole("policy_start_iter") or 0
    starts = message.text("method") != "ASYNC" and message.text("start") == "WARMUP_END"
    if starts and warm_up and length and warm_up - skipped >= length:
        text = "the replicas would start at the end of the warm-up, and the stage ends with it, after"
        hint = "write `start: STAGE_START`, or remove `sync_param`"
        yield message.place("start"), f"{text} {length} iterations", hint


def _neighbours(message: View, view: View, stage: str) -> Mistakes:
    """What doesn't go together with replicas, or with learning rates that are not known beforehand."""
    if view.has("audit_param"):
        text = "`audit_param` with `sync_param`: between synchronisations there is no one state to prove"
        yield view.place("audit_param"), text, 'remove it, or leave it out of this stage: `clear: "audit_param"`'
    if view.has("compress_param"):
        text = "`compress_param` with `sync_param`: replicas send their weights as they are, and seldom"
        hint = f'remove one of them from stage `{stage}`: `clear: "compress_param"` leaves it out there'
        yield message.block.place, text, hint
    if view.has("ema_decay"):
        text = "`sync_param` with `ema_decay`: an average follows every update, and replicas meet only at some"
        yield view.place("ema_decay"), text, "remove one of them"
    if view.text("lr_policy") == "plateau" and message.text("rule") == "QSR":
        text = "`rule: QSR` with lr_policy `plateau`, whose learning rates are not known beforehand"
        yield message.place("rule"), text, "write `rule: CONSTANT`, or another lr_policy"


SYNC = _fields, _alpha, _replicas, _asynchronous, _replicas_start, _neighbours
