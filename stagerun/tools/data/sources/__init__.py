"""Sets of labelled images in the formats that people have them in, for `stagerun data import`: one way to ask them all.

A format is a module with a `Format`, and a row of `FORMATS`; all else is derived from these. `open_source` knows which it is by the
content. Archives are read in place, by offset. Nothing here decodes an image, runs anything, or follows a name out of an archive.
"""

import os

from stagerun.base.errors import DataError, UsageError, listing, nearest
from stagerun.data.importing.items import Item, Pixels, Source, regular
from stagerun.system.image_folder import SPLITS, can_not_open
from stagerun.tools.data.sources import cifar, csv_table, folders, idx, lists, recordio, tfrecord
from stagerun.tools.data.sources.format import Format, Place, SourceOptions

__all__ = ["FORMATS", "SPLITS", "Format", "Item", "Pixels", "Source", "SourceOptions", "format_of", "open_source"]

# In the order in which they are looked for. Those with the most particular names and first bytes come first: next to them anything
# may lie, and nearly any folder has folders.
FORMATS: tuple[Format, ...] = (
    cifar.FORMAT,
    idx.FORMAT,
    tfrecord.FORMAT,
    recordio.FORMAT,
    folders.IMAGENET,
    csv_table.FORMAT,
    lists.FORMAT,
    folders.CLASSES,
)
BY_NAME = {format.name: format for format in reversed(FORMATS)}  # as they are listed: what most people have first


def readers(option: str) -> tuple[str, ...]:
    """The names of the formats for which a field of SourceOptions means something."""
    return tuple(format.name for format in BY_NAME.values() if option in format.reads)


def open_source(path: str, options: SourceOptions) -> Source:
    """The set of images at a path.

    Goes through it once (archives: header by header). UsageError for options that make no sense, or a path that could be
    several things; DataError if it is none that is known, is damaged, or has no labels; RecipeError with places for
    mistakes in lists.
    """
    if options.part not in SPLITS:
        raise UsageError(f"`{options.split}` is not a split", f"give {listing(SPLITS)}")
    format = format_of(path, options)
    for option in dict.fromkeys(option for each in FORMATS for option in each.reads):
        if getattr(options, option) is not None and option not in format.reads:
            raise UsageError(
                f"--{option.replace('_', '-')} means nothing for the format `{format.name}`",
                f"it is for {listing(readers(option))}",
            )
    return format.open(path, options)


def format_of(path: str, options: SourceOptions) -> Format:
    """As it was given, or by the content. DataError, with what was looked for, if it can't be known; UsageError."""
    if options.format is not None:
        if found := BY_NAME.get(options.format):
            return found
        names = tuple(BY_NAME)
        raise UsageError(
            f"`{options.format}` is not a format", nearest(options.format, names) or f"formats: {listing(names)}"
        )
    if not os.path.exists(path):
        if any(c in path for c in "*?["):
            return next(format for format in FORMATS if format.pattern)
        raise DataError(f"{path}: no such file or folder", "check the name")
    is_folder = os.path.isdir(path)
    start = b""
    try:
        if not is_folder:
            with open(path, "rb", opener=regular) as stream:
                start = stream.read(4096)
        listed = sorted(os.listdir(path)) if is_folder else []
        place = Place(path=path, names=listed, start=start, options=options)
        signs = [(sign, format) for format in FORMATS if (sign := format.folder if is_folder else format.file)]
        for sign, format in signs:
            if sign.found(place):
                return format
    except OSError as error:
        can_not_open(path, error)
    problem = "nothing in it that is known" if is_folder else "of no format that is known" if start else "empty"
    if start.startswith(b"PK\x03\x04"):
        raise DataError(f"{path}: a zip", "unpack it; save what a .npz holds as images, in a folder for each class")
    *words, last = [sign.words for sign, _ in reversed(signs)]
    raise DataError(
        f"{path}: {problem}: {', '.join(words)} or {last} were looked for",
        "if it is one of them, name it with --format",
    )
