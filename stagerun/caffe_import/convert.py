"""A folder of Caffe's, as texts -> the stages with their settings, and what is left out. Pure; `Folder` looks for files."""

import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from stagerun.caffe_import.commands import ordered_steps
from stagerun.caffe_import.converted import Converted, Wanted
from stagerun.caffe_import.counts import Counting, count_images, source_lines
from stagerun.caffe_import.data_layers import images_of
from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.lines import Line, message
from stagerun.caffe_import.model import last_linear, model_lines, note_other_network
from stagerun.caffe_import.multipliers import multipliers
from stagerun.caffe_import.nets import layers_in, state_of
from stagerun.caffe_import.no_nets import without_nets
from stagerun.caffe_import.resumed import going_on, parent_of
from stagerun.caffe_import.settings import (
    AS_CAFFE,
    CaffeStage,
    SolverStage,
    batch,
    evaluation,
    note_sources,
    seeded,
    seeds,
    transforms,
)
from stagerun.caffe_import.solver import check_solver, solver_settings
from stagerun.caffe_import.stages import Step
from stagerun.caffe_import.text import NET, SOLVER, CaffeText, read_text
from stagerun.caffe_import.transforms import MeanFiles
from stagerun.caffe_import.workers import workers_of
from stagerun.errors import RecipeError
from stagerun.spec.tree import Block, Entry
from stagerun.spec.view import Doubtful, View


class Folder(Counting, Protocol):
    """What is to be known of the disk. Names are those of files in Caffe's folder, paths are as its files write them."""

    name: str
    shown: str  # the folder as messages name it, '' where that is the working folder

    def prototxts(self) -> Mapping[str, bytes]: ...

    def scripts(self) -> Mapping[str, bytes]: ...

    def net(self, path: str) -> tuple[str, bytes] | None:
        """The file as messages name it, and its bytes; None if there is none."""
        ...

    def above(self, path: str) -> bool:
        """Whether a file that was found is in none of Caffe's folder."""
        ...

    def near(self, path: str) -> str:
        """The nearest net that there is, '' if none is near."""
        ...

    def meant(self, path: str) -> str:
        """Where the file is first looked for."""
        ...

    def mean_file(self, path: str) -> bytes | None: ...


def convert(folder: Folder, wanted: Wanted) -> Converted:
    """Everything but the writing. RecipeError with all mistakes, each at its place in Caffe's files; UsageError."""
    found = Findings()
    prototxts = folder.prototxts()
    steps = ordered_steps(folder.shown, folder.name, prototxts, folder.scripts(), wanted.order, found)
    nets: dict[str, CaffeText | None] = {}
    stages = []
    alone = []
    for step in steps:
        text = read_text(posixpath.join(folder.shown, step.file), prototxts[step.file], SOLVER, found)
        check_solver(text, wanted.nets, found)
        if not wanted.nets:
            alone.append(SolverStage(step, text))
            continue
        with suppress(Doubtful):
            stage = _read_stage(step, text, folder, nets, found)
            if stage is not None:
                stages.append(stage)
    if found.mistakes:
        raise RecipeError(found.mistakes.all())
    if not wanted.nets:
        return without_nets(folder.shown, alone, folder, wanted, found)
    return _converted(stages, folder, wanted, found)


def _read_stage(
    step: Step, text: CaffeText, folder: Folder, nets: dict[str, CaffeText | None], found: Findings
) -> CaffeStage | None:
    """A stage with its nets. None after a mistake."""
    view = View(text.block)
    train = _net(text, ("train_net_param", "train_net", "net_param", "net"), folder, nets, found)
    if train is None:
        return None
    tests = _net(text, ("test_net_param", "test_net", "net_param", "net"), folder, nets, found)
    layers = layers_in(train, state_of(view.block.block("train_state"), "TRAIN"))
    state = next(iter(text.block.blocks("test_state")), None)
    tested = layers_in(tests, state_of(state, "TEST")) if tests is not None else []
    for name in ("test_net", "test_net_param", "test_state"):
        entry = text.block.entries.get(name)
        if entry is not None and len(entry.values) > 1:
            found.leave(entry.values[1].span, name, "one evaluation is made; the first is taken")
    means = MeanFiles({p: d for p in _mean_files(layers + tested) if (d := folder.mean_file(p)) is not None})
    images = images_of(layers, "TRAIN", found, means)
    if images is None:
        if not found.mistakes.count(train.place.path):  # else what was meant to read them is among those
            message = "the net has no layer that reads images in training"
            found.mistakes.add(train.place, message, "a layer of type `Data` with `include { phase: TRAIN }` does")
        return None
    return CaffeStage(step, text, train, layers, images, images_of(tested, "TEST", found, means))


def _net(
    text: CaffeText, fields: Sequence[str], folder: Folder, nets: dict[str, CaffeText | None], found: Findings
) -> Block | None:
    """The net that the first of the fields which is written names or holds. None if there is none, or a mistake."""
    entry: Entry | None = next((text.block.entries[f] for f in fields if f in text.block.entries), None)
    if entry is None or not entry.values:
        return None
    value = entry.values[0].value
    if isinstance(value, Block):
        return value
    path = str(value)
    if path not in nets:
        there = folder.net(path)
        nets[path] = read_text(there[0], there[1], NET, found) if there else None
        if there and folder.above(there[0]) and not posixpath.dirname(path):
            why = f"{there[0]}, in a folder above, is taken; there is none of that name here"
            found.leave(entry.place, f"net `{path}`", why, "read it: it may be another's")
    net = nets[path]
    if net is None:
        near = folder.near(path)
        hint = (
            f"the nearest there is is {near}"
            if near
            else f"copy the net to {folder.meant(path)}; or `--root`, the folder in which Caffe is started and its paths begin; "
            "or `--no-nets`, which imports the solvers alone"
        )
        found.mistakes.add(entry.place, f"there is no net `{path}`", hint)
        return None
    return net.block


def _mean_files(layers: Sequence[Block]) -> set[str]:
    names = ("transform_param", "data_param", "image_data_param")
    blocks = [b for layer in layers for name in names if (b := layer.block(name)) is not None]
    return {str(b.entries["mean_file"].values[0].value) for b in blocks if "mean_file" in b.entries}


def _converted(stages: list[CaffeStage], folder: Folder, wanted: Wanted, found: Findings) -> Converted:
    first = stages[0]
    val = next((s.val for s in stages if s.val is not None), None)
    train_count = count_images(first.train, wanted.images, folder, found)
    val_count = count_images(val, wanted.val_images, folder, found) if val is not None else None
    channels = first.train.channels or train_count.channels
    model, name = model_lines(first.net, first.layers, wanted.model, channels, found)
    last = last_linear(first.layers)
    for other in stages[1:]:
        note_other_network(first.layers, other.layers, first.step.file, found)
    seed, own_seeds = seeds(stages)
    note_sources(stages, val, found)
    settings = {}
    for stage in stages:
        made = solver_settings(stage.text, found)
        workers = workers_of(stage.step, [s.step for s in stages], wanted.workers)
        made |= {s.name: s for s in batch(stage, workers, found)}
        made |= {s.name: s for s in transforms(stage, val)}
        if any(s.step.parents for s in stages) and (not stage.train.shuffle or seeded(stage)):
            # Every Caffe begins at the first record, in the same order where there is nothing random about it.
            made["carry"] = AS_CAFFE
        made |= evaluation(stage, val, made, val_count.number if val_count else 0, found)
        if (rules := multipliers(stage.layers, name, last, found)) is not None:
            made["param"] = rules
        if stage.step.name in own_seeds:
            made["random_seed"] = own_seeds[stage.step.name]
        settings[stage.step.name] = going_on(stage, parent_of(stage, stages), made, found)
    if found.mistakes:
        raise RecipeError(found.mistakes.all())
    data = message("train", source_lines(train_count, first.train.source_place), first.train.source_place)
    if val is not None and val_count is not None:
        data += message("val", source_lines(val_count, val.source_place), val.source_place)
    if not first.train.shuffle:
        data += (Line("shuffle: false", first.train.layer.place),)
    steps = tuple(s.step for s in stages)
    nets = {s.step.name: s.net.place.path for s in stages if s.net.place.path != s.text.path}
    return Converted(steps=steps, settings=settings, model=model, data=data, seed=seed, found=found, nets=nets)
