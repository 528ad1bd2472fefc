"""Builds a recipe.Schedule from checked settings: the identity of each stage's snapshots, and the origin of each value. Pure."""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stagerun.base import recipe
from stagerun.language import build, layers, values
from stagerun.language.build import Context, Fact
from stagerun.language.code import LocalFiles
from stagerun.language.references import build_ensembles
from stagerun.language.stages import Node
from stagerun.language.tree import SCHEDULE, SOLVER, Block, View, quoted, seen_by

# The fields whose contents have these digests.
_NAMED_BY = {recipe.LABELS: "data.train.labels", recipe.TESTED_LABELS: "data.val.labels", recipe.NET: "model.caffe_net"}


def schedule_of(
    schedule: Block,
    settings: Mapping[str, Block],
    order: Sequence[Node],
    lengths: Mapping[str, int],
    context: Context,
    python: LocalFiles,
    files: Sequence[tuple[str, str]],
) -> recipe.Schedule:
    """Return the recipe of a checked schedule. `order`: the nodes in running order; `lengths`: their iterations."""
    view, nodes = View(schedule), {node.name: node for node in order}
    whole = values.build(
        recipe.Schedule,
        view,
        name=view.text("name") or posixpath.basename(context.root),
        model=build.model(view.inside("model"), context),
        data=build.data(view.inside("data"), context),
        stages=(),
        ensembles=build_ensembles(schedule, [nodes[name] for name in settings], lengths),
        files=tuple(files),
    )
    shared = _shared(schedule, whole.name, whole.model, context)
    made: dict[str, recipe.Stage] = {}
    for node in order:
        block = settings[node.name]
        seen = seen_by(block, schedule)
        data = whole.data if seen is schedule else build.data(View(seen).inside("data"), context)
        solver = build.solver(View(block), whole.seed, data.train.images, context)
        model = solver.model or whole.model
        facts = list(shared if seen is schedule else _shared(seen, whole.name, model, context))
        facts += build.code_facts(block, schedule, python, context.path)
        for ensemble, written in zip(whole.ensembles, schedule.blocks("ensemble"), strict=True):
            if ensemble.name == node.average:
                facts += _average(ensemble, written)
        facts += build.facts(SOLVER, block, "solver.", _derived(solver), context.path)
        facts += [*_last_used(node, data, solver, made, block), *_start_facts(node, block)]
        origins = {fact.key: fact.origin for fact in facts}
        digests = {recipe.LABELS: data.train.labels_digest, recipe.NET: model.net and values.net_digest(model.net)}
        follows = [n for n in order if (n.parent, n.parent_at) == (node.name, recipe.BEST)]
        if follows:
            origin = recipe.Origin("recorded", "schedule", follows[0].parent_place)
            facts.append(Fact(recipe.FOLLOWED, origin.text, True, origin))
        tested = solver.early_stop is not None or bool(follows)
        if tested and data.val:
            digests[recipe.TESTED_LABELS] = data.val[0].labels_digest
        facts += [Fact(key, digest, True, origins[_NAMED_BY[key]]) for key, digest in digests.items() if digest]
        made[node.name] = recipe.Stage(
            name=node.name,
            parent=node.parent,
            model=model,
            data=data,
            solver=solver,
            identity={fact.key: fact.text for fact in facts if _counts(fact, solver, tested)},
            origins={fact.key: _in_layer(fact.origin, block, context) for fact in facts},
            span=node.place,
            parent_iter=node.parent_iter,
            parent_at=node.parent_at,
            average=node.average,
            enabled=node.enabled,
            group=node.group,
        )
    return replace(whole, stages=tuple(made.values()))


def _shared(schedule: Block, name: str, model: recipe.Model, context: Context) -> list[Fact]:
    """Return the facts of a Schedule, as a stage has it."""
    derived = {"name": quoted(name), **dict(values.leaves(model, "model"))}
    return list(build.facts(SCHEDULE, schedule, "", derived, context.path))


def _last_used(
    node: Node, data: recipe.Data, solver: recipe.Solver, above: Mapping[str, recipe.Stage], block: Block
) -> Iterator[Fact]:
    """Yield how many stages earlier the training set was used, if the parent has another set: its order resumes from there. Part of the
    identity, which excludes paths, although paths decide which sets are the same."""
    steps, parent = 1, node.parent
    while parent is not None and not above[parent].data.train.same(data.train):
        steps, parent = steps + 1, above[parent].parent
    if node.parent is None or not solver.carry_data or parent == node.parent:
        return
    text = f"{steps} stages before" if parent is not None else "never"
    entry = block.entries.get("data")
    yield Fact(recipe.LAST_USED, text, True, recipe.Origin(text, "stage", entry.name if entry else node.place))


def _in_layer(origin: recipe.Origin, block: Block, context: Context) -> recipe.Origin:
    """Return the origin with the layer from the stage's settings: `sweep`, or a Caffe net."""
    if origin.span is None:
        return origin
    of_net = origin.span.path in (held.path for held in context.nets.values())
    layer = layers.NET if of_net else block.layers.get(origin.span, origin.layer)
    return origin if layer == origin.layer else replace(origin, layer=layer)


def _derived(solver: recipe.Solver) -> dict[str, str]:
    """Return the texts of a stage's values whose defaults follow from other fields."""
    derived = {
        "solver.random_seed": str(solver.random_seed),
        "solver.test_batch_size": str(solver.test_batch_size),
        "solver.test_transform_param": "transform_param without what is drawn at random",
    }
    for key, message in (
        ("solver.compress_param", solver.compress),
        ("solver.sync_param", solver.sync),
        ("solver.model", solver.model),
        ("solver.transform_param.random_resize_param", solver.transform.random_resize),
        ("solver.test_transform_param.random_resize_param", solver.test_transform.random_resize),
    ):
        if message is not None:
            derived |= values.leaves(message, key)
    return derived


def _counts(fact: Fact, solver: recipe.Solver, tested: bool) -> bool:
    """Return whether the stage's snapshots depend on the fact; `tested`: also on evaluations. A stage's images and network are in its
    identity under the schedule's names."""
    if tested and build.is_tested(fact.key):
        return True
    renamed = ("solver.data.", "solver.model.")
    return fact.identity and not f"{fact.key}.".startswith(renamed) and values.is_read(fact.key, solver.lr_policy)


def _start_facts(node: Node, block: Block) -> Iterator[Fact]:
    """Yield the facts besides fields that a stage depends on: its start, and files and snapshots, which only have an
    origin so far. The iteration of the parent is in a snapshot's id, too, but only as long as the parent's snapshot
    exists."""
    if (at := node.parent_at or node.parent_iter) is not None:
        key = recipe.FROM_WEIGHTS if at == recipe.EMA else recipe.FROM_ITER
        yield Fact(key, str(at), True, recipe.Origin(f"{node.parent}@{at}", "schedule", node.parent_place))
    if node.teacher is not None:
        yield Fact(recipe.TEACHER, "", False, recipe.Origin(node.teacher, "stage", node.teacher_place))
    for value in block.entries["clear"].values if "clear" in block.entries else ():
        yield Fact(f"{recipe.CLEARED}{value.value}", "", False, recipe.Origin(value.text, "stage", value.span))
    weights, transform = block.block("weights"), block.block("transform_param")
    mean = transform.entries.get("mean_file") if transform is not None else None
    start = weights.entries["file"] if weights is not None else block.entries.get("solverstate")
    for key, entry in ((recipe.MEAN_DIGEST, mean), (recipe.WEIGHTS_DIGEST, start)):
        if entry is not None:
            yield Fact(key, values.NONE, False, recipe.Origin(entry.values[0].text, "stage", entry.place))


def _average(ensemble: recipe.Ensemble, block: Block) -> Iterator[Fact]:
    """Yield the facts of the average that a stage starts from, except its snapshots, which a plan adds to the identity."""
    at = ["end" if iter is None else str(iter) for _, iter in ensemble.points]
    texts = {"rule": ensemble.rule.value, "shape": ensemble.shape or values.NONE, "members": " ".join(at)}
    texts["batch_norm_iter"] = str(ensemble.batch_norm_iter)
    for name, text in texts.items():
        entry = block.entries.get(name)
        origin = recipe.Origin(text, "schedule" if entry else "default", entry.values[0].span if entry else None)
        yield Fact(f"{recipe.AVERAGE}{name}", text, True, origin)
    yield Fact(recipe.AVERAGE_OF, "", False, recipe.Origin(ensemble.name, "schedule", ensemble.span))
