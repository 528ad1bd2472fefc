"""Ensembles: their names, which stages they stand for, and whether these are evaluated on the same pictures. Pure."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stagerun.base import recipe
from stagerun.base.errors import Problems, listing, nearest
from stagerun.language import members
from stagerun.language.build import evaluation_transform
from stagerun.language.check import check_required
from stagerun.language.check_weights import check_members
from stagerun.language.lexer import shown
from stagerun.language.stages import Node, some, stages_of
from stagerun.language.tree import Block, Value
from stagerun.language.values import layout
from stagerun.language.view import Doubtful, View


def build(schedule: Block, found: Sequence[Node], lengths: Mapping[str, int]) -> tuple[recipe.Ensemble, ...]:
    """The ensembles of a valid schedule; `found` holds its stages, those of a block in its order, `lengths` their iterations."""
    return tuple(_build(View(block), found, lengths) for block in schedule.blocks("ensemble"))


def _build(view: View, found: Sequence[Node], lengths: Mapping[str, int]) -> recipe.Ensemble:
    name, count = view.text("name"), view.whole("batch_norm_iter")
    assert name is not None and count is not None
    written = [members.read(str(value.value)) for value in _members(view.block)]
    points = [(stage, iter) for named, iters in written for stage in stages_of(named, found) for iter in iters]
    return recipe.Ensemble(
        name=name,
        members=tuple(_label(stage, None if iter == lengths[stage] else iter) for stage, iter in points),
        rule=recipe.EnsembleRule(view.text("rule")),
        batch_norm_iter=count,
        shape=view.text("shape"),
        span=view.place("name"),
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """Of the stages whose length is known: their iterations, and those that `early_stop` leaves in any case."""

    length: Mapping[str, int]
    sure: Mapping[str, int]


def check(
    schedule: Block, found: Sequence[Node], settings: Mapping[str, Block], ends: Ends, problems: Problems
) -> None:
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
            _of_averages(view, problems)
        label = f"ensemble `{name}`" if name else "an ensemble"
        meant = list(_meant(label, block, found, ends, _all_named(schedule), problems))
        stages = list(dict(reversed(meant)).items())[::-1]
        with suppress(Doubtful):
            if view.has("shape") and len(stages) > 1:
                message = (
                    f"`shape` of {label}, whose members are of {len(stages)} stages: {some([s for s, _ in stages])}"
                )
                problems.add(view.place("shape"), message, "it imitates a decay along one stage: name snapshots of one")
        _same_pictures(stages, schedule, settings, problems)
        with suppress(Doubtful):
            check_members(schedule, view.text("rule"), stages, settings, problems)


def _of_averages(view: View, problems: Problems) -> None:
    """Reports what only averages of weights read, beside another rule."""
    if view.has("batch_norm_iter") and not recipe.EnsembleRule(view.text("rule")).averages:
        message = f"`batch_norm_iter` means nothing for rule {view.text('rule')}"
        hint = (
            "BatchNorm statistics are taken anew where weights are averaged: write `rule: WEIGHT_AVERAGE`, or remove it"
        )
        problems.add(view.place("batch_norm_iter"), message, hint)
    if view.has("shape") and view.text("rule") != "WEIGHT_AVERAGE":
        message = f"`shape` means nothing for rule {view.text('rule')}"
        hint = "it weighs what is averaged: write `rule: WEIGHT_AVERAGE`, or remove it"
        problems.add(view.place("shape"), message, hint)


def _all_have_val(block: Block, found: Sequence[Node], settings: Mapping[str, Block]) -> bool:
    """Whether every member has validation images of its own."""
    names = [name for value in _members(block) for name in stages_of(str(value.value).partition("@")[0], found)]
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
    label: str, block: Block, found: Sequence[Node], ends: Ends, complete: bool, problems: Problems
) -> Iterator[tuple[str, Value]]:
    """The stage of each member, and where it is named."""
    where: dict[tuple[str, int | None], Value] = {}
    unknown = "members" in block.doubtful or block.broken
    for value in _members(block):
        try:
            name, iters = members.read(str(value.value))
        except members.WrongMember as error:
            unknown = True
            problems.add(value.span, *error.args)
            continue
        stages = stages_of(name, found)
        if not stages:
            unknown = True
            known = list(dict.fromkeys([*(n.name for n in found), *(n.group for n in found if n.group)]))
            hint = nearest(name, known) or (f"the stages are {listing(known, 'and')}" if known else "")
            if complete:
                problems.add(value.span, f"member `{shown(name)}` of {label} is not a stage", hint)
        for stage in stages:
            unknown |= _missed(label, stage, iters, ends, value, problems)
            for iter in iters:
                place = stage, None if iter == ends.length.get(stage) else iter
                if place in where:
                    group = next((g for g in (name, str(where[place].value)) if g != stage and "@" not in g), None)
                    message = f"{label} has member `{_label(*place)}` twice" + (
                        f": it is one of `{group}`" if group else ""
                    )
                    problems.add(value.span, message, "each counts once: remove one of them")
                    unknown = True
                where.setdefault(place, value)
    if len(where) == 1 and not unknown:
        ((place, value),) = where.items()
        message = f"{label} has one member only, {'snapshot' if place[1] else 'stage'} `{_label(*place)}`"
        problems.add(value.span, message, "name two or more, one `members` each, or a range as `trunk@6000..8000/500`")
    yield from ((stage, value) for (stage, _), value in where.items())


def _missed(label: str, stage: str, iters: Sequence[int | None], ends: Ends, value: Value, problems: Problems) -> bool:
    """Reports an iteration that the stage doesn't have, or may not come to."""
    last, length = iters[-1], ends.length.get(stage)
    if last is None or length is None:
        return False
    reached = ends.sure.get(stage, length)
    if last > length:
        message = f"{label} has iteration {last} of `{stage}`, which has {length}"
        problems.add(value.span, message, f"an iteration up to {length}, which is its end")
    elif last > reached:
        message = f"{label} has iteration {last} of `{stage}`, which `early_stop` may end at {reached}"
        problems.add(value.span, message, f"an iteration up to {reached}, or `{stage}` for its end")
    return last > min(length, reached)


def _label(stage: str, iter: int | None) -> str:
    return stage if iter is None else f"{stage}@{iter}"


def _members(block: Block) -> Sequence[Value]:
    return block.entries["members"].values if "members" in block.entries else ()


def _same_pictures(
    stages: Sequence[tuple[str, Value]], schedule: Block, settings: Mapping[str, Block], problems: Problems
) -> None:
    """One pass over the images serves all members, so each must look at them in the same way."""
    first: tuple[str, dict[str, object]] | None = None
    for stage, value in stages:
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
