"""Errors of meaning in `loss` and `early_stop`. Pure."""

from stagerun.base.code import WrongCode, code_of
from stagerun.base.errors import Problems
from stagerun.language.view import View

# The type that reads a field which the others don't.
_READERS = {
    "normalization": "BINARY",
    "teacher": "DISTILL",
    "temperature": "DISTILL",
    "weight": "DISTILL",
    "teacher_weights": "DISTILL",
    "teacher_model": "DISTILL",
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
    given = loss.has("teacher_weights")
    if given and loss.has("teacher"):
        hint = "remove one of them: a stage has one teacher"
        problems.add(loss.place("teacher_weights"), "`teacher` and `teacher_weights` exclude each other", hint)
    if loss.has("teacher_model") and not given:
        hint = "remove it: a stage that teaches has its own network" if loss.has("teacher") else "write them beside it"
        problems.add(loss.place("teacher_model"), "`teacher_model` without `teacher_weights`", hint)
    if name and not loss.has(name) and not (name == "teacher" and given):
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
