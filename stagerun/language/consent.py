"""The fields that may name code or a file, and the consent that runs or opens it: one table, for `check`, stored recipes, networks and
`verify`. A schedule or a snapshot may come from anyone. Pure."""

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any, TypeVar

from stagerun.base import recipe
from stagerun.base.code import Sources, code_of
from stagerun.base.errors import UsageError, listing
from stagerun.base.proto import message_of
from stagerun.language import arguments
from stagerun.language.networks import TIMM, TIMM_ARGUMENTS, code_in
from stagerun.language.values import Member, layout


class Consent(enum.Enum):
    """Kinds of consent. CODE names Python: a command that trains or evaluates with DIR, or --trust-code, runs it. ARGUMENTS are passed to it;
    timm's networks need no consent if all arguments are `TIMM_ARGUMENTS`. IMAGES are read by commands that evaluate, predict or train.
    TRAINING is read or written by commands that train. SCHEDULE is read with the schedule; a stored recipe has its content."""

    CODE = ("Model.name", "LossParameter.function", "TransformParameter.python")
    ARGUMENTS = ("Model.args", "LossParameter.args")
    IMAGES = ("Source.source", "Source.labels", "TransformParameter.mean_file")
    TRAINING = ("Data.scratch", "WeightsParameter.file", "Solver.solverstate")
    SCHEDULE = ("StageEntry.solver", "Model.caffe_net", "Solver.net")


NEEDED = {field: consent for consent in Consent for field in consent.value}

T = TypeVar("T")


def unlisted(name: str, args: str | None) -> list[str]:
    """Return the arguments that a timm network needs consent for: some open files, or load weights. ValueError for unreadable args."""
    return [word for word in arguments.read(args) if name.startswith(TIMM) and word not in TIMM_ARGUMENTS]


def scalars(value: Any) -> Iterator[tuple[Any, str, Member, Any]]:
    """Yield each value in a recipe's message, recursively: its message, the field as `Message.field` of the language, its member, the value."""
    kind = message_of(type(value))
    assert kind is not None
    for member in layout(type(value)):
        held = getattr(value, member.attribute)
        for one in held if isinstance(held, tuple) else (held,):
            if dataclasses.is_dataclass(one) and message_of(type(one)) is not None:
                yield from scalars(one)
            else:
                yield value, f"{kind.name}.{member.name}", member, one


def asked(value: Any) -> Iterator[str]:
    """Yield the code that a recipe's message, and the messages in it, would run with `Consent.CODE`. ValueError for a bad name."""
    for holder, field, _, text in scalars(value):
        if text is None or NEEDED.get(field) is not Consent.CODE:
            continue
        if not isinstance(holder, recipe.Model):
            yield str(code_of(text))
        elif holder.net is None and (code := code_in(text)) is not None:
            risky = [f"{text} {{ {word} }}" for word in unlisted(text, holder.args)]
            yield from risky if text.startswith(TIMM) else [str(code)]


def trusted(value: T, sources: Sources) -> T:
    """Return the stage, or a message of it, with the Python files that its networks and its loss may run."""
    runs = isinstance(value, recipe.Model | recipe.Loss) and any(asked(value))
    changes: dict[str, Any] = {"sources": sources} if runs else {}
    for member in layout(type(value)):
        held = getattr(value, member.attribute)
        if member.is_message and not member.repeated and held is not None:
            changes[member.attribute] = trusted(held, sources)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def require_consent(value: recipe.Model | recipe.Loss, where: str) -> None:
    """Raise UsageError if a network or loss read from `where` would run someone's Python."""
    if value.sources is None and (names := list(asked(value))):
        hint = "add --trust-code, or `trust_code=True` in Python, if you know where the snapshot comes from"
        raise UsageError(f"{where}: made by {listing(names, 'and')}, and code from a snapshot needs consent", hint)
