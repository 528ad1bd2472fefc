"""Errors of meaning in `compress_param` and in what is carried over of it. Pure."""

import contextlib
from collections.abc import Callable, Iterator

from stagerun.base import compression
from stagerun.base.compression import METHODS
from stagerun.base.errors import Problems, listing
from stagerun.base.recipe import Method
from stagerun.language.view import Doubtful, View


def check_compression(stage: str, view: View, problems: Problems) -> None:
    """Everything about one stage's `compress_param`."""
    message = view.view("compress_param")
    if message is None:
        return
    for check in CHECKS:
        with contextlib.suppress(Doubtful):
            check(message, problems)
    with contextlib.suppress(Doubtful):
        _start(stage, view, message, problems)


def _method(view: View) -> Method:
    """That of a CompressionParameter or of an entry of `param`. Doubtful where it is missing, which is reported as such."""
    name = view.text("method")
    if name is None:
        raise Doubtful("method")
    return Method(name)


def _allowed(message: View) -> tuple[Method, ...]:
    return tuple(Method(name) for name in message.texts("allow"))


def _rules(message: View) -> Iterator[tuple[View, Method]]:
    """The entries of `param` whose method is known and one that they can have."""
    for rule in message.views("param"):
        with contextlib.suppress(Doubtful):
            method = _method(rule)
            if method is not Method.AUTO:
                yield rule, method


def _unread_settings(message: View, problems: Problems) -> None:
    """What is written and not read, in the message itself and in each entry of `param`."""
    allow = _allowed(message)
    for view, method in [(message, _method(message)), *_rules(message)]:
        for name in compression.SETTINGS:
            if name in view.block.entries and name not in compression.settings_read(method, allow):
                readers = listing([m.value for m, known in METHODS.items() if name in known.reads], "or")
                chosen = " with what it may choose here" if method is Method.AUTO else ""
                text = f"method `{method.value}` does not read `{name}`{chosen}"
                problems.add(view.place(name), text, f"remove it, or write method {readers}")


def _allow(message: View, problems: Problems) -> None:
    """`allow` is for AUTO, and names methods that it can choose, each once."""
    method, seen = _method(message), set()
    if not message.has("allow"):
        return
    if method is not Method.AUTO:
        text = f"`allow` goes with method `AUTO`, not with `{method.value}`"
        problems.add(message.place("allow"), text, "remove it, or write `method: AUTO`")
        return
    for value in message.block.entries["allow"].values:
        if value.value == "AUTO":
            problems.add(
                value.span, "`AUTO` can't choose `AUTO`", "name methods that it may choose, or leave `allow` out"
            )
        elif value.value == "NONE":
            problems.add(value.span, "`allow` names `NONE`, which is always allowed", "remove it")
        elif value.value in seen:
            problems.add(value.span, f"`allow` names `{value.value}` twice", "remove one of them")
        seen.add(value.value)


def _whole_methods(message: View, problems: Problems) -> None:
    """Report AUTO for some parameters only."""
    for rule in message.views("param"):
        with contextlib.suppress(Doubtful):
            method = _method(rule)
            if method is Method.AUTO:
                text = f"method `{method.value}` can't be for some parameters only"
                problems.add(rule.place("method"), text, f"write `method: {method.value}` outside `param`")


def _scope(message: View, problems: Problems) -> None:
    """One vector of all parameters has one method, and no rows and columns."""
    if message.text("scope") != "ENTIRE_MODEL":
        return
    method, hint = _method(message), "write `scope: LAYERWISE`"
    why = "with `scope: ENTIRE_MODEL`: a vector of all parameters is not a matrix"
    if method is Method.POWER_SGD:
        problems.add(message.place("method"), f"method `POWER_SGD` {why}", hint)
    for value in message.block.entries["allow"].values if message.has("allow") else ():
        if value.value == "POWER_SGD":
            problems.add(value.span, f"`allow: POWER_SGD` {why}", hint)
    for rule, own in _rules(message):
        if own is not Method.NONE:
            text = f"method `{own.value}` for some parameters with `scope: ENTIRE_MODEL`, which makes all of them one vector"
            problems.add(
                rule.place("method"), text, f"write `method: NONE`, which leaves them out of it, or {hint[6:]}"
            )


def _memory(message: View, problems: Problems) -> None:
    """Something must be lost for a residual to be left."""
    method = _method(message)
    lossy = any(not METHODS[own].exact for _, own in _rules(message))
    if message.text("memory") == "RESIDUAL" and METHODS[method].exact and not lossy:
        text = f"`memory: RESIDUAL` with method `{method.value}`, which loses nothing"
        problems.add(message.place("memory"), text, "remove it")


def _start(stage: str, view: View, message: View, problems: Problems) -> None:
    """Compression begins before the stage ends."""
    start, length = message.whole("start_iter"), view.whole("max_iter")
    if start and length and start >= length:
        text = f"compression would start at iteration {start}, and the stage ends after {length}"
        problems.add(message.place("start_iter"), text, f"stage `{stage}`: {view.origin('max_iter')}")


CHECKS: tuple[Callable[[View, Problems], None], ...] = (
    _unread_settings,
    _allow,
    _whole_methods,
    _scope,
    _memory,
)
