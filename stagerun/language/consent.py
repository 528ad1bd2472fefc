"""Which fields of the language may name code or a file, and what consent runs or opens it: one table. `check`, stored recipes, the networks
that are built, and `verify` read it. A schedule or a snapshot may come from anyone. Pure."""

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
    """CODE names Python: a command that trains or evaluates with DIR, or --trust-code, runs it. ARGUMENTS are what it is called with;
    timm's networks need no consent, with `TIMM_ARGUMENTS` alone. IMAGES are read by commands that evaluate, predict or train. TRAINING is
    read, or written to, by commands that train. SCHEDULE is part of the schedule, and read with it; a stored recipe has its content."""

    CODE = ("Model.name", "LossParameter.function", "TransformParameter.python")
    ARGUMENTS = ("Model.args", "LossParameter.args")
    IMAGES = ("Source.source", "Source.labels", "TransformParameter.mean_file")
    TRAINING = ("Data.scratch", "WeightsParameter.file", "Solver.solverstate")
    SCHEDULE = ("StageEntry.solver", "Model.caffe_net", "Solver.net")


NEEDED = {field: consent for consent in Consent for field in consent.value}

T = TypeVar("T")


def unlisted(name: str, args: str | None) -> list[str]:
    """Arguments that a network of timm isn't called with unasked: some open files, or load weights. ValueError for args that can't be read."""
    return [word for word in arguments.read(args) if name.startswith(TIMM) and word not in TIMM_ARGUMENTS]


def scalars(value: Any) -> Iterator[tuple[Any, str, Member, Any]]:
    """Each value in a message of a recipe and in those in it: that message, the field as `Message.field` of the language, its member, the
    value."""
    kind = message_of(type(value))
    assert kind is not None
    for member in layout(type(value)):
        held = getattr(value, member.attribute)
        for one in held if isinstance(held, tuple) else (held,):
            if type(one).__module__ == recipe.__name__ and dataclasses.is_dataclass(one):
                yield from scalars(one)
            else:
                yield value, f"{kind.name}.{member.name}", member, one


def asked(value: Any) -> Iterator[str]:
    """What a message of a recipe, and those in it, would run: it needs `Consent.CODE`. ValueError for what can't name code."""
    for holder, field, _, text in scalars(value):
        if text is None or NEEDED.get(field) is not Consent.CODE:
            continue
        if not isinstance(holder, recipe.Model):
            yield str(code_of(text))
        elif holder.net is None and (code := code_in(text)) is not None:
            found = [f"{text} {{ {word} }}" for word in unlisted(text, holder.args)]
            yield from found if text.startswith(TIMM) else [str(code)]


def trusted(value: T, sources: Sources) -> T:
    """The stage, or a message of it, with the Python files that its networks and its loss may run from now on."""
    own = isinstance(value, recipe.Model | recipe.Loss) and any(asked(value))
    changes: dict[str, Any] = {"sources": sources} if own else {}
    for member in layout(type(value)):
        held = getattr(value, member.attribute)
        if member.is_message and not member.repeated and held is not None:
            changes[member.attribute] = trusted(held, sources)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def require_consent(value: recipe.Model | recipe.Loss, where: str) -> None:
    """UsageError if a network or loss that is read from `where` would run someone's Python."""
    if value.sources is None and (names := list(asked(value))):
        hint = "add --trust-code, or `trust_code=True` in Python, if you know where the snapshot comes from"
        raise UsageError(
            f"{where}: made by {listing(names, 'and')}, and what came with a snapshot is not run unasked", hint
        )
