"""Caffe's solver files -> Blocks; the lines that are written from them; and what an import finds on its way. Pure."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems, Span, nearest
from stagerun.language.lexer import Token, shown
from stagerun.language.parse import Reader, parse
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import Block, Entry
from stagerun.language.view import View

SOLVER: Descriptor = caffe_pb2.SolverParameter.DESCRIPTOR
COMMENT_COLUMN = 34  # where a comment beside a field begins, as in the folders of solvers/
GAP = "\0"  # before a comment, until the lines are in their places
_SOLVERS = re.compile(rb"^[^#\n]*\b(?:base_lr|lr_policy|max_iter|net|train_net|solver_mode|snapshot_prefix)\s*:", re.M)
_LAYERS = re.compile(rb"^[^#\n]*\blayers?\s*[:{<]", re.M)


class Findings:
    """`mistakes` stop the import. `left` is listed in its output and in the head of schedule.prototxt."""

    def __init__(self) -> None:
        self.mistakes = Problems()
        self.left: list[str] = []

    def leave(self, span: Span, what: str, why: str, todo: str = "") -> None:
        """List `what` the written folder does not say as Caffe's did, why, and what the user can do."""
        place = f"{span.path}:{span.line}" if span.line else span.path
        text = f"{place}: {what}: {why}" + (f"; {todo}" if todo else "")
        if text not in self.left:  # a net that five solvers name is looked at five times
            self.left.append(text)


class SolverReader(Reader):
    """The grammar, with Caffe's names in the hints."""

    def unknown(self, kind: Descriptor, name: Token, doubtful: set[str]) -> None:
        if hint := nearest(name.text, kind.fields_by_name):
            doubtful.add(hint.split("`")[1])
        if name.text == "weights":
            hint = "take it out, and give it as `--weights` in the `caffe train` line of a README or script"
        if name.text != "layer_wise_reduce":  # how BVLC's later Caffe sums gradients: no part of a recipe
            hint = hint or f"no version of Caffe's {kind.name} has it"
            self.fail(name, f"{kind.name} has no field `{shown(name.text)}`", hint)
        self.pass_over()


@dataclass(frozen=True, slots=True)
class SolverText:
    path: str
    lines: Sequence[str]
    block: Block

    @property
    def view(self) -> View:
        return View(self.block)

    def whole(self, name: str) -> int:
        return self.view.whole(name) or 0

    def comment(self, name: str) -> str:
        """The comment in the line of a field's last value, after it; '' if there is none."""
        span = self.block.entries[name].values[-1].span
        found = re.match(r"\s*[;,]?\s*#+(.*)", self.lines[span.line - 1][span.column - 1 + span.width :])
        return plain(found[1], " ").strip() if found else ""


def read_solver(path: str, data: bytes, mistakes: Problems) -> SolverText:
    block = parse(path, data, SOLVER, mistakes, SolverReader)
    text = data.decode(errors="replace").removeprefix("\N{BYTE ORDER MARK}")
    return SolverText(path, text.split("\n"), block)


def is_solver(data: bytes) -> bool:
    """Whether a .prototxt is a solver's and no net's."""
    return _SOLVERS.search(data) is not None and (_LAYERS.search(data) is None or b"net_param" in data)


def text_of(block: Block, name: str) -> str:
    """A text field, '' where it is not written."""
    return View(block).text(name) or ""


def of_type(layers: Sequence[Block], *types: str) -> Iterator[Block]:
    return (layer for layer in layers if text_of(layer, "type") in types)


Settings = dict[str, str]  # the text of each field of stagerun's Solver: one line, or a message


def setting(name: str, value: str, comment: str = "") -> str:
    return beside(f"{name}: {value}", comment)


def beside(text: str, comment: str) -> str:
    return f"{text}{GAP}# {comment}" if comment else text


def aligned(text: str) -> str:
    """Put the comments into their column."""
    return re.sub(f"(?m)^(.*){GAP}", lambda match: f"{match[1]:<{COMMENT_COLUMN - 2}}  ", text)


def message(name: str, inside: str, comment: str = "") -> str:
    """`name { ... }` over several lines."""
    return f"{beside(f'{name} {{', comment)}\n{textwrap.indent(inside, '  ')}\n}}"


def plain(text: str, instead: str = "?") -> str:
    """What a comment may hold: `instead` stands for what does not print."""
    return "".join(c if c.isprintable() else instead for c in text)


def value_of(entry: Entry) -> str:
    """A scalar field's value as it stands in Caffe's file, which means the same here: one value, or a list."""
    texts = ", ".join(v.text for v in entry.values)
    return texts if len(entry.values) == 1 else f"[{texts}]"
