"""A folder per class, with images in it at any depth: classes and images as `system.image_folder` orders them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from stagerun.base.errors import DataError
from stagerun.data.importing.folder import Files, folder_files
from stagerun.data.importing.items import Source
from stagerun.system.image_folder import is_image, listed
from stagerun.tools.data.sources.format import Format, Place, Sign, SourceOptions
from stagerun.tools.data.sources.tar import open_tar
from stagerun.tools.data.sources.truth import classes_and_labels


def open_folder(root: str, synsets: str | None = None) -> Files:
    """Errors as in `listed`. With a synsets file, labels are as there, and the classes are all of its."""
    found = listed(root)
    classes, labels = classes_and_labels(root, list(found.classes), synsets)
    labels_of = np.repeat(np.array(labels, np.int32), found.counts)
    return replace(folder_files(found), classes=classes, labels=labels_of)


def _open(path: str, options: SourceOptions) -> Source:
    return open_folder(path, options.synsets) if os.path.isdir(path) else open_tar(path, options)


def _has_folders(place: Place) -> bool:
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in Path(place.path).iterdir()):
        return True
    if any(is_image(name) for name in place.names):
        raise DataError(
            f"{place.path}: images without class folders",
            "give a list with their labels, or --ground-truth if they are a validation set",
        )
    return False


FORMAT = Format(
    name="folder",
    about="a folder per class, as torchvision's ImageFolder, or a tar of such folders",
    open=_open,
    reads=("synsets",),
    folder=Sign("class folders of images", _has_folders),
)
