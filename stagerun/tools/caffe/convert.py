"""A folder of Caffe's, as texts -> the stages with their settings, and what is left out. Only `CaffeFolder` looks at the disk."""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stagerun.base.errors import RecipeError, Span, UsageError
from stagerun.language.net.phases import State, layers_in, state_of
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import Block, Entry, quoted
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.images import Count, count_images, count_lmdb, images_of, source_lines
from stagerun.tools.caffe.lines import Line, Setting, message, setting
from stagerun.tools.caffe.model import WHICH, last_linear, model_lines, multipliers, note_other_network, whole_lines
from stagerun.tools.caffe.nodes import norm_lines, note_norms, overlapped_rates, overlapped_start
from stagerun.tools.caffe.order import ordered_steps
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
    passes_of,
    seeded,
    seeds,
    solver_settings,
    transforms,
)
from stagerun.tools.caffe.stages import Step, workers_of
from stagerun.tools.caffe.text import SOLVER, CaffeText, Findings, read_text
from stagerun.tools.caffe.train_lines import Word
from stagerun.tools.caffe.whole import CaffeNet, Written, inside, read_net, written

S = TypeVar("S", bound=SolverStage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for; None is: as the files say. With `nets` False solver files are imported alone: what nets
    would have said is in the last five, and the written files ask for what is None. Sources are absolute paths."""

    order: tuple[str, ...] = ()
    workers: int | None = None
    overlap: bool = False
    model: str | None = None
    images: int | None = None
    val_images: int | None = None
    nets: bool = True
    batch_size: int | None = None
    device_batch_size: int | None = None
    classes: int | None = None
    train_source: str | None = None
    val_source: str | None = None


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
        text = read_text(posixpath.join(folder.shown, step.file), prototxts[step.file], SOLVER, found)
        check_solver(text, wanted.nets, found)
        if not wanted.nets:
            alone.append(SolverStage(step, text))
            continue
        with suppress(Doubtful):
            if stage := _read_stage(step, text, folder, nets, wanted.model is not None, taken, found):
                stages.append(stage)
                if stage.written is not None:
                    taken[stage.written.name] = stage.written.source
    _refuse_mistakes(found)
    return _with_nets(stages, folder, wanted, found) if wanted.nets else _without_nets(alone, folder, wanted, found)


def _refuse_mistakes(found: Findings) -> None:
    if found.mistakes:
        raise RecipeError(found.mistakes.all())


def _settings(
    stages: Sequence[S], add: Callable[[S, dict[str, Setting]], None], found: Findings
) -> tuple[Line, dict[str, Mapping[str, Setting]]]:
    """The schedule's seed, and the settings of each stage. `add(stage, made)` adds what its solver alone doesn't say."""
    seed, own_seeds = seeds(stages)
    settings: dict[str, Mapping[str, Setting]] = {}
    for stage in stages:
        made = solver_settings(stage.text, found)
        add(stage, made)
        if stage.step.name in own_seeds:
            made["random_seed"] = own_seeds[stage.step.name]
        go_on(stage, parent_of(stage, stages), made, found)
        settings[stage.step.name] = made
    _refuse_mistakes(found)
    return seed, settings


# -- with nets


def _read_stage(
    step: Step,
    text: CaffeText,
    folder: CaffeFolder,
    nets: dict[str, CaffeNet | None],
    stand_in: bool,
    taken: Mapping[str, str],
    found: Findings,
) -> CaffeStage | None:
    """A stage with its nets. None after a mistake. `stand_in`: a network of stagerun's stands for them."""
    train = _net(text, ("train_net_param", "train_net", "net_param", "net"), folder, nets, stand_in, found)
    if train is None:
        return None
    tests = _net(text, ("test_net_param", "test_net", "net_param", "net"), folder, nets, stand_in, found)
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
    if images is None:
        if not found.mistakes.count(train.path):  # else what was meant to read them is among those
            message = "the net has no layer that reads images in training"
            found.mistakes.add(
                train.block.place, message, "a layer of type `Data` with `include { phase: TRAIN }` does"
            )
        return None
    val = images_of(tested, "TEST", found, folder)
    if not stand_in:
        note_norms(step, layers, tested, found)
    own = None if stand_in or train.whole is None else written(step.name, train, tests, states, taken)
    return CaffeStage(step, text, train.block, layers, images, val, own)


def _net(
    text: CaffeText,
    fields: Sequence[str],
    folder: CaffeFolder,
    nets: dict[str, CaffeNet | None],
    stand_in: bool,
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
            nets[key] = inside(path, value, stand_in, found)
        return nets[key]
    if path not in nets:
        there = folder.net(path)
        nets[path] = read_net(there[0], there[1], stand_in, found) if there else None
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
    name = wanted.model or ""
    stages = [_as_first(stage, first) for stage in stages]
    steps = tuple(s.step for s in stages)
    workers = {s.step.name: workers_of(s.step, steps, wanted.workers, s.train.batch_place, found) for s in stages}
    if wanted.overlap and not any(w.nodes for w in workers.values()):
        raise UsageError("`--overlap`, and no stage has several processes", "give their number with `--workers N`")
    for stage in stages[1:] if first.written is None else ():
        note_other_network(first.layers, stage.layers, first.step.file, found)

    def model_of(stage: CaffeStage) -> tuple[Line, ...]:
        if stage.written is not None:
            lines = whole_lines(stage.net, stage.written.name, channels, train_count.there)
            return (*lines, *norm_lines(stage, workers[stage.step.name], found))
        return model_lines(first.net, first.layers, name, channels, passes_of(first), found)

    model = model_of(first)
    last = last_linear(first.layers)
    note_sources(stages, val, found)

    def add(stage: CaffeStage, made: dict[str, Setting]) -> None:
        nodes = workers[stage.step.name]
        made |= {s.name: s for s in (*batch(stage, nodes, made, found), *transforms(stage, val))}
        if any(s.step.parents for s in stages) and (not stage.train.shuffle or seeded(stage)):
            # Every Caffe begins at the first record, in the same order where there is nothing random about it.
            made["carry"] = AS_CAFFE
        evaluation(stage, val, made, val_count.number if val_count else 0, found)
        if stage.written is None and (rules := multipliers(stage.layers, name, last, found)) is not None:
            made["param"] = rules
        own = model_of(stage) if stage.written is not None else model
        if [line.text for line in own] != [line.text for line in model]:
            # `net` alone stands for a model without settings of its own.
            norm = any(line.text.startswith("batch_norm_param") for line in own)
            net = setting("net", quoted(stage.written.name if stage.written else ""), stage.net.place)
            made |= {"model": Setting("model", message("model", own, stage.net.place))} if norm else {"net": net}
        if stage.step.given and stage.step.start is not None:
            made |= {s.name: s for s in [_given(stage.step.start, folder, found)]}

    seed, settings = _settings(stages, add, found)
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
    nets = {s.step.name: s.net.place.path for s in stages if s.net.place.path != s.text.path}
    copies = {s.written.name: s.written for s in stages if s.written is not None}
    return Converted(
        steps=steps,
        settings=settings,
        model=model,
        data=data,
        seed=seed,
        found=found,
        nets=nets,
        written=tuple(copies.values()),
    )


def _as_first(stage: CaffeStage, first: CaffeStage) -> CaffeStage:
    """The stage with the first one's net, if that is the same but for what its data layers read."""
    if stage.written is None or first.written is None or stage.written.layers != first.written.layers:
        return stage
    return replace(stage, written=first.written)


def _given(word: Word, folder: CaffeFolder, found: Findings) -> Setting:
    """Weights or a solverstate that no stage makes."""
    there = folder.file(word.text)
    if not there:
        found.leave(word.span, word.text, "it isn't there", "write its path: it starts at the schedule's folder")
    path = quoted(there or word.text)
    if ".solverstate" in word.text:
        return setting("solverstate", path, word.span, "as Caffe's `--snapshot`")
    return Setting("weights", (Line(f"weights {{ file: {path} strict: false }}", word.span, "as Caffe's `--weights`"),))


# -- without nets: what they say comes from the command line, or is asked for


def _without_nets(stages: Sequence[SolverStage], folder: CaffeFolder, wanted: Wanted, found: Findings) -> Converted:
    evaluated = bool(wanted.val_images or wanted.val_source or any(_tests(stage) for stage in stages))
    _note_nets(folder.shown or ".", wanted, evaluated, found)

    def add(stage: SolverStage, made: dict[str, Setting]) -> None:
        made |= {s.name: s for s in _batch(stage, wanted, found)}
        if any(s.step.parents for s in stages) and seeded(stage):
            made["carry"] = AS_CAFFE
        _evaluation(stage, evaluated, made, found)

    def count(part: str, source: str | None, images: int | None) -> Count:
        if source is None:
            return Count(f"{part}_lmdb", images or 0)
        return count_lmdb(f"--{part}-source", source, images, folder, found)

    seed, settings = _settings(stages, add, found)
    train = count("train", wanted.train_source, wanted.images)
    data = message("train", source_lines(train, None), None)
    if evaluated:
        data += message("val", source_lines(count("val", wanted.val_source, wanted.val_images), None), None)
    steps = tuple(stage.step for stage in stages)
    model = _model(wanted, train)
    return Converted(steps=steps, settings=settings, model=model, data=data, seed=seed, found=found)


def _note_nets(shown: str, wanted: Wanted, evaluated: bool, found: Findings) -> None:
    """One entry for everything that neither a file nor an option says."""
    place = Span(shown, 0, 0)
    batch = [] if wanted.batch_size and wanted.device_batch_size else ["batch"]
    why = (
        f"{', '.join([*batch, 'transform'])} and multipliers are not carried, nor what else nets say of layers and loss"
    )
    found.leave(place, "nets were not read", why, "write them, or import again with the nets")
    if not evaluated:
        found.leave(place, "data.val", "no solver evaluates", "`--val-images` says that there is one")
    for part, source in (("train", wanted.train_source), ("val", wanted.val_source if evaluated else "")):
        if source is None:
            todo = f"write the LMDB's path, or import again with `--{part}-source`"
            found.leave(place, f"data.{part}.source", f"{part}_lmdb is only a name that stands there", todo)


def _model(wanted: Wanted, train: Count) -> tuple[Line, ...]:
    asked = Line('name: "?"', None, WHICH, asks=True)
    classes = Line("num_classes: 0", None, "how many?", asks=True)
    return (
        Line(f"name: {quoted(wanted.model)}") if wanted.model else asked,
        Line(f"num_classes: {wanted.classes}") if wanted.classes else classes,
        *((Line("channels: 1", None, "as in the LMDB"),) if train.channels == 1 else ()),
    )


def _batch(stage: SolverStage, wanted: Wanted, found: Findings) -> list[Setting]:
    """batch_size and device_batch_size, the same in all stages."""
    view = View(stage.text.block)
    passes = (view.whole("iter_size") or 1) if view.has("iter_size") else 1
    if passes > 1:
        why = f"batch_size is that of a whole update, its {passes} passes together"
        found.leave(view.place("iter_size"), "iter_size", why, "write the stage's own batch_size where it is another")
    asked = (
        ("batch_size", wanted.batch_size, "images of one update, of all workers together?"),
        ("device_batch_size", wanted.device_batch_size, "those of one worker's pass? BatchNorm sees these"),
    )
    return [
        setting(name, str(value)) if value else Setting(name, (Line(f"{name}: 0", None, question, asks=True),))
        for name, value, question in asked
    ]


def _tests(stage: SolverStage) -> bool:
    view = View(stage.text.block)
    return view.has("test_interval") and (view.whole("test_interval") or 0) > 0


def _evaluation(stage: SolverStage, evaluated: bool, made: dict[str, Setting], found: Findings) -> None:
    """Without a count of images to go by, every image is evaluated. Where nothing is, all intervals are 0."""
    entry = stage.text.block.entries.get("test_iter")
    if not evaluated:
        made.pop("test_interval", None)
        if entry is not None:
            found.idle["test_iter"] = "no solver evaluates while it trains"
    elif entry is not None:
        why = "it counts batches of a size that the net says"
        found.leave(
            entry.place, "test_iter", why, "every image is evaluated; `test_batch_size` and `test_iter` say else"
        )
