"""Who teaches whom (`loss { type: DISTILL }`): stages that come before others without being their parents. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stagerun.base.errors import Problems, listing, nearest
from stagerun.language.check_weights import network_of
from stagerun.language.lexer import shown
from stagerun.language.stages import Node, groups, some, with_disabled
from stagerun.language.tree import Block
from stagerun.language.view import Doubtful, View


def with_teachers(found: Sequence[Node], settings: Mapping[str, Block], problems: Problems) -> list[Node]:
    """The nodes with their teachers, which `settings` name. Reports teachers that are not one stage. A stage whose teacher is not enabled
    is not enabled either."""
    return with_disabled([_taught(node, found, settings.get(node.name), problems) for node in found])


def _taught(node: Node, found: Sequence[Node], settings: Block | None, problems: Problems) -> Node:
    if settings is None:
        return node
    try:
        loss = View(settings).view("loss")
        name = loss.text("teacher") if loss is not None else None
    except Doubtful:
        return node
    if loss is None or not name:
        return node
    place, names = loss.place("teacher"), [other.name for other in found]
    if name in names:
        return replace(node, teacher=name, teacher_place=place)
    if members := groups(found).get(name):
        text = f"stage `{node.name}` is taught by `{name}`, which stands for {some(members)}"
        problems.add(place, text, f'name one of them: `teacher: "{members[0]}"`')
    else:
        text = f"stage `{node.name}` is taught by `{shown(name)}`, which is not a stage"
        at = "a teacher is a stage at its end, without an `@`" if "@" in name else ""
        problems.add(place, text, at or nearest(name, names) or f"the stages are {listing(names)}")
    return node


def check_classes(found: Sequence[Node], schedule: Block, settings: Mapping[str, Block], problems: Problems) -> None:
    """A teacher knows the classes of what it teaches."""
    for node in found:
        if node.teacher is None or node.teacher_place is None or not {node.teacher, node.name} <= settings.keys():
            continue
        own, theirs = (network_of(schedule, settings[name]) for name in (node.name, node.teacher))
        if own and theirs and own.num_classes != theirs.num_classes:
            message = (
                f"`{node.name}` has {own.num_classes} classes, and its teacher `{node.teacher}` {theirs.num_classes}"
            )
            problems.add(node.teacher_place, message, "a teacher needs the same classes")
