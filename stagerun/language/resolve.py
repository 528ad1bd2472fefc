"""A folder, or its texts -> recipe.Schedule, or every mistake in them. All but `load` is pure."""

import contextlib
import functools
import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError

from stagerun.base import recipe
from stagerun.base.errors import DataError, Problem, Problems, RecipeError, Span, StagerunError, UsageError
from stagerun.language import (
    build,
    check,
    ensembles,
    labels,
    layers,
    override,
    ranges,
    stages,
    teachers,
    tree,
    values,
)
from stagerun.language.check_code import require_code
from stagerun.language.check_images import check_model, classes_problem
from stagerun.language.check_loss import check_sampling
from stagerun.language.check_weights import check_begins
from stagerun.language.code import MISSING, LocalFiles, Reader, Text, Unreadable
from stagerun.language.nets import Files, First, Images, Nets, of_stage, with_block
from stagerun.language.override import Override
from stagerun.language.parse import LARGEST, parse
from stagerun.language.proto import caffe_pb2
from stagerun.language.stages import Node
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Entry, Value
from stagerun.language.view import Doubtful, View
from stagerun.system.files import upward
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.image_sets import class_names, first_value
from stagerun.system.lmdb_file import check_file

SCHEDULE_FILE = "schedule.prototxt"
LARGEST_MEAN = 64_000_000  # bytes of a mean image


_ELSEWHERE = "check `source`; where the LMDB is on another machine, write `images: N` with the number of its records"

T = TypeVar("T")
Records = Callable[[str], int]  # the folder of an LMDB -> its number of records; StagerunError


def read(
    texts: Mapping[str, Text],
    root: str,
    overrides: Sequence[str] = (),
    shown: str = "",
    records: Records | None = None,
    python: Reader | None = None,
    lists: Reader | None = None,
    nets: Files | None = None,
) -> recipe.Schedule:
    """The schedule that the files describe. RecipeError with all mistakes of all files.

    `texts` has schedule.prototxt and the stages' files by their path below the folder (`stage_files` says which); a
    file that is not in it does not exist. `root` is the folder's absolute path, `shown` the same as the user wrote it,
    for messages. `overrides` are the arguments of `--set`. `records` counts the LMDB of a Source without `images`; None
    where no LMDB may be looked at. `python` reads the Python files and others that it names, `lists` its files of labels, and `nets`
    Caffe's nets and what they name; None: they are in `texts`.
    """
    problems = Problems()
    local = LocalFiles(python or (lambda file: texts.get(file, MISSING)), shown, problems)
    caffe = Nets(nets or Files(lambda file: texts.get(file, MISSING)), shown, problems)
    path = posixpath.join(shown, SCHEDULE_FILE)
    text = texts.get(SCHEDULE_FILE, MISSING)
    if isinstance(text, Unreadable):
        hint = "a schedule is a folder with a schedule.prototxt and a file per stage"
        raise RecipeError([Problem(text.reason, Span(path, 1, 1), hint)])
    schedule = written = ranges.sound(parse(path, text, SCHEDULE, problems), problems)
    found = stages.nodes(schedule, problems)
    schedule, settings = _merged(schedule, found, texts, root, shown, overrides, Count(root, records, problems), caffe)
    found = _check_tree(found, settings, problems)
    if list(schedule.blocks("ensemble")) != list(written.blocks("ensemble")):
        _require_as_written(found, problems)
    order = stages.in_running_order(found, problems)
    _check(schedule, settings, posixpath.basename(root), problems)
    for block in settings.values():
        own = block if "model" in block.entries else schedule
        channels = _known(own, lambda view: view.inside("model").whole("channels"))
        caffe.check_means(block, channels, functools.partial(build.path_of, root))
    lengths = _numbers(settings, lambda view: view.whole("max_iter"))
    ends = ensembles.Ends(lengths, _numbers(settings, build.earliest_end))
    ensembles.check(schedule, found, settings, ends, problems)
    images = functools.partial(_images_of, schedule, root)
    teachers.check_teachers(found, schedule, settings, caffe, images, problems)
    beside = functools.partial(posixpath.join, shown)
    marked = labels.check(View(schedule), settings, lists or local.read, beside, problems)
    code = {name: _code(schedule, block) for name, block in settings.items()}
    needed = require_code([entry for entries in code.values() for entry in entries], local, problems)
    _check_handed_on(found, settings, problems)
    if problems:
        raise RecipeError(problems.all())
    names = dict.fromkeys([SCHEDULE_FILE, *(n.file for n in found if n.file is not None)])
    sources = local.sources(needed)
    kept = tuple((beside(n), _decoded(texts[n])) for n in names if texts.get(n, MISSING) != MISSING)
    kept += tuple((beside(file), text) for file, text in sources.files) + caffe.kept
    facts = {
        name: list(build.code_facts([entry for _, entry in entries], local, path)) for name, entries in code.items()
    }
    return _build(schedule, order, settings, root, path, kept, facts, build.Beside(sources, marked, caffe.held))


def _merged(
    schedule: Block,
    found: Sequence[Node],
    texts: Mapping[str, Text],
    root: str,
    shown: str,
    overrides: Sequence[str],
    count: "Count",
    caffe: Nets,
) -> tuple[Block, dict[str, Block]]:
    """The Schedule with what `--set`, LMDBs and nets add to it, and the settings of each stage by its name."""
    problems = count.problems
    names = dict.fromkeys([*(n.name for n in found), *stages.groups(found)])
    changes = [replace(c, leaf=ranges.sound(c.leaf, problems)) for c in override.read(overrides, list(names), problems)]
    files = _stage_blocks(found, texts, shown, problems)
    schedule = _counted(caffe.moved(_change_schedule(schedule, changes), files.values()), count)
    settings = _settings(schedule, found, files, changes, count, caffe, problems)
    return _with_networks(schedule, settings, root, caffe)


def _check_tree(found: Sequence[Node], settings: Mapping[str, Block], problems: Problems) -> list[Node]:
    """The nodes with their teachers. Reports branches from where a stage doesn't come, and teachers that are not one stage."""
    lengths = _numbers(settings, lambda view: view.whole("max_iter"))
    found = stages.check_branches(found, lengths, _numbers(settings, build.earliest_end), problems)
    return teachers.with_teachers(found, settings, problems)


def _require_as_written(found: Sequence[Node], problems: Problems) -> None:
    """Reports stages that start from an ensemble, where `--set` changes those: the tree is that of the file."""
    for node in found:
        if node.average is not None and node.parent_place is not None:
            message = f"--set changes ensembles, and `{node.name}` starts from `{node.average}`"
            problems.add(node.parent_place, message, "write the ensemble in schedule.prototxt")


def _check_handed_on(found: Sequence[Node], settings: dict[str, Block], problems: Problems) -> None:
    for node in found:
        if node.average is not None and node.parent in settings:
            check.check_from_average(node.name, View(settings[node.name]), node.average, problems)
        elif node.parent in settings:
            parent, own = View(settings[node.parent]), View(settings[node.name])
            check.check_carry(node.name, own, node.parent, parent, problems)
            check_begins(node.name, own, node.parent, problems)


def _code(schedule: Block, settings: Block) -> list[tuple[Block, Entry]]:
    """What names Python in the settings of a stage, and in the network that it shares."""
    own = "model" in settings.entries
    return [*build.code_entries(None if own else schedule.block("model")), *build.code_entries(settings)]


def stage_files(text: bytes | str) -> tuple[str, ...]:
    """The files of the stages that a schedule.prototxt names, below its folder. Mistakes in it are not looked at."""
    return _files_of(stage_nodes(text))


def _files_of(found: Sequence[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.file for node in found if node.file is not None))


def stage_nodes(text: Text) -> list[Node]:
    """The stages of a schedule.prototxt, as far as it can be read; their teachers are not known."""
    ignored = Problems()
    schedule = Block(SCHEDULE, Span(SCHEDULE_FILE, 1, 1))
    if not isinstance(text, Unreadable):
        schedule = parse(SCHEDULE_FILE, text, SCHEDULE, ignored)
    return stages.nodes(schedule, ignored)


def _decoded(text: Text) -> str:
    assert not isinstance(text, Unreadable)
    return text if isinstance(text, str) else text.decode()


def _numbers(settings: Mapping[str, Block], read: Callable[[View], int | None]) -> dict[str, int]:
    """By the name of the stage, where it is known."""
    return {name: number for name, block in settings.items() if (number := _known(block, read)) is not None}


def _known(block: Block, read: Callable[[View], T]) -> T | None:
    """None where it could not be read."""
    try:
        return read(View(block))
    except Doubtful:
        return None


def _stage_blocks(found: Sequence[Node], texts: Mapping[str, Text], shown: str, problems: Problems) -> dict[str, Block]:
    """What each stage's own file says, by the stage's name; an empty, broken Block where it can't be read."""
    parsed: dict[str, Block] = {}
    result: dict[str, Block] = {}
    for node in found:
        path = posixpath.join(shown, node.file or "")
        if node.file is None:
            result[node.name] = node.solver or Block(SOLVER, node.file_place, broken=True)
            continue
        text = texts.get(node.file, MISSING)
        if isinstance(text, Unreadable):
            needed = text != MISSING or not node.filled
            if needed:
                hint = "every stage has a file of its own, which `solver:` names, or says it here in `solver_param { ... }`"
                problems.add(node.file_place, f"{path}: {text.reason}", hint)
            result[node.name] = Block(SOLVER, node.file_place, broken=needed)
            continue
        if node.file not in parsed:
            parsed[node.file] = ranges.sound(parse(path, text, SOLVER, problems), problems)
        result[node.name] = parsed[node.file]
    return result


def _change_schedule(schedule: Block, changes: Sequence[Override]) -> Block:
    """Schedule with each `--set` that is for itself and not for a Solver."""
    for change in changes:
        if change.stage is None and change.path[:1] != ("solver",):
            if change.path == () and "solver" in change.leaf.kind.fields_by_name and "solver" in change.leaf.entries:
                continue  # `--set solver={...}` is a layer, as `--set solver.FIELD=...` is
            schedule = layers.edit(schedule, change.path, change.leaf)
    return schedule


def _counted(holder: Block, count: "Count") -> Block:
    """A Schedule or Solver with `images` in every Source of its `data` that doesn't say how many records it has."""
    data = holder.block("data")
    if data is None:
        return holder
    entries = dict(data.entries)
    for name in {"train", "val"} & entries.keys():
        found = [replace(v, value=count(v.value)) if isinstance(v.value, Block) else v for v in entries[name].values]
        entries[name] = replace(entries[name], values=tuple(found))
    entry = holder.entries["data"]
    value = replace(entry.values[0], value=replace(data, entries=entries))
    return replace(holder, entries={**holder.entries, "data": replace(entry, values=(value,))})


class Count:
    """A Source without `images` -> the same with it, by the number of records of its LMDB, where that may be looked at."""

    def __init__(self, root: str, records: Records | None, problems: Problems) -> None:
        self._root, self.problems = root, problems
        self._records = cache(records) if records is not None else None

    def __call__(self, block: Block) -> Block:
        source = View(block)
        with contextlib.suppress(Doubtful):
            folder = source.text("source")
            if source.has("images") or folder is None:
                return block
            message, hint = "Source lacks `images`", "write `images: N` with the number of its records"
            try:
                if self._records is not None:
                    found = self._records(build.path_of(self._root, folder))
                    value = Value(found, str(found), Span(layers.LMDB, 1, 1))
                    entry = Entry(SOURCE.fields_by_name["images"], value.span, (value,))
                    return replace(block, entries={**block.entries, "images": entry})
            except StagerunError as error:
                message += f", and its images can't be counted: {error.message}"
                hint = error.hint if isinstance(error, UsageError) else _ELSEWHERE
            self.problems.add(block.place, message, hint)
        return block


def _settings(
    schedule: Block,
    found: Sequence[Node],
    files: Mapping[str, Block],
    changes: Sequence[Override],
    count: Count,
    nets: Nets,
    problems: Problems,
) -> dict[str, Block]:
    """The settings of each stage by its name, durations in iterations."""
    nothing = Block(SOLVER, schedule.place, broken="solver" in schedule.doubtful or schedule.broken)
    shared = [c for c in changes if c.stage is None and c.path[:1] == ("solver",)]
    below = [replace(c, path=c.path[1:]) for c in shared]
    base = [schedule.block("solver") or nothing]
    base += [
        b for c in changes if c.stage is None and not c.path for b in c.leaf.blocks("solver") if c.leaf.kind is SCHEDULE
    ]
    base += _as_layer(below)
    layers.check_layers(base, problems)
    merged_by_name, settings = {}, {}
    for node in found:
        swept = [node.sweep] if node.sweep is not None else []
        # Where one block makes several stages: changes for all of them first, then those for this one.
        names = [name for name in (node.group, node.name) if name is not None]
        own = [[c for c in changes if c.stage == name] for name in names]

        def laid(net: Sequence[Block], above: Sequence[Block], own: Sequence[Sequence[Override]]) -> Block:
            """All layers, those of a net of Caffe's at the bottom."""
            merged = layers.merge([_deep(layers.merge([*net, *base]), below), *above])
            for changed in own:
                merged = _deep(layers.merge([merged, *_as_layer(changed)]), changed)
            return of_stage(merged, schedule.block("model"))

        above = [files[node.name], *swept]
        layers.check_layers([layers.merge(base), *above, *(b for changed in own for b in _as_layer(changed))], problems)
        merged = laid([], above, own)
        net = nets.below(merged, layers.merge([*base, *above]), schedule)
        merged = laid([net], above, own) if net is not None else merged
        named = [("stage", files[node.name]), *(("sweep", block) for block in swept)]
        places = {entry.place: layer for layer, block in named for _, entry in block.walk()}
        merged = _counted(replace(merged, place=files[node.name].place, own=places), count)
        merged_by_name[node.name] = merged
        settings[node.name] = layers.in_iterations(merged, _images(merged, schedule), problems)
    override.check_reached(shared, merged_by_name, problems)
    return settings


def _with_networks(
    schedule: Block, settings: dict[str, Block], root: str, nets: Nets
) -> tuple[Block, dict[str, Block]]:
    """Both with the classes, channels and multipliers of their nets."""
    shared = schedule.block("model")
    images = functools.partial(_images_of, schedule, root)
    sharing = [images(block) for block in settings.values() if "model" not in block.entries]
    sized = nets.sized(shared, sharing or [images(block) for block in settings.values()])
    if sized is not None and sized is not shared:
        schedule = with_block(schedule, "model", sized)
    for name, block in settings.items():
        own = nets.sized(block.block("model"), [images(block)], sized)
        if own is not None and own is not block.block("model"):
            block = with_block(block, "model", own)
        settings[name] = nets.with_rules(block, own if own is not None else sized)
    return schedule, settings


def _images_of(schedule: Block, root: str, settings: Block) -> Images:
    return Images(settings, _lmdb(settings, schedule, root))


def _lmdb(settings: Block, schedule: Block, root: str) -> str | None:
    """The folder of the training images of a stage."""
    own = _known(settings, lambda view: view.inside("data").has("train"))
    if own is None:
        return None
    source = _known(settings if own else schedule, lambda view: view.inside("data").inside("train").text("source"))
    return build.path_of(root, source) if source else None


def _images(settings: Block, schedule: Block) -> int | None:
    """The images in an epoch of a stage."""
    own = _known(settings, lambda view: view.inside("data").has("train"))
    holder = settings if own else schedule
    return None if own is None else _known(holder, lambda view: view.inside("data").inside("train").whole("images"))


def _as_layer(changes: Sequence[Override]) -> list[Block]:
    """The changes of whole fields as one layer."""
    whole = [c.leaf for c in changes if not c.path]
    if not whole:
        return []
    entries = {name: entry for leaf in whole for name, entry in leaf.entries.items()}
    return [Block(SOLVER, whole[0].place, entries, frozenset().union(*(leaf.doubtful for leaf in whole)))]


def _deep(block: Block, changes: Sequence[Override]) -> Block:
    """The changes inside messages, on top of what is inherited."""
    for change in changes:
        if change.path:
            block = layers.edit(block, change.path, change.leaf)
    return block


def _check(schedule: Block, settings: Mapping[str, Block], folder: str, problems: Problems) -> None:
    view = View(schedule)
    channels = _known(schedule, lambda view: view.inside("model").whole("channels"))
    on_device = _known(schedule, lambda view: view.inside("data").text("cache")) == "DEVICE"
    own = {n: e for n, e in schedule.entries.items() if n != "solver"}
    check.check_required(replace(schedule, entries=own), problems)
    if "name" not in schedule.entries and "name" not in schedule.doubtful and not schedule.broken:
        ranges.folder_name_problem(folder, schedule.place, problems)
    with contextlib.suppress(Doubtful):
        check.check_data(view, problems)
    with contextlib.suppress(Doubtful):
        check.check_sources(view, problems)
    check_model(view, [View(block) for block in settings.values()], problems)
    classes = _known(schedule, lambda view: view.inside("model").whole("num_classes"))
    shuffle = _known(schedule, lambda view: view.inside("data").flag("shuffle")) is not False
    for name, block in settings.items():
        with contextlib.suppress(Doubtful):
            check.check_sources(View(block), problems)
        own_val = _known(block, lambda view: view.inside("data").has("val"))
        has_val = _known(schedule, lambda view: view.inside("data").has("val")) if own_val is False else own_val
        tested = _known(block if own_val else schedule, _first_val) if has_val else None
        shared = check.Shared(channels, has_val, tested, on_device, _images(block, schedule))
        check.check_stage(name, View(block), shared, problems)
        with contextlib.suppress(Doubtful):
            model = View(block).view("model") or view.inside("model")
            check.check_passes(name, View(block), model.inside("batch_norm_param"), problems)
        check.check_required(block, problems)
        check_sampling(View(block), classes, shuffle, problems)


def _first_val(view: View) -> int | None:
    return next(view.inside("data").views("val")).whole("images")


def _build(
    schedule: Block,
    order: Sequence[Node],
    settings: Mapping[str, Block],
    root: str,
    path: str,
    files: tuple[tuple[str, str], ...],
    code: Mapping[str, Sequence[build.Fact]],
    given: build.Beside,
) -> recipe.Schedule:
    view = View(schedule)
    name = view.text("name") or posixpath.basename(root)
    seed, keep = view.whole("seed"), view.whole("keep_snapshots")
    assert seed is not None and keep is not None
    model = build.model(view.inside("model"), given)
    derived = {"name": tree.quoted(name), **_derived_of(model)}
    shared = list(build.facts(SCHEDULE, schedule, "", derived, path))
    data = build.data(view.inside("data"), root, given.labels)
    nodes = {node.name: node for node in order}
    as_written = [nodes[name] for name in settings]  # which may be another order than that in which they run
    found = ensembles.build(schedule, as_written, _numbers(settings, lambda view: view.whole("max_iter")))
    averages = {one.name: (one, block) for one, block in zip(found, schedule.blocks("ensemble"), strict=True)}
    made: dict[str, recipe.Stage] = {}
    for node in order:
        facts = [*shared, *code[node.name], *(_average(*averages[node.average]) if node.average is not None else ())]
        made[node.name] = _stage(node, settings[node.name], model, seed, data, made, facts, path, root, given)
    return recipe.Schedule(
        name=name,
        seed=seed,
        model=model,
        data=data,
        stages=tuple(made.values()),
        determinism=recipe.Determinism(view.text("determinism")),
        keep_snapshots=keep,
        files=files,
        ensembles=found,
    )


def _stage(
    node: Node,
    block: Block,
    model: recipe.Model,
    seed: int,
    shared_data: recipe.Data,
    above: Mapping[str, recipe.Stage],
    shared: Sequence[build.Fact],
    path: str,
    root: str,
    given: build.Beside,
) -> recipe.Stage:
    data = build.stage_data(View(block), shared_data, root, given.labels)
    solver = build.solver(View(block), seed, data.train.images, root, given)
    derived = {
        "solver.warmup_iter": "0",
        "solver.random_seed": str(solver.random_seed),
        "solver.test_batch_size": str(solver.test_batch_size),
        "solver.test_transform_param": "transform_param without what is drawn at random",
    }
    if solver.compress is not None:
        derived |= values.leaves(solver.compress, "solver.compress_param")
    if solver.sync is not None:
        derived |= values.leaves(solver.sync, "solver.sync_param")
    for field, transform in (("transform_param", solver.transform), ("test_transform_param", solver.test_transform)):
        derived[f"solver.{field}.mean_value"] = "[0.0]"
        derived[f"solver.{field}.std_value"] = "[1.0]"
        if transform.random_resize:
            derived[f"solver.{field}.random_resize_param.max_size"] = str(transform.random_resize.max_size)
    if solver.model is not None:
        model, shared = solver.model, _with_own_model(block, solver.model, shared, path)
        derived |= _derived_of(model, "solver.model.batch_norm_param")
    own = list(build.facts(SOLVER, block, "solver.", derived, path))
    found = [*_with_images(shared, own), *own, *_branch(node), *_last_used(node, data, solver, above, block)]
    found += [
        *_digests(block),
        *_labels(data, solver.early_stop is not None, found),
        *_lesson(node),
        *_net(model, found),
    ]
    return recipe.Stage(
        name=node.name,
        parent=node.parent,
        model=model,
        data=data,
        solver=solver,
        identity={f.key: f.text for f in found if _counts(f, solver)},
        origins={f.key: _in_layer(f.origin, block, given) for f in found},
        span=node.place,
        parent_iter=node.parent_iter,
        average=node.average,
        enabled=node.enabled,
        group=node.group,
    )


def _derived_of(model: recipe.Model, prefix: str = "model.batch_norm_param") -> dict[str, str]:
    return {
        f"{prefix}.moving_average_fraction": values.text(model.moving_average_fraction),
        f"{prefix}.eps": values.text(model.eps),
    }


def _with_own_model(block: Block, model: recipe.Model, shared: Sequence[build.Fact], path: str) -> list[build.Fact]:
    """What the stage shares with others, but for the network. Its identity has its own under the names of the schedule's."""
    own = build.facts(
        block.kind.fields_by_name["model"].message_type, block.block("model"), "model.", _derived_of(model), path
    )
    return [*(fact for fact in shared if not fact.key.startswith("model.")), *own]


def _digests(block: Block) -> Iterator[build.Fact]:
    """Those of the stage's weights or solver state and of its mean image, which no one has looked at yet: they have an origin."""
    weights, transform = block.block("weights"), block.block("transform_param")
    places = (
        (recipe.MEAN_DIGEST, transform.entries.get("mean_file") if transform is not None else None),
        (recipe.WEIGHTS_DIGEST, weights.entries["file"] if weights is not None else block.entries.get("solverstate")),
    )
    for key, place in places:
        if place is not None:
            yield build.Fact(key, values.NONE, False, recipe.Origin(place.values[0].text, "stage", place.place))


def _counts(fact: build.Fact, solver: recipe.Solver) -> bool:
    """Whether snapshots of the stage depend on it. Images and a network of its own are in its identity under the names of the schedule's."""
    if solver.early_stop is not None and build.is_tested(fact.key):
        return True
    own = fact.key.startswith(("solver.data.", "solver.model.")) or fact.key in ("solver.data", "solver.model")
    return fact.identity and values.is_read(fact.key, solver.lr_policy) and not own


def _with_images(shared: Sequence[build.Fact], own: Sequence[build.Fact]) -> Iterator[build.Fact]:
    """The facts of the schedule, but for the images that a stage has of its own: `data.train.images` of those."""
    named = {f.key.removeprefix("solver."): f for f in own if f.key.startswith("solver.data.")}
    replaced = {f"data.{part}" for part in ("train", "val") if any(key.startswith(f"data.{part}.") for key in named)}
    for fact in shared:
        if ".".join(fact.key.split(".")[:2]) not in replaced:
            yield fact
    for key, fact in named.items():
        if ".".join(key.split(".")[:2]) in replaced:
            yield replace(fact, key=key, identity=key == "data.train.images")


def _last_used(
    node: Node, data: recipe.Data, solver: recipe.Solver, above: Mapping[str, recipe.Stage], block: Block
) -> Iterator[build.Fact]:
    """How many stages up the path the training set was used last, where the parent has another: it goes on from there. Part of the
    identity: paths are not, and tell which sets are one."""
    parent = above[node.parent] if node.parent is not None else None
    if parent is None or not solver.carry_data or parent.data.train.same(data.train):
        return
    steps, stage = 1, parent
    while stage.parent is not None:
        steps, stage = steps + 1, above[stage.parent]
        if stage.data.train.same(data.train):
            break
    else:
        steps = 0
    text = f"{steps} stages before" if steps else "never"
    entry = block.entries.get("data")
    yield build.Fact(recipe.LAST_USED, text, True, recipe.Origin(text, "stage", entry.name if entry else node.place))


def _in_layer(origin: recipe.Origin, block: Block, given: build.Beside) -> recipe.Origin:
    layer = block.own.get(origin.span) if origin.span is not None else None
    if origin.span is not None and origin.span.path in given.nets_read:
        layer = layers.NET
    return origin if layer is None else replace(origin, layer=layer)


def _branch(node: Node) -> Iterator[build.Fact]:
    """The iteration of its parent that a stage starts from, where that is not the end. Part of its identity: a snapshot's id
    says it, too, but only as long as the parent's snapshot is there."""
    if node.parent_iter is not None:
        origin = recipe.Origin(f"{node.parent}@{node.parent_iter}", "schedule", node.parent_place)
        yield build.Fact(recipe.FROM_ITER, str(node.parent_iter), True, origin)


def _labels(data: recipe.Data, early_stop: bool, facts: Sequence[build.Fact]) -> Iterator[build.Fact]:
    """The digests of the labels that decide what is trained, where images have several."""
    tested = data.val[0].labels_digest if early_stop and data.val else None
    for key, digest in ((recipe.LABELS, data.train.labels_digest), (recipe.TESTED_LABELS, tested)):
        if digest is not None:
            field = key.replace("labels_digest", "labels")
            yield build.Fact(key, digest, True, next(fact.origin for fact in facts if fact.key == field))


def _net(model: recipe.Model, facts: Sequence[build.Fact]) -> Iterator[build.Fact]:
    """The digest of a net of Caffe's, under the name of what names it."""
    if model.net is not None:
        origin = next(fact.origin for fact in facts if fact.key == "model.caffe_net")
        yield build.Fact(recipe.NET, values.net_digest(model.net), True, origin)


def _average(ensemble: recipe.Ensemble, block: Block) -> Iterator[build.Fact]:
    """What the average of snapshots that a stage starts from depends on, but for the snapshots: these a plan puts into the identity."""
    at = ["end" if iter is None else str(iter) for _, iter in ensemble.points]
    texts = {"rule": ensemble.rule.value, "shape": ensemble.shape or values.NONE, "members": " ".join(at)}
    texts["batch_norm_iter"] = str(ensemble.batch_norm_iter)
    for name, text in texts.items():
        entry = block.entries.get(name)
        origin = recipe.Origin(text, "schedule" if entry else "default", entry.values[0].span if entry else None)
        yield build.Fact(f"{recipe.AVERAGE}{name}", text, True, origin)
    yield build.Fact(recipe.AVERAGE_OF, "", False, recipe.Origin(ensemble.name, "schedule", ensemble.span))


def _lesson(node: Node) -> Iterator[build.Fact]:
    """Where the teacher is named. Which snapshot that is only a plan knows, and puts into the identity."""
    if node.teacher is not None:
        yield build.Fact(recipe.TEACHER, "", False, recipe.Origin(node.teacher, "stage", node.teacher_place))


# -- a folder -> recipe.Schedule: the only part that reads files


NOT_SAVED: Mapping[str, bytes] = {}


def files_in(folder: str, edited: Mapping[str, bytes] = NOT_SAVED) -> dict[str, Text]:
    """schedule.prototxt, and the files of the stages that it names: their bytes, or why they can't be read; not those that no stage needs
    and that aren't there. RecipeError if the folder isn't there. `edited`: as in `load`."""
    if SCHEDULE_FILE not in edited and not os.path.isdir(folder):
        raise RecipeError([_no_folder(folder)])
    first = _text(folder, edited, SCHEDULE_FILE)
    found = stage_nodes(first)
    needed = {node.file for node in found if not node.filled}
    texts = {name: _text(folder, edited, name) for name in _files_of(found) if name != SCHEDULE_FILE}
    return {SCHEDULE_FILE: first} | {name: text for name, text in texts.items() if text != MISSING or name in needed}


def load(folder: str | Path, overrides: Sequence[str] = (), edited: Mapping[str, bytes] = NOT_SAVED) -> recipe.Schedule:
    """The schedule in a folder, with the changes of `--set`. RecipeError with every mistake of every file, sorted by
    place; paths in it start with `folder` as it was given. Where `images` is not written, the LMDB's own count is read.
    `edited` has what an editor holds of files, by their paths below the folder: it counts in place of what is on disk.
    """
    shown = os.path.normpath(folder)
    texts = files_in(shown, edited)
    python = functools.partial(_text, shown, edited)
    lists = functools.partial(_text, shown, edited, most=labels.MOST)
    nets = Files(python, functools.partial(_found, shown), first_record, _content)
    return read(texts, os.path.abspath(shown), overrides, "" if shown == "." else shown, _records, python, lists, nets)


def _records(path: str) -> int:
    """The records of the LMDB in a folder, by its two meta pages; or the images in its class folders. DataError, UsageError,
    PermissionDenied."""
    if is_class_folder(path):
        try:
            return len(small(path).names)
        except DataError as error:  # it is here, so that its own hint helps, not that for an LMDB elsewhere
            raise UsageError(error.message, error.hint) from None
    found = check_file(path)
    if not found:
        raise DataError(f"{path}: the LMDB is empty")
    return found


def _found(folder: str, path: str, net: str) -> str:
    """The absolute path of what a path in a net of Caffe's means: from the net's folder, from the schedule's, or from one above either, as
    Caffe is started in a folder above. '' if nothing is there."""
    if not path or "\0" in path:
        return ""
    starts = [os.path.dirname(os.path.abspath(net)), os.path.abspath(folder)]
    order = [*starts, *(up for start in starts for up in upward(start))]
    return next((place for start in order if os.path.exists(place := os.path.normpath(os.path.join(start, path)))), "")


def first_record(path: str) -> First | None:
    """The shape of the first record of the LMDB in a folder; None where it can't be read, which is reported when it is opened."""
    with contextlib.suppress(StagerunError, DecodeError):
        datum = caffe_pb2.Datum.FromString(first_value(path))
        known = datum.channels in (1, 3) and not datum.encoded
        return First(datum.channels, (datum.height, datum.width)) if known else First(None, None)
    return None


def _content(path: str) -> bytes | None:
    """The bytes of a file that a net names, as a mean image."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                return file.read(LARGEST_MEAN)
    except (OSError, ValueError):
        pass
    return None


def look_at_classes(schedule: recipe.Schedule) -> list[Problem]:
    """`classes_problem` for the LMDBs that are on this machine."""
    named = {source.path: class_names(source.path) for source in schedule.sources}
    found: dict[str, Problem] = {}
    for stage in schedule.stages:
        here = [(s.path, named[s.path]) for s in (stage.data.train, *stage.data.val) if s.path in named]
        most = max(here, key=lambda pair: len(pair[1]), default=None)
        problem = classes_problem(schedule, stage, *most) if most is not None else None
        if problem is not None:
            found.setdefault(problem.message, problem)
    return list(found.values())


def _no_folder(shown: str) -> Problem:
    if os.path.isfile(shown):
        return Problem(
            "this is a file, and a schedule is a folder",
            Span(shown, 1, 1),
            hint=f"give {os.path.dirname(shown) or '.'}",
        )
    hint = "give the folder that holds schedule.prototxt"
    return Problem("there is no such folder", Span(shown, 1, 1), hint=hint)


def _text(folder: str, edited: Mapping[str, bytes], name: str, most: int = LARGEST) -> Text:
    """The bytes of a file, one more than `most` at most."""
    if (typed := edited.get(os.path.normpath(name))) is not None:
        return typed[: most + 1]
    path = os.path.join(folder, name)
    try:
        # Opening a FIFO would wait for a writer, and reading a device may never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Unreadable("this is not a regular file")
        with open(path, "rb") as file:
            return file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except PermissionError:
        return Unreadable("no permission to read it")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return Unreadable(f"can't be read ({error.strerror if isinstance(error, OSError) else error})")
