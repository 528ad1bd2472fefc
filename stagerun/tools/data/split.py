"""`--split-val`: which images of a set validate. The digest of an image's bytes decides, not its name or its place: the same images always
fall alike, more of them move no others, and copies fall on one side. And folders that hold the parts already."""

import hashlib
import os
import re

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, UsageError
from stagerun.base.text import count, listed
from stagerun.data.importing.engine import in_order
from stagerun.data.importing.images import Pixels, Source, signature
from stagerun.system.image_folder import HELD_OUT, TRAINING, is_class_folder, is_folder
from stagerun.tools.data.files import Images
from stagerun.tools.data.records import Shown, threads_here

_SPAN = 2**64


def share_of(text: str) -> float:
    """Return the share that `10%` or `0.1` means. UsageError unless it is between 0 and 1."""
    match = re.fullmatch(r"(\d*\.?\d+)(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0
    if not 0 < share < 1:
        raise UsageError(f"--split-val {text}: not a part of the images", "write `10%`, say")
    return share


def split(source: Source, share: float, threads: int | None) -> tuple[tuple[Images, Images], list[str]]:
    """Return the images to train and to validate on, and what to tell the user. StorageError."""

    def look(i: int) -> tuple[int, int]:
        try:
            item, data = source.item(i), source.read(i)
        except DataError:  # the import reports it
            return -1, i
        if item.several is not None:
            raise UsageError("--split-val: images have several labels each", "divide the table in two")
        data = data.array.tobytes() if isinstance(data, Pixels) else data
        return item.label, int.from_bytes(hashlib.sha256(data).digest()[:8], "big")

    with Shown("dividing") as shown:
        looks = list[tuple[int, int]]()
        for one in in_order(look, 0, len(source), threads_here(threads)):
            looks.append(one)
            shown.progress(len(looks), len(source))
    labels, digests = (
        np.array(values, kind) for values, kind in zip(zip(*looks, strict=True), ("i8", "u8"), strict=True)
    )
    val, tiny = {digest for _, digest in looks if digest < share * _SPAN}, list[str]()
    for label in np.unique(labels[labels >= 0]).tolist():
        first, *others = np.unique(digests[labels == label]).tolist()
        if not others:
            val.discard(first)
            tiny.append(source.classes[label] if source.classes else f"class {label}")
        elif val.isdisjoint((first, *others)):
            val.add(first)
        elif val.issuperset((first, *others)):
            val.discard(others[-1])
    chosen = np.isin(digests, np.array(sorted(val), "u8"))
    numbers = int(chosen.sum()), len(looks)
    lines = [
        f"split: {count(numbers[1] - numbers[0], 'image')} to train, {numbers[0]} to validate, by each one's digest"
    ]
    if copies := len(looks) - len({digest for _, digest in looks}):
        lines.append(f"copies of other images: {copies}, each on the side of its original")
    if tiny:
        lines.append(f"classes of one image, which trains: {listed(tiny, 5)}")
    return (_part(source, np.flatnonzero(~chosen)), _part(source, np.flatnonzero(chosen))), lines


def _part(source: Source, numbers: NDArray[np.int64]) -> Images:
    return Images(
        kind=source.kind,
        length=len(numbers),
        signature=signature("part", source.signature, numbers),
        item=lambda i: source.item(int(numbers[i])),
        read=lambda i: source.read(int(numbers[i])),
        classes=source.classes,
        ignored=source.ignored,
    )


def sets_in(folder: str) -> tuple[str, str] | None:
    """Return the folders of training and validation images in a folder, or in its only folder."""
    if not is_class_folder(folder):
        return None
    words = {
        entry.name.lower(): entry.path for entry in os.scandir(folder) if entry.name[0] != "." and is_folder(entry)
    }
    train, val = (next((words[word] for word in names if word in words), "") for names in (TRAINING, HELD_OUT))
    if train and val:
        return train, val
    return sets_in(*words.values()) if len(words) == 1 else None
