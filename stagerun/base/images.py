"""Values of sets of images and of their transforms. See `recipe`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from stagerun.base import proto
from stagerun.base.proto.enums_pb2 import (
    Cache,
    ChannelOrder,
    InterpMode,
    OnBadRecord,
    PadMode,
    ScratchCopy,
    ScratchFrom,
)

if TYPE_CHECKING:
    from typing import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda function: function


PROTO: Any = object()  # stands for the default that stagerun.proto states
T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(kind: type[T]) -> type[T]:
    """Make a frozen dataclass for the values of a message, with the defaults of stagerun.proto."""
    for attribute, value in list(vars(kind).items()):
        if value is PROTO:
            stated = proto.default(proto.path_to(kind, attribute)[-1])
            setattr(kind, attribute, kind.__annotations__[attribute](stated))
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


@message
class Source:
    source: str  # as written; `path` is absolute
    path: str
    images: int
    name: str = ""  # of a validation set, if there are several
    labels: str | None = None  # as written; `labels_path` is absolute
    labels_path: str | None = None
    labels_digest: str | None = None

    def same(self, other: "Source") -> bool:
        """Return whether both are one set of images."""
        return (self.path, self.images) == (other.path, other.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """The LMDB that a Source of class folders becomes on this machine, which may not exist yet. `counts`: images of each class. `files`, `state`:
    digests in hex of the images' names and sizes, and of these and the times of change. `bytes`: of all files."""

    lmdb: str
    in_scratch: bool
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    files: str
    state: str
    bytes: int

    @property
    def images(self) -> int:
        return sum(self.counts)


def each_once(sources: Iterable[Source]) -> tuple[Source, ...]:
    by_path: dict[str, Source] = {}
    for source in sources:
        by_path.setdefault(source.path, source)
    return tuple(by_path.values())


@message
class Data:
    train: Source
    val: tuple[Source, ...] = ()  # the first decides if one number is needed
    scratch: str | None = None
    shuffle: bool = PROTO
    loader_threads: int | None = None
    cache: Cache = PROTO
    on_bad_record: OnBadRecord = PROTO  # retired, as are the next two; canonical forms have them
    scratch_reserve: float = PROTO  # gigabytes
    scratch_copy: ScratchCopy = PROTO
    scratch_from: ScratchFrom = PROTO


@message
class RandomAspectRatio:
    min_area_ratio: float
    max_area_ratio: float
    aspect_ratio_change: float
    max_attempt: int
    interp_mode: InterpMode


@message
class RandomResize:
    min_size: int
    max_size: int
    interp_mode: InterpMode


@message
class RandomResizedCrop:
    min_area_ratio: float = PROTO
    max_area_ratio: float = PROTO
    min_aspect_ratio: float = PROTO
    max_aspect_ratio: float = PROTO
    max_attempt: int = PROTO
    interp_mode: InterpMode = PROTO


@message
class RandAugment:
    num_ops: int = PROTO
    magnitude: int = PROTO
    # Retired, as are all but two fields of RandomResizedCrop; canonical forms have them.
    num_magnitude_bins: int = PROTO


@message
class CropSizeRamp:
    start_size: int
    start_epoch: float = PROTO
    end_epoch: float
    multiple: int = PROTO


@message
class Transform:
    scale: float = PROTO
    mirror: bool = PROTO
    crop_size: int | None = None
    mean_value: tuple[float, ...] = ()
    pad: int = PROTO
    random_aspect_ratio: RandomAspectRatio | None = None
    random_resize: RandomResize | None = None
    pad_mode: PadMode = PROTO
    random_resized_crop: RandomResizedCrop | None = None
    channel_order: ChannelOrder = PROTO
    std_value: tuple[float, ...] = ()
    cutout_size: int = PROTO
    lighting_std: float = PROTO  # retired; canonical forms have it
    color_jitter: bool | None = None  # retired
    rand_augment: RandAugment | None = None
    trivial_augment: bool = PROTO
    rectangular: bool = PROTO
    crop_size_ramp: CropSizeRamp | None = None
    python: str | None = None
    mean_file: str | None = None
    mean_path: str = ""  # the absolute path

    @property
    def changes_colours(self) -> bool:
        return self.rand_augment is not None or self.trivial_augment
