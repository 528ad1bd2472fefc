"""Errors of meaning in `sync_param`. Pure."""

import contextlib
from collections.abc import Callable

from stagerun.base.errors import Problems, listing
from stagerun.base.text import count
from stagerun.language.view import Doubtful, View

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


def check_sync(stage: str, view: View, problems: Problems) -> None:
    """Everything about one stage's `sync_param`."""
    message = view.view("sync_param")
    if message is None:
        return
    for check in CHECKS:
        with contextlib.suppress(Doubtful):
            check(stage, view, message, problems)


def _unread(stage: str, view: View, message: View, problems: Problems) -> None:
    method = message.text("method")
    for name, readers in _READERS.items():
        if method is not None and method not in readers and message.has(name):
            text = f"method `{method}` does not read `{name}`"
            other = listing([f"method: {reader}" for reader in readers], "or")
            problems.add(message.place(name), text, f"remove it, or write {other}")


def _needed(stage: str, view: View, message: View, problems: Problems) -> None:
    method = message.text("method")
    if method is None:
        return
    name, value = _NEEDED[method]
    if not message.has(name):
        problems.add(message.place("method"), f"method `{method}` lacks `{name}`", f"write `{name}: {value}`, say")


def _alpha(stage: str, view: View, message: View, problems: Problems) -> None:
    """`alpha` and `rule: QSR` go together."""
    if message.text("method") != "LOCAL":
        return
    if message.text("rule") == "QSR" and not message.has("alpha"):
        problems.add(message.place("rule"), "`rule: QSR` without `alpha`", "write `alpha: 0.2`, say, of SGD")
    elif message.text("rule") != "QSR" and message.has("alpha"):
        text = "`alpha` without `rule: QSR`, which alone reads it"
        problems.add(message.place("alpha"), text, "write `rule: QSR`, or remove it")


def _replicas(stage: str, view: View, message: View, problems: Problems) -> None:
    """Each replica has as many device batches as any other."""
    replicas, batch, device_batch = message.whole("replicas"), view.whole("batch_size"), view.whole("device_batch_size")
    if not replicas or not batch or not device_batch or batch % device_batch or message.text("method") == "ASYNC":
        return
    logical = batch // device_batch
    if logical % replicas:
        text = (
            f"{count(replicas, 'replica')} can't share out a batch evenly: batch_size / device_batch_size is {logical}"
        )
        fits = [str(n) for n in range(2, logical + 1) if logical % n == 0]
        hint = f"`replicas` can be {listing(fits, 'or')}" if fits else "make device_batch_size smaller"
        problems.add(message.place("replicas"), text, f"{hint} (batch_size {batch}, device_batch_size {device_batch})")


def _asynchronous(stage: str, view: View, message: View, problems: Problems) -> None:
    """Several replicas push; nothing follows each update of all, or goes back."""
    if message.text("method") != "ASYNC":
        return
    if message.whole("replicas") == 1:
        text = "`method: ASYNC` with one replica, which has nobody to wait for"
        problems.add(message.place("replicas"), text, "write `replicas: 2` or more, or remove `sync_param`")
    if (on_nan := view.text("on_nan")) in ("ROLLBACK", "SKIP"):
        text = f"`on_nan: {on_nan}` with `method: ASYNC`: pushes after the one that failed are applied already"
        problems.add(view.place("on_nan"), text, "write `on_nan: STOP`")
    if view.text("lr_policy") == "plateau":
        text = "lr_policy `plateau` with `method: ASYNC`: the next learning rate is needed before the last losses are known"
        problems.add(view.place("lr_policy"), text, "take another lr_policy, or `method: LOCAL`")


def _start(stage: str, view: View, message: View, problems: Problems) -> None:
    """Something is left after the warm-up."""
    warm_up, length = view.whole("warmup_iter"), view.whole("max_iter")
    skipped = view.whole("policy_start_iter") or 0
    starts = message.text("method") != "ASYNC" and message.text("start") == "WARMUP_END"
    if starts and warm_up and length and warm_up - skipped >= length:
        text = (
            f"the replicas would start at the end of the warm-up, and the stage ends with it, after {length} iterations"
        )
        problems.add(message.place("start"), text, "write `start: STAGE_START`, or remove `sync_param`")


def _neighbours(stage: str, view: View, message: View, problems: Problems) -> None:
    """What doesn't go together with replicas, or with learning rates that are not known beforehand."""
    if view.has("audit_param"):
        text = "`audit_param` with `sync_param`: between synchronisations there is no one state to prove"
        hint = 'remove it, or leave it out of this stage: `clear: "audit_param"`'
        problems.add(view.place("audit_param"), text, hint)
    if view.has("compress_param"):
        text = "`compress_param` with `sync_param`: replicas send their weights as they are, and seldom"
        hint = f'remove one of them from stage `{stage}`: `clear: "compress_param"` leaves it out there'
        problems.add(message.block.place, text, hint)
    if view.has("ema_decay"):
        text = "`sync_param` with `ema_decay`: an average follows every update, and replicas meet only at some"
        problems.add(view.place("ema_decay"), text, "remove one of them")
    if view.text("lr_policy") == "plateau" and message.text("rule") == "QSR":
        text = "`rule: QSR` with lr_policy `plateau`, whose learning rates are not known beforehand"
        problems.add(message.place("rule"), text, "write `rule: CONSTANT`, or another lr_policy")


CHECKS: tuple[Callable[[str, View, View, Problems], None], ...] = (
    _unread,
    _needed,
    _alpha,
    _replicas,
    _asynchronous,
    _start,
    _neighbours,
)
