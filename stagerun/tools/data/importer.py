"""`stagerun data import`, and the table of formats: a new one is a reader and a row."""

import gzip
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, ExitCode, UsageError, listing
from stagerun.base.text import count, listed
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.data.importing.engine import Job, Work, run
from stagerun.data.importing.images import Files, Item, Pixels, Source, read_whole, regular, signature
from stagerun.data.importing.partial import ignored_text
from stagerun.launch import StopRequest
from stagerun.system.image_folder import can_not_open, is_class_folder
from stagerun.system.image_sets import REPORT, class_names
from stagerun.system.lmdb_file import data_file
from stagerun.tools.data import binary, files
from stagerun.tools.data.files import DAMAGED, Images, SourceOptions, Text
from stagerun.tools.data.images import ImportOptions, ImportWork
from stagerun.tools.data.prepare import PreparedRecords
from stagerun.tools.data.records import DataThreads, Shown, schedule_line, threads_here
from stagerun.tools.data.split import sets_in, share_of, split

# -- IDX (MNIST and its family) and CIFAR's binary version: pixels, held in memory

LARGEST = 1 << 30  # bytes, unpacked; a small gzip may be anything up to about a thousand times its size


def unzipped(path: str, most: int) -> bytes:
    """Return at most `most` bytes of a file's content, which may be gzipped."""
    try:
        with open(path, "rb", opener=regular) as file:
            return (gzip.open(file) if file.peek(2)[:2] == b"\x1f\x8b" else file).read(most)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: can't be unpacked: {error}", DAMAGED) from None
    except OSError as error:
        can_not_open(path, error)


def read_idx(path: str) -> NDArray[np.uint8]:
    """Return the array of an IDX file of unsigned bytes: pictures have 3 dimensions, labels 1."""
    data = unzipped(path, LARGEST)
    header = 4 + 4 * data[3] if data[:3] == b"\0\0\x08" and len(data) > 3 else 0
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
    if header not in (8, 16) or len(data) != header + math.prod(shape) or 0 in shape:
        message = f"{path}: not an IDX file of pictures or labels, unsigned bytes; or cut off, or larger than 1 GiB"
        raise DataError(message, "give the published file")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def is_idx(names: Iterable[str]) -> bool:
    return any("idx3-ubyte" in name for name in names)


def open_idx(path: str, options: SourceOptions) -> Images:
    """`path` is the file of images, next to the file of labels, or a folder of such a pair."""
    if os.path.isdir(path):
        train = options.split in (None, "train")
        names = [name for name in sorted(os.listdir(path)) if is_idx([name]) and ("train-" in name) == train]
        if len({name.removesuffix(".gz") for name in names}) != 1:
            message = f"{path}: {len(names)} files of the split `{options.split or 'train'}`, not one: {names}"
            raise DataError(message, "give the file of images itself, or another --split")
        path = os.path.join(path, names[0])
    folder, name = os.path.split(path.removesuffix(".gz"))
    of_labels = os.path.join(folder, name.replace("images", "labels").replace("idx3", "idx1"))
    of_labels = of_labels if os.path.isfile(of_labels) else f"{of_labels}.gz"
    pictures, labels = read_idx(path), read_idx(of_labels)
    if pictures.ndim != 3 or labels.shape != pictures.shape[:1]:
        message = f"{path} holds {pictures.shape}, {of_labels} holds {labels.shape}: not images and their labels"
        raise DataError(message, "give the file of images")
    return Images(
        kind="idx",
        length=len(labels),
        signature=signature("idx", name, *pictures.shape, pictures, labels),
        item=lambda i: Item(f"{name}/{i:05d}", int(labels[i])),
        read=lambda i: Pixels(pictures[i, :, :, None]),
    )


# A row of CIFAR is one byte of label (CIFAR-100: coarse, then fine, which is the label), and 32 x 32 bytes each of red, green, blue
# (https://www.cs.toronto.edu/~kriz/cifar.html).

_PIXELS = 3 * 32 * 32
# Training files, test file, names of the classes.
_TEN = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",), "batches.meta.txt"
_HUNDRED = ("train.bin",), ("test.bin",), "fine_label_names.txt"


def is_cifar(names: Iterable[str]) -> bool:
    return not {*_TEN[0], *_TEN[1], *_HUNDRED[0], *_HUNDRED[1]}.isdisjoint(names)


def open_cifar(path: str, options: SourceOptions) -> Images:
    """`path` is the folder of the binary version."""
    version, before, number = (_TEN, 1, 10) if "test_batch.bin" in os.listdir(path) else (_HUNDRED, 2, 100)
    files, width = version[0 if options.split in (None, "train") else 1], before + _PIXELS
    parts = [np.frombuffer(read_whole(os.path.join(path, file)), np.uint8) for file in files]
    if any(len(part) % width or not len(part) for part in parts):
        raise DataError(f"{path}: {', '.join(files)}: the bytes are not a whole number of pictures", DAMAGED)
    counts, classes = [len(part) // width for part in parts], tuple[str, ...]()
    names = [f"{f.removesuffix('.bin')}/{i:05d}" for f, n in zip(files, counts, strict=True) for i in range(n)]
    rows = np.concatenate(parts).reshape(-1, width)
    if os.path.isfile(of_classes := os.path.join(path, version[2])):
        classes = tuple(line for _, line in Text(of_classes))
    labels = rows[:, before - 1]
    if labels.max() >= number:
        message = f"{path}: the labels go to {labels.max()}, above {number - 1}"
        raise DataError(message, DAMAGED)
    pictures = rows[:, before:].reshape(-1, 3, 32, 32)[:, ::-1].transpose(0, 2, 3, 1)  # B, G, R
    return Images(
        kind="cifar",
        length=len(names),
        signature=signature("cifar", *files, *np.cumsum(counts).tolist(), rows),
        item=lambda i: Item(names[i], int(labels[i])),
        read=lambda i: Pixels(np.ascontiguousarray(pictures[i])),
        classes=classes,
    )


# -- formats


class Format(NamedTuple):
    """`reads`: the fields of SourceOptions that mean something."""

    open: Callable[[str, SourceOptions], Source]
    about: str  # for --help
    reads: tuple[str, ...] = ()


FORMATS = {
    "folder": Format(files.open_folder, "a folder per class, as torchvision's ImageFolder", ("synsets",)),
    "list": Format(files.open_list, "a text of `path label` lines, as Caffe's convert_imageset", ("root",)),
    "csv": Format(files.open_csv, 'a .csv of paths and several labels each, for `labels: "float_data"`', ("root",)),
    "tar": Format(files.open_tar, "a tar of class folders, or ILSVRC2012_img_train.tar, never unpacked", ("synsets",)),
    "idx": Format(open_idx, "MNIST, Fashion-MNIST, EMNIST and the like, gzipped or not", ("split",)),
    "tfrecord": Format(binary.open_tfrecords, "a shard or a folder of shards with ImageNet's keys", ("split",)),
    "recordio": Format(binary.open_recordio, "a .rec of MXNet's im2rec"),
    "cifar": Format(open_cifar, "the folder of CIFAR-10 or CIFAR-100 in the binary version", ("split",)),
}


def format_of(path: str) -> str:
    """Return the name of the format by the content: particular names and first bytes first, since nearly any folder has folders, and any
    text lines."""
    if os.path.isdir(path):
        names = os.listdir(path)
        if "data.mdb" in names:
            hint = f"`stagerun data verify --index {path}` makes its side file, --prepare a copy that decodes faster"
            raise UsageError(f"{path}: this is an LMDB already", hint)
        matches = {
            "cifar": is_cifar(names),
            "idx": is_idx(names),
            "tfrecord": any(map(binary.is_shard, names)),
            "folder": True,
        }
    else:
        start = unzipped(path, 512)
        matches = {
            "idx": start[:3] == b"\0\0\x08",
            "tfrecord": binary.is_tfrecord(start),
            "recordio": start[:4] == binary.MAGIC,
            "csv": path.lower().endswith(".csv"),
            "tar": start[257:262] == b"ustar",
            "list": bool(start) and b"\0" not in start,
        }
    if name := next((name for name, is_it in matches.items() if is_it), ""):
        return name
    hint = f"formats are {listing(list(FORMATS))}; unpack a zip; name the format with --format"
    raise DataError(f"{path}: empty, or of no format that is imported", hint)


def open_source(path: str, options: SourceOptions, name: str | None = None) -> Source:
    """Return the images at a path, in the format `name` or, without one, by the content."""
    name = name or format_of(path)
    for word in ("root", "synsets", "split"):
        unread = word not in FORMATS[name].reads or (word == "split" and os.path.isfile(path))
        if unread and getattr(options, word) is not None:
            raise UsageError(f"--{word} means nothing for {path}, a {name}", "leave it out")
    return FORMATS[name].open(path, options)


@dataclass(frozen=True, slots=True)
class JobOptions:
    max_bad: int = option("--max-bad N", "Leave out and list up to N images that can't be used.", least=0, default=0)
    threads: DataThreads = None
    restart: bool = flag("--restart", "Discard the result of an interrupted import.")


@command("import")
def import_images(
    source: str = argument("SOURCE"),
    out: str | None = argument("[OUT]", default=None),
    *,
    format: str | None = option(
        "--format",
        f"The format of SOURCE.  [default: by its content]  {'; '.join(f'{name}: {f.about}' for name, f in FORMATS.items())}.",
        type=click.Choice(list(FORMATS)),
    ),
    of_source: SourceOptions,
    options: ImportOptions,
    prepare: bool = flag("--prepare", "Copy an LMDB, and arrange its JPEGs losslessly so that they decode faster."),
    job: JobOptions,
) -> None:
    """Makes an LMDB of Caffe's Datum records from a set of labelled images.

    SOURCE is a folder of class folders, or of another format: --format lists them. OUT is a new folder, which Caffe reads too:
    keys are as convert_imageset makes them, 00000000_RELATIVE/PATH.JPEG, numbered after one shuffle of all images, so that every
    stretch of the LMDB holds a mixture of classes.

    In class folders, at any depth, files named .jpg .jpeg .jpe .jfif .png .ppm .bmp .pgm .tif .tiff .webp .gif are taken, in small
    or capital letters; others are counted and listed, but for hidden ones.

    JPEGs and PNGs of 8 bits keep their bytes unless they are resized: area interpolation shrinks, linear enlarges. Unusual images are
    converted by rule, counted, and listed in OUT/stagerun-import.txt: CMYK becomes JPEG in B, G, R; palettes, 16 bits, alpha channels
    (composited on --background), GIF, BMP, TIFF, WebP and PPM become PNG of 8 bits; a JPEG or PNG that EXIF turns is turned, and encoded
    again. Unusable images are left out: empty, cut off, damaged, not an image, above 100 million pixels. Formats of pixels, as CIFAR's,
    are stored as pixels.

    With --prepare SOURCE is an LMDB. Its JPEGs become baseline JPEGs with a restart marker every 4 blocks, or as near to that as divides a
    row, so that a training's random crop is decoded without the rest; keys, labels and order stay. Every image is decoded before and after
    and compared.

    With --split-val the digest of each file decides: a file falls alike in every set, copies on one side, and each class of two or more keeps
    images on both. The LMDBs are OUT-train_lmdb and OUT-val_lmdb; OUT is SOURCE's name by default.

    After an interruption of any kind the same command resumes, with the same result.
    """
    if out is None and options.split_val is None:
        raise UsageError("OUT: missing", "name the new LMDB")
    out = out or os.path.basename(os.path.abspath(source)).partition(".")[0]
    if prepare:
        if options != ImportOptions() or of_source != SourceOptions() or format is not None:
            message = "--prepare copies the records of an LMDB as they are; most other options are for images"
            raise UsageError(message, "leave them out, or import the images first")
        show(_make(PreparedRecords(source), out, job))
        return
    tell(f"looking through {source}")
    images = open_source(source, of_source, format)
    # OUT.partial is next to OUT, even if OUT is a link.
    if images.kind == "folder" and Path(out).parent.resolve().is_relative_to(Path(source).resolve()):
        message = f"{out}: is in {source}, whose folders are the classes, and would be taken for one"
        raise UsageError(message, f"give a folder outside of {source}")
    work = ImportWork(images, source, options)
    tell(f"{count(len(work), 'image')} for {out}")
    if work.ignored:
        tell(ignored_text(work.ignored))
    if options.split_val is not None:
        show("\n".join(text for _, text in _make_parts(images, source, out, options, job)))
        return
    show(_make(work, out, job) + (' labels: "float_data"' if images.kind == "csv" else ""))


def _make_parts(source: Source, path: str, out: str, options: ImportOptions, job: JobOptions) -> list[tuple[str, str]]:
    """Make an LMDB of each part of the images. Return its path, and what `import` prints."""
    parts, lines = split(source, share_of(options.split_val or ""), job.threads)
    tell("\n".join(lines))
    made = list(zip((f"{out}-train_lmdb", f"{out}-val_lmdb"), parts, strict=True))
    if empty := [lmdb for lmdb, part in made if not len(part)]:
        raise DataError(f"{path}: no image is left for {empty[0]}", "give another --split-val, or more images")
    return [(lmdb, _make(ImportWork(part, path, options), lmdb, job)) for lmdb, part in made]


def as_lmdbs(train: str, val: str | None, split_val: str | None, out: str, job: JobOptions) -> tuple[str, str]:
    """Return LMDBs of the images to train and to validate on: class folders are imported into OUT-train_lmdb and OUT-val_lmdb. `train` may hold
    both sets, or be divided. After a stop signal the process ends with 75."""
    if val is None and (sets := sets_in(train)) is not None:
        train, val = sets
        tell(f"training images: {train}; validation images: {val}")
    if (val is None) is (split_val is None):
        text = "--val: missing" if val is None else "--split-val, and there are images to validate on"
        raise UsageError(text, "give --val FOLDER, or hold out a part: --split-val 10%")
    if val is None:
        source = open_source(train, SourceOptions())
        made = _make_parts(source, train, out, ImportOptions(split_val=split_val), job)
    else:
        made = []
        for path in (train, val):  # before an import that takes hours
            if not is_class_folder(path):
                data_file(path)
        for path, lmdb in ((train, f"{out}-train_lmdb"), (val, f"{out}-val_lmdb")):
            if is_class_folder(path):
                tell(f"importing {path} into {lmdb}")
                images = files.open_folder(path, SourceOptions())
                if made:
                    images = _in_classes(images, class_names(made[0][0]))
                made.append((lmdb, _make(ImportWork(images, path, ImportOptions()), lmdb, job)))
            else:
                made.append((path, ""))
    tell("\n".join(text.partition("\nin schedule")[0] for _, text in made if text))
    return made[0][0], made[1][0]


def _in_classes(images: Files, classes: tuple[str, ...]) -> Files:
    """Return validation images with the labels of the training images' classes, of which some may be missing. A class that only validates
    leaves them as they are, for `new` to refuse."""
    if not {*images.classes} <= {*classes}:
        return images
    if missing := [name for name in classes if name not in images.classes]:
        tell(f"note: no images to validate: {listed(missing, 5)}")
    labels = np.array([classes.index(name) for name in images.classes], np.int32)
    return replace(images, classes=classes, labels=labels[images.labels])


def _make(work: Work, out: str, options: JobOptions) -> str:
    """Make the LMDB; return what `import` prints: what is in it, and the text for schedule.prototxt."""
    stop = StopRequest("the same command resumes", "this commit")
    stop.install()
    with Shown("import") as shown:
        job = Job(
            threads=threads_here(options.threads),
            max_bad=options.max_bad,
            restart=options.restart,
            progress=shown.progress,
            stop=stop,
            tell=tell,
        )
        result = run(work, out, job)
    if not result.complete:
        tell(f"stopped: {count(result.records, 'record')} are in {out}.partial; the same command resumes")
        sys.exit(ExitCode.SAVED)
    lines = [f"nothing to do: {out} is complete"]
    if not result.already:
        kinds = ", ".join(f"{n} {kind}" for kind, n in result.kinds)
        lines = [f"{out}: {count(result.records, 'record')} ({kinds})"]
        lines += [f"  {n} {what}" for what, n in result.counts]
        if result.bad:
            lines.append(f"left out: {count(result.bad, 'image')}")
        if result.counts or work.ignored:
            lines.append(f"{out}/{REPORT} lists them")
    return "\n".join([*lines, "in schedule.prototxt, under `data`:", f"  {schedule_line(out, result.records)}"])
