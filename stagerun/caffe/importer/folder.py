"""The files of a folder of Caffe's: solvers, nets with their data layers, LMDBs. Only `CaffeFolder` reads the disk."""

import io
import os
import posixpath
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from stagerun.base.errors import DataError, Problems, Span, StagerunError, UsageError, nearest
from stagerun.caffe.data_layers import channel_means, translated
from stagerun.language.lexer import Token, shown
from stagerun.language.parse import LARGEST, Reader, parse
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import Block, Entry, View, quoted
from stagerun.system.files import upward
from stagerun.system.image_sets import first_value
from stagerun.system.lmdb_file import check_file

SCRIPTS = (".sh", ".bash")


class CaffeFolder:
    """A folder, and what its import finds. Its files have paths relative to it or to a folder above it, where Caffe was started.
    `mistakes` stop the import; `left` is listed in its output and in the head of schedule.prototxt. DataError."""

    def __init__(self, folder: str) -> None:
        if not folder:
            raise UsageError("FOLDER is empty", "give the folder with the solver files; `.` is the working folder")
        if not os.path.isdir(folder):
            raise DataError(f"{folder}: no such folder", "give the folder with the solver files")
        shown = os.path.normpath(folder)
        self.shown = "" if shown == "." else shown
        self._folder = os.path.abspath(folder)
        self.mistakes = Problems()
        self.left: list[str] = []

    def leave(self, span: Span, what: str, why: str, todo: str = "") -> None:
        """List `what` differs from Caffe's folder, why, and what the user can do."""
        location = f"{span.path}:{span.line}" if span.line else span.path
        text = f"{location}: {what}: {why}" + (f"; {todo}" if todo else "")
        if text not in self.left:  # a net that five solvers name is visited five times
            self.left.append(text)

    def scripts(self) -> dict[str, bytes]:
        """Return the scripts, 2_collapse.sh before 10_again.sh, then the READMEs."""
        scripts = self.files(lambda name: name.endswith(SCRIPTS) or name.upper().startswith("README"))

        def rank(name: str) -> tuple[bool, str]:
            return not name.endswith(SCRIPTS), re.sub("[0-9]+", lambda digits: digits[0].zfill(9), name)

        return {name: scripts[name] for name in sorted(scripts, key=rank)}

    def files(self, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        with _reading(self._folder):
            names = sorted(os.listdir(self._folder))
        paths = {name: os.path.join(self.shown, name) for name in names if wanted(name)}
        return {name: _bytes(path) for name, path in paths.items() if os.path.isfile(path)}

    def net(self, path: str) -> tuple[str, bytes] | None:
        """Return the path and the text of a net, searched by its path and next to the solver."""
        sibling = os.path.join(self.shown, os.path.basename(path))
        file = next(filter(os.path.isfile, (*self._candidates(path), sibling)), "")
        return (file, _bytes(file)) if file else None

    def file(self, path: str) -> str:
        """Return the absolute path that a path of Caffe's means; '' if no such file exists."""
        # Only a regular file: opening a FIFO would wait, and reading a device may never end.
        file = next(filter(os.path.isfile, self._candidates(path)), "")
        return os.path.abspath(file) if file else ""

    def mean_file(self, path: str) -> tuple[str, bytes]:
        return (file, _bytes(file, 64_000_000)) if (file := self.file(path)) else ("", b"")

    def lmdb(self, path: str) -> tuple[str, int, int | None] | None:
        """Return the absolute path, the number and the channels of an LMDB's images; None if it is missing. An unreadable LMDB has 0
        images: `run` reports why."""
        if (lmdb := next(filter(os.path.isdir, self._candidates(path)), None)) is None:
            return None
        number, channels = 0, None
        with suppress(StagerunError):
            number = check_file(lmdb)
            channels = _channels(first_value(lmdb))
        return os.path.abspath(lmdb), number, channels

    def _candidates(self, path: str) -> Iterator[str]:
        """Yield the path relative to the folder, then to each folder above it."""
        if not path or "\0" in path:
            return
        yield os.path.normpath(os.path.join(self.shown, path))
        for above in upward(self._folder):
            candidate = os.path.normpath(os.path.join(above, path))
            short = os.path.relpath(candidate)
            yield candidate if short.startswith("..") else short


def _channels(record: bytes) -> int | None:
    """Return the channels of a record, of which an encoded image tells more than its Datum; None if unreadable."""
    from PIL import Image

    with suppress(DecodeError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        datum = caffe_pb2.Datum.FromString(record)
        if datum.channels in (1, 3) and not datum.encoded:
            return int(datum.channels)
        with Image.open(io.BytesIO(datum.data)) as image:
            return 1 if image.mode in ("1", "L", "I", "I;16") else 3
    return None


def _bytes(path: str, most: int = LARGEST + 1) -> bytes:
    with _reading(path), open(path, "rb") as file:
        return file.read(most)


@contextmanager
def _reading(shown: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{shown}: can't be read: {error.strerror}", "check the disk, and its permissions") from error


# -- solver files, and the written lines

SOLVER: Descriptor = caffe_pb2.SolverParameter.DESCRIPTOR
COMMENT_COLUMN = 34  # start of a field's comment, as in the folders of solvers/
GAP = "\0"  # before a comment, until the comments are aligned
_SOLVERS = re.compile(rb"^[^#\n]*\b(?:base_lr|lr_policy|max_iter|net|train_net|solver_mode|snapshot_prefix)\s*:", re.M)
_LAYERS = re.compile(rb"^[^#\n]*\blayers?\s*[:{<]", re.M)


class SolverReader(Reader):
    """The grammar, with Caffe's names in the hints."""

    def unknown(self, kind: Descriptor, name: Token, doubtful: set[str]) -> None:
        if hint := nearest(name.text, kind.fields_by_name):
            doubtful.add(hint.split("`")[1])
        if name.text == "weights":
            hint = "take it out, and give it as `--weights` in the `caffe train` line of a README or script"
        if name.text != "layer_wise_reduce":  # BVLC's later Caffe sums gradients by it: not part of a recipe
            hint = hint or f"no version of Caffe's {kind.name} has it"
            self.fail(name, f"{kind.name} has no field `{shown(name.text)}`", hint)
        self.pass_over()


@dataclass(frozen=True, slots=True)
class SolverText(View):
    """A solver file, read with its defaults."""

    lines: Sequence[str]

    def whole(self, name: str) -> int:
        return View.whole(self, name) or 0

    def comment(self, name: str) -> str:
        """Return the comment after a field's last value; '' without a comment."""
        span = self.block.entries[name].values[-1].span
        comment = re.match(r"\s*[;,]?\s*#+(.*)", self.lines[span.line - 1][span.column - 1 + span.width :])
        return plain(comment[1], " ").strip() if comment else ""


def read_solver(path: str, data: bytes, mistakes: Problems) -> SolverText:
    text = data.decode(errors="replace").removeprefix("\N{BYTE ORDER MARK}")
    return SolverText(parse(path, data, SOLVER, mistakes, SolverReader), text.split("\n"))


def is_solver(data: bytes) -> bool:
    """Return whether a .prototxt is a solver's rather than a net's."""
    return _SOLVERS.search(data) is not None and (_LAYERS.search(data) is None or b"net_param" in data)


def of_type(layers: Sequence[Block], kind: str) -> list[Block]:
    return [layer for layer in layers if layer.text("type") == kind]


Settings = dict[str, str]  # the text of each field of stagerun's Solver: one line, or a message


def setting(name: str, value: str, comment: str = "") -> str:
    return with_comment(f"{name}: {value}", comment)


def with_comment(text: str, comment: str) -> str:
    return f"{text}{GAP}# {comment}" if comment else text


def aligned(text: str) -> str:
    """Put the comments into their column."""
    return re.sub(f"(?m)^(.*){GAP}", lambda match: f"{match[1]:<{COMMENT_COLUMN - 2}}  ", text)


def message(name: str, inside: str, comment: str = "") -> str:
    """Return `name { ... }` over several lines."""
    return f"{with_comment(f'{name} {{', comment)}\n{textwrap.indent(inside, '  ')}\n}}"


def plain(text: str, instead: str = "?") -> str:
    """Return the text for a comment, with `instead` for characters that don't print."""
    return "".join(c if c.isprintable() else instead for c in text)


def value_of(entry: Entry) -> str:
    """Return a scalar field's value as written in Caffe's file: one value, or a list."""
    texts = ", ".join(v.text for v in entry.values)
    return texts if len(entry.values) == 1 else f"[{texts}]"


# -- the facts of a net's data layers


class Images(NamedTuple):
    """A data layer's `data_param`. `batch`: images of one worker's forward pass. `channels` is None if the layer lacks them."""

    settings: View
    source: str
    batch: int
    shuffle: bool
    channels: int | None
    transform: str


def images_of(layers: Sequence[Block], phase: str, folder: CaffeFolder) -> Images | None:
    """Return the images of a net in one phase; None if no layer reads any."""
    readers = of_type(layers, "Data")
    if not readers:
        return None
    for other in readers[1:]:
        folder.leave(other.place, f"layer `{other.text('name') or ''}`", f"a second source in {phase} is not read")
    layer = readers[0]
    settings, moved = View(layer).inside("data_param"), View(layer).inside("transform_param")
    for name, example in (("source", 'source: "/path/to/lmdb"'), ("batch_size", "batch_size: 32")):
        if not settings.scalar(name):
            folder.mistakes.add(layer.place, f"the layer has no `{name}` in `data_param`", f"write `{example}`")
    if settings.text("backend") == "LEVELDB":
        why = "LevelDB, which is also the default, is not read"
        folder.leave(settings.place("backend"), "backend", why, "make an LMDB of it: `stagerun data import`")
    path, mean = folder.mean_file(moved.text("mean_file") or "")
    numbers = channel_means(mean) if path else moved.numbers("mean_value")
    channels = 1 if moved.flag("force_gray") else 3 if len(numbers or ()) == 3 else None
    source, batch = settings.text("source") or "", settings.whole("batch_size") or 0
    block, lost = translated(moved.block, phase == "TEST", folder.mean_file)
    transform = _lines(block)
    for one in lost:
        folder.leave(one.place, one.field, one.why, one.hint)
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


class Source(NamedTuple):
    """The inside of `train` or `val`, and its facts. `number`: of images, 0 if unknown."""

    inside: str
    number: int
    channels: int | None


def source_of(images: Images, given: int | None, folder: CaffeFolder) -> Source:
    """Count the images in the LMDB; the number `given` on the command line overrides the count."""
    counted = folder.lmdb(images.source)
    if counted is None and not posixpath.isabs(images.source):
        why = "the LMDB is missing, as seen from Caffe's folder; correct `source`: its path starts at the schedule's folder"
        folder.leave(images.settings.place("source"), "source", why)
    path, number, channels = counted or (images.source, 0, None)
    comment = "counted in the LMDB" if number else "how many records has it?"
    if given is not None:
        number, comment = given, ""
    return Source(f"source: {quoted(path)}\n{setting('images', str(number), comment)}", number, channels)
