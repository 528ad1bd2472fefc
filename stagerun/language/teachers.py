"""Who teaches whom (`loss { type: DISTILL }`): stages that come before others without being their parents. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stagerun.base.errors import Problems, listing, nearest
from stagerun.language import networks
from stagerun.language.check_images import check_sizes
from stagerun.language.check_weights import network_of
from stagerun.language.lexer import shown
from stagerun.language.nets import Images, Nets
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


def check_teachers(
    found: Sequence[Node],
    schedule: Block,
    settings: Mapping[str, Block],
    nets: Nets,
    images: Callable[[Block], Images],
    problems: Problems,
) -> None:
    """A teacher knows the classes of what it teaches, and takes its images. `images`: those of a stage's settings."""
    for node in found:
        block, taught, place = settings.get(node.name), settings.get(node.teacher or ""), node.teacher_place
        if block is None or taught is None or place is None:
            continue
        models = [one.block("model") or schedule.block("model") for one in (block, taught)]
        nets.check_teacher(models[0], images(block), models[1], f"its teacher `{node.teacher}`", place)
        own, theirs = network_of(schedule, block), network_of(schedule, taught)
        if own is None or theirs is None:
            continue
        if own.num_classes != theirs.num_classes:
            message = (
                f"`{node.name}` has {own.num_classes} classes, and its teacher `{node.teacher}` {theirs.num_classes}"
            )
            problems.add(place, message, "a teacher needs the same classes")
        if theirs.name != own.name:  # of its own network the stage is told
            who = f"`{theirs.name}`, which teaches `{node.name}`,"
            check_sizes(who, networks.known_of(theirs), View(block), problems, fields=("transform_param",))
