"""Rules, and functions that make the common ones. Pure.

A mistake, a warning and a note differ only in the level of their rule. A rule about a message runs if its field is written; it is
skipped if a value that it needs is missing or could not be read, so that one mistake is reported once.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Level, Problems, Span, listing
from stagerun.base.proto import stagerun_pb2
from stagerun.language.layers import higher, partner
from stagerun.language.stages import Node
from stagerun.language.tree import SOLVER, Block, Doubtful, View

Found = Iterator[tuple[Span, str, str]]  # span, message, hint


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. `id`: for a mistake `Message.field`, the field that triggers it, or `Message`; for a finding the word that silences it.
    `purpose`: the harm that the rule prevents. `looks`: it depends on images that may be on another machine. `once`: report only the first
    result at a position."""

    id: str
    find: Callable[..., Iterable[tuple[Span, str, str]]]
    level: Level = Level.MISTAKE
    purpose: str = ""
    looks: bool = False
    once: bool = True


def run(rules: Iterable[Rule], problems: Problems, *subject: object) -> None:
    """Report the rules' results for the subject: a message, or the stages of a schedule."""
    for rule in rules:
        with suppress(Doubtful):
            for span, message, hint in rule.find(*subject):
                id = "" if rule.level is Level.MISTAKE else rule.id
                problems.add(span, message, hint, rule.level, id, id if rule.once else "")


class Around:
    """Surroundings of a message: the schedule, and the settings of its stages. `node`: the stage, None for a message of the schedule."""

    def __init__(self, schedule: View, stages: Mapping[str, View], node: Node | None = None) -> None:
        self.stages, self.node = stages, node
        self.schedule = Message(schedule, self)
        self.settings = Message(stages[node.name], self) if node is not None else self.schedule


class Message:
    """A message as rules read it: `m.pad` is a field's value or default, `m.loss` a message, `m.val` a list of messages; Doubtful if missing.
    `settings`: the stage's."""

    def __init__(self, view: View, around: Around) -> None:
        self.view, self.around = view, around
        self.node: Any = around.node

    def __getattr__(self, name: str) -> Any:
        field = self.view.block.kind.fields_by_name[name]
        if field.message_type:
            messages = [Message(view, self.around) for view in self.view.views(name)]
            value: Any = messages if field.is_repeated else next(iter(messages), None)
        elif field.is_repeated:
            value = [value.value for value in self.view.block.entries[name].values] if name in self else []
        else:
            value = self.view.scalar(name)
        if value is None:
            raise Doubtful(name)
        self.__dict__[name] = value  # rules read it repeatedly
        return value

    def __contains__(self, name: str) -> bool:
        return self.view.has(name)

    @property
    def stage(self) -> str:
        return self.node.name if self.node is not None else ""

    @property
    def schedule(self) -> "Message":
        return self.around.schedule

    @property
    def settings(self) -> "Message":
        return self.around.settings

    @property
    def parent(self) -> "Message":
        """Return the settings of the parent stage."""
        if self.node is None or self.node.parent not in self.around.stages:
            raise Doubtful("from")
        return Message(self.around.stages[self.node.parent], self.around)

    @property
    def starts_from(self) -> str:
        """Return the parent, or the ensemble, in words."""
        average = self.node.average
        return f"`{self.node.parent}`" if average is None else f"ensemble `{average}`"

    @property
    def network(self) -> Any:
        """Return the `model` of the stage."""
        return (self.settings if "model" in self.settings else self.schedule).model

    def data_with(self, part: str) -> Any:
        """Return the `data` with the stage's `train` or `val`."""
        of_stage = "data" in self.settings and part in self.settings.data
        return (self.settings if of_stage else self.schedule).data

    def inner(self, path: str) -> "tuple[Message, str]":
        """Return the message of a field `transform_param.mirror`, and the field's name in it."""
        outer, _, name = path.rpartition(".")
        return (reduce(getattr, outer.split("."), self) if outer else self), name

    def place(self, path: str, other: str = "") -> Span:
        """Return the span of a field; of two that don't fit, the one in the higher layer."""
        inner, name = self.inner(path)
        return higher(inner.view, name, other) if other in inner.view.block.entries else inner.view.place(name)

    def filled(self, text: "str | Callable[[Message], str]") -> str:
        """Return the text with the value of each `{field}`; `{stage}` is the name of the stage."""
        if not isinstance(text, str):
            return text(self)
        return _FIELD.sub(lambda match: _shown(getattr(*self.inner(match[1]))), text)


_FIELD = re.compile(r"\{([a-z_.]+)\}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- rows: a path is `Message.field`, `Message.field: VALUE`, or `Message.inner.field` for a field of an inner message


def says(m: Message, path: str) -> bool:
    """Return whether a field has an effect (`pad`), or that value (`sync_param.method: ASYNC`)."""
    path, _, value = path.partition(": ")
    inner, name = m.inner(path)
    return str(inner.view.scalar(name)) == value.strip('"') if value else inner.view.asks(name)


Text = str | Callable[[Message], str]


def wrong(
    path: str, text: Text, hint: Text = "", when: Callable[[Message], object] | None = None, other: str = ""
) -> Rule:
    """Return a rule: `path` is a mistake when `when` holds. `other`: the field that it conflicts with."""
    kind, _, condition = path.partition(".")
    field = condition.partition(": ")[0]

    def find(m: Message) -> Found:
        if says(m, condition) and (when is None or when(m)):
            yield m.place(field, other), m.filled(text), m.filled(hint)

    return Rule(f"{kind}.{field.partition('.')[0]}", find)


def needs(path: str, other: str, why: str = "", hint: Text = "") -> Rule:
    """Return a rule: `path` has no effect without `other`."""
    field = path.partition(".")[2]
    text = f"`{field}` without `{other}`: {why}" if why else f"`{field}` needs `{other}`"
    return wrong(path, text, hint, lambda m: not says(m, other))


def excludes(path: str, other: str, why: str = "", hint: Text = "remove one of them") -> Rule:
    """Return a rule: `path` excludes `other`."""
    field, shown = path.rpartition(".")[2], other.rpartition(".")[2]
    text = f"`{field}` with `{shown}`: {why}" if why else f"`{field}` and `{shown}` exclude each other"
    return wrong(path, text, hint, lambda m: says(m, other), other.partition(": ")[0])


def ordered(kind: str, low: str, high: str, when: Callable[[Message], object] = lambda m: True) -> list[Rule]:
    """Return rules: `low` must not exceed `high`."""
    text = f"`{low}` {{{low}}} is more than `{high}` {{{high}}}"

    def find(m: Message) -> Found:
        if when(m) and getattr(m, low) > getattr(m, high):
            yield m.place(high if high in m else low), m.filled(text), ""

    return [Rule(f"{kind}.{name}", find) for name in (low, high)]


def read_by(message: str, kind: str, readers: Mapping[str, str]) -> list[Rule]:
    """Return rules for fields that only some values of field `kind` read; `readers`: the values, separated by spaces, by field."""

    def row(name: str, values: Sequence[str]) -> Rule:
        hint = f"remove it, or write {listing([f'{kind}: {value}' for value in values])}"
        text = f"`{kind}: {{{kind}}}` does not read `{name}`"

        def find(m: Message) -> Found:
            if getattr(m, kind) not in (value.strip('"') for value in values):
                yield m.place(name), m.filled(text), hint

        return Rule(f"{message}.{name}", find)

    return [row(name, values.split()) for name, values in readers.items()]


# -- required fields


@cache
def required(kind: Descriptor) -> tuple[str, ...]:
    return tuple(field.name for field in kind.fields if field.GetOptions().HasExtension(stagerun_pb2.required))


def missing_fields(block: Block, names: Iterable[str]) -> list[str]:
    """Return the names of missing fields; an unreadable field is not missing. Durations may be written in epochs."""
    missing = []
    for name in names:
        entry = block.entries.get(name) or block.entries.get(partner(block.kind.fields_by_name[name]))
        if not entry.values if entry else not (block.broken or name in block.doubtful):
            missing.append(name)
    return missing


def examples(kind: Descriptor, names: Iterable[str]) -> str:
    """Return a hint with an example of each field."""
    fields = [kind.fields_by_name[name] for name in names]
    return "write " + ", ".join(f"`{field.GetOptions().Extensions[stagerun_pb2.required]}`" for field in fields)


def check_required(block: Block, problems: Problems) -> None:
    """Report missing fields of a message, recursively; except of a Solver, which inherits, and of a Model whose net has them."""
    of_net = block.kind.name == "Model" and "caffe_net" in (*block.entries, *block.doubtful)
    missing = [] if block.kind is SOLVER or of_net else missing_fields(block, required(block.kind))
    if missing:
        text = f"{block.kind.name} lacks {listing(missing, 'and')}"
        problems.add(block.place, text, examples(block.kind, missing))
    for name in block.entries:
        for inner in block.blocks(name):
            check_required(inner, problems)
