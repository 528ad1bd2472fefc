"""Ensembles: their names, which stages they stand for, and whether these are evaluated on the same pictures. Pure."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from stagerun.base import recipe
from stagerun.base.errors import Problems, listing, nearest
from stagerun.language.build import evaluation_transform
from stagerun.language.check import check_required
from stagerun.language.check_weights import check_members
from stagerun.language.lexer import shown
from stagerun.language.stages import Node
from stagerun.language.tree import Block, Value
from stagerun.language.values import layout
from stagerun.language.view import Doubtful, View


def build(schedule: Block, order: Sequence[Node]) -> tuple[recipe.Ensemble, ...]:
    """The ensembles of a valid schedule; `order` holds its stages in running order."""
    return tuple(_build(View(block), order) for block in schedule.blocks("ensemble"))


def _build(view: View, order: Sequence[Node]) -> recipe.Ensemble:
    name, count = view.text("name"), view.whole("batch_norm_iter")
    assert name is not None and count is not None
    meant = {stage for value in _members(view.block) for stage in _stages(str(value.value), order)}
    return recipe.Ensemble(
        name=name,
        members=tuple(node.name for node in order if node.name in meant),
        rule=recipe.EnsembleRule(view.text("rule")),
        batch_norm_iter=count,
        span=view.place("name"),
    )


def check(schedule: Block, found: Sequence[Node], settings: Mapping[str, Block], problems: Problems) -> None:
    """`settings` are those of each stage, by name. Fields missing from an ensemble are reported elsewhere."""
    taken: dict[str, int] = {}
    for block in schedule.blocks("ensemble"):
        view, name = View(block), ""
        with suppress(Doubtful):
            name = view.text("name") or ""
            if name:
                _name(name, view, found, taken, problems)
            evaluated = View(schedule).inside("data").has("val") or _all_have_val(block, found, settings)
            if name and not evaluated:
                hint = "write `val { source: ... images: ... }` in `data`, or remove the ensemble"
                problems.add(view.place("name"), f"ensemble `{name}` without `data.val`: nothing to evaluate", hint)
        with suppress(Doubtful):
            if view.has("batch_norm_iter") and view.text("rule") != "WEIGHT_AVERAGE":
                message = f"`batch_norm_iter` means nothing for rule {view.text('rule')}"
                hint = "BatchNorm statistics are taken anew where weights are averaged: write `rule: WEIGHT_AVERAGE`, or remove it"
                problems.add(view.place("batch_norm_iter"), message, hint)
        label = f"ensemble `{name}`" if name else "an ensemble"
        members = list(_meant(label, block, found, _all_named(schedule), problems))
        _same_pictures(members, schedule, settings, problems)
        with suppress(Doubtful):
            check_members(schedule, view.text("rule"), members, settings, problems)


def _all_have_val(block: Block, found: Sequence[Node], settings: Mapping[str, Block]) -> bool:
    """Whether every member has validation images of its own."""
    names = [name for value in _members(block) for name in _stages(str(value.value), found)]
    return bool(names) and all(View(settings[name]).inside("data").has("val") for name in names if name in settings)


def _name(name: str, view: View, found: Sequence[Node], taken: dict[str, int], problems: Problems) -> None:
    place = view.place("name")
    if any(name in (node.name, node.group) for node in found):
        hint = "both would stand under one name in tables and logs"
        problems.add(place, f"ensemble `{name}` has the name of a stage", hint)
    elif name in taken:
        problems.add(place, f"two ensembles are named `{name}`", f"the other one stands in line {taken[name]}")
    taken.setdefault(name, place.line)


def _all_named(schedule: Block) -> bool:
    """Whether every stage has a name that could be read: another one may be what a member means."""
    blocks = [schedule, *schedule.blocks("stage"), *(s for b in schedule.blocks("stage") for s in b.blocks("sweep"))]
    doubtful = any(b.doubtful & {"stage", "name", "from", "sweep"} or b.broken for b in blocks)
    return not doubtful and all("name" in b.entries for b in schedule.blocks("stage"))


def _meant(
    label: str, block: Block, found: Sequence[Node], complete: bool, problems: Problems
) -> Iterator[tuple[str, Value]]:
    """Each member stage once, and where it is named."""
    where: dict[str, Value] = {}
    unknown = "members" in block.doubtful or block.broken
    for value in _members(block):
        name = str(value.value)
        stages = _stages(name, found)
        if not stages:
            unknown = True
            known = list(dict.fromkeys([*(n.name for n in found), *(n.group for n in found if n.group)]))
            hint = nearest(name, known) or (f"the stages are {listing(known, 'and')}" if known else "")
            if complete:
                problems.add(value.span, f"member `{shown(name)}` of {label} is not a stage", hint)
        for stage in stages:
            if stage in where:
                group = next((g for g in (name, str(where[stage].value)) if g != stage), None)
                message = f"{label} has member `{stage}` twice" + (f": it is one of `{group}`" if group else "")
                problems.add(value.span, message, "each stage counts once: remove one of them")
                unknown = True
            where.setdefault(stage, value)
    if len(where) == 1 and not unknown:
        ((stage, value),) = where.items()
        message = f"{label} has one member only, stage `{stage}`"
        problems.add(value.span, message, "name two stages or more, one `members` each")
    yield from where.items()


def _members(block: Block) -> Sequence[Value]:
    return block.entries["members"].values if "members" in block.entries else ()


def _stages(member: str, nodes: Sequence[Node]) -> list[str]:
    """The stage of that name, or those that the block of that name makes."""
    return [n.name for n in nodes if n.group == member] or [n.name for n in nodes if n.name == member]


def _same_pictures(
    members: Sequence[tuple[str, Value]], schedule: Block, settings: Mapping[str, Block], problems: Problems
) -> None:
    """One pass over the images serves all members, so each must look at them in the same way."""
    first: tuple[str, dict[str, object]] | None = None
    for stage, value in members:
        block = settings.get(stage)
        seen = _seen(block, schedule) if block is not None else None
        if seen is None:
            continue
        if first is None:
            first = stage, seen
            continue
        other, theirs = first
        differing = [field for field in seen if seen[field] != theirs[field]]
        if differing:
            how = ", ".join(f"{f} {_written(seen[f])} (`{other}`: {_written(theirs[f])})" for f in differing)
            message = f"`{stage}` is not evaluated on the same pictures as `{other}`: {how}"
            hint = "set `test_transform_param` in the `solver` of schedule.prototxt, and in none of the members' files"
            if "test_batch_size" in differing:
                hint = "set `test_batch_size` in the `solver` of schedule.prototxt: batches of `rectangular` have a shape each"
            if "data.val" in differing:
                hint = "members are evaluated together: give all of them the same `val`"
            problems.add(value.span, message, hint)


def _seen(block: Block, schedule: Block) -> dict[str, object] | None:
    """What the pictures of a stage's evaluation depend on, by field; None where that is unknown, which was reported."""
    missing = Problems()
    check_required(block, missing)
    if missing:
        return None
    view = View(block)
    try:
        made = evaluation_transform(view)
        found = {member.name: getattr(made, member.attribute) for member in layout(recipe.Transform)}
        if made.rectangular:
            found["test_batch_size"] = view.whole("test_batch_size") or view.whole("device_batch_size")
        own = view.inside("data")
        holder = own if own.has("val") else View(schedule).inside("data")
        found["data.val"] = tuple(val.text("source") for val in holder.views("val"))
    except Doubtful:
        return None
    return found


def _written(value: object) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if dataclasses.is_dataclass(value):
        return f"{{ {' '.join(f'{f.name}: {_written(getattr(value, f.name))}' for f in dataclasses.fields(value))} }}"
    return str(getattr(value, "value", value))  # an enum's name
