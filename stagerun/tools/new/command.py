"""`stagerun new`: a schedule of the gallery, or of a folder, made to fit other images."""

import math
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np

import stagerun
from stagerun.base import recipe, units
from stagerun.base.errors import DataError, ExitCode, Problem, Problems, RecipeError, StagerunError, UsageError, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count, listed
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.data.index import Index
from stagerun.data.index import load as load_index
from stagerun.language import load, read, stages
from stagerun.language.disk import refuse_existing, write_folder
from stagerun.language.layers import pairs
from stagerun.language.lexer import Kind, tokens
from stagerun.language.parse import parse
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import SCHEDULE, SOLVER, Block, Entry, quoted
from stagerun.tools.data.indexing import build
from stagerun.tools.data.progress import Shown, threads_here
from stagerun.tools.plan.check import missing_weights, tell_findings

T = TypeVar("T")


class Unfit(StagerunError):
    """All that keeps a schedule from being made. The exit code is that of the first."""

    def __init__(self, found: Sequence[StagerunError | Problem]) -> None:
        super().__init__(f"{count(len(found), 'mistake')}; nothing is written")
        self.found = found
        self.exit_code = found[0].exit_code if isinstance(found[0], StagerunError) else ExitCode.RECIPE

    def render(self) -> str:
        return "\n\n".join([*(error.render() for error in self.found), self.message])


def gallery() -> Path:
    """The folder of the schedules that come with stagerun: in a wheel inside the package, in its repository beside it."""
    package = Path(stagerun.__file__).parent
    return next((p for p in (package / "gallery", package.parent / "solvers") if p.is_dir()), package / "gallery")


@command()
def new(
    folder: str | None = argument("[NAME]", default=None),
    base: str = option("--from SCHEDULE", "One of the gallery, or a folder.", default="fashion_collapse"),
    train: str | None = option("--train LMDB", "The training images."),
    val: str | None = option("--val LMDB", "The images to evaluate with."),
    as_list: bool = flag("--list", "Show the gallery."),
) -> None:
    """Makes the folder NAME: the stages of a schedule of the gallery, made to fit your own images.

    Number of images, classes, mean, deviation, channels and paths are read from the LMDBs that `stagerun data import` has made.
    Lengths are in epochs. A crop of padded images becomes their size; every other crop, batch and learning rate stays.
    """
    if as_list:
        show(list_text())
        return
    given = (("NAME", folder), ("--train LMDB", train), ("--val LMDB", val))
    if folder is None or train is None or val is None:
        raise UsageError(
            f"{listed([what for what, value in given if value is None])}: missing",
            "`stagerun data import` makes an LMDB of a folder of images",
        )
    new_schedule(folder, base, train, val)


def list_text() -> str:
    """Every schedule of the gallery, one line each."""
    rows = [("--from", "network", "stages", "epochs", "batch", "what it is")]
    for folder in sorted(p for p in gallery().iterdir() if (p / SCHEDULE_FILE).is_file()):
        schedule = load(folder)
        batches = sorted({s.solver.batch_size for s in schedule.stages})
        epochs = sum(s.solver.max_iter * s.solver.batch_size / s.data.train.images for s in schedule.stages)
        what = " ".join(description((folder / SCHEDULE_FILE).read_text())[:1]).partition(":")[0].rstrip(".")
        batch = "-".join(str(b) for b in dict.fromkeys([batches[0], batches[-1]]))
        what = textwrap.shorten(what, 64, placeholder=" ...")
        rows.append((folder.name, schedule.model.name, str(len(schedule.stages)), f"{epochs:.3g}", batch, what))
    return "\n".join(columns(rows))


def new_schedule(out: str, base: str, train: str, val: str) -> None:
    """Writes the folder `out`. Unfit with every mistake, and then nothing is written."""
    mistakes: list[StagerunError | Problem] = []

    def tried(function: Callable[..., T], *arguments: object) -> T | None:
        try:
            return function(*arguments)
        except StagerunError as error:
            mistakes.extend(error.problems if isinstance(error, RecipeError) else [error])
            return None

    tried(refuse_existing, out)
    folder = tried(_base, base)
    schedule = tried(load, folder) if folder is not None else None
    own, other = (tried(_index, path, path == train) for path in (train, val))
    if folder is None or schedule is None or own is None or other is None:
        raise Unfit(mistakes)
    texts = _fitted(folder, schedule, out, (train, val), (own, other))
    made = tried(read, texts, os.path.abspath(out), (), os.path.normpath(out))
    mistakes += [*_classes(own, other, val), *_sizes(made or schedule, own, other)]
    if mistakes:
        raise Unfit(mistakes)
    write_folder(out, texts)
    written = load(out)
    tell("\n".join(f"note: {line}" for line in missing_weights(written.stages)))
    tell_findings(written)
    show(f"{out}: the stages of {base} for {count(len(own), 'image')}; next:")
    if _sides(own, other)[1]:
        tell("note: images of many sizes: training cuts out and resizes a part at random, an evaluation the midst")
    word = shlex.quote(out)
    rows = [
        (f"  stagerun plan {word} --plot lr.svg", "what will run, and its learning rate"),
        (f"  stagerun rehearse {word}", "a few iterations of every stage, and how long the run will take"),
        (f"  stagerun run {word}", "trains; the same command goes on after anything"),
    ]
    show("\n".join(columns(rows)))


def _base(base: str) -> Path:
    """The folder that `--from` means: a schedule's, or one of the gallery by name. UsageError."""
    for folder in (Path(base), gallery() / base):
        if (folder / SCHEDULE_FILE).is_file():
            return folder
    hint = nearest(base, os.listdir(gallery())) or "`stagerun new --list` shows the gallery"
    raise UsageError(f"--from {base}: there is no such schedule", hint)


def _index(path: str, pixels: bool) -> Index:
    """What is known of each record, by the side file or, without one, by the records. DataError, StorageError."""
    index = load_index(path)
    if index is None or (pixels and not index.facts.deviation_bgr):
        with Shown(f"reading {path}", "records") as shown:
            index = build(path, shown.progress, threads=threads_here(None), pixels=pixels).index
    if not len(index):
        hint = "`stagerun data import` makes an LMDB of a folder of images"
        raise DataError(f"{path}: there are no images in it", hint)
    return index


def _number_of_classes(index: Index) -> int:
    return len(index.facts.classes) or int(index.labels.max()) + 1


def _sides(*indexes: Index) -> tuple[int, bool]:
    """The shortest side of any image, and whether they are of many sizes."""
    sizes = {size for i in indexes for size in zip(i.heights.tolist(), i.widths.tolist(), strict=True)} - {(0, 0)}
    return min(map(min, sizes)), len(sizes) > 1


def _fitted(
    folder: Path, schedule: Schedule, out: str, paths: tuple[str, str], indexes: tuple[Index, Index]
) -> dict[str, str]:
    train, val = indexes
    side, mixed = _sides(train, val)
    images = Images(
        train=(os.path.abspath(paths[0]), len(train)),
        val=(os.path.abspath(paths[1]), len(val)),
        classes=_number_of_classes(train),
        side=min(side, _OF_MIXED) if mixed else side,
        mixed=mixed,
        mean=train.facts.mean_bgr,
        deviation=train.facts.deviation_bgr,
        sizes=tuple(np.bincount(train.labels[train.labels >= 0], minlength=_number_of_classes(train)).tolist()),
    )
    about = (
        f"{count(len(train), 'image')} of {images.classes} classes, trained in the stages of {folder.name}. Its lengths in iterations stand here in "
        "epochs; mean and deviation are those of these images. Made by `stagerun new`."
    )
    name = os.path.basename(os.path.abspath(out))
    texts = {os.path.relpath(path, folder): text for path, text in schedule.files}
    return fitted(texts, schedule, name, about, images)


def _classes(train: Index, val: Index, path: str) -> Iterator[StagerunError]:
    """Whether a label means the same class in both."""
    known, other = train.facts.classes, val.facts.classes
    hint = "import both with the same class folders"
    number = _number_of_classes(train)
    if known and other and known != other:
        odd = sorted({*known} ^ {*other})
        what = f"{listed(odd, 5)} in one of them only" if odd else "the order is another"
        yield DataError(f"{path}: its classes are not those of the training images: {what}", hint)
    elif (most := int(val.labels.max())) >= number:
        yield DataError(f"{path}: there is a label {most}, but the training images have labels 0 to {number - 1}", hint)


def _sizes(schedule: Schedule, train: Index, val: Index) -> Iterator[StagerunError]:
    """Whether the images suffice for every stage once its crop is `fitted`; of each kind of mistake the first stage that has it."""
    sets = [{*zip(i.widths.tolist(), i.heights.tolist(), strict=True)} - {(0, 0)} for i in (train, val)]
    sizes = [sorted(found, key=lambda size: (min(size), max(size))) for found in (*sets, sets[0] | sets[1])]
    least, most = sizes[2][0], sizes[2][-1]
    found: dict[str, StagerunError] = {}
    for stage in schedule.stages:
        solver, where = stage.solver, f"stage `{stage.name}`"
        if solver.batch_size > len(train):
            message = f"an update of {where} takes {solver.batch_size} images, and there are {len(train)}"
            hint = "begin `--from` a schedule with a smaller batch: `stagerun new --list` shows them"
            found.setdefault("batch", DataError(message, hint))
        for t, own in ((solver.transform, sizes[0]), (solver.test_transform, sizes[1])):
            resized = t.random_resize or t.random_aspect_ratio or t.random_resized_crop
            if not resized and t.crop_size is None and least != most:
                message = f"images from {_size(least)} to {_size(most)}, and {where} takes one size alone"
                hint = (
                    "write `crop_size: 64 random_resized_crop_param { }` in its `transform_param`, and "
                    "`crop_size: 64 random_resize_param { min_size: 73 }` in its `test_transform_param`"
                )
                found.setdefault("mixed", DataError(message, hint))
            typical = own[len(own) // 2 if resized else 0]
            if t.crop_size is not None and not t.pad and min(typical) < t.crop_size and solver.transform.pad == 0:
                message = f"images of {_size(typical)}, and {where} cuts out {t.crop_size} x {t.crop_size}"
                hint = "`stagerun data import --resize-shorter N` enlarges them; `--from fashion_collapse` fits its crop to images of one size"
                found.setdefault("small", DataError(message, hint))
    yield from found.values()


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


_OF_MIXED = 64  # the most pixels of a side to which `new` crops images of many sizes

_EPOCHS = {iterations: epochs for epochs, iterations in pairs(SOLVER).items()}
_START = re.compile(r'"([\w-]+)@(\d+)(?:\.\.(\d+)/(\d+))?"')  # "trunk@15000", or the members "trunk@6000..8000/500"
_LENGTH = re.compile(r"[:,;][^:,;]*\d[\d,.]* updates?\b.*")  # `: 7800 updates, 25 epochs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """`train` and `val` are paths with their number of records, `side` the shortest side of any image in pixels, `mean` and
    `deviation` those of B, G and R, or of grey; `sizes` how many training images each class has, () where they are alike; `mixed`: the
    images are not of one size."""

    train: tuple[str, int]
    val: tuple[str, int]
    classes: int
    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    sizes: tuple[int, ...] = ()
    mixed: bool = False

    @property
    def class_weight(self) -> str:
        """All classes of the same weight in the loss: the mean number of images of a class over its own."""
        sizes = self.sizes or (1,) * self.classes
        weights = (sum(sizes) / len(sizes) / max(1, size) for size in sizes)
        return f"class_weight: [{', '.join(f'{weight:.4g}' for weight in weights)}]"


def fitted(
    texts: Mapping[str, str], schedule: recipe.Schedule, name: str, about: str, images: Images
) -> dict[str, str]:
    """The texts, by file, of the same stages under another name for other images; `schedule` is what `texts` say, `about` the new
    first paragraph. Lengths in iterations become epochs; of comments in lines that change, only lint's stay, and of each file's head
    its first paragraph, without numbers of updates.
    """
    texts = {file: text.removeprefix("\N{BYTE ORDER MARK}") for file, text in texts.items()}
    first = texts[SCHEDULE_FILE]
    first = _moved_points(first, images.train[1] / schedule.data.train.images)
    batches = {stage.group or stage.name: stage.solver.batch_size for stage in schedule.stages}

    def edited(source: str, root: Block, about: Sequence[str], batch: int) -> str:
        return _File(source, root, schedule, images, name, batches).text(about, batch)

    root = parse(SCHEDULE_FILE, first, SCHEDULE, Problems())
    result = {SCHEDULE_FILE: edited(first, root, [about], schedule.stages[0].solver.batch_size)}
    for node in stages.nodes(root, Problems()):
        if node.file is not None and node.file in texts and node.file not in result:
            source = texts[node.file]
            block = parse(node.file, source, SOLVER, Problems())
            result[node.file] = edited(source, block, description(source), batches[node.group or node.name])
    return result | {file: text for file, text in texts.items() if file.endswith(".py")}


def _moved_points(text: str, factor: float) -> str:
    """The text with each point of a stage, and each stage that is called after one, at `factor` times its iteration."""

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


def description(text: str) -> list[str]:
    """The sentences of the first paragraph of a file's head that hold for any images."""
    head = "\n".join(
        line[1:].strip() for line in text[: _head_end(text)].split("\n") if not line.startswith("# proto-")
    )
    paragraph = head.strip().partition("\n\n")[0].replace("\n", " ")
    sentences = (_LENGTH.sub("", s.rstrip(".")) for s in re.split(r"(?<=\.) ", paragraph))
    return [s + "." for s in sentences if s and "update " not in s and " updates" not in s]


def _head_end(text: str) -> int:
    match = re.match(r"(?:#.*\n)*", text)
    return match.end() if match else 0


class _File:
    """One file while it is edited: `edits` are (start, end, new text) of stretches of `source`. `batches`: of stages, by block."""

    def __init__(
        self, source: str, root: Block, schedule: recipe.Schedule, images: Images, name: str, batches: Mapping[str, int]
    ) -> None:
        self.source, self.root, self.schedule, self.images = source, root, schedule, images
        self.name, self.batches = name, batches
        self.tokens = tokens(source)
        starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
        self.ends = [starts[t.line - 1] + t.column - 1 + len(t.text) for t in self.tokens]
        self.place = {(t.line, t.column): i for i, t in enumerate(self.tokens)}
        self.edits: list[tuple[int, int, str]] = []

    def text(self, about: Sequence[str], batch: int) -> str:
        """The file after all edits. `batch`: images per update, where no block says another number."""
        self.visit(self.root, batch)
        lines = textwrap.wrap(" ".join(about), 118, break_on_hyphens=False)
        head = [
            "proto-file: protos/stagerun.proto",
            f"proto-message: {self.root.kind.name}",
            *[""] * bool(lines),
            *lines,
        ]
        text, at = "", _head_end(self.source)
        for start, end, new in sorted(self.edits):
            text += self.source[at:start] + new
            at = max(at, end)  # a comment inside of a list goes with the list
        text = re.sub(r"\n[ \t]+(?=\n)", "", text + self.source[at:])
        return "".join(f"# {line}".rstrip() + "\n" for line in head) + text

    def visit(self, block: Block, batch: int) -> None:
        if block.kind.name == "StageEntry":
            batch = self.batches[str(block.entries["name"].values[0].value)]
        elif "batch_size" in block.entries:
            batch = int(str(block.entries["batch_size"].values[0].value))
        for entry in block.entries.values():
            if new := list(self.changed(block, entry, batch)):
                self.replace(entry, new)
            branch = entry.field.name == "from" and "@" in str(entry.values[0].value)
            # Comments say where images come from, or how long something takes.
            if branch or entry.field.name in ("data", "snapshot_epoch"):
                self.without_comment(self.place[entry.name.line, entry.name.column])
            for inner in block.blocks(entry.field.name):
                whole = "pad" in inner.entries or ("crop_size" not in inner.entries and inner.entries)
                if self.images.mixed and entry.field.name == "transform_param" and whole:
                    self.make_one_size(block, entry, inner)
                self.visit(inner, batch)

    def make_one_size(self, block: Block, entry: Entry, transform: Block) -> None:
        """Images of many sizes, of which the transform takes the whole: the shorter side is resized to 8/7 of the crop, which is cut out."""
        resized = f"crop_size: {self.images.side}  random_resize_param {{ min_size: {self.images.side * 8 // 7} }}"
        if "crop_size" not in transform.entries:
            self.insert(next(iter(transform.entries.values())), resized)
        if "test_transform_param" not in block.entries:
            for one in filter(None, map(transform.entries.get, ("mean_value", "std_value", "scale", "channel_order"))):
                said = list(self.changed(transform, one, 1)) or [f"{one.field.name}: {v.text}" for v in one.values]
                resized = "  ".join([resized, *filter(None, said)])
            self.insert(entry, f"test_transform_param {{ {resized} }}")

    def insert(self, entry: Entry, text: str) -> None:
        """Above the line of the field."""
        at = self.ends[self.place[entry.name.line, entry.name.column]] - len(entry.field.name)
        self.edits.append((at, at, f"{text}\n{' ' * (entry.name.column - 1)}"))

    def changed(self, block: Block, entry: Entry, batch: int) -> Iterator[str]:
        """What is to stand in place of a field: a text for each time it is written, '' to take it out; nothing to leave it."""
        images, field = self.images, entry.field.name
        match block.kind.name, field:
            case "Schedule", "name":
                yield f"name: {quoted(self.name)}"
            case "Model", "num_classes":
                grey = len(images.mean) == 1 and "channels" not in block.entries
                yield f"num_classes: {images.classes}" + "  channels: 1" * grey
            case "Model", "channels":
                yield f"channels: {len(images.mean)}"
            case "Source", "source" | "images":
                data = self.root.block("data")
                path, number = images.train if data is not None and data.block("train") is block else images.val
                count = "" if "images" in block.entries else f" images: {number}"
                yield f"images: {number}" if field == "images" else f"source: {quoted(path)}{count}"
            case "TransformParameter", "crop_size" if "pad" in block.entries:  # the whole image, moved by the padding
                yield f"crop_size: {images.side}" + "  random_resized_crop_param { }" * images.mixed
            case "TransformParameter", "pad" | "pad_mode" if images.mixed:
                yield ""
            case "TransformParameter", "mean_value" | "std_value" | "scale" if "mean_value" in block.entries:
                word, values = ("mean_value", images.mean) if field == "mean_value" else ("std_value", images.deviation)
                order = block.entries.get("channel_order")
                values = values[::-1] if order is not None and order.values[0].value == "RGB" else values
                text = ", ".join(f"{value:.4g}" for value in values)
                text = f"[{text}]" if len(values) > 1 else text
                yield "" if field == "scale" and "std_value" in block.entries else f"{word}: {text}"
                yield from [""] * (len(entry.values) - 1)
            case "Solver", "clear" if images.mixed and "transform_param.crop_size" in {
                value.value for value in entry.values
            }:
                gone = {f"transform_param.{name}" for name in ("crop_size", "pad", "pad_mode")}
                kept = [
                    "transform_param.random_resized_crop_param",
                    *(str(v.value) for v in entry.values if v.value not in gone),
                ]
                cleared = ", ".join(quoted(path) for path in kept)
                yield f"clear: [{cleared}]  transform_param {{ random_resize_param {{ min_size: {images.side * 8 // 7} }} }}"
                yield from [""] * (len(entry.values) - 1)
            case "Solver", "class_weight":
                yield images.class_weight
                yield from [""] * (len(entry.values) - 1)
            case ("Solver", _) | ("Knot", "iter") if field in (*_EPOCHS, "iter"):
                for value in entry.values:
                    epochs = units.epochs(int(str(value.value)), self.schedule.data.train.images, batch)
                    yield f"{_EPOCHS.get(field, 'epoch')}: {epochs:.3g}"

    def replace(self, entry: Entry, new: Sequence[str]) -> None:
        """The new texts in the places of the field's values, of which a list in brackets is one; no comment stays behind."""
        places: dict[int, tuple[int, list[str]]] = {}
        for value, text in zip(entry.values, new, strict=True):
            last = first = self.place[value.span.line, value.span.column]
            while self.tokens[first].kind is not Kind.WORD or self.tokens[first - 1].text == ":":  # an enum's value
                first -= 1
            while self.tokens[last + 1].text == "]" or self.tokens[last + 1].kind is Kind.STRING:
                last += 1
            texts = places[first][1] if first in places else []
            places[first] = last, [*texts, *[text] * bool(text)]
        for first, (last, texts) in places.items():
            start = self.ends[first] - len(self.tokens[first].text)
            self.edits.append((start, self.ends[last], "  ".join(texts)))
            self.without_comment(last)

    def without_comment(self, at: int) -> None:
        """Takes away the comment behind the line of a token, but for one that lint reads."""
        while self.tokens[at + 1].line == self.tokens[at].line and self.tokens[at + 1].kind is not Kind.END:
            at += 1
        end = self.ends[at] + len(self.source[self.ends[at] :].partition("\n")[0])
        if "lint:" not in self.source[self.ends[at] : end]:
            self.edits.append((self.ends[at], end, ""))
