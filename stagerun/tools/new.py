"""`stagerun new`: a schedule of the gallery, or of a folder, for other images.

The files are read as fields and values, `_Fitter` changes these by name, and the result is written without the comments, which are
about the images that the schedule was made for.
"""

import math
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stagerun.base.errors import DataError, Problems, UsageError, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count, listed
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.data.index import Index
from stagerun.data.index import load as load_index
from stagerun.language import SCHEDULE_FILE, load, read, stage_nodes
from stagerun.language.disk import refuse_existing, write_folder
from stagerun.language.layers import is_twin, pairs
from stagerun.language.parse import parse
from stagerun.language.tree import SCHEDULE, SOLVER, Block, Value, quoted
from stagerun.tools.check import missing_weights, tell_findings
from stagerun.tools.data.importer import JobOptions, as_lmdbs
from stagerun.tools.data.records import Shown, build, threads_here
from stagerun.tools.fmt import formatted
from stagerun.tools.starter import LARGEST_CROP, Images, Starter, network_for

# A message: the texts of the values of each field, or the messages.
Fields = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Sets:
    train: str | None = option(
        "--train LMDB|FOLDER",
        "The training images: a folder of them for each class, or one that holds train/ and val/.",
    )
    val: str | None = option("--val LMDB|FOLDER", "The images to evaluate with.")
    split_val: str | None = option("--split-val PART", "Instead of --val: hold out a part of each class, such as 10%.")


@dataclass(frozen=True, slots=True)
class Start:
    base: str | None = option("--from SCHEDULE", "Stages, batch and rates of one of the gallery, or of a folder.")
    model: str | None = option("--model NAME", "The network.  [default: resnet_small]")
    weights: str | None = option("--weights FILE|NAME", "Fine-tune these weights: a file's, or published ones.")

    def checked(self) -> "Start":
        """Return it with the network's name. UsageError."""
        if self.base is not None and (self.model or self.weights):
            raise UsageError("--from, and --model or --weights", "leave one out: `--from` names the network, too")
        return replace(self, model=network_for(self.model, self.weights)) if self.base is None else self


@command()
def new(
    folder: str | None = argument("[NAME]", default=None),
    *,
    sets: Sets,
    start: Start,
    as_list: bool = flag("--list", "Show the gallery."),
    job: JobOptions,
) -> None:
    """Makes the folder NAME: a schedule for your images, and says what it chose and why.

    Number of images, classes, sizes, mean and deviation are read from LMDBs; class folders are first imported, as `data import` does, into
    NAME-train_lmdb and NAME-val_lmdb. With --weights the schedule fine-tunes: first the head alone, then all, then a collapse. With --from it
    has the stages of that schedule in epochs, its batch and rates; a crop of padded images becomes their size.
    """
    if as_list:
        show(gallery_text())
        return
    if folder is None or sets.train is None:
        missing = "NAME" if folder is None else "--train"
        raise UsageError(f"{missing}: missing", "name an LMDB, or a folder with one folder of images per class")
    start = start.checked()
    refuse_existing(folder)
    train, val = as_lmdbs(sets.train, sets.val, sets.split_val, folder, job)
    schedule, lines = make(folder, start, train, val)
    to_fetch = list(missing_weights(schedule.stages))
    tell("\n".join(f"note: {line}" for line in to_fetch))
    tell_findings(schedule)
    head = f"{folder}: {count(schedule.data.train.images, 'image')} of {schedule.model.num_classes} classes"
    show("\n".join([head, *(f"  {line}" for line in lines), "next:"]))
    word = shlex.quote(folder)
    rows = [
        (f"  stagerun plan {word} --plot lr.svg", "what will run, and its learning rate"),
        (f"  stagerun rehearse {word}", "a few iterations of every stage, and how long the run will take"),
        (f"  stagerun run {word}", "trains; the same command resumes after anything"),
    ]
    if any("--fetch" in line for line in to_fetch):
        rows.insert(0, (f"  stagerun check {word} --fetch", "downloads the weights"))
    show("\n".join(columns(rows)))


def gallery() -> Path:
    """Return the folder of the schedules that come with stagerun: in a wheel inside the package, in its repository next to it."""
    package = Path(__file__).parents[1]
    return next((p for p in (package / "gallery", package.parent / "solvers") if p.is_dir()), package / "gallery")


def gallery_text() -> str:
    """Return a line for each schedule of the gallery."""
    rows = [("--from", "network", "stages", "batch", "what it is")]
    for folder in sorted(path.parent for path in gallery().glob(f"*/{SCHEDULE_FILE}")):
        schedule = load(folder)
        about = textwrap.shorten(_about((folder / SCHEDULE_FILE).read_text()), 72, placeholder=" ...")
        batch = max(stage.solver.batch_size for stage in schedule.stages)
        rows.append((folder.name, schedule.model.name, str(len(schedule.stages)), str(batch), about))
    return "\n".join(columns(rows))


def _about(text: str) -> str:
    """Return the first sentence of a file's head, up to a colon."""
    lines = (line[1:].strip() for line in text.partition("\n\n")[0].split("\n") if not line.startswith("# proto-"))
    return re.split(r"[:;]|\.( |$)", " ".join(lines).strip())[0]


# -- the images


def _index(path: str, pixels: bool) -> Index:
    """Return the index of the records, from the side file or else from the records. DataError, StorageError."""
    index = load_index(path)
    if index is None or (pixels and not index.facts.deviation_bgr):
        with Shown(f"reading {path}") as shown:
            index = build(path, shown.progress, threads=threads_here(None), pixels=pixels)
    if not len(index):
        raise DataError(f"{path}: it holds no images", "`stagerun data import` makes an LMDB of a folder of images")
    return index


def _shapes(index: Index) -> list[tuple[int, int]]:
    """Return the (width, height) of the images, the smallest first."""
    shapes = {*zip(index.widths.tolist(), index.heights.tolist(), strict=True)} - {(0, 0)}
    return sorted(shapes, key=lambda shape: (min(shape), max(shape)))


def _images(paths: tuple[str, str], train: Index, val: Index) -> Images:
    shapes = {*_shapes(train), *_shapes(val)}
    side, classes = min(map(min, shapes)), len(train.facts.classes) or int(train.labels.max()) + 1
    return Images(
        train=(os.path.abspath(paths[0]), len(train)),
        val=(os.path.abspath(paths[1]), len(val)),
        classes=classes,
        side=min(side, LARGEST_CROP) if len(shapes) > 1 else side,
        shorter=int(np.median(np.minimum(train.heights, train.widths))),
        mean=train.facts.mean_bgr,
        # 0 in a channel that is the same everywhere
        deviation=tuple(max(value, 1.0) for value in train.facts.deviation_bgr),
        sizes=tuple(np.bincount(train.labels[train.labels >= 0], minlength=classes).tolist()),
        mixed=len(shapes) > 1,
    )


# -- a new folder


def make(out: str, start: Start, train: str, val: str) -> tuple[Schedule, list[str]]:
    """Write the folder `out`, whole or not at all; return what was chosen, too. RecipeError, UsageError, DataError, StorageError."""
    folder = _base(start.base) if start.base is not None else None
    indexes, name = (_index(train, True), _index(val, False)), os.path.basename(os.path.abspath(out))
    images = _images((train, val), *indexes)
    if folder is None:
        starter = Starter(images, start.model or "", start.weights)
        texts, lines = {SCHEDULE_FILE: starter.text(name)}, list(starter.lines())
    else:
        schedule = load(folder)
        texts = {os.path.relpath(path, folder): text for path, text in schedule.files}
        about = (
            f"{count(images.train[1], 'image')} of {images.classes} classes, trained in the stages of {folder.name}."
        )
        texts, lines = fitted(texts, schedule, name, about, images), [f"stages, batch and rates: of {folder.name}"]
        if images.mixed:
            tell("note: images of many sizes: training resizes a random part of each, an evaluation the middle")
    _tell_copies(*indexes)
    _require_fitting(read(texts, os.path.abspath(out), (), os.path.normpath(out)), val, *indexes)
    write_folder(out, texts)
    return load(out), lines


def _tell_copies(train: Index, val: Index) -> None:
    """Name images that are in both sets, with the same label; the finding `same-images` says what it means."""
    _, *places = np.intersect1d(train.digests, val.digests, return_indices=True)
    keys = zip(map(train.key, places[0]), map(val.key, places[1]), strict=True)
    pairs = ["train {} = val {}".format(*(os.fsdecode(key).partition("_")[2] for key in pair)) for pair in keys]
    if pairs:
        tell(f"note: the same image in both sets: {listed(pairs, 3)}")


def _base(base: str) -> Path:
    """Return the folder that `--from` means: a schedule's, or one of the gallery by name. UsageError."""
    for folder in (Path(base), gallery() / base):
        if (folder / SCHEDULE_FILE).is_file():
            return folder
    hint = nearest(base, os.listdir(gallery())) or "`stagerun new --list` shows the gallery"
    raise UsageError(f"--from {base}: not a schedule", hint)


_SAME_CLASSES = "import both with the same classes: `--synsets FILE` has one a line, also those without images"


def _require_fitting(schedule: Schedule, path: str, train: Index, val: Index) -> None:
    """Raise DataError unless a label means the same class in both sets, and the images suffice for every stage."""
    names, others = train.facts.classes, val.facts.classes
    if names and others and names != others:
        missing, more = sorted({*names} - {*others}), sorted({*others} - {*names})
        different = [f"without {listed(missing, 5)}"] if missing else []
        different += [f"with {listed(more, 5)}"] if more else []
        text = f"{path}: other classes than the training images: {' and '.join(different) or 'in another order'}"
        raise DataError(text, _SAME_CLASSES)
    if (most := int(val.labels.max())) >= schedule.model.num_classes:
        message = f"{path}: label {most}, but the training images have {schedule.model.num_classes} classes"
        raise DataError(message, _SAME_CLASSES)
    for stage in schedule.stages:
        seen = stage.solver.transform
        crop = 0 if seen.pad or seen.random_resize or seen.random_resized_crop else seen.crop_size or 0
        width, height = _shapes(train)[len(_shapes(train)) // 2]
        if stage.solver.batch_size > len(train):
            message = f"an update of stage `{stage.name}` takes {stage.solver.batch_size} images, and the set has {len(train)}"
            raise DataError(message, "leave `--from` out for a batch that fits, or give more images")
        if min(width, height) < crop:
            message = f"images of {width} x {height}, and stage `{stage.name}` cuts out {crop} x {crop}"
            hint = "`stagerun data import --resize-shorter N` enlarges them; `--from fashion_collapse` fits its crop to the images"
            raise DataError(message, hint)


# -- other fields and values

_START = re.compile(r'"([\w-]+)@(\d+)(?:\.\.(\d+)/(\d+))?"')  # "trunk@15000", or the members "trunk@6000..8000/500"
_KINDS = (SOLVER, SOLVER.fields_by_name["knot"].message_type)
_EPOCHS = {pairs(kind)[f.name]: f.name for kind in _KINDS for f in kind.fields if is_twin(f)}
_IGNORE = re.compile(r"# lint: ignore ([\w, -]+)")


def fitted(texts: Mapping[str, str], schedule: Schedule, name: str, about: str, images: Images) -> dict[str, str]:
    """Return the texts, by file, of the same stages under another name for other images; `schedule` is what `texts` say, `about` the head of
    the first file. Lengths in iterations become epochs."""
    first = _moved_points(texts[SCHEDULE_FILE], images.train[1] / schedule.data.train.images)
    root, fitter = parse(SCHEDULE_FILE, first, SCHEDULE, Problems()), _Fitter(images, schedule)
    fields = fitter.fit("", _fields(root), schedule.stages[0].solver.batch_size) | {"name": [quoted(name)]}
    result = {SCHEDULE_FILE: _text("Schedule", about, fields, first)}
    for node in stage_nodes(first):
        if node.file is not None and node.file in texts and node.file not in result:
            source = texts[node.file]
            block = parse(node.file, source, SOLVER, Problems())
            fields = fitter.fit("solver", _fields(block), fitter.batches[node.group or node.name])
            about = _about(source)  # numbers in it are of the other images
            result[node.file] = _text("Solver", "" if re.search(r"\d", about) else about, fields, source)
    return result | {file: text for file, text in texts.items() if file.endswith(".py")}


def _moved_points(text: str, factor: float) -> str:
    """Return the text with each point of a stage, and each stage that is called after one, at `factor` times its iteration."""

    def moved(match: re.Match[str]) -> str:
        stage, first, last, step = match.groups()
        if last is None:
            return f'"{stage}@{max(1, round(int(first) * factor))}"'
        # Below the factor, for lengths in epochs have three digits: the last one is never behind the stage's end.
        begin, every = (max(1, math.floor(int(number) * factor * 0.995)) for number in (first, step))
        return f'"{stage}@{begin}..{begin + (int(last) - int(first)) // int(step) * every}/{every}"'

    for stage, first, last, _ in dict.fromkeys(_START.findall(text)):
        if not last:  # `trunk@15000` makes the stage `cooldown_trunk_15000`
            called = rf"{re.escape(stage)}_{first}(?!\d)"
            text = re.sub(called, f"{stage}_{max(1, round(int(first) * factor))}", text)
    return _START.sub(moved, text)


def _fields(block: Block) -> Fields:
    def value(held: Value) -> Any:
        return _fields(held.value) if isinstance(held.value, Block) else held.text

    return {name: [value(held) for held in entry.values] for name, entry in block.entries.items()}


_SPATIAL = ("crop_size", "pad", "pad_mode", "random_resize_param")


class _Fitter:
    """Changes fields by their names. `batches`: images per update, by the name of a stage's block."""

    def __init__(self, images: Images, schedule: Schedule) -> None:
        self.images, self.epoch = images, schedule.data.train.images
        self.batches = {stage.group or stage.name: stage.solver.batch_size for stage in schedule.stages}
        seen = schedule.stages[0].solver.transform
        self.resize: Fields = {"min_size": [str(images.side * 8 // 7)]}
        self.resized = images.mixed and (seen.pad > 0 or seen.crop_size is None)  # else it crops any image

    def fit(self, name: str, fields: Fields, batch: int) -> Fields:
        """Return the message in the field `name` for the new images. `batch`: images per update, where no block says another number."""
        if name == "stage":
            batch = self.batches[fields["name"][0].strip("\"'")]
        elif "batch_size" in fields:
            batch = int(fields["batch_size"][0])
        images, made = self.images, Fields()
        for key, values in fields.items():
            if key in _EPOCHS:
                lengths = (int(value) * batch / self.epoch for value in values)
                made[_EPOCHS[key]] = [f"{length:.3g}" for length in lengths]
            else:
                made[key] = [self.fit(key, value, batch) if isinstance(value, dict) else value for value in values]
        if name == "model" and "num_classes" in made:
            made |= {"num_classes": [str(images.classes)], "channels": [str(len(images.mean))]}
        elif name in ("train", "val") and "source" in made:
            path, number = images.train if name == "train" else images.val
            made |= {"source": [quoted(path)], "images": [str(number)]}
        elif name in ("transform_param", "test_transform_param"):
            made = self._transform(made)
        elif name == "solver" and "transform_param" in made and self.resized:
            self._add_resizing(made)
        if "class_weight" in made:
            made["class_weight"] = images.class_weight
        if self.resized and '"transform_param.crop_size"' in made.get("clear", ()):  # for whole images
            others = [path for path in made["clear"] if path.strip('"').partition(".")[2] not in _SPATIAL]
            made["clear"] = ['"transform_param.random_resized_crop_param"', *others]
            made["transform_param"] = [{"random_resize_param": [self.resize]}]
        return made

    def _transform(self, made: Fields) -> Fields:
        if "mean_value" in made:
            order = -1 if made.get("channel_order") == ["RGB"] else 1
            made["mean_value"] = [f"{value:.4g}" for value in self.images.mean[::order]]
            made["std_value"] = [f"{value:.4g}" for value in self.images.deviation[::order]]
            made.pop("scale", None)
        if "pad" in made and "crop_size" in made:  # the whole image, moved by the padding
            made["crop_size"] = [str(self.images.side)]
        return {key: values for key, values in made.items() if not self.resized or key not in _SPATIAL}

    def _add_resizing(self, solver: Fields) -> None:
        """Train on a random part of each image, and evaluate the middle; a stage that would take whole images takes the middle, too."""
        crop = [str(self.images.side)]
        seen = solver["transform_param"][0]
        normal = {key: seen[key] for key in ("mean_value", "std_value", "channel_order") if key in seen}
        solver["transform_param"] = [seen | {"crop_size": crop, "random_resized_crop_param": [{}]}]
        solver["test_transform_param"] = [normal | {"crop_size": crop, "random_resize_param": [self.resize]}]


def _text(kind: str, about: str, fields: Fields, source: str) -> str:
    """Return a file. `source`: the file that it was made from, whose findings stay silenced."""
    head = ["proto-file: protos/stagerun.proto", f"proto-message: {kind}", "", *textwrap.wrap(about, 118)]
    if silenced := sorted({word.strip() for ids in _IGNORE.findall(source) for word in ids.split(",")}):
        head += ["", f"lint: ignore {', '.join(silenced)}"]
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + "\n" + formatted("\n".join(_lines(fields)))


def _lines(fields: Fields) -> Iterator[str]:
    for name, values in fields.items():
        if len(values) > 1 and not isinstance(values[0], dict):
            values = [f"[{', '.join(values)}]"]
        for value in values:
            lines = list(_lines(value)) if isinstance(value, dict) else []
            if not isinstance(value, dict):
                yield f"{name} {value}" if value.startswith("{") else f"{name}: {value}"
            elif sum(map(len, lines)) < 80:
                yield f"{name} {{ {' '.join(lines)} }}"
            else:
                yield from (f"{name} {{", *lines, "}")
