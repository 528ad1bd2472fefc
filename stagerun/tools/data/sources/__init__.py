"""Sets of labelled images in the formats that people have them in, for `stagerun data import`: one way to ask them all.

    folder      a folder per class, as torchvision's ImageFolder; or a tar of such folders
    list        a text of `path label` lines, as Caffe's convert_imageset
    imagenet    ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar or a folder of val with the ground truth; never unpacked
    cifar       CIFAR-10 and CIFAR-100 in the binary version: the folder, or its .tar.gz
    idx         MNIST, Fashion-MNIST, EMNIST and the like, gzipped or not
    tfrecord    shards of tf.train.Example with ImageNet's keys
    recordio    MXNet's .rec

`open_source` knows which by the content. Archives are read in place, by offset. Nothing here decodes an image, runs
anything, or follows a name out of an archive.
"""

import os
from collections.abc import Callable

from stagerun.base.errors import DataError, UsageError, listing, nearest
from stagerun.tools.data.sources import cifar, folder, idx, recordio, tar, tfrecord
from stagerun.tools.data.sources.items import (
    FORMATS,
    SPLITS,
    Item,
    Pixels,
    Source,
    SourceOptions,
    can_not_open,
    regular,
)

__all__ = ["FORMATS", "SPLITS", "Item", "Pixels", "Source", "SourceOptions", "open_source"]

_TAR_MAGIC = 257
_TEXT = (".txt", ".lst", ".csv", ".list")
_IMAGENET_TARS = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar", "test": ""}


def open_source(path: str, options: SourceOptions) -> Source:
    """The set of images at a path.

    Goes through it once (archives: header by header). UsageError for options that make no sense, or a path that could be
    several things; DataError if it is none that is known, is damaged, or has no labels; RecipeError with places for
    mistakes in lists.
    """
    if options.format is not None and options.format not in FORMATS:
        raise UsageError(
            f"`{options.format}` is not a format", nearest(options.format, FORMATS) or f"formats: {listing(FORMATS)}"
        )
    if options.part not in SPLITS:
        raise UsageError(f"`{options.split}` is not a split", f"give {listing(SPLITS)}")
    kind = options.format or detect(path, options)
    _check_options(kind, options)
    return _OPEN[kind](path, options)


def detect(path: str, options: SourceOptions) -> str:
    """One of FORMATS. DataError, with what was looked for, if it can't be known."""
    if not os.path.exists(path):
        if any(c in path for c in "*?["):
            return "tfrecord"
        raise DataError(f"{path}: no such file or folder", "check the name")
    return _of_folder(path, options) if os.path.isdir(path) else _of_file(path)


def _of_folder(path: str, options: SourceOptions) -> str:
    try:
        names = sorted(os.listdir(path))
        if cifar.is_cifar(names, path):
            return "cifar"
        if idx.is_idx(names):
            return "idx"
        if any(tfrecord.is_shard(name) for name in names):
            return "tfrecord"
        if "data.mdb" in names:
            raise UsageError(f"{path}: this is an LMDB already", "`stagerun data index` makes what goes with it")
        if not set(names).isdisjoint(_IMAGENET_TARS.values()) or options.ground_truth is not None:
            return "imagenet"
        if folder.has_folders(path):
            return "folder"
    except OSError as error:
        can_not_open(path, error)
    if any(folder.is_image(name) for name in names):
        raise DataError(
            f"{path}: images without class folders",
            "give a list with their labels, or --ground-truth if they are a validation set",
        )
    raise DataError(f"{path}: nothing in it that is known: {_KNOWN_FOLDERS}", _HINT)


def _of_file(path: str) -> str:
    try:
        with open(path, "rb", opener=regular) as stream:
            start = stream.read(4096)
    except OSError as error:
        can_not_open(path, error)
    if start[_TAR_MAGIC : _TAR_MAGIC + 5] == b"ustar":
        return "imagenet"
    if start[:4] == recordio.MAGIC:
        return "recordio"
    if tfrecord.is_tfrecord(start):
        return "tfrecord"
    if start[:3] == b"\0\0\x08":
        return "idx"
    if start[:2] == b"\x1f\x8b":
        names = cifar.archive_names(path)
        if cifar.is_cifar(names):
            return "cifar"
        if names:
            raise DataError(
                f"{path}: a gzipped tar can't be read in place", "unpack it: gunzip, the tar itself may stay"
            )
        return "idx"
    if start and b"\0" not in start:
        if start[:1] in b"[{<%" or path.endswith((".json", ".xml", ".py")):
            raise DataError(f"{path}: a text, but not a list of images", "a line of a list is `path label`")
        return "list"
    raise DataError(f"{path}: {'empty' if not start else 'of no format that is known'}: {_KNOWN_FILES}", _HINT)


_KNOWN_FOLDERS = "class folders of images, ImageNet's tars, CIFAR's binary files, IDX files or TFRecord shards"
_KNOWN_FILES = "a list of `path label`, a tar, CIFAR's .tar.gz, an IDX file, a TFRecord or a .rec were looked for"
_HINT = "if it is one of them, name it with --format"


def _check_options(kind: str, options: SourceOptions) -> None:
    """UsageError for an option that would do nothing."""
    for name, kinds in _OF_KINDS.items():
        if getattr(options, name) is not None and kind not in kinds:
            words = name.replace("_", "-")
            raise UsageError(f"--{words} means nothing for the format `{kind}`", f"it is for {listing(kinds)}")


_OF_KINDS = {
    "root": ("list",),
    "ground_truth": ("imagenet",),
    "synsets": ("imagenet", "folder"),
    "labels": ("idx",),
    "split": ("cifar", "idx", "imagenet", "tfrecord"),
}


def _open_folder(path: str, options: SourceOptions) -> Source:
    return folder.open_folder(path, options.synsets) if os.path.isdir(path) else tar.open_tar(path, options)


def _open_imagenet(path: str, options: SourceOptions) -> Source:
    if not os.path.isdir(path):
        options.refuse_split(f"{path} is one archive")
        return tar.open_tar(path, options)
    names = os.listdir(path)
    if set(names).isdisjoint(_IMAGENET_TARS.values()):
        options.refuse_split(f"{path} holds none of ImageNet's archives")
        return tar.open_val_folder(path, options)
    name = _IMAGENET_TARS[options.part]
    if name not in names:
        raise DataError(f"{path}: no {name or 'archive with labels'} for the split `{options.part}`", "give another")
    return tar.open_tar(os.path.join(path, name), options)


_OPEN: dict[str, Callable[[str, SourceOptions], Source]] = {
    "folder": _open_folder,
    "list": lambda path, options: folder.open_list(path, options.root),
    "imagenet": _open_imagenet,
    "cifar": cifar.open_cifar,
    "idx": idx.open_idx,
    "tfrecord": tfrecord.open_tfrecords,
    "recordio": lambda path, options: recordio.open_recordio(path),
}
