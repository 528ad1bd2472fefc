"""Folders and tars of images: a folder per class, at any depth below it, in the order of `system.image_folder`; and ImageNet as it is
published: ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, the folder of both, or a folder of val's images.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from stagerun.base.errors import DataError, UsageError
from stagerun.data.importing.items import Files, Source, folder_files
from stagerun.system.image_folder import can_not_open, is_folder, is_image, listed
from stagerun.tools.data.sources.format import Format, Place, Sign, SourceOptions
from stagerun.tools.data.sources.tar import by_truth, open_tar
from stagerun.tools.data.sources.truth import classes_and_labels

_TARS = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar", "test": ""}
_TAR_MAGIC = slice(257, 262)


def _is_folder_of_it(place: Place) -> bool:
    # The formats before have files of their own, whatever lies beside them. With --ground-truth this one would take any folder.
    if "data.mdb" in place.names:
        raise UsageError(
            f"{place.path}: this is an LMDB already",
            "`stagerun data index` makes what goes with it; --prepare makes a copy that decodes faster",
        )
    return not set(place.names).isdisjoint(_TARS.values()) or place.options.ground_truth is not None


def _is_tar(place: Place) -> bool:
    if place.gzipped:  # and it is neither CIFAR's nor a single file, which come before
        raise DataError(
            f"{place.path}: a gzipped tar can't be read in place", "unpack it: gunzip, the tar itself may stay"
        )
    return place.start[_TAR_MAGIC] == b"ustar"


def open_imagenet(path: str, options: SourceOptions) -> Source:
    if not os.path.isdir(path):
        options.refuse_split(f"{path} is one archive")
        return open_tar(path, options)
    names = os.listdir(path)
    if set(names).isdisjoint(_TARS.values()):
        options.refuse_split(f"{path} holds none of ImageNet's archives")
        return _open_val_folder(path, options)
    name = _TARS[options.part]
    if name not in names:
        raise DataError(f"{path}: no {name or 'archive with labels'} for the split `{options.part}`", "give another")
    return open_tar(os.path.join(path, name), options)


def _open_val_folder(path: str, options: SourceOptions) -> Files:
    """A folder of images and nothing else, labelled by the ground truth."""
    try:
        names = sorted(entry.name for entry in os.scandir(path) if is_image(entry.name) and not is_folder(entry))
    except OSError as error:
        can_not_open(path, error)
    if not names:
        raise DataError(f"{path}: no images in it", "give the folder of ILSVRC2012_val_00000001.JPEG and the others")
    labels, classes = by_truth(path, names, options)
    return Files("imagenet", path, classes, tuple(names), labels)


def _open_classes(path: str, options: SourceOptions) -> Source:
    if not os.path.isdir(path):
        return open_tar(path, options)
    found = listed(path)
    classes, labels = classes_and_labels(path, list(found.classes), options.synsets)
    labels_of = np.repeat(np.array(labels, np.int32), found.counts)
    return replace(folder_files(found), classes=classes, labels=labels_of)


def _has_folders(place: Place) -> bool:
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in Path(place.path).iterdir()):
        return True
    if any(is_image(name) for name in place.names):
        raise DataError(
            f"{place.path}: images without class folders",
            "give a list with their labels, or --ground-truth if they are a validation set",
        )
    return False


IMAGENET = Format(
    name="imagenet",
    about="ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar or a folder of val with the ground truth, never unpacked",
    open=open_imagenet,
    reads=("ground_truth", "synsets", "split"),
    folder=Sign("ImageNet's tars", _is_folder_of_it),
    file=Sign("a tar", _is_tar),
)
CLASSES = Format(
    name="folder",
    about="a folder per class, as torchvision's ImageFolder, or a tar of such folders",
    open=_open_classes,
    reads=("synsets",),
    folder=Sign("class folders of images", _has_folders),
)
