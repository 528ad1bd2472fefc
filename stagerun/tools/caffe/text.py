"""Caffe's texts -> Blocks, with the comments beside their fields; the lines that are written from them, each with its place in Caffe's
files; and what an import finds on its way. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems, Span, nearest
from stagerun.language.lexer import Kind, Token, shown, tokens
from stagerun.language.parse import Reader, parse
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import Block, Entry
from stagerun.language.view import View


@dataclass(frozen=True, slots=True)
class Left:
    """Something that the written folder does not say as Caffe's did: `what`, usually a field, why, and what the user can do."""

    span: Span
    what: str
    why: str
    todo: str = ""

    def __str__(self) -> str:
        place = f"{self.span.path}:{self.span.line}" if self.span.line else self.span.path
        return f"{place}: {self.what}: {self.why}" + (f"; {self.todo}" if self.todo else "")


class Findings:
    """`mistakes` stop the import. `left` is listed in its output and in the head of schedule.prototxt, `idle` too: fields,
    by name, without which nothing is lost, and why."""

    def __init__(self) -> None:
        self.mistakes = Problems()
        self.left: list[Left] = []
        self.idle: dict[str, str] = {}

    def leave(self, span: Span, what: str, why: str, todo: str = "") -> None:
        self.add(Left(span, what, why, todo))

    def add(self, left: Left) -> None:
        if left not in self.left:  # a net that five solvers name is looked at five times
            self.left.append(left)


SOLVER: Descriptor = caffe_pb2.SolverParameter.DESCRIPTOR
# Fields that some Caffe has and protos/caffe.proto has not, and what to do about them.
ELSEWHERE = {
    "weights": "take it out, and give it as `--weights` in the `caffe train` line of a README or script",
    "poly_cyc": 'it is a policy: `lr_policy: "poly_cyc"`',
}
# BVLC's later Caffe; how gradients are summed is not part of a recipe.
IDLE = "layer_wise_reduce"


class CaffeReader(Reader):
    """The grammar, with Caffe's names in the hints."""

    def unknown(self, kind: Descriptor, name: Token, doubtful: set[str]) -> None:
        hint = ELSEWHERE.get(name.text) or nearest(name.text, kind.fields_by_name)
        if hint.startswith("did you mean"):
            doubtful.add(hint.split("`")[1])
        if name.text != IDLE:
            hint = hint or f"no version of Caffe's {kind.name} has it"
            self.fail(name, f"{kind.name} has no field `{shown(name.text)}`", hint)
        self.pass_over()


@dataclass(frozen=True, slots=True)
class CaffeText:
    """A file as read."""

    path: str
    lines: tuple[str, ...]
    block: Block

    def beside(self, entry: Entry) -> str:
        """The comment in the line of a field's last value, after it; '' if there is none."""
        span = entry.values[-1].span if entry.values else entry.name
        if span.path != self.path or span.line > len(self.lines):
            return ""
        found = re.match(r"\s*[;,]?\s*#+(.*)", self.lines[span.line - 1][span.column - 1 + span.width :])
        return plain(found[1], " ").strip() if found else ""


def read_solver(path: str, data: bytes, found: Findings) -> CaffeText:
    """A solver, mistakes into `found`."""
    block = parse(path, data, SOLVER, found.mistakes, CaffeReader)
    text = data.decode(errors="replace").removeprefix("\N{BYTE ORDER MARK}")
    return CaffeText(path, tuple(line.rstrip("\r") for line in text.split("\n")), block)


def is_solver(data: bytes) -> bool:
    """Whether a .prototxt is a solver's and no net's, by the words outside all braces."""
    depth, names = 0, set()
    for token in tokens(data.decode(errors="replace")):
        if token.kind is Kind.MARK:
            depth += (token.text in "{<[") - (token.text in "}>]")
        elif token.kind is Kind.WORD and depth == 0:
            names.add(token.text)
    solvers = {"base_lr", "lr_policy", "max_iter", "net", "train_net", "solver_mode", "snapshot_prefix", "net_param"}
    return not names & {"layer", "layers"} and bool(names & solvers)


def text_of(block: Block, name: str) -> str:
    """A text field, '' where it is not written."""
    value = View(block).text(name) if name in block.entries else None
    return value or ""


def of_type(layers: Sequence[Block], *types: str) -> Iterator[Block]:
    return (layer for layer in layers if text_of(layer, "type") in types)


# -- what is written

COMMENT_COLUMN = 34  # where a comment beside a field begins, as in the folders of solvers/


@dataclass(frozen=True, slots=True)
class Line:
    """`span` is None for what no file of Caffe's says. `asks`: a value that the user is to fill in."""

    text: str
    span: Span | None = None
    comment: str = ""
    asks: bool = False

    def __str__(self) -> str:
        return f"{self.text:<{COMMENT_COLUMN - 2}}  # {self.comment}" if self.comment else self.text


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of stagerun's Solver: one line, or a message."""

    name: str
    lines: tuple[Line, ...]

    @property
    def value(self) -> tuple[str, ...]:
        """What it says, comments left out: equal for equal settings."""
        return tuple(line.text for line in self.lines)


def setting(name: str, text: str, span: Span | None = None, comment: str = "") -> Setting:
    return Setting(name, (Line(f"{name}: {text}", span, comment),))


def message(name: str, inside: Iterable[Line], span: Span | None, comment: str = "") -> tuple[Line, ...]:
    """`name { ... }` over several lines."""
    return (Line(f"{name} {{", span, comment), *indented(inside), Line("}", span))


def indented(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(replace(line, text=f"  {line.text}") for line in lines)


def plain(text: str, instead: str) -> str:
    """What a comment may hold: `instead` stands for what does not print."""
    return "".join(c if c.isprintable() else instead for c in text)


def written(entry: Entry) -> str:
    """A scalar field's value as it stands in Caffe's file, which means the same here: one value, or a list."""
    texts = [v.text for v in entry.values]
    return f"[{', '.join(texts)}]" if entry.field.is_repeated else texts[0]
