"""What the commands that take pictures or show them have in common: resizing, the names of classes, and a record as it is stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from stagerun.base.errors import DataError, PermissionDenied, UsageError
from stagerun.command.options import option
from stagerun.data import datum
from stagerun.data.index import Index, printable
from stagerun.data.records import LmdbSource, Records, Room
from stagerun.tools.data.contact_sheet import Tile
from stagerun.tools.data.images import ImportOptions


@dataclass(frozen=True, slots=True)
class ResizeOptions:
    background: str | None = option(
        "--background COLOUR",
        "What shows where an image is transparent: a colour's name as in CSS, or #rrggbb.  [default: white]",
    )
    resize_shorter: int | None = option(
        "--resize-shorter N", "Resize: the shorter side to N pixels.", type=click.IntRange(1)
    )
    resize_height: int | None = option(
        "--resize-height N", "Resize: to exactly this height ...", type=click.IntRange(1)
    )
    resize_width: int | None = option("--resize-width N", "... and this width.", type=click.IntRange(1))

    def checked(self) -> ImportOptions:
        """In the source's order. UsageError for options that exclude each other."""
        height, width = self.resize_height, self.resize_width
        if (height is None) != (width is None):
            raise UsageError(
                "--resize-height and --resize-width go together",
                "give both, or --resize-shorter, which keeps the picture's shape",
            )
        exact = (height, width) if height is not None and width is not None else None
        if exact is not None and self.resize_shorter is not None:
            raise UsageError("--resize-shorter, and an exact size too", "give one of them")
        return ImportOptions(seed=None, shorter=self.resize_shorter, exact=exact, background=self.background)


class ListRecords(Records):
    """Records held in memory, with the keys that `write_lmdb` gives."""

    def __init__(self, values: Sequence[bytes], name: str = "memory") -> None:
        self.name = name
        self.index: Index | None = None
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def key(self, i: int) -> bytes:
        return b"%08d" % i

    def read(self, i: int, room: Room) -> memoryview:
        return memoryview(self._values[i])


def class_names(path: str) -> tuple[str, ...]:
    """The lines of a text file: a name for each label. UsageError, PermissionDenied."""
    try:
        lines = Path(path).read_text().splitlines()
    except PermissionError:
        raise PermissionDenied(f"{path}: may not be read", "ask its owner for read permission") from None
    except (OSError, UnicodeDecodeError) as error:
        why = f"can't be read: {error.strerror}" if isinstance(error, OSError) else "is not text in UTF-8"
        raise UsageError(f"{path}: {why}", "give a text file, one name per line") from None
    names = tuple(line.strip() for line in lines)
    if not names or not all(names):
        raise UsageError(f"{path}: has an empty line, or none", "one name per line, the first one for label 0")
    return names


def classes_of(records: LmdbSource) -> Sequence[str]:
    """Names by label; () where there is no side file, or it doesn't know them."""
    return records.index.facts.classes if records.index is not None else ()


def label_text(label: int, classes: Sequence[str]) -> str:
    return f"{label} {classes[label]}" if 0 <= label < len(classes) else f"label {label}"


def stored_tile(records: LmdbSource, i: int, classes: Sequence[str]) -> Tile:
    """Record `i` as it is stored: its key, its label and its shape."""
    key = printable(records.key(i))
    try:
        fields = datum.parse(records.get(i)[1])
        channels = 3 if fields.encoded or fields.channels not in (1, 3) else fields.channels
        image = datum.picture_of(fields, channels).decode()
    except DataError as error:
        return Tile(None, (key,), f"{records.name}: record `{key}`: {error.message}")
    shape = f"{image.shape[0]} high, {image.shape[1]} wide"
    return Tile(image, (key, label_text(fields.label, classes), shape))
