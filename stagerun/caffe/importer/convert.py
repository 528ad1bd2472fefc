"""A folder of Caffe's -> the stages with their settings, and what is left out. Only `CaffeFolder` looks at the disk."""

import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from stagerun.base.errors import RecipeError, UsageError
from stagerun.caffe.blocks import layers_in
from stagerun.caffe.importer.folder import CaffeFolder, Count
from stagerun.caffe.importer.nets import CaffeNet, count_images, images_of, net_of, source_lines
from stagerun.caffe.importer.order import Step, ordered_steps, workers_of
from stagerun.caffe.importer.settings import (
    RESTART,
    CaffeStage,
    add_batch,
    add_images,
    add_start,
    check_solver,
    go_on,
    model_of,
    note_norms,
    note_sources,
    overlapped_rates,
    overlapped_start,
    solver_settings,
)
from stagerun.caffe.importer.text import Findings, Settings, SolverText, message, read_solver, setting
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import quoted
from stagerun.language.view import Doubtful


def convert(
    folder: CaffeFolder, order: Sequence[str], workers: int | None, overlap: bool, counts: tuple[int | None, int | None]
) -> tuple[list[CaffeStage], dict[str, Settings], Settings, list[str]]:
    """The stages, the settings of each, what the schedule says, and what is left out. RecipeError with all mistakes; UsageError."""
    found = Findings()
    prototxts = folder.files(lambda name: name.endswith(".prototxt"))
    steps, lines = ordered_steps(folder, prototxts, order, found)
    nets: dict[str, CaffeNet | None] = {}
    stages: list[CaffeStage] = []
    taken = dict.fromkeys([SCHEDULE_FILE, *(f"{step.name}.prototxt" for step in steps)], "")
    for step in steps:
        solver = read_solver(posixpath.join(folder.shown, step.file), prototxts[step.file], found.mistakes)
        check_solver(solver, found)
        with suppress(Doubtful):
            if (stage := _with_net(step, solver, nets, taken, folder, found)) is not None:
                stages.append(stage)
                taken[stage.file] = stage.net.path
    if found.mistakes:
        raise RecipeError(found.mistakes.all())
    # Nets that differ in what their data layers read alone are one.
    same = stages[0].net.computing
    stages = [replace(s, file=stages[0].file) if s.net.computing == same else s for s in stages]
    first, val = stages[0], next((s.val for s in stages if s.val is not None), None)
    train_count = count_images(first.train, counts[0], folder, found)
    val_count = count_images(val, counts[1], folder, found) if val is not None else Count("")
    ran_in = {s.name: workers_of(s.step, lines, workers, s.train.settings.place("batch_size"), found) for s in stages}
    if overlap and not any(w.nodes for w in ran_in.values()):
        raise UsageError("`--overlap`, and no stage has several processes", "give their number with `--workers N`")
    models = {s.name: model_of(s, first.train.channels or train_count.channels, ran_in[s.name], found) for s in stages}
    note_sources(stages, val, found)
    settings: dict[str, Settings] = {}
    for stage in stages:
        made = settings[stage.name] = solver_settings(stage.solver, found)
        add_batch(stage, ran_in[stage.name], made, found)
        add_images(stage, val, val_count.number, made, found)
        if any(step.parents for step in steps) and (not stage.train.shuffle or stage.seed):
            made["carry"] = RESTART
        model = models[stage.name]
        if model != models[first.name] and "batch_norm_param" in model:
            made["model"] = message("model", model)
        elif stage.file != first.file:  # `net` alone stands for a model without settings of its own
            made["net"] = setting("net", quoted(stage.file))
        add_start(stage, first.seed, folder, made, found)
        go_on(stage, made, found)
    for stage in stages:
        if ran_in[stage.name].nodes:
            settings[stage.name] = overlapped_rates(stage, settings[stage.name], overlap, found)
    if found.mistakes:
        raise RecipeError(found.mistakes.all())
    data = [message("train", source_lines(train_count))]
    data += [message("val", source_lines(val_count))] if val is not None else []
    data += ["shuffle: false"] if not first.train.shuffle else []
    if overlap:
        stages = [overlapped_start(stage, stages, ran_in) for stage in stages]
    seed = setting("seed", first.seed or "1", "Caffe's random_seed" if first.seed else "")
    head = {"seed": seed, "model": message("model", models[first.name]), "data": message("data", "\n".join(data))}
    return stages, settings, head, found.left


def _with_net(
    step: Step,
    solver: SolverText,
    nets: dict[str, CaffeNet | None],
    taken: Mapping[str, str],
    folder: CaffeFolder,
    found: Findings,
) -> CaffeStage | None:
    """None after a mistake. `taken`: the names of files, and what they are copies of."""
    if (net := net_of(solver, folder, nets, found)) is None:
        return None
    layers, tested = (layers_in(net.layers, phase) for phase in ("TRAIN", "TEST"))
    tested = tested if "net" in solver.block.entries else []
    train, val = (images_of(one, phase, found, folder) for one, phase in ((layers, "TRAIN"), (tested, "TEST")))
    if train is None:
        text = "the net has no layer that reads images in training"
        hint = "make an LMDB of them (`stagerun data import LIST OUT --format list --resize-height 256 --resize-width 256`), and a layer of type `Data`"
        found.mistakes.add(net.file.place, text, hint)
        return None
    note_norms(step, layers, tested, found)
    name = posixpath.basename(net.path).removesuffix(".prototxt") + ".prototxt"
    while taken.get(name, net.path) != net.path:
        name = f"net_{name}"
    return CaffeStage(step, solver, net, layers, train, val, name)
