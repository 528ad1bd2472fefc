"""A folder of Caffe's, as texts -> the stages with their settings, and what is left out. Only `CaffeFolder` looks at the disk."""

import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from stagerun.base.errors import RecipeError, Span, UsageError
from stagerun.language.net.phases import State, layers_in, state_of
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import Block, Entry, quoted
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.images import Count, count_images, images_of, source_lines
from stagerun.tools.caffe.nodes import norm_lines, note_norms, overlapped_rates, overlapped_start
from stagerun.tools.caffe.order import Step, Word, ordered_steps, workers_of
from stagerun.tools.caffe.settings import (
    AS_CAFFE,
    CaffeStage,
    SolverStage,
    batch,
    check_solver,
    evaluation,
    go_on,
    note_sources,
    parent_of,
    seeded,
    seeds,
    solver_settings,
    transforms,
)
from stagerun.tools.caffe.text import CaffeText, Findings, Line, Setting, message, plain, read_solver, setting, text_of
from stagerun.tools.caffe.whole import CaffeNet, Written, inside, read_net, written


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for; None is: as the files say. With `nets` False solver files are imported alone, and the written files
    ask for what nets would have said."""

    order: tuple[str, ...] = ()
    workers: int | None = None
    overlap: bool = False
    images: int | None = None
    val_images: int | None = None
    nets: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """`settings` by stage, fields in no order; `seed` is that of the schedule, from all solvers alike. `nets`: the file of each
    stage's net, by stage; none where it stands in the solver, or was not read."""

    steps: tuple[Step, ...]
    settings: Mapping[str, Mapping[str, Setting]]
    model: tuple[Line, ...]
    data: tuple[Line, ...]
    seed: Line
    found: Findings
    nets: Mapping[str, str] = field(default_factory=dict)
    written: tuple[Written, ...] = ()  # nets that are copied


def convert(folder: CaffeFolder, wanted: Wanted) -> Converted:
    """Everything but the writing. RecipeError with all mistakes, each at its place in Caffe's files; UsageError."""
    found = Findings()
    prototxts = folder.prototxts()
    steps = ordered_steps(folder, prototxts, wanted.order, found)
    nets: dict[str, CaffeNet | None] = {}
    stages: list[CaffeStage] = []
    taken = dict.fromkeys([SCHEDULE_FILE, *(f"{step.name}.prototxt" for step in steps)], "")
    alone: list[SolverStage] = []
    for step in steps:
        text = read_solver(posixpath.join(folder.shown, step.file), prototxts[step.file], found)
        check_solver(text, wanted.nets, found)
        alone.append(SolverStage(step, text))
        with suppress(Doubtful):
            if wanted.nets and (stage := _read_stage(step, text, folder, nets, taken, found)):
                stages.append(stage)
                taken[stage.written.name] = stage.written.source
    _refuse_mistakes(found)
    return _with_nets(stages, folder, wanted, found) if wanted.nets else _without_nets(alone, folder, wanted, found)


def _refuse_mistakes(found: Findings) -> None:
    if found.mistakes:
        raise RecipeError(found.mistakes.all())


# -- with nets


def _read_stage(
    step: Step,
    text: CaffeText,
    folder: CaffeFolder,
    nets: dict[str, CaffeNet | None],
    taken: Mapping[str, str],
    found: Findings,
) -> CaffeStage | None:
    """A stage with its nets. None after a mistake."""
    train = _net(text, ("train_net_param", "train_net", "net_param", "net"), folder, nets, found)
    if train is None:
        return None
    tests = _net(text, ("test_net_param", "test_net", "net_param", "net"), folder, nets, found)
    states = [
        state_of(next(iter(text.block.blocks(name)), None)) if name in text.block.entries else State()
        for name in ("train_state", "test_state")
    ]
    layers = layers_in(train.layers, "TRAIN", states[0])
    tested = layers_in(tests.layers, "TEST", states[1]) if tests is not None else []
    for name in ("test_net", "test_net_param", "test_state"):
        entry = text.block.entries.get(name)
        if entry is not None and len(entry.values) > 1:
            found.leave(entry.values[1].span, name, "one evaluation is made; the first is taken")
    images = images_of(layers, "TRAIN", found, folder)
    if images is None and not found.mistakes.count(train.path):  # else what was meant to read them is among those
        message = "the net has no layer that reads images in training"
        found.mistakes.add(train.block.place, message, "a layer of type `Data` with `include { phase: TRAIN }` does")
    val = images_of(tested, "TEST", found, folder)
    if images is None or train.whole is None:
        return None
    note_norms(step, layers, tested, found)
    own = written(step.name, train, tests, states, taken)
    return CaffeStage(step, text, train.block, layers, images, val, own)


def _net(
    text: CaffeText,
    fields: Sequence[str],
    folder: CaffeFolder,
    nets: dict[str, CaffeNet | None],
    found: Findings,
) -> CaffeNet | None:
    """The net that the first of the fields which is written names or holds. None if there is none, or a mistake."""
    entry: Entry | None = next((text.block.entries[f] for f in fields if f in text.block.entries), None)
    if entry is None or not entry.values:
        return None
    value = entry.values[0].value
    path = text.path if isinstance(value, Block) else str(value)
    if isinstance(value, Block):
        key = f"{text.path}:{entry.field.name}"
        if key not in nets:
            nets[key] = inside(path, value, found)
        return nets[key]
    if path not in nets:
        there = folder.net(path)
        nets[path] = read_net(there[0], there[1], found) if there else None
        if there and ((above := folder.above(there[0]) and not posixpath.dirname(path)) or not folder.file(path)):
            where = "in a folder above, is taken; there is none of that name here"
            why = f"{there[0]}, {where if above else 'beside the solver, is taken; there is none at that path'}"
            found.leave(entry.place, f"net `{path}`", why, "read it: it may be another's")
    net = nets[path]
    if net is not None:
        return net
    hint = (
        f"copy the net to {folder.meant(path)}; or `--root`, the folder in which Caffe is started and its paths begin; "
        "or `--no-nets`, which imports the solvers alone"
    )
    found.mistakes.add(entry.place, f"there is no net `{path}`", hint)
    return None


def _with_nets(stages: Sequence[CaffeStage], folder: CaffeFolder, wanted: Wanted, found: Findings) -> Converted:
    first = stages[0]
    val = next((s.val for s in stages if s.val is not None), None)
    train_count = count_images(first.train, wanted.images, folder, found)
    val_count = count_images(val, wanted.val_images, folder, found) if val is not None else None
    channels = first.train.channels or train_count.channels
    stages = [_as_first(stage, first) for stage in stages]
    steps = tuple(s.step for s in stages)
    workers = {s.step.name: workers_of(s.step, steps, wanted.workers, s.train.batch_place, found) for s in stages}
    if wanted.overlap and not any(w.nodes for w in workers.values()):
        raise UsageError("`--overlap`, and no stage has several processes", "give their number with `--workers N`")

    def model_of(stage: CaffeStage) -> tuple[Line, ...]:
        """The inside of `model`. What can't be known of images that aren't there is asked."""
        title, place = text_of(stage.net, "name"), stage.net.place
        comment = f"Caffe's net: {plain(title, '?')}" if title else ""
        lines = [Line(f"caffe_net: {quoted(stage.written.name)}", place, comment, asks=not train_count.there)]
        lines += [Line(f"channels: {channels}", place)] if channels is not None else []
        return (*lines, *norm_lines(stage, workers[stage.step.name], found))

    model = model_of(first)
    note_sources(stages, val, found)

    seed, own_seeds = seeds(stages)
    settings: dict[str, Mapping[str, Setting]] = {}
    for stage in stages:
        made = solver_settings(stage.text, found) | own_seeds.get(stage.step.name, {})
        nodes = workers[stage.step.name]
        made |= {s.name: s for s in (*batch(stage, nodes, made, found), *transforms(stage, val))}
        if any(s.step.parents for s in stages) and (not stage.train.shuffle or seeded(stage)):
            # Every Caffe begins at the first record, in the same order where there is nothing random about it.
            made["carry"] = AS_CAFFE
        evaluation(stage, val, made, val_count.number if val_count else 0, found)
        own = model_of(stage)
        if [line.text for line in own] != [line.text for line in model]:
            # `net` alone stands for a model without settings of its own.
            if any(line.text.startswith("batch_norm_param") for line in own):
                made["model"] = Setting("model", message("model", own, stage.net.place))
            else:
                made["net"] = setting("net", quoted(stage.written.name), stage.net.place)
        if stage.step.start is not None and not stage.step.parents:
            start = _given(stage.step.start, folder, found)
            made[start.name] = start
        go_on(stage, made, found)
        settings[stage.step.name] = made
    _refuse_mistakes(found)
    for stage in stages:
        if workers[stage.step.name].nodes:
            settings[stage.step.name] = overlapped_rates(stage, settings[stage.step.name], wanted.overlap, found)
    data = message("train", source_lines(train_count, first.train.source_place), first.train.source_place)
    if val is not None and val_count is not None:
        data += message("val", source_lines(val_count, val.source_place), val.source_place)
    if not first.train.shuffle:
        data += (Line("shuffle: false", first.train.layer.place),)
    if wanted.overlap:
        before = [parent_of(s, stages) for s in stages]
        steps = tuple(overlapped_start(s, b, workers[b.step.name].nodes) for s, b in zip(stages, before, strict=True))
    return Converted(
        steps=steps,
        settings=settings,
        model=model,
        data=data,
        seed=seed,
        found=found,
        nets={s.step.name: s.net.place.path for s in stages if s.net.place.path != s.text.path},
        written=tuple({s.written.name: s.written for s in stages}.values()),
    )


def _as_first(stage: CaffeStage, first: CaffeStage) -> CaffeStage:
    """The stage with the first one's net, if that is the same but for what its data layers read."""
    return replace(stage, written=first.written) if stage.written.layers == first.written.layers else stage


def _given(word: Word, folder: CaffeFolder, found: Findings) -> Setting:
    """Weights or a solverstate that no stage makes."""
    there = folder.file(word.text)
    if not there:
        found.leave(word.span, word.text, "it isn't there", "write its path: it starts at the schedule's folder")
    path = quoted(there or word.text)
    if ".solverstate" in word.text:
        return setting("solverstate", path, word.span, "as Caffe's `--snapshot`")
    return Setting("weights", (Line(f"weights {{ file: {path} strict: false }}", word.span, "as Caffe's `--weights`"),))


# -- without nets: what they say is asked for


def _without_nets(stages: Sequence[SolverStage], folder: CaffeFolder, wanted: Wanted, found: Findings) -> Converted:
    evaluated = bool(wanted.val_images) or any((View(s.text.block).whole("test_interval") or 0) > 0 for s in stages)
    place = Span(folder.shown or ".", 0, 0)
    why = "batch, sources, transform and multipliers are not carried, nor what else nets say of layers and loss"
    found.leave(place, "nets were not read", why, "write them, or import again with the nets")
    if not evaluated:
        found.leave(place, "data.val", "no solver evaluates", "`--val-images` says that there is one")

    def ask(text: str, question: str) -> Line:
        return Line(text, None, question, asks=True)

    seed, own_seeds = seeds(stages)
    settings: dict[str, Mapping[str, Setting]] = {}
    for stage in stages:
        made = solver_settings(stage.text, found) | own_seeds.get(stage.step.name, {})
        view, entries = View(stage.text.block), stage.text.block.entries
        if (passes := view.whole("iter_size") or 1) > 1:
            why = f"batch_size is that of a whole update, its {passes} passes together"
            todo = "write the stage's own batch_size where it is another"
            found.leave(view.place("iter_size"), "iter_size", why, todo)
        made["batch_size"] = Setting("batch_size", (ask("batch_size: 0", "images of one update, of all workers?"),))
        device = ask("device_batch_size: 0", "those of one worker's pass? BatchNorm sees these")
        made["device_batch_size"] = Setting("device_batch_size", (device,))
        if any(s.step.parents for s in stages) and seeded(stage):
            made["carry"] = AS_CAFFE
        if not evaluated:
            made.pop("test_interval", None)
        elif "test_iter" in entries:  # without a count of images to go by, every image is evaluated
            why = "it counts batches of a size that the net says"
            todo = "every image is evaluated; `test_batch_size` and `test_iter` say else"
            found.leave(entries["test_iter"].place, "test_iter", why, todo)
        go_on(stage, made, found)
        settings[stage.step.name] = made
    _refuse_mistakes(found)
    data = message("train", source_lines(Count("", wanted.images or 0), None), None)
    if evaluated:
        data += message("val", source_lines(Count("", wanted.val_images or 0), None), None)
    steps = tuple(stage.step for stage in stages)
    name = "which network? `stagerun help Model.name` lists them"
    model = (ask('name: "?"', name), ask("num_classes: 0", "how many?"))
    return Converted(steps=steps, settings=settings, model=model, data=data, seed=seed, found=found)
