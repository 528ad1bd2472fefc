"""Who teaches whom (`loss { type: DISTILL }`): stages that come before others without being their parents. Pure."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from stagerun.base.errors import Problems, listing, nearest
from stagerun.language import networks
from stagerun.language.lexer import shown
from stagerun.language.nets import Images, Nets
from stagerun.language.rules.model import TRAINING_SIZES, model_of, wrong_sizes
from stagerun.language.rules.rule import Around, Message, Rule, run
from stagerun.language.stages import Node, groups, some, with_disabled
from stagerun.language.tree import Block
from stagerun.language.view import Doubtful, View


def with_teachers(found: Sequence[Node], settings: Mapping[str, Block], problems: Problems) -> list[Node]:
    """The nodes with their teachers, which `settings` name. Reports teachers that are not one stage. A stage whose teacher is not enabled
    is not enabled either."""
    names = [node.name for node in found]
    taught: list[Node] = []
    for node in found:
        with suppress(Doubtful):
            loss = View(settings[node.name]).view("loss")
            teacher = loss.text("teacher") if loss is not None else None
            if loss is not None and teacher in names:
                node = replace(node, teacher=teacher, teacher_place=loss.place("teacher"))
            elif loss is not None and teacher:
                text, hint = f"is taught by `{shown(teacher)}`, which is not a stage", nearest(teacher, names)
                if made := groups(found).get(teacher):
                    text = f"is taught by `{teacher}`, which stands for {some(made)}"
                    hint = f'name one of them: `teacher: "{made[0]}"`'
                elif "@" in teacher:
                    hint = "a teacher is a stage at its end, without an `@`"
                place = loss.place("teacher")
                problems.add(place, f"stage `{node.name}` {text}", hint or f"the stages are {listing(names)}")
        taught.append(node)
    return with_disabled(taught)


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
        teacher, place = node.teacher, node.teacher_place
        if teacher is None or place is None:
            continue
        block, taught = settings[node.name], settings[teacher]
        models = [one.block("model") or schedule.block("model") for one in (block, taught)]
        nets.check_teacher(models[0], images(block), models[1], f"its teacher `{teacher}`", place)
        own, theirs = model_of(schedule, block), model_of(schedule, taught)
        if own is None or theirs is None:
            continue
        if own.num_classes != theirs.num_classes:
            message = f"`{node.name}` has {own.num_classes} classes, and its teacher `{teacher}` {theirs.num_classes}"
            problems.add(place, message, "a teacher needs the same classes")
        if theirs.name != own.name:  # of its own network the stage is told
            who = f"`{theirs.name}`, which teaches `{node.name}`,"
            view = View(block)
            found_by = partial(wrong_sizes, who, networks.known_of(theirs))
            rules = [Rule(path, partial(found_by, path=path)) for path in TRAINING_SIZES]
            run(rules, problems, Message(view, Around(View(schedule), {node.name: view}, node)))
