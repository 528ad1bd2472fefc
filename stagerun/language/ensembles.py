"""Ensembles: their names, which stages they stand for, and whether these are evaluated on the same pictures. Pure."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from stagerun.base import recipe
from stagerun.base.errors import Problems, listing, nearest
from stagerun.language import members, values
from stagerun.language.build import evaluation_transform
from stagerun.language.lexer import shown
from stagerun.language.rules import check_required
from stagerun.language.rules.model import check_members
from stagerun.language.stages import Ends, Node, all_named, members_of, names_of, some, stages_of
from stagerun.language.tree import Block, Value, seen_by
from stagerun.language.values import differing, text
from stagerun.language.view import Doubtful, View

# What to do about members whose evaluations differ in a field.
_SAME = {
    "data.val": "members are evaluated together: give all of them the same `val`",
    "test_batch_size": "set `test_batch_size` in the `solver` of schedule.prototxt: batches of `rectangular` have a shape each",
    "test_transform_param": "set `test_transform_param` in the `solver` of schedule.prototxt, and in none of the members' files",
}


def build(schedule: Block, found: Sequence[Node], lengths: Mapping[str, int]) -> tuple[recipe.Ensemble, ...]:
    """The ensembles of a valid schedule; `found` holds its stages, those of a block in its order, `lengths` their iterations."""
    made = []
    for block in schedule.blocks("ensemble"):
        points = [_point(stage, iter, lengths) for stage, iters in members_of(block, found) for iter in iters]
        view = View(block)
        made.append(values.build(recipe.Ensemble, view, members=tuple(points), span=view.place("name")))
    return tuple(made)


def _point(stage: str, iter: int | None, lengths: Mapping[str, int]) -> str:
    """A member as `recipe.Ensemble.members` has it: an iteration that is the stage's last is its end."""
    return stage if iter is None or iter == lengths.get(stage) else f"{stage}@{iter}"


def check(
    schedule: Block, found: Sequence[Node], settings: Mapping[str, Block], ends: Ends, problems: Problems
) -> None:
    """`settings` are those of each stage, by name. Fields missing from an ensemble are reported elsewhere."""
    lines: dict[str, int] = {}
    for block in schedule.blocks("ensemble"):
        view, name = View(block), block.text("name") or ""
        label = f"ensemble `{name}`" if name else "an ensemble"
        if name:
            _check_name(name, view, found, lines, problems)
        with suppress(Doubtful):
            seen_by_members = [
                seen_by(settings[one], schedule) for one, _ in members_of(block, found) if one in settings
            ]
            if name and not all(View(seen).inside("data").has("val") for seen in seen_by_members or [schedule]):
                hint = "write `val { source: ... images: ... }` in `data`, or remove the ensemble"
                problems.add(view.place("name"), f"{label} without `data.val`: nothing to evaluate", hint)
        with suppress(Doubtful):
            _check_rule(view, problems)
        stages = _stages(label, block, found, ends, all_named(schedule), problems)
        with suppress(Doubtful):
            if view.has("shape") and len(stages) > 1:
                message = f"`shape` of {label}, whose members are of {len(stages)} stages: {some(list(stages))}"
                problems.add(view.place("shape"), message, "it imitates a decay along one stage: name snapshots of one")
        _check_pictures(stages, schedule, settings, problems)
        with suppress(Doubtful):
            check_members(schedule, view.text("rule"), list(stages.items()), settings, problems)


def _check_name(name: str, view: View, found: Sequence[Node], lines: dict[str, int], problems: Problems) -> None:
    place = view.place("name")
    if any(name in (node.name, node.group) for node in found):
        hint = "both would stand under one name in tables and logs"
        problems.add(place, f"ensemble `{name}` has the name of a stage", hint)
    elif name in lines:
        problems.add(place, f"two ensembles are named `{name}`", f"the other one stands in line {lines[name]}")
    lines.setdefault(name, place.line)


def _check_rule(view: View, problems: Problems) -> None:
    """Reports what only averages of weights read, beside another rule."""
    for field, why in (
        ("batch_norm_iter", "BatchNorm statistics are taken anew where weights are averaged"),
        ("shape", "it weighs what is averaged"),
    ):
        if view.has(field) and view.text("rule") != "WEIGHT_AVERAGE":
            message = f"`{field}` means nothing for rule {view.text('rule')}"
            problems.add(view.place(field), message, f"{why}: write `rule: WEIGHT_AVERAGE`, or remove it")


def _stages(
    label: str, block: Block, found: Sequence[Node], ends: Ends, complete: bool, problems: Problems
) -> dict[str, Value]:
    """The stages of the members, and where each is named first. Reports members that are no stage or none of its iterations, that come
    twice, or of which there is one alone. `complete`: the names of all stages could be read."""
    stages: dict[str, Value] = {}
    points: dict[str, Value] = {}
    entry = block.entries.get("members")
    unknown = "members" in block.doubtful or block.broken
    for value in entry.values if entry else ():
        try:
            name, iters = members.read(str(value.value))
        except members.WrongMember as error:
            unknown = True
            problems.add(value.span, *error.args)
            continue
        meant = stages_of(name, found)
        if not meant:
            unknown = True
            known = names_of(found)
            hint = nearest(name, known) or (f"the stages are {listing(known, 'and')}" if known else "")
            if complete:
                problems.add(value.span, f"member `{shown(name)}` of {label} is not a stage", hint)
        for stage in meant:
            stages.setdefault(stage, value)
            if iters[-1] is not None and (wrong := ends.missed(stage, iters[-1])):
                unknown = True
                problems.add(value.span, f"{label} has {wrong[0]}", wrong[1])
            for point in [_point(stage, iter, ends.length) for iter in iters]:
                if point in points:
                    unknown = True
                    group = next((g for g in (name, str(points[point].value)) if g != stage and "@" not in g), None)
                    message = f"{label} has member `{point}` twice" + (f": it is one of `{group}`" if group else "")
                    problems.add(value.span, message, "each counts once: remove one of them")
                points.setdefault(point, value)
    if len(points) == 1 and not unknown:
        ((point, value),) = points.items()
        message = f"{label} has one member only, {'snapshot' if '@' in point else 'stage'} `{point}`"
        problems.add(value.span, message, "name two or more, one `members` each, or a range as `trunk@6000..8000/500`")
    return stages


def _check_pictures(
    stages: Mapping[str, Value], schedule: Block, settings: Mapping[str, Block], problems: Problems
) -> None:
    """One pass over the images serves all members, so each must look at them in the same way."""
    seen = {name: _pictures(settings[name], schedule) for name in stages if name in settings}
    known = {name: pictures for name, pictures in seen.items() if pictures is not None}
    other = next(iter(known), "")
    for stage, pictures in known.items():
        theirs = known[other]
        differs = [one for field in pictures for one in differing(theirs[field], pictures[field], field)]
        if differs:
            how = ", ".join(f"{field} {text(two)} (`{other}`: {text(one)})" for field, one, two in differs)
            message = f"`{stage}` is not evaluated on the same pictures as `{other}`: {how.replace('test_transform_param.', '')}"
            hint = next(hint for field, hint in _SAME.items() if pictures.get(field) != theirs.get(field))
            problems.add(stages[stage].span, message, hint)


def _pictures(block: Block, schedule: Block) -> dict[str, object] | None:
    """What the pictures of a stage's evaluation depend on, by field; None where that is unknown, which was reported."""
    missing = Problems()
    check_required(block, missing)
    view = View(block)
    with suppress(Doubtful):
        if not missing:
            transform = evaluation_transform(view)
            size = view.whole("test_batch_size") or view.whole("device_batch_size") if transform.rectangular else None
            data = View(seen_by(block, schedule)).inside("data")
            vals = tuple(val.text("source") for val in data.views("val"))
            return {"test_transform_param": transform, "test_batch_size": size, "data.val": vals}
    return None
