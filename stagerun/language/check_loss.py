"""Errors of meaning in `loss`, `early_stop`, `class_weight` and `sampling`. Pure."""

from contextlib import suppress

from stagerun.base.code import WrongCode, code_of
from stagerun.base.errors import Problems
from stagerun.base.text import count
from stagerun.language.view import Doubtful, View

# The type that reads a field which the others don't.
_READERS = {
    "normalization": "BINARY",
    "teacher": "DISTILL",
    "temperature": "DISTILL",
    "weight": "DISTILL",
    "function": "PYTHON",
    "args": "PYTHON",
}
# What a type can't do without, and what to write.
_NEEDED = {"DISTILL": ("teacher", '"STAGE"'), "PYTHON": ("function", '"loss.py:build"')}


def check_loss(stage: str, view: View, problems: Problems) -> None:
    """Everything about one stage's `loss` but who its teacher is (`teachers`)."""
    loss = view.view("loss")
    kind = loss.text("type") if loss is not None else None
    if loss is None or kind is None:
        return
    for name, reader in _READERS.items():
        if kind != reader and loss.has(name):
            text = f"loss `{kind}` does not read `{name}`"
            problems.add(loss.place(name), text, f"remove it, or write type: {reader}")
    name, example = _NEEDED.get(kind, ("", ""))
    if name and not loss.has(name):
        problems.add(loss.place("type"), f"loss `{kind}` lacks `{name}`", f"write `{name}: {example}`")
    elif kind == "PYTHON":
        text = loss.text("function") or ""
        try:
            code_of(text)
        except WrongCode as error:
            problems.add(loss.place("function"), error.message, error.hint)


def check_early_stop(stage: str, view: View, problems: Problems) -> None:
    """Everything about one stage's `early_stop` but whether there is anything to test."""
    early = view.view("early_stop")
    if early is None:
        return
    if not view.whole("test_interval"):
        text = f"`early_stop` without `test_interval`: nothing is tested inside stage `{stage}`"
        problems.add(early.block.place, text, "write `test_epoch: 1`, say")
    sync = view.view("sync_param")
    if sync is not None and sync.text("method") == "ASYNC":
        text = "`early_stop` with `method: ASYNC`: iterations after the last one have been computed already"
        problems.add(early.block.place, text, f"remove one of them from stage `{stage}`, or write `method: LOCAL`")


def check_sampling(view: View, classes: int | None, shuffle: bool, problems: Problems) -> None:
    """How often the classes of one stage come, and how much they weigh. `classes`: those of the schedule's network, None where they are
    not known."""
    with suppress(Doubtful):
        loss = view.view("loss")
        kind = loss.text("type") if loss is not None else None
        if kind not in (None, "SOFTMAX") and view.numbers("class_weight"):
            message = f"`class_weight` weighs cross entropy, and loss `{kind}` has no use for it"
            problems.add(view.place("class_weight"), message, "remove it, or `loss`")
    with suppress(Doubtful):
        own = view.view("model")
        _class_weight(view, own.whole("num_classes") if own is not None else classes, problems)
    with suppress(Doubtful):
        how = view.text("sampling")
        if how != "UNIFORM" and not shuffle:
            message = f"`sampling: {how}` draws an order of its own, and `shuffle` is false"
            problems.add(view.place("sampling"), message, "remove `shuffle: false` from `data`, or `sampling` here")


def _class_weight(view: View, classes: int | None, problems: Problems) -> None:
    weights = view.numbers("class_weight")
    if not weights:
        return
    place = view.place("class_weight")
    if classes is not None and len(weights) != classes:
        message = f"{count(len(weights), 'value')} of `class_weight`, and `num_classes` is {classes}"
        problems.add(place, message, f"give {classes}, one for each class in the order of their numbers")
    if not any(weights):
        problems.add(place, "`class_weight` is 0 for every class: nothing is learned", "give some class more than 0")
