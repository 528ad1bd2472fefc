"""`stagerun import caffe`: reads a folder of Caffe's, writes a schedule's folder, and shows its plan or its open questions."""

import os
import posixpath
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING

import click

from stagerun.base.errors import ExitCode, RecipeError, UsageError
from stagerun.base.snapshots import Inventory
from stagerun.caffe.importer.folder import (
    CaffeFolder,
    Settings,
    SolverText,
    aligned,
    images_of,
    message,
    plain,
    read_solver,
    setting,
    source_of,
    with_comment,
)
from stagerun.caffe.importer.order import Step, ordered_steps, workers_of
from stagerun.caffe.importer.settings import (
    OF_STAGE,
    RESTART,
    UPDATE,
    CaffeStage,
    check_solver,
    note_norms,
    note_sources,
    overlap_starts,
)
from stagerun.caffe.reading import IMAGES, PHASES, layers_in, type_of
from stagerun.caffe.text import NetText, read
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.language import load
from stagerun.language.disk import refuse_existing, write_folder
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import Doubtful, quoted
from stagerun.plan import make_plan
from stagerun.plan.render import render_text


@command()
def caffe(
    folder: str = argument("FOLDER"),
    out: str = option("--out DIR", "The new schedule's folder: solvers/NAME.", default=MISSING),
    order: str | None = option(
        "--order STAGE,STAGE...",
        "The solver files in order, each trained from the end of the previous one: `init,cyc1,collapse` or file names.  "
        "[default: by the `caffe train` lines in FOLDER's README or script]",
    ),
    workers: int | None = option(
        "--workers N",
        "Number of Caffe's processes, whose batches add up.  [default: by `mpirun -n` and `-gpu` in those lines, else 1]",
        type=click.IntRange(1),
    ),
    overlap: bool = flag(
        "--overlap",
        "Writes the rates of SURFsara's and Intel's usual build for several nodes, which applies the gradient of an iteration in the "
        "next one, with its rate.",
    ),
    images: int | None = option(
        "--images N", "Training images.  [default: counted in the LMDB]", type=click.IntRange(1)
    ),
    val_images: int | None = option(
        "--val-images N", "Images of the evaluation.  [default: counted in the LMDB]", type=click.IntRange(1)
    ),
) -> None:
    """Converts a folder of Caffe's (BVLC's, Intel's or SURFsara's) to a schedule's folder.

    Solvers become stages with the same learning rate, batch, weight decay, momentum and transform; their nets are copied and trained
    unchanged. The `caffe train` lines of a README or script in FOLDER (`--weights PREFIX_iter_N.caffemodel`, `--snapshot
    PREFIX_iter_N.solverstate`) decide which solvers are imported, their order and what each starts from. With --order they only decide
    the number of workers and where in the previous stage each starts. Nothing in FOLDER is run or changed.

    All mistakes are reported at once with their position: a missing net, a field that no Caffe has, weights with the wrong ending or
    that no stage makes, a layer that image classifiers don't have. Settings that stagerun can't express are listed, also in the head of
    schedule.prototxt. Unknown facts (the number of images and their channels, a mean image, the GPUs of `-gpu all`) are left open in the
    files: DIR is written, `stagerun check` reports them, and the exit code is 64; likewise for a value that can't be trained.
    """
    words = [word.strip() for word in order.split(",")] if order is not None else []
    refuse_existing(out)
    caffes = CaffeFolder(folder)
    stages, head = convert(caffes, words, workers, overlap, (images, val_images))
    out, left = os.path.normpath(out), left_out(caffes.left)
    name = os.path.basename(os.path.abspath(out))
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", name, flags=re.ASCII).lstrip(".") or "caffe"
    head["seed"] = f"name: {quoted(name)}\n{head['seed']}"
    write_folder(out, files_of(stages, head, about_of(stages, left, folder)))
    if left:
        show(left + "\n")
    try:
        plan = make_plan(load(out), Inventory())
    except RecipeError as error:
        tell("\n\n".join(problem.render() for problem in error.problems))
        tell(f"\n{out} is written; correct the above in its files, then run `stagerun check {out}`")
        sys.exit(ExitCode.RECIPE)
    show(render_text(plan))
    show(f"\n{out}: written; read it, then run `stagerun plan {out}`")


# -- conversion to stages; only `CaffeFolder` reads the disk


def convert(
    folder: CaffeFolder, order: Sequence[str], workers: int | None, overlap: bool, counts: tuple[int | None, int | None]
) -> tuple[list[CaffeStage], Settings]:
    """Return the stages and the schedule's fields. RecipeError with all mistakes; UsageError."""
    prototxts = folder.files(lambda name: name.endswith(".prototxt"))
    steps, lines = ordered_steps(folder, prototxts, order)
    nets: dict[str, NetText | None] = {}
    stages: list[CaffeStage] = []
    taken = dict.fromkeys([SCHEDULE_FILE, *(f"{step.name}.prototxt" for step in steps)], "")
    for step in steps:
        solver = read_solver(posixpath.join(folder.shown, step.file), prototxts[step.file], folder.mistakes)
        check_solver(solver, folder)
        with suppress(Doubtful):
            if (stage := _with_net(step, solver, nets, taken, folder)) is not None:
                stages.append(stage)
                taken[stage.file] = stage.net.path
    if folder.mistakes:
        raise RecipeError(folder.mistakes.all())
    first, val = stages[0], next((s.val for s in stages if s.val is not None), None)
    train = source_of(first.train, counts[0], folder)
    tested = source_of(val, counts[1], folder) if val is not None else None
    same = _computing(first.net)
    for stage in stages:
        stage.workers = workers_of(stage.step, lines, workers, stage.train.settings.place("batch_size"), folder)
        if _computing(stage.net) == same:  # nets that differ only in their data layers are one
            stage.file = first.file
    if overlap and not any(stage.workers.nodes for stage in stages):
        raise UsageError("`--overlap` needs a stage with several processes", "give their number with `--workers N`")
    models = {stage.name: stage.model(first.train.channels or train.channels) for stage in stages}
    note_sources(stages, val)
    for stage in stages:
        model, made = models[stage.name], stage.made
        stage.add_solver()
        stage.add_batch()
        stage.add_images(val, tested.number if tested is not None else 0)
        if any(step.parents for step in steps) and (not stage.train.shuffle or stage.seed):
            made["carry"] = RESTART
        if model != models[first.name] and "batch_norm_param" in model:
            made["model"] = message("model", model)
        elif stage.file != first.file:  # `net` is short for a model without other settings
            made["net"] = setting("net", quoted(stage.file))
        stage.add_start(first.seed)
        stage.start_from_snapshot()
    for stage in stages:
        if stage.workers.nodes:
            stage.overlap_rates(overlap)
    if folder.mistakes:
        raise RecipeError(folder.mistakes.all())
    if overlap:
        overlap_starts(stages)
    data = [message("train", train.inside)]
    data += [message("val", tested.inside)] if tested is not None else []
    data += ["shuffle: false"] if not first.train.shuffle else []
    seed = setting("seed", first.seed or "1", "Caffe's random_seed" if first.seed else "")
    return stages, {
        "seed": seed,
        "model": message("model", models[first.name]),
        "data": message("data", "\n".join(data)),
    }


def _computing(net: NetText) -> str:
    """Return the canonical form of a net without its data layers."""
    return net._replace(layers=tuple(layer for layer in net.layers if type_of(layer) not in IMAGES)).canonical()


def _with_net(
    step: Step, solver: SolverText, nets: dict[str, NetText | None], taken: Mapping[str, str], folder: CaffeFolder
) -> CaffeStage | None:
    """Return a step with the net to train, which is read once into `nets`; None after a mistake. `taken`: the sources by names of files."""
    field = "train_net" if "train_net" in solver.block.entries else "net"
    named = solver.text(field) or ""
    if (path_and_data := folder.net(named)) is None:
        if named:  # else `check_solver` reports it
            folder.mistakes.add(solver.place(field), f"the net `{named}` is missing", "copy the net next to the solver")
        return None
    path, data = path_and_data
    if path not in nets:
        nets[path] = read(data, path, folder.mistakes)
    if (net := nets[path]) is None:
        return None
    layers, tested = (layers_in(net.layers, phase) for phase in PHASES)
    tested = tested if field == "net" else []
    train, val = images_of(layers, "TRAIN", folder), images_of(tested, "TEST", folder)
    if train is None:
        text = "the net has no layer that reads images in training"
        hint = "make an LMDB of them (`stagerun data import LIST OUT --format list --resize-height 256 --resize-width 256`), and a layer of type `Data`"
        folder.mistakes.add(net.place, text, hint)
        return None
    note_norms(step, layers, tested, folder)
    name = posixpath.basename(path).removesuffix(".prototxt") + ".prototxt"
    while taken.get(name, path) != path:
        name = f"net_{name}"
    return CaffeStage(folder, step, solver, net, data.decode(errors="replace"), layers, train, val, name)


# -- the texts of the files, as a person would write them

# The fields of Solver in the order of writing; messages come after an empty line.
OWN = ("net", "model", *OF_STAGE, "knot", "policy_start_iter")  # always in the stage's file
ORDER = (
    *(*OWN, "weights", "solverstate", "batch_size", "device_batch_size", "type", *UPDATE, "local_lr_passes"),
    *("clip_gradients", "random_seed", "carry", "transform_param", "test_transform_param", "test_batch_size"),
    *("test_interval", "test_iter", "display", "snapshot"),
)


def files_of(stages: Sequence[CaffeStage], head: Settings, about: str) -> dict[str, str]:
    """Return the texts of all files. `head`: the schedule's name, seed, model and data."""
    shared, above, files = _shared([stage.made for stage in stages]), "", {SCHEDULE_FILE: ""}
    if shared:
        head["solver"] = message("solver", _written(shared), "shared by all stages")
    entries = ""
    for stage in stages:
        changed = {n: text for n, text in stage.made.items() if shared.get(n) != text}
        # A message would otherwise be merged into the shared one.
        gone = [n for n in shared if n not in stage.made or (n in changed and "\n" in changed[n])]
        clear = with_comment(f"clear: [{', '.join(map(quoted, gone))}]", "from the settings shared by all stages")
        lines = [_comments("Solver", f"From {stage.step.file}."), "", *([clear] if gone else []), _written(changed)]
        files[f"{stage.name}.prototxt"] = "\n".join(lines)
        parents = stage.step.parents or ("",)
        start = "" if parents == (above,) else "".join(f" from: {quoted(parent)}" for parent in parents)
        entries += f"\nstage {{ name: {quoted(stage.name)}{start} }}"
        above = stage.name
    files[SCHEDULE_FILE] = "\n\n".join([_comments("Schedule", about), *head.values()]) + "\n" + entries
    nets = {stage.file: stage.text for stage in reversed(stages)}
    return {file: aligned(text) + "\n" for file, text in files.items()} | nets


def _shared(stages: Sequence[Settings]) -> Settings:
    """Return Schedule.solver: settings that more than half of the stages share, or half of them including the first."""
    shared: Settings = {}
    for name in (name for name in ORDER if name not in OWN):
        value, number = Counter(stage.get(name) for stage in stages).most_common(1)[0]
        most = number * 2 > len(stages) or (number * 2 == len(stages) and value == stages[0].get(name))
        # A stage that resumes from a snapshot has its `carry`.
        if value is not None and most and (name != "carry" or number == len(stages)):
            shared[name] = value
    return shared


def _written(settings: Settings) -> str:
    """Return the settings in order, with an empty line around each message."""
    lines, message_before = "", True
    for text in (settings[name] for name in ORDER if name in settings):
        lines += "\n" if "\n" in text and not message_before else ""
        lines += text + "\n"
        message_before = "\n" in text
    return lines.rstrip("\n")


def _comments(kind: str, about: str) -> str:
    text = f"proto-file: protos/stagerun.proto\nproto-message: {kind}\n\n{about}"
    return "\n".join(f"# {line}".rstrip() for line in text.split("\n"))


def about_of(stages: Sequence[CaffeStage], left: str, folder: str) -> str:
    """Return the origin of each stage and the list of differences. `folder`: Caffe's, as on the command line."""
    rows = [(stage.name, plain(stage.step.file), plain(stage.net.path)) for stage in stages]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {name:<{first}}  {file:<{second}}  {net}" for name, file, net in rows]
    return "\n".join([f"Imported from Caffe's files in {plain(folder)}:", "", *lines, *(["", left] if left else [])])


def left_out(left: Sequence[str]) -> str:
    """Return the list of differences, also for the terminal. File names may contain line ends."""
    wrapper = textwrap.TextWrapper(110, "  ", " " * 6, break_long_words=False, break_on_hyphens=False)
    lines = [wrapper.fill(plain(text)) for text in left]
    return "\n".join(["Left out or changed:", *lines]) if left else ""
