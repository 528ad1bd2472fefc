"""The nets of Caffe's solvers, and what their data layers say: where images come from, how many there are and make a batch, their transforms."""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagerun.caffe.data_layers import channel_means, translated
from stagerun.caffe.importer.folder import CaffeFolder, Count
from stagerun.caffe.importer.text import Findings, SolverText, message, of_type, setting, text_of, value_of
from stagerun.caffe.text import read
from stagerun.language.tree import Block, quoted
from stagerun.language.view import View

_READS = re.compile(r' type: "(?:Data|ImageData|DummyData|Input)" ')


@dataclass(frozen=True, slots=True)
class CaffeNet:
    """A net as read. `computing`: its layers in canonical form, but for those that read images."""

    path: str
    data: bytes
    file: Block
    layers: tuple[Block, ...]
    computing: list[str]


def net_of(
    solver: SolverText, folder: CaffeFolder, known: dict[str, CaffeNet | None], found: Findings
) -> CaffeNet | None:
    """The net to train, read once into `known`. None after a mistake."""
    field = "train_net" if "train_net" in solver.block.entries else "net"
    name = solver.view.text(field) or ""
    if (there := folder.net(name)) is None:
        if name:  # else `check_solver` says it
            text = f"there is no net `{name}`"
            found.mistakes.add(solver.view.place(field), text, "copy the net beside the solver")
        return None
    path, data = there
    if path not in known:
        known[path] = None
        if (net := read(data, path, found.mistakes)) is not None:
            computing = [line for line in net.canonical().splitlines() if not _READS.search(line)]
            known[path] = CaffeNet(path, data, net.file, net.layers, computing)
    return known[path]


@dataclass(frozen=True, slots=True)
class Images:
    """One data layer, and its `data_param`. `batch`: images of one worker's forward pass. `channels` is None where the layer doesn't say."""

    settings: View
    source: str
    batch: int
    shuffle: bool
    channels: int | None
    transform: str


def images_of(layers: Sequence[Block], phase: str, found: Findings, folder: CaffeFolder) -> Images | None:
    """The images of a net in one phase; None if no layer reads any."""
    readers = list(of_type(layers, "Data"))
    if not readers:
        return None
    for other in readers[1:]:
        found.leave(other.place, f"layer `{text_of(other, 'name')}`", f"a second source in {phase} is not read")
    layer = readers[0]
    settings, moved = View(layer).inside("data_param"), View(layer).inside("transform_param")
    for name, example in (("source", 'source: "/path/to/lmdb"'), ("batch_size", "batch_size: 32")):
        if not settings.scalar(name):
            found.mistakes.add(layer.place, f"the layer has no `{name}` in `data_param`", f"write `{example}`")
    if settings.text("backend") == "LEVELDB":
        why = "LevelDB, which is also the default, is not read"
        found.leave(settings.place("backend"), "backend", why, "make an LMDB of it: `stagerun data import`")
    mean = folder.mean_file(moved.text("mean_file") or "")
    numbers = channel_means(mean[1]) if mean is not None else moved.numbers("mean_value")
    channels = 1 if moved.flag("force_gray") else 3 if len(numbers or ()) == 3 else None
    source, batch = settings.text("source") or "", settings.whole("batch_size") or 0
    transform: list[str] = []
    if (said := layer.block("transform_param")) is not None:
        block, lost = translated(said, phase == "TEST", folder.mean_file)
        transform = _lines(block)
        for one in lost:
            found.leave(one.place, one.field, one.why, one.hint)
            if one.field == "mean_file" and not one.harmless:
                transform.append(setting("mean_value", "?", "the mean of each channel?"))
    return Images(settings, source, batch, settings.flag("shuffle"), channels, "\n".join(transform))


def _lines(block: Block) -> list[str]:
    lines: list[str] = []
    for name, entry in block.entries.items():
        if (inner := block.block(name)) is not None:
            inside, short = _lines(inner), name == "resize_param"
            lines.append(f"{name} {{ {' '.join(inside)} }}" if short else message(name, "\n".join(inside)))
        elif name == "mean_file":
            lines.append(f"{name}: {quoted(str(entry.values[0].value))}")
        else:
            three = name == "mean_value" and len(entry.values) == 3
            lines.append(setting(name, value_of(entry), "B, G, R" if three else ""))
    return lines


def count_images(images: Images, given: int | None, folder: CaffeFolder, found: Findings) -> Count:
    """As given, or as counted."""
    counted = folder.lmdb(images.source)
    if counted is None and not posixpath.isabs(images.source):
        why = "the LMDB is not there, as seen from Caffe's folder; mend `source`: its path starts at the schedule's folder"
        found.leave(images.settings.place("source"), "source", why)
    counted = counted or Count(images.source)
    return counted if given is None else replace(counted, number=given, counted=False)


def source_lines(count: Count) -> str:
    """The inside of `train` or `val`."""
    why = "" if not count.counted else "counted in the LMDB" if count.number else "how many records has it?"
    return f"source: {quoted(count.place)}\n{setting('images', str(count.number), why)}"
