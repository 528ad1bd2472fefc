"""`--set NAME=VALUE`: changes of single values, on the command line. Pure.

NAME is a stage and a path inside its Solver (`collapse.max_epoch`, `collapse.transform_param.crop_size`), or a path
inside Schedule (`seed`, `data.train.source`, `solver.batch_size`). VALUE is the text after the colon in a file; the
quotes of a text are optional. A path into a message changes only that field.
Problems point into the argument: path `--set`, its line counts the arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Problems, Span, nearest
from stagerun.language.layers import SET, partner
from stagerun.language.lexer import Kind, tokens
from stagerun.language.parse import ELSEWHERE, hint_for_unknown, parse_value
from stagerun.language.tree import (
    SCHEDULE,
    SOLVER,
    SOURCE,
    Block,
    Entry,
    Value,
    is_message,
    quoted,
    retired,
    takes_arguments,
)


@dataclass(frozen=True, slots=True)
class Override:
    """A change. `leaf` holds the entry for the message at `path`, which starts in the stage's Solver, or in Schedule if `stage` is None."""

    stage: str | None
    path: tuple[str, ...]
    leaf: Block


def read(arguments: Sequence[str], stages: Sequence[str], problems: Problems) -> list[Override]:
    """Return the arguments that make sense; report mistakes in the others."""
    lines = [argument.replace("\n", " ") for argument in arguments]
    problems.file(SET, "\n".join(lines))
    overrides: dict[tuple[str | None, tuple[str, ...]], Override] = {}
    for line, argument in enumerate(lines, 1):
        override = _one(line, argument, stages, problems)
        if override is None:
            continue
        span, key = override.leaf.place, (override.stage, (*override.path, *override.leaf.entries))
        if key in overrides:
            hint = f"argument {overrides[key].leaf.place.line} sets it already"
            problems.add(span, f"`{argument[: span.width]}` is set twice", hint)
        overrides.setdefault(key, override)
    return list(overrides.values())


def _one(line: int, argument: str, stages: Sequence[str], problems: Problems) -> Override | None:
    name, equals, text = argument.partition("=")
    whole, span = Span(SET, line, 1, max(1, len(argument))), Span(SET, line, 1, len(name))
    if any(0xD800 <= ord(c) <= 0xDFFF for c in argument):  # how Python passes on bytes that are not UTF-8
        problems.add(whole, "the argument is not UTF-8")
        return None
    if not equals or not name.strip():
        problems.add(whole, "no `NAME=VALUE`", "write `--set STAGE.FIELD=VALUE` or `--set FIELD=VALUE`")
        return None
    words = name.split(".")
    stage = words[0] if words[0] in stages and words[0] not in SCHEDULE.fields_by_name else None
    if stage is not None and len(words) == 1:
        problems.add(span, f"`{stage}` is a stage", f"write `{stage}.FIELD=VALUE`")
        return None
    field = _follow(line, words, stage, stages, problems)
    if field is None:
        return None
    if not text.strip():
        problems.add(whole, f"`{name}` has no value", f'write `{name}=""` for an empty text' if _is_text(field) else "")
        return None
    entry = _value(line, len(name) + 2, text, field, span, problems)
    path = words[:-1] if stage is None else words[1:-1]
    leaf = Block(field.containing_type, span, {field.name: entry}) if entry else None
    return Override(stage, tuple(path), leaf) if leaf else None


def _follow(
    line: int, words: Sequence[str], stage: str | None, stages: Sequence[str], problems: Problems
) -> FieldDescriptor | None:
    """Return the field of a dotted name, from the stage's settings or from the schedule; None after a mistake."""
    kind, column, field = SCHEDULE if stage is None else SOLVER, 1, None
    for number, word in enumerate(words):
        span = Span(SET, line, column, max(1, len(word)))
        column += len(word) + 1
        if stage is not None and number == 0:
            continue
        field, last = kind.fields_by_name.get(word), number == len(words) - 1
        if field is None:
            _unknown(span, word, number, kind, stages, problems)
        elif hint := retired(field):
            problems.add(span, f"`{word}` was retired", hint)
        elif kind is SCHEDULE and word == "stage":
            hint = "`--set` changes fields: STAGE.FIELD=VALUE"
            problems.add(span, "stages are added and named in schedule.prototxt", hint)
        elif not last and not is_message(field):
            problems.add(span, f"`{word}` is not a message: it has no fields")
        elif not last and field.is_repeated and field.message_type is not SOURCE:
            problems.add(span, f"`{word}` is a list of messages", f"give it whole: `{word}=[{{ ... }}]`")
        else:
            kind = field.message_type
            continue
        return None
    return field


def _unknown(span: Span, word: str, number: int, kind: Descriptor, stages: Sequence[str], problems: Problems) -> None:
    if number == 0:
        field = ELSEWHERE.get(word, word)
        if field in SOLVER.fields_by_name:
            hint = f"name the stage, or `solver` for all of them: `solver.{field}=...`"
        else:
            hint = nearest(word, [*stages, *kind.fields_by_name]) or (f"stages: {', '.join(stages)}" if stages else "")
        problems.add(span, f"`{word}` is neither a stage nor a field of Schedule", hint)
    else:
        hint = hint_for_unknown(word, kind)
        if kind is SOLVER and word in SCHEDULE.fields_by_name:
            hint = f"it is a field of Schedule: write `{word}=...`, which is for all stages"
        problems.add(span, f"{kind.name} has no field `{word}`", hint)


def _is_text(field: FieldDescriptor) -> bool:
    return bool(field.type == FieldDescriptor.TYPE_STRING) and not takes_arguments(field)


def _value(line: int, column: int, text: str, field: FieldDescriptor, name: Span, problems: Problems) -> Entry | None:
    if (
        _is_text(field)
        and not text.lstrip().startswith(('"', "'"))
        and not (field.is_repeated and text.startswith("["))
    ):
        span = Span(SET, line, column, len(text))
        if "\0" in text:
            problems.add(span, f"`{field.name}` holds a NUL character")
            return None
        return Entry(field, name, (Value(text, quoted(text), span),))
    if tokens(text)[0].kind is Kind.END:
        problems.add(name, f"`{field.name}` has no value", "quote the argument: `#` starts a comment")
        return None
    return parse_value(SET, line, column, text, field, problems)


# -- `--set solver.FIELD=VALUE` without effect, since each stage sets the field


def check_reached(changes: Sequence[Override], stages: Mapping[str, Block], problems: Problems) -> None:
    """Report each change for all stages that reaches none. `stages`: their merged settings, with durations as written.
    A stage whose settings have a mistake counts as reached."""
    for change in changes:
        if change.stage is not None or change.path[:1] != ("solver",):
            continue  # as `solver={...}`
        path = (*change.path[1:], *change.leaf.entries)  # without an entry if the value is out of range
        passed = all(_passes_by(block, path[0], change.leaf.place) for block in stages.values() if path)
        if not change.leaf.entries or path[0] == "clear" or not stages or not passed:
            continue
        field, name, first = path[0], ".".join(path), next(iter(stages))
        other = partner(SOLVER.fields_by_name[field])
        written = all(field in b.entries or other in b.entries for b in stages.values())
        message = f"`solver.{name}` reaches no stage: each overrides it{'' if written else ' or clears it'}"
        problems.add(change.leaf.place, message, f"name the stage: `{first}.{name}=...`")


def _passes_by(block: Block, field: str, span: Span) -> bool:
    """Return whether nothing in the block comes from the argument at `span`, which changes the field or a part of it."""
    if block.broken or field in block.doubtful:
        return False
    entry = block.entries.get(field)
    inside = [inner for value in block.blocks(field) for _, inner in value.walk()]
    return entry is None or not any((e.name.path, e.name.line) == (SET, span.line) for e in (entry, *inside))
