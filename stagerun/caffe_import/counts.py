"""How many images there are, and where. Pure; `Counting` looks."""

import posixpath
from dataclasses import dataclass, replace
from typing import Protocol

from stagerun.caffe_import.data_layers import Images, lmdb_of
from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.lines import Line
from stagerun.errors import Span
from stagerun.spec.tree import quoted

ILSVRC12 = {"train": 1281167, "val": 50000}
ASKED = "how many records has it?"


class Counting(Protocol):
    """What is to be known of images on disk."""

    def images(self, path: str, is_list: bool) -> "tuple[str, int, int | None] | None":
        """Where an LMDB, or a list of files, is; number and channels (0, None: not known) of its images. None if it isn't
        there."""
        ...


@dataclass(frozen=True, slots=True)
class Count:
    """`number` is 0 where nothing tells it; `why` says where it comes from. `place` is where the LMDB is, or will be."""

    place: str
    number: int
    why: str = ""
    channels: int | None = None


def count_images(images: Images, given: int | None, disk: Counting, found: Findings) -> Count:
    """How many images there are: as given, as counted, or as everybody knows of ILSVRC 2012 by the name of its LMDB."""
    there = disk.images(images.source, images.list_file)
    place, counted, channels = there or (images.source, 0, None)
    if images.list_file:
        place = lmdb_of(images.source)
    elif there is None and not posixpath.isabs(images.source):
        why = "a path from Caffe's folder, and it isn't there; here paths begin at the schedule's folder"
        found.leave(images.source_place, "source", why, "write the LMDB's path")
    return _counted(
        images.source, Count(place, counted, "", channels), given, "the list" if images.list_file else "the LMDB"
    )


def count_told(option: str, source: str, given: int | None, disk: Counting, found: Findings) -> Count:
    """The same of an LMDB whose absolute path an option gives."""
    there = disk.images(source, False)
    place, counted, channels = there or (source, 0, None)
    if there is None:
        found.leave(Span(option, 0, 0), source, "there is no LMDB of that name on this machine")
    return _counted(source, Count(place, counted, "", channels), given, "the LMDB")


def _counted(source: str, there: Count, given: int | None, what: str) -> Count:
    """`there` with its number: `given`, else its own, else that of the part of ILSVRC 2012 that the name ends with."""
    if given is not None:
        return replace(there, number=given)
    if there.number:
        return replace(there, why=f"counted in {what}")
    name = source.lower()
    part = max(ILSVRC12, key=name.rfind)
    if "ilsvrc12" in name and part in name:
        return replace(there, number=ILSVRC12[part], why="of ILSVRC 2012, by its name")
    return there


def source_lines(count: Count, span: Span | None) -> tuple[Line, ...]:
    """The inside of `train` or `val`."""
    return (
        Line(f"source: {quoted(count.place)}", span),
        Line(f"images: {count.number}", None, count.why if count.number else ASKED, asks=not count.number),
    )
