"""Reads a snapshot's recipe.prototxt as a recipe.Schedule: the inverse of `values.canonical`. Pure.

The types of recipe's dataclasses drive the reading, so that a new field needs no code here.
"""

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from stagerun.base import recipe
from stagerun.base.errors import Span
from stagerun.base.proto import path_to
from stagerun.base.wings import of_model
from stagerun.language import arguments, lexer, tree
from stagerun.language.consent import asked, scalars
from stagerun.language.lexer import Kind, Token, tokens
from stagerun.language.networks import is_foreign
from stagerun.language.ranges import wrong
from stagerun.language.tree import SCHEDULE
from stagerun.language.values import Member, default_text, layout

_SHARED = recipe.Data(train=recipe.Source(source="", path="", images=0))  # marks a stage with the schedule's data
_LIVE = {field.name for kind in SCHEDULE.file.message_types_by_name.values() for field in tree.fields(kind)}

DEEPEST = 20  # messages inside messages; the language has five


@dataclass(frozen=True, slots=True)
class _Block:
    line: int
    fields: dict[str, "list[Token | _Block]"] = field(default_factory=dict)


def read_recipe(text: str) -> recipe.Schedule:
    """Return the schedule whose canonical form is `text`. It has no files, and its stages no identity and no origins. A
    field that an older stagerun didn't write has the dataclass's default. ValueError with the line for an unknown
    field, a missing one without a default, or a value of another type."""
    schedule: recipe.Schedule = _read(recipe.Schedule, _block(iter(tokens(text))))

    def completed(stage: recipe.Stage) -> recipe.Stage:
        images = schedule.data if stage.data is _SHARED else stage.data  # a stage's data has only images
        data = replace(schedule.data, train=images.train, val=images.val)
        return replace(stage, model=stage.solver.model or schedule.model, data=data)

    return replace(schedule, stages=tuple(map(completed, schedule.stages)))


def read_foreign(text: str) -> recipe.Schedule:
    """Read a recipe that someone else may have written. ValueError also for a value out of range, and for names of code, methods and stages
    that no schedule has. Its code has no consent to run (`consent.trusted`)."""
    schedule = read_recipe(text)
    list(asked(schedule))
    for holder, key, member, held in scalars(schedule):
        if held in (None, member.default):
            continue  # a default need not be in range
        if member.fields and key != "Model.name":
            message, hint = wrong(key, member.fields[-1], held, lexer.shown(str(held)))
            if message:
                raise ValueError(f"{message}: {hint}" if hint else message)
        if key == "Source.labels" and held != recipe.FLOAT_DATA and None in (holder.labels_path, holder.labels_digest):
            raise ValueError("`labels` without the path and the digest of its file")
        if key == "Model.net":
            of_model(holder)
    stages, ensembles = {stage.name for stage in schedule.stages}, {one.name for one in schedule.ensembles}
    for name, iter in (point for ensemble in schedule.ensembles for point in ensemble.points):
        if name not in stages or (iter is not None and iter < 1):
            raise ValueError(f"an ensemble has a member `{lexer.shown(name)}` that is not an iteration of a stage")
    before: set[str | None] = {None}
    for stage in schedule.stages:
        if not {stage.parent, stage.solver.teacher} <= before:
            raise ValueError(f"stage `{stage.name}` starts from, or is taught by, a stage that does not come before it")
        before.add(stage.name)
        if stage.average is not None and stage.average not in ensembles:
            raise ValueError(f"stage `{stage.name}` starts from the average of an unknown ensemble")
        sync = stage.solver.sync
        if sync is not None and stage.solver.compress is not None:
            raise ValueError(f"stage `{stage.name}` has `compress_param` and `sync_param`, which no longer go together")
        if sync is not None and sync.period is None and not stage.solver.asynchronous:
            raise ValueError(f"`sync_param` of stage `{stage.name}` lacks `period`")
    return schedule


def _block(stream: Iterator[Token], opening: Token | None = None, depth: int = 0) -> _Block:
    """Read the inside of a message: only `name: value` and `name { ... }` of the text format."""
    block = _Block(opening.line if opening else 1)
    if depth > DEEPEST:
        raise ValueError(f"line {block.line}: nested too deep")
    for name in stream:
        if (name.text == "}" and opening) or (name.kind is Kind.END and not opening):
            break
        mark = next(stream, name)
        if name.kind is not Kind.WORD or mark.text not in (":", "{"):
            raise ValueError(f"line {name.line}: `{lexer.shown(name.text)}` is not a field")
        item = _block(stream, mark, depth + 1) if mark.text == "{" else next(stream)
        block.fields.setdefault(name.text, []).append(item)
    return block


def _read(kind: Any, block: _Block) -> Any:
    """Build the dataclass `kind` that a block describes."""
    members = {member.name: member for member in layout(kind) if member.stored}
    values: dict[str, Any] = {"data": _SHARED} if kind is recipe.Stage else {}
    for name, items in block.fields.items():
        fields = path_to(kind, name)
        if fields and tree.retired(fields[-1]) and fields[-1].name not in _LIVE:
            text = items[0].text if isinstance(items[0], Token) else ""
            if tree.identity(fields[-1]) and text != default_text(fields[-1]):  # training depended on it
                raise ValueError(f"line {items[0].line}: `{fields[-1].name}` was retired: {tree.retired(fields[-1])}")
            continue
        if name not in members:
            raise ValueError(f"line {items[0].line}: {kind.__name__} has no field `{name}`")
        member = members[name]
        if len(items) > 1 and not member.repeated:
            raise ValueError(f"line {items[1].line}: `{name}` a second time")
        read = tuple(_item(member, item) for item in items)
        values[member.attribute] = read if member.repeated else read[0]
    if kind is recipe.Model and ("net" in values or is_foreign(values.get("name", ""))):
        values = {"moving_average_fraction": None, "eps": None} | values  # if missing, each layer has its values
    for name, member in members.items():
        if member.default is dataclasses.MISSING and member.attribute not in values:
            raise ValueError(f"line {block.line}: {kind.__name__} lacks `{name}`")
    if kind is recipe.Stage:
        values["parent"] = values["parent"] or None
        # `read_recipe` fills in the model.
        values |= {"model": None, "identity": {}, "origins": {}, "span": Span("recipe.prototxt", block.line, 1)}
    return kind(**values)


def _item(member: Member, item: "Token | _Block") -> Any:
    if isinstance(item, _Block) and member.is_message:
        return _read(member.kind, item)
    if isinstance(item, _Block) or member.is_message:
        raise ValueError(f"line {item.line}: `{member.name}` is of another kind")
    field, shown = f"line {item.line}: `{member.name}", lexer.shown(item.text)
    try:
        return _scalar(member.kind, item)
    except (ValueError, lexer.WrongValue) as error:
        values = {} if not issubclass(member.kind, enum.Enum) else member.fields[-1].enum_type.values_by_name
        if item.text in values and (hint := tree.retired_value(values[item.text])):
            raise ValueError(f"{field}: {shown}` was retired: {hint}") from error
        raise ValueError(f"{field}` can't be `{shown}`") from error


def _scalar(wanted: Any, token: Token) -> Any:
    if issubclass(wanted, enum.Enum):
        return wanted(token.text)
    value = arguments.scalar(token)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise ValueError("of another type")
    return value
