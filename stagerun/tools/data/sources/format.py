"""What the import knows of a format. Each format's module has one `Format`, and the table of `sources` lists them."""

from collections.abc import Callable
from dataclasses import dataclass

from stagerun.base.errors import UsageError
from stagerun.data.importing.items import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What can't be known from the path; None where the user didn't say."""

    format: str | None = None  # the name of one; known from the path's content if None
    root: str | None = None  # list: the folder that its paths are relative to; the list's own folder if None
    ground_truth: str | None = None  # imagenet: the labels of a validation set
    synsets: str | None = None  # imagenet: the classes in the order of their labels; sorted synsets if None
    split: str | None = None  # one of SPLITS, where one path holds several; `train` if None
    labels: str | None = None  # idx: the file of labels, if its name isn't that of the images with `labels` in it

    @property
    def part(self) -> str:
        """The split, where there are several."""
        return self.split or "train"

    def refuse_split(self, reason: str) -> None:
        """UsageError if a split was asked for where there is only one: it would be taken for what it isn't."""
        if self.split is not None:
            raise UsageError(f"--split {self.split} means nothing here: {reason}", "leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What lies at a path: a folder with these names in it, sorted, or a file that starts with these bytes."""

    path: str
    names: list[str]
    start: bytes
    options: SourceOptions

    @property
    def gzipped(self) -> bool:
        return self.start[:2] == b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Sign:
    """How a format is recognised. `words`: what was looked for, in the message that nothing was found.

    `found` may raise: DataError or UsageError for what comes close and isn't read, OSError for a folder.
    """

    words: str
    found: Callable[[Place], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    name: str
    about: str  # for --help
    open: Callable[[str, SourceOptions], Source]
    reads: tuple[str, ...] = ()  # the fields of SourceOptions that mean something for it
    folder: Sign | None = None
    file: Sign | None = None
    pattern: bool = False  # it opens `DIR/train-*` too
    pixels: bool = False  # it holds pixels, not encoded images
