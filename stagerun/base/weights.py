"""Kinds of `weights { file: ... }`, how published ones see images, and patterns over the names of tensors. Pure."""

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from stagerun.base.recipe import Rename

# The end of the name of BatchNorm's counter of passes, which older files lack.
COUNTER = "num_batches_tracked"
# The blobs of a BatchNorm: sums of means and of variances, and their divisor. Intel's merged layer has Scale's, too.
MEAN, VARIANCE, FACTOR = "running_mean", "running_var", "factor"
NORM = (MEAN, VARIANCE, FACTOR)
MERGED = (*NORM, "weight", "bias")
# The counter of statistics if a file lacks it, or has 0 as converted files do, as from long training: they move by 1 - fraction.
LONG = 1_000_000
_HDF5 = b"\x89HDF\r\n\x1a\n"
_SNAPSHOT = re.compile(r"(.+):([A-Za-z0-9_-]+)(?:@([1-9][0-9]{0,17}))?", re.ASCII)
_PUBLISHED = re.compile(r"(torchvision|timm)/([A-Za-z0-9_.-]+)", re.ASCII)


class Kind(enum.Enum):
    FILE = "file"
    SNAPSHOT = "snapshot"
    TORCHVISION = "torchvision"
    TIMM = "timm"


@dataclass(frozen=True, slots=True)
class Place:
    """The origin of weights. `path`: a file's, or a snapshot's output folder, as written; '' for published weights. `name`: the stage's, or of
    published weights. `iter`: the snapshot's, None for the stage's end."""

    kind: Kind
    path: str = ""
    name: str = ""
    iter: int | None = None

    @property
    def published(self) -> bool:
        return self.kind in (Kind.TORCHVISION, Kind.TIMM)


def place_of(file: str) -> Place:
    """Parse `file` of `weights`.

    >>> place_of("../out/base:trunk@500")
    Place(kind=<Kind.SNAPSHOT: 'snapshot'>, path='../out/base', name='trunk', iter=500)
    >>> place_of("torchvision/resnet50"), place_of("./timm/x").kind
    (Place(kind=<Kind.TORCHVISION: 'torchvision'>, path='', name='resnet50', iter=None), <Kind.FILE: 'file'>)
    """
    if match := _PUBLISHED.fullmatch(file):
        return Place(Kind(match[1]), name=match[2])
    if match := _SNAPSHOT.fullmatch(file):
        return Place(Kind.SNAPSHOT, match[1], match[2], int(match[3]) if match[3] else None)
    return Place(Kind.FILE, file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """How published weights see images: R, G, B of 0 to 255, less `mean`, divided by `std`; a square of `crop` pixels from the centre of an image
    whose shorter side is `resize`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int
    resize: int

    @property
    def numbers(self) -> str:
        """The text for both transforms."""
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"channel_order: RGB  mean_value: [{mean}]  std_value: [{std}]"

    @property
    def test_size(self) -> str:
        """The text for `test_transform_param`. Publishers resize by antialiasing, bilinear or, if they say so, bicubic."""
        size = f"min_size: {self.resize}  resize_param {{ interp_mode: ANTIALIAS }}"
        return f"random_resize_param {{ {size} }}  crop_size: {self.crop}"


def is_caffes(start: bytes, name: str) -> bool:
    """Return whether a file of weights is a .caffemodel, by its name and its first nine bytes."""
    other = is_safetensors(start) or start[:2] == b"PK" or start[:1] == b"\x80"
    return not other and (name.endswith(".caffemodel") or is_hdf5(start))


def is_safetensors(start: bytes) -> bool:
    """Return whether a file is safetensors, by its first nine bytes: the length of a header, below 4 GB, and the header's brace."""
    return start[8:9] == b"{" and start[4:8] == bytes(4)


def is_hdf5(data: bytes | memoryview) -> bool:
    return bytes(data[:8]) == _HDF5


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a tensor's name fits one of the patterns, as in `param`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def renamed(name: str, rules: Iterable[Rename]) -> tuple[str, Rename | None]:
    """Return a tensor's name after the first rule that fits, and that rule.

    >>> renamed("module.fc.weight", [Rename(from_="module.*", to="*")])[0]
    'fc.weight'
    """
    for rule in rules:
        parts = rule.from_.split("*")
        match = re.fullmatch("(.*)".join(map(re.escape, parts)), name)
        if match:
            first, *others = rule.to.split("*")
            stars = zip(match.groups(), others, strict=True)
            return first + "".join(star + text for star, text in stars), rule
    return name, None
