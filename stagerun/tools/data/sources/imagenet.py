"""Archives of images read in place: ImageNet's own (a tar of a tar per class; a flat one of val), and a tar of class folders.

The headers are gone through once; an image is then one pread. A validation set, tar or folder, takes its labels from a
ground truth file (`truth`). Items are sorted by class, folder and name, as in `folder`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagerun.errors import DataError, UsageError
from stagerun.tools.data.sources.files import Archive
from stagerun.tools.data.sources.folder import Files, check_classes, classes_and_labels, flat_images, is_image
from stagerun.tools.data.sources.items import Item, Names, SourceOptions, signature
from stagerun.tools.data.sources.tar import Member, members, only_files
from stagerun.tools.data.sources.truth import read_synsets, read_truth

_NO_TRUTH = (
    "give --ground-truth: lines of `name synset` or `name label` (Caffe's val.txt), a synset per line, "
    "or Kaggle's LOC_val_solution.csv"
)


@dataclass(frozen=True, slots=True, eq=False)
class Archived:
    """Images that are pieces of one archive."""

    ignored = ()

    kind: str
    classes: tuple[str, ...]
    archive: Archive
    names: Names
    labels: NDArray[np.int32]
    places: NDArray[np.int64]  # [n, 2]: offset, bytes

    @property
    def signature(self) -> str:
        return signature(self.kind, self.archive.state, self.names, self.labels, self.places, *self.classes)

    def __len__(self) -> int:
        return len(self.names)

    def item(self, i: int) -> Item:
        return Item(self.names[i], int(self.labels[i]))

    def read(self, i: int) -> bytes:
        at, size = self.places[i]
        return self.archive.read(int(at), int(size), self.names[i])


def open_tar(path: str, options: SourceOptions) -> Archived:
    """DataError if it is damaged, holds no images, or they come without labels."""
    archive = Archive(path)
    found = list(_contents(archive, 0, archive.size, path))
    inner = [member for member in found if member.name.endswith(".tar")]
    images = [member for member in found if is_image(member.name.rpartition("/")[2])]
    if inner and images:
        raise DataError(f"{path}: holds both tars and images", "give a tar of a tar per class, or one of class folders")
    if inner and options.ground_truth is not None:
        raise UsageError(f"{path}: its images are by class already", "--ground-truth is for a validation set")
    if inner:
        return _by_class("imagenet", archive, _tar_per_class(archive, inner), options)
    if not images:
        raise DataError(f"{path}: no images in it", "give a tar of class folders, or one of ImageNet's own")
    images = _below_the_top(images, options)
    if options.ground_truth is None and any("/" in member.name for member in images):
        return _by_class("folder", archive, _folder_per_class(images, path), options)
    images.sort(key=lambda member: member.name)
    names = [member.name for member in images]
    labels, classes = _truth(path, names, options)
    return Archived("imagenet", classes, archive, Names(names), labels, _places(images))


def open_val_folder(path: str, options: SourceOptions) -> Files:
    """A folder of images and nothing else, labelled by the ground truth."""
    names = flat_images(path)
    if not names:
        raise DataError(f"{path}: no images in it", "give the folder of ILSVRC2012_val_00000001.JPEG and the others")
    labels, classes = _truth(path, names, options)
    return Files("imagenet", path, classes, Names(names), labels)


def _contents(archive: Archive, start: int, end: int, place: str) -> Iterable[Member]:
    return only_files(members(archive.read, start, end, place), place)


def _truth(path: str, names: list[str], options: SourceOptions) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    if options.ground_truth is None:
        raise DataError(f"{path}: {len(names)} images without classes", _NO_TRUTH)
    synsets = read_synsets(options.synsets) if options.synsets else None
    labels, classes = read_truth(options.ground_truth, names, synsets)
    return np.array(labels, np.int32), classes


def _by_class(kind: str, archive: Archive, found: dict[str, list[Member]], options: SourceOptions) -> Archived:
    names = sorted(found)
    check_classes(archive.path, names)
    classes, labels = classes_and_labels(archive.path, names, options.synsets)
    ordered = [sorted(found[name], key=lambda member: member.name.rpartition("/")[::2]) for name in names]
    return Archived(
        kind,
        classes,
        archive,
        Names(member.name for images in ordered for member in images),
        np.repeat(np.array(labels, np.int32), [len(images) for images in ordered]),
        _places(member for images in ordered for member in images),
    )


def _tar_per_class(archive: Archive, inner: list[Member]) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for tar in inner:
        name = tar.name.rpartition("/")[2].removesuffix(".tar")
        place = f"{archive.path}: {tar.name}"
        images = []
        for member in _contents(archive, tar.at, tar.at + tar.size, place):
            if is_image(member.name.rpartition("/")[2]):
                below = f"{name}/{member.name.removeprefix(name + '/')}"
                images.append(Member(below, member.at, member.size, True))
        if not images:
            raise DataError(f"{place}: no images in it", "is it damaged?")
        if name in found:
            raise DataError(f"{archive.path}: two tars of the class {name}", "is it damaged?")
        found[name] = images
    return found


def _below_the_top(images: list[Member], options: SourceOptions) -> list[Member]:
    """Without the one folder that all of them are in (`train/`), if there is one and it isn't the only class."""
    first = images[0].name.partition("/")[0] + "/"
    if not all(member.name.startswith(first) for member in images):
        return images
    shorter = [Member(m.name.removeprefix(first), m.at, m.size, True) for m in images]
    return shorter if options.ground_truth or any("/" in member.name for member in shorter) else images


def _folder_per_class(images: list[Member], path: str) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for member in images:
        name, below, _ = member.name.partition("/")
        if not below:
            raise DataError(f"{path}: `{name}` is in no class folder, others are", "give a tar of class folders alone")
        found.setdefault(name, []).append(member)
    return found


def _places(found: Iterable[Member]) -> NDArray[np.int64]:
    return np.array([(member.at, member.size) for member in found], np.int64)
