"""What the layers say of one field of a stage or the schedule: the value that counts and those that it replaced. Pure.

Reads the files of a schedule that has no mistakes a second time, so that reading one keeps no more than what counts.
"""

import posixpath
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stagerun.base import recipe
from stagerun.base.errors import Problems, Span
from stagerun.language import override, stages
from stagerun.language.layers import partner
from stagerun.language.parse import parse
from stagerun.language.stages import Node
from stagerun.language.tree import SCHEDULE, SOLVER, Block, Entry, is_message


class Said(NamedTuple):
    """What a layer says of a field. `name` is the field that is written there: its own, its partner's in another unit, `clear`,
    or a message around it that `clear` names.

    `layer`: "schedule", "stage", "sweep" or "--set". `text` is the value as written, '' for a message. `source`: the line.
    """

    layer: str
    name: str
    text: str
    span: Span
    source: str


class _Layer(NamedTuple):
    """`path` is where the block goes: () for a Solver's fields, else that of a message whose other fields stay."""

    name: str
    block: Block
    path: tuple[str, ...] = ()


def history(schedule: recipe.Schedule, overrides: Sequence[str], stage: str | None, key: str) -> tuple[Said, ...]:
    """Lowest layer first, so that the last one counts. `key` is `solver.FIELD` of a stage, or a field of Schedule where
    `stage` is None. `overrides` are those that the schedule was read with. Empty for a default.
    """
    texts = dict(schedule.files)
    path, text = schedule.files[0]
    ignored = Problems()
    root = parse(path, text, SCHEDULE, ignored)
    found = stages.nodes(root, ignored)
    changes = override.read(overrides, [*(n.name for n in found), *stages.groups(found)], ignored)
    words = key.split(".")
    if stage is None:
        layers = [_Layer("schedule", root)]
        layers += [_Layer("--set", c.leaf, c.path) for c in changes if c.stage is None]
    else:
        node = next(n for n in found if n.name == stage)
        file = posixpath.join(posixpath.dirname(path), node.file or "")
        own = node.solver or parse(file, texts.get(file, ""), SOLVER, ignored)
        layers = list(_of_stage(node, root, own, changes))
        words = words[1:]
    return tuple(one for layer in layers for one in _said(layer, words, ignored))


def _of_stage(node: Node, root: Block, file: Block, changes: Sequence[override.Override]) -> Iterator[_Layer]:
    """In the order of `language.layers`: of what one layer says, what is inside a message comes on top of the message."""
    for block in root.blocks("solver"):
        yield _Layer("schedule", block)
    shared = [c for c in changes if c.stage is None and (not c.path or c.path[0] == "solver")]
    for change in sorted(shared, key=lambda c: len(c.path)):
        for block in change.leaf.blocks("solver") if not change.path else [change.leaf]:
            yield _Layer("--set", block, change.path[1:])
    yield _Layer("stage", file)
    if node.sweep is not None:
        yield _Layer("sweep", node.sweep)
    for name in (node.group, node.name):
        own = [c for c in changes if name is not None and c.stage == name]
        for change in sorted(own, key=lambda c: bool(c.path)):
            yield _Layer("--set", change.leaf, change.path)


def _said(layer: _Layer, words: Sequence[str], files: Problems) -> Iterator[Said]:
    """What a layer says of the field that `words` lead to: that it takes it away, sets it, both or nothing."""
    inside = len(layer.path)
    if tuple(words[:inside]) != layer.path or len(words) == inside:
        return
    entries, top = layer.block.entries, words[inside]
    other = partner(layer.block.kind.fields_by_name[top])
    if "clear" in entries and not inside:
        around = {".".join(words[:n]) for n in range(1, len(words) + 1)}
        for value in entries["clear"].values:
            if value.value in around | {other}:
                yield Said(layer.name, "clear", value.text, value.span, files.line(value.span))
    found = entries.get(top) or entries.get(other)
    if found is not None and (entry := _inside(found, words[inside + 1 :])) is not None:
        yield Said(layer.name, entry.field.name, _written(entry), entry.place, files.line(entry.place))


def _inside(entry: Entry, words: Sequence[str]) -> Entry | None:
    """Return the field that `words` lead to inside a message; None where the message doesn't write it."""
    for word in words:
        value = entry.values[0].value
        if not isinstance(value, Block):
            return entry
        found = value.entries.get(word) or value.entries.get(partner(value.kind.fields_by_name[word]))
        if found is None:
            return None
        entry = found
    return entry


def _written(entry: Entry) -> str:
    if is_message(entry.field):
        return ""
    texts = [value.text for value in entry.values]
    return f"[{', '.join(texts)}]" if entry.field.is_repeated else texts[0]
