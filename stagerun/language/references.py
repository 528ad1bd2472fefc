"""Stages that refer to others: by `@best` and `@ema`, as members of ensembles, and as teachers (`loss { type: DISTILL }`). Pure."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from stagerun.base import recipe
from stagerun.base.errors import Problems, listing, nearest
from stagerun.language import networks, values
from stagerun.language.build import evaluation_transform
from stagerun.language.lexer import shown
from stagerun.language.nets import Images, Nets
from stagerun.language.ranges import WrongMember, read_member
from stagerun.language.rules import check_required
from stagerun.language.rules.model import TRAINING_SIZES, check_members, model_of, wrong_sizes
from stagerun.language.rules.rule import Around, Message, Rule, run
from stagerun.language.stages import Ends, Node, all_named, groups, members_of, names_of, some, stages_of, with_disabled
from stagerun.language.tree import Block, Doubtful, Value, View, seen_by
from stagerun.language.values import differing, text

# -- `from: "trunk@best"`, `from: "trunk@ema"`


def check_starts(schedule: Block, nodes: Sequence[Node], settings: Mapping[str, Block], problems: Problems) -> None:
    """Report starts from the best evaluation, or the averaged weights, of a stage that has none."""
    for node in nodes:
        name, span = node.parent, node.parent_place
        if node.parent_at is None or name is None or span is None or name not in settings:
            continue
        with suppress(Doubtful):
            block = settings[name]
            view, sync, lacks, hint = View(block), View(block).view("sync_param"), "", ""
            if node.parent_at == recipe.EMA:
                lacks = "" if view.has("ema_decay") else "has no `ema_decay`"
                hint = f"write `ema_decay: 0.999` in `{name}`, or start from `{name}`: its trained weights"
            elif not View(seen_by(block, schedule)).inside("data").has("val"):
                lacks, hint = "has no `data.val` to evaluate", "write `val { source: ... }` in `data`"
            elif not view.asks("test_interval"):
                lacks, hint = "has no evaluations inside", f"for example, write `test_epoch: 1` in `{name}`"
            elif view.has("solverstate"):
                lacks, hint = "begins with a `solverstate`, which has no evaluations", f"write `{name}@ITERATION`"
            elif sync is not None and sync.text("method") == "ASYNC":
                lacks, hint = "has `method: ASYNC`, whose bits vary", "write `method: LOCAL`"
            if lacks:
                message = f"stage `{node.shown}` starts from `{name}@{node.parent_at}`, and `{name}` {lacks}"
                problems.add(span, message, hint)


# -- ensembles

# Hints about members whose evaluations differ in a field.
_SAME = {
    "data.val": "members are evaluated together: give all of them the same `val`",
    "test_batch_size": "set `test_batch_size` in the `solver` of schedule.prototxt: batches of `rectangular` have a shape each",
    "test_transform_param": "set `test_transform_param` in the `solver` of schedule.prototxt, and remove it from the members' files",
}


def build_ensembles(schedule: Block, nodes: Sequence[Node], lengths: Mapping[str, int]) -> tuple[recipe.Ensemble, ...]:
    """Build the ensembles of a valid schedule. `nodes`: its stages, within a block in its order; `lengths`: their iterations."""
    made = []
    for block in schedule.blocks("ensemble"):
        points = [_point(stage, iter, lengths) for stage, iters in members_of(block, nodes) for iter in iters]
        view = View(block)
        made.append(values.build(recipe.Ensemble, view, members=tuple(points), span=view.place("name")))
    return tuple(made)


def _point(stage: str, iter: int | None, lengths: Mapping[str, int]) -> str:
    """Return a member for `recipe.Ensemble.members`: the stage's last iteration is its end."""
    return stage if iter is None or iter == lengths.get(stage) else f"{stage}@{iter}"


def check_ensembles(
    schedule: Block, nodes: Sequence[Node], settings: Mapping[str, Block], ends: Ends, problems: Problems
) -> None:
    """Report mistakes in ensembles. `settings`: by stage. Missing fields are reported elsewhere."""
    lines: dict[str, int] = {}
    for block in schedule.blocks("ensemble"):
        view, name = View(block), block.text("name") or ""
        label = f"ensemble `{name}`" if name else "an ensemble"
        if name:
            _check_name(name, view, nodes, lines, problems)
        with suppress(Doubtful):
            seen_by_members = [
                seen_by(settings[one], schedule) for one, _ in members_of(block, nodes) if one in settings
            ]
            if name and not all(View(seen).inside("data").has("val") for seen in seen_by_members or [schedule]):
                hint = "write `val { source: ... images: ... }` in `data`, or remove the ensemble"
                problems.add(view.place("name"), f"{label} without `data.val`: nothing to evaluate", hint)
        with suppress(Doubtful):
            _check_rule(view, problems)
        stages = _stages(label, block, nodes, ends, all_named(schedule), problems)
        with suppress(Doubtful):
            if view.has("shape") and len(stages) > 1:
                message = f"`shape` of {label}, whose members come from {len(stages)} stages: {some(list(stages))}"
                problems.add(view.place("shape"), message, "it imitates a decay along one stage: name snapshots of one")
        _check_pictures(stages, schedule, settings, problems)
        with suppress(Doubtful):
            check_members(schedule, view.text("rule"), list(stages.items()), settings, problems)


def _check_name(name: str, view: View, nodes: Sequence[Node], lines: dict[str, int], problems: Problems) -> None:
    span = view.place("name")
    if any(name in (node.name, node.group) for node in nodes):
        hint = "both would have one name in tables and logs"
        problems.add(span, f"ensemble `{name}` has the name of a stage", hint)
    elif name in lines:
        problems.add(span, f"two ensembles are named `{name}`", f"the other one is in line {lines[name]}")
    lines.setdefault(name, span.line)


def _check_rule(view: View, problems: Problems) -> None:
    """Report fields that only weight averages read, next to another rule."""
    for field, why in (
        ("batch_norm_iter", "it recomputes BatchNorm statistics for averaged weights"),
        ("shape", "it weighs the averaged snapshots"),
    ):
        if view.has(field) and view.text("rule") != "WEIGHT_AVERAGE":
            message = f"`{field}` has no effect with rule {view.text('rule')}"
            problems.add(view.place(field), message, f"{why}: write `rule: WEIGHT_AVERAGE`, or remove it")


def _stages(
    label: str, block: Block, nodes: Sequence[Node], ends: Ends, complete: bool, problems: Problems
) -> dict[str, Value]:
    """Return the stages of the members with each one's first mention. Report members that aren't a stage or an iteration of it, duplicates,
    and a single member. `complete`: the names of all stages could be read."""
    stages: dict[str, Value] = {}
    points: dict[str, Value] = {}
    entry = block.entries.get("members")
    unknown = "members" in block.doubtful or block.broken
    for value in entry.values if entry else ():
        try:
            name, iters = read_member(str(value.value))
        except WrongMember as error:
            unknown = True
            problems.add(value.span, *error.args)
            continue
        meant = stages_of(name, nodes)
        if not meant:
            unknown = True
            names = names_of(nodes)
            hint = nearest(name, names) or (f"the stages are {listing(names, 'and')}" if names else "")
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
                    message = f"{label} has member `{point}` twice" + (f": `{group}` includes it" if group else "")
                    problems.add(value.span, message, "each counts once: remove one of them")
                points.setdefault(point, value)
    if len(points) == 1 and not unknown:
        ((point, value),) = points.items()
        message = f"{label} has only one member, {'snapshot' if '@' in point else 'stage'} `{point}`"
        problems.add(value.span, message, "name two or more, one `members` each, or a range as `trunk@6000..8000/500`")
    return stages


def _check_pictures(
    stages: Mapping[str, Value], schedule: Block, settings: Mapping[str, Block], problems: Problems
) -> None:
    """Report members that are evaluated on other pictures: one pass over the images serves all."""
    seen = {name: _pictures(settings[name], schedule) for name in stages if name in settings}
    complete = {name: pictures for name, pictures in seen.items() if pictures is not None}
    other = next(iter(complete), "")
    for stage, pictures in complete.items():
        theirs = complete[other]
        differs = [one for field in pictures for one in differing(theirs[field], pictures[field], field)]
        if differs:
            how = ", ".join(f"{field} {text(two)} (`{other}`: {text(one)})" for field, one, two in differs)
            message = f"`{stage}` is not evaluated on the same pictures as `{other}`: {how.replace('test_transform_param.', '')}"
            hint = next(hint for field, hint in _SAME.items() if pictures.get(field) != theirs.get(field))
            problems.add(stages[stage].span, message, hint)


def _pictures(block: Block, schedule: Block) -> dict[str, object] | None:
    """Return the fields that the pictures of a stage's evaluation depend on; None if unknown, which was reported."""
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


# -- teachers


def with_teachers(nodes: Sequence[Node], settings: Mapping[str, Block], problems: Problems) -> list[Node]:
    """Return the nodes with the teachers that `settings` name; report teachers that are not one stage. Disable the stages of a disabled
    teacher."""
    names = [node.name for node in nodes]
    taught: list[Node] = []
    for node in nodes:
        with suppress(Doubtful):
            loss = View(settings[node.name]).view("loss")
            teacher = loss.text("teacher") if loss is not None else None
            if loss is not None and teacher in names:
                node = replace(node, teacher=teacher, teacher_place=loss.place("teacher"))
            elif loss is not None and teacher:
                text, hint = f"is taught by `{shown(teacher)}`, which is not a stage", nearest(teacher, names)
                if made := groups(nodes).get(teacher):
                    text = f"is taught by `{teacher}`, which makes {some(made)}"
                    hint = f'name one of them: `teacher: "{made[0]}"`'
                elif "@" in teacher:
                    hint = "a teacher is a stage at its end, without an `@`"
                hint = hint or f"the stages are {listing(names)}"
                problems.add(loss.place("teacher"), f"stage `{node.name}` {text}", hint)
        taught.append(node)
    return with_disabled(taught)


def check_teachers(
    nodes: Sequence[Node],
    schedule: Block,
    settings: Mapping[str, Block],
    nets: Nets,
    images: Callable[[Block], Images],
    problems: Problems,
) -> None:
    """Report teachers that have other classes than the stage, or don't take its images. `images`: returns the images of settings."""
    for node in nodes:
        teacher, span = node.teacher, node.teacher_place
        if teacher is None or span is None:
            continue
        block, taught = settings[node.name], settings[teacher]
        models = [one.block("model") or schedule.block("model") for one in (block, taught)]
        nets.check_teacher(models[0], images(block), models[1], f"its teacher `{teacher}`", span)
        student, theirs = model_of(schedule, block), model_of(schedule, taught)
        if student is None or theirs is None:
            continue
        if student.num_classes != theirs.num_classes:
            text = f"`{node.name}` has {student.num_classes} classes, and its teacher `{teacher}` {theirs.num_classes}"
            problems.add(span, text, "a teacher needs the same classes")
        if theirs.name != student.name:  # the stage's network is checked elsewhere
            who = f"`{theirs.name}`, which teaches `{node.name}`,"
            view = View(block)
            find = partial(wrong_sizes, who, networks.known_of(theirs))
            rules = [Rule(path, partial(find, path=path)) for path in TRAINING_SIZES]
            run(rules, problems, Message(view, Around(View(schedule), {node.name: view}, node)))
