"""`stagerun import caffe`: reads a folder of Caffe's, writes a schedule's folder, and shows its plan or its open questions."""

import os
import posixpath
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, replace

import click

from stagerun.base.errors import ExitCode, RecipeError, UsageError
from stagerun.base.snapshots import Inventory
from stagerun.caffe.importer.folder import (
    CaffeFolder,
    CaffeNet,
    Count,
    Findings,
    Settings,
    SolverText,
    aligned,
    count_images,
    images_of,
    message,
    net_of,
    plain,
    read_solver,
    setting,
    source_lines,
    with_comment,
)
from stagerun.caffe.importer.order import Step, ordered_steps, workers_of
from stagerun.caffe.importer.settings import (
    OF_STAGE,
    RESTART,
    UPDATE,
    CaffeStage,
    add_batch,
    add_images,
    add_start,
    check_solver,
    model_of,
    note_norms,
    note_sources,
    overlapped_rates,
    overlapped_start,
    solver_settings,
    start_from_snapshot,
)
from stagerun.caffe.reading import layers_in
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
    stages, settings, head, lost = convert(CaffeFolder(folder), words, workers, overlap, (images, val_images))
    out, left = os.path.normpath(out), left_out(lost)
    name = os.path.basename(os.path.abspath(out))
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", name, flags=re.ASCII).lstrip(".") or "caffe"
    head["seed"] = f"name: {quoted(name)}\n{head['seed']}"
    write_folder(out, files_of(stages, settings, head, about_of(stages, left, folder)))
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
) -> tuple[list[CaffeStage], dict[str, Settings], Settings, list[str]]:
    """Return the stages, the settings of each, the schedule's fields, and the list of differences. RecipeError with all mistakes; UsageError."""
    findings = Findings()
    prototxts = folder.files(lambda name: name.endswith(".prototxt"))
    steps, lines = ordered_steps(folder, prototxts, order, findings)
    nets: dict[str, CaffeNet | None] = {}
    stages: list[CaffeStage] = []
    taken = dict.fromkeys([SCHEDULE_FILE, *(f"{step.name}.prototxt" for step in steps)], "")
    for step in steps:
        solver = read_solver(posixpath.join(folder.shown, step.file), prototxts[step.file], findings.mistakes)
        check_solver(solver, findings)
        with suppress(Doubtful):
            if (stage := _with_net(step, solver, nets, taken, folder, findings)) is not None:
                stages.append(stage)
                taken[stage.file] = stage.net.path
    if findings.mistakes:
        raise RecipeError(findings.mistakes.all())
    # Nets that differ only in their data layers are one.
    same = stages[0].net.computing
    stages = [replace(s, file=stages[0].file) if s.net.computing == same else s for s in stages]
    first, val = stages[0], next((s.val for s in stages if s.val is not None), None)
    train_count = count_images(first.train, counts[0], folder, findings)
    val_count = count_images(val, counts[1], folder, findings) if val is not None else Count("")
    ran_in = {
        s.name: workers_of(s.step, lines, workers, s.train.settings.place("batch_size"), findings) for s in stages
    }
    if overlap and not any(w.nodes for w in ran_in.values()):
        raise UsageError("`--overlap` needs a stage with several processes", "give their number with `--workers N`")
    models = {
        s.name: model_of(s, first.train.channels or train_count.channels, ran_in[s.name], findings) for s in stages
    }
    note_sources(stages, val, findings)
    settings: dict[str, Settings] = {}
    for stage in stages:
        made = settings[stage.name] = solver_settings(stage.solver, findings)
        add_batch(stage, ran_in[stage.name], made, findings)
        add_images(stage, val, val_count.number, made, findings)
        if any(step.parents for step in steps) and (not stage.train.shuffle or stage.seed):
            made["carry"] = RESTART
        model = models[stage.name]
        if model != models[first.name] and "batch_norm_param" in model:
            made["model"] = message("model", model)
        elif stage.file != first.file:  # `net` is short for a model without other settings
            made["net"] = setting("net", quoted(stage.file))
        add_start(stage, first.seed, folder, made, findings)
        start_from_snapshot(stage, made, findings)
    for stage in stages:
        if ran_in[stage.name].nodes:
            settings[stage.name] = overlapped_rates(stage, settings[stage.name], overlap, findings)
    if findings.mistakes:
        raise RecipeError(findings.mistakes.all())
    data = [message("train", source_lines(train_count))]
    data += [message("val", source_lines(val_count))] if val is not None else []
    data += ["shuffle: false"] if not first.train.shuffle else []
    if overlap:
        stages = [overlapped_start(stage, stages, ran_in) for stage in stages]
    seed = setting("seed", first.seed or "1", "Caffe's random_seed" if first.seed else "")
    head = {"seed": seed, "model": message("model", models[first.name]), "data": message("data", "\n".join(data))}
    return stages, settings, head, findings.left


def _with_net(
    step: Step,
    solver: SolverText,
    nets: dict[str, CaffeNet | None],
    taken: Mapping[str, str],
    folder: CaffeFolder,
    findings: Findings,
) -> CaffeStage | None:
    """Return a step with its net; None after a mistake. `taken`: the sources by names of files."""
    if (net := net_of(solver, folder, nets, findings)) is None:
        return None
    layers, tested = (layers_in(net.layers, phase) for phase in ("TRAIN", "TEST"))
    tested = tested if "net" in solver.block.entries else []
    train, val = (images_of(one, phase, findings, folder) for one, phase in ((layers, "TRAIN"), (tested, "TEST")))
    if train is None:
        text = "the net has no layer that reads images in training"
        hint = "make an LMDB of them (`stagerun data import LIST OUT --format list --resize-height 256 --resize-width 256`), and a layer of type `Data`"
        findings.mistakes.add(net.file.place, text, hint)
        return None
    note_norms(step, layers, tested, findings)
    name = posixpath.basename(net.path).removesuffix(".prototxt") + ".prototxt"
    while taken.get(name, net.path) != net.path:
        name = f"net_{name}"
    return CaffeStage(step, solver, net, layers, train, val, name)


# -- the texts of the files, as a person would write them

# The fields of Solver in the order of writing; messages come after an empty line.
OWN = ("net", "model", *OF_STAGE, "knot", "policy_start_iter")  # always in the stage's file
ORDER = (
    *(*OWN, "weights", "solverstate", "batch_size", "device_batch_size", "type", *UPDATE, "local_lr_passes"),
    *("clip_gradients", "random_seed", "carry", "transform_param", "test_transform_param", "test_batch_size"),
    *("test_interval", "test_iter", "display", "snapshot"),
)


def files_of(
    stages: Sequence[CaffeStage], settings: Mapping[str, Settings], head: Settings, about: str
) -> dict[str, str]:
    """Return the texts of all files. `settings`: by stage; `head`: the schedule's name, seed, model and data."""
    shared, above, files = _shared(list(settings.values())), "", {SCHEDULE_FILE: ""}
    if shared:
        head["solver"] = message("solver", _written(shared), "shared by all stages")
    entries = ""
    for stage in stages:
        changed = {n: text for n, text in settings[stage.name].items() if shared.get(n) != text}
        # A message would otherwise be merged into the shared one.
        gone = [n for n in shared if n not in settings[stage.name] or (n in changed and "\n" in changed[n])]
        clear = with_comment(f"clear: [{', '.join(map(quoted, gone))}]", "from the settings shared by all stages")
        lines = [_comments("Solver", f"From {stage.step.file}."), "", *([clear] if gone else []), _written(changed)]
        files[f"{stage.name}.prototxt"] = "\n".join(lines)
        parents = stage.step.parents or ("",)
        start = "" if parents == (above,) else "".join(f" from: {quoted(parent)}" for parent in parents)
        entries += f"\nstage {{ name: {quoted(stage.name)}{start} }}"
        above = stage.name
    files[SCHEDULE_FILE] = "\n\n".join([_comments("Schedule", about), *head.values()]) + "\n" + entries
    nets = {stage.file: stage.net.data.decode(errors="replace") for stage in reversed(stages)}
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
