"""The `caffe train` commands of a README or a shell script: read, never run. Pure."""

import itertools
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagerun.base.errors import Span


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, variables put in, quotes taken off."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class TrainLine:
    """One command. `start`: what `option` names, --weights or --snapshot. `workers`: None if the command is silent, 0 if the number is
    unknown. `nodes`: whether an MPI launcher starts several."""

    solver: Word
    start: Word | None
    option: str
    workers: int | None
    nodes: bool

    @property
    def file(self) -> str:
        return posixpath.basename(self.solver.text)

    @property
    def place(self) -> Span:
        return (self.start or self.solver).span

    @property
    def ending(self) -> str:
        return ".solverstate" if self.option == "--snapshot" else ".caffemodel"


# `2>&1` belongs to a command; `;`, `&&` and `|` stand between two.
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[<>]&|&>|[^\s"';|&])+|[;|&]+""")
_ASSIGNMENT = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s"'$`;]*)\s*;?\s*(?:#.*)?$""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_CAFFE = re.compile(r"(?!-)(?:.*/)?caffe(?:\.bin|\.exe)?$")
# A variable that no line sets may stand for a launcher.
_LAUNCHER = re.compile(r"(?:.*/)?(?:mpirun|mpiexec|srun|prun|ibrun)(?:\.\w+)?$|\$(?!\w*DOCKER)\w+$")


def train_lines(path: str, text: str) -> list[TrainLine]:
    """Return the commands in the order of the file. A command ends at `;`, `&&`, `||`, `|` or the next `caffe`. It goes on in the
    next line after a backslash and, as READMEs break lines, where that begins with an option, or with `caffe` below a launcher."""
    known: dict[str, str] = {}
    lines: list[TrainLine] = []
    command: list[Word] = []
    goes_on = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("#"):
            continue
        if (match := _ASSIGNMENT.match(line)) and not goes_on:
            known[match[1]] = match[2].strip("\"'")
            continue
        words = list(_words(path, number, line, known))
        first = words[0].text if words else ""
        if not (goes_on or first.startswith("-") or (_CAFFE.match(first) and _is_open(command))):
            lines += _commands(command)
            command = []
        command += words
        goes_on = line.rstrip().endswith("\\")
    return [*lines, *_commands(command)]


def _words(path: str, number: int, line: str, known: dict[str, str]) -> Iterator[Word]:
    for match in _WORD.finditer(line):
        raw = match[0]
        if raw.startswith("#") and path.endswith((".sh", ".bash")):
            return
        plain = _VARIABLE.sub(lambda m: known.get(m[1] or m[2], m[0]), raw)
        plain = plain if plain.strip(";|&") == "" else re.sub(r"[\"'`]", "", plain).rstrip("\\,.)").lstrip("(")
        span = Span(path, number, match.start() + 1, len(raw.rstrip("\\,.)`")) or 1)
        yield from (Word(part, span) for part in plain.split())  # a variable may hold several


def _caffes(words: Sequence[Word]) -> list[int]:
    return [i for i, word in enumerate(words) if _CAFFE.match(word.text)]


def _launcher(words: Sequence[Word]) -> Word | None:
    return next((word for word in words if _LAUNCHER.match(word.text)), None)


def _is_open(command: Sequence[Word]) -> bool:
    """Whether a command ends in a launcher's options and their values, its program still to come."""
    texts = [word.text for word in itertools.dropwhile(lambda word: not _LAUNCHER.match(word.text), command)]
    options = [text.startswith("-") for text in texts]
    two = [text in ("-genv", "-env", "-mca", "--mca") for text in texts]
    return bool(texts) and all(options[i] or options[i - 1] or two[i - 2] for i in range(1, len(texts)))


def _commands(words: Sequence[Word]) -> Iterator[TrainLine]:
    """The `caffe train` commands in a logical line."""
    ends = [i for i, word in enumerate(words) if not word.text.strip(";|&")] + _caffes(words)
    for at in _caffes(words):
        before = words[max((i + 1 for i in ends if i < at), default=0) : at]
        inside = words[at + 1 : min((i for i in ends if i > at), default=len(words))]
        solver, weights, snapshot, gpu = (_option(inside, name) for name in ("solver", "weights", "snapshot", "gpu"))
        if solver is None or all(word.text != "train" for word in inside):
            continue
        launcher, counts = _launcher(before), [_option(before, n) for n in ("n", "np", "ntasks")]
        number = next((count for count in counts if count), None)
        count = int(number.text) if number and re.fullmatch(r"[0-9]{1,9}", number.text) else 0
        gpus = 0 if not gpu or not re.fullmatch(r"\d+(,\d+)*", gpu.text) else len(gpu.text.split(","))
        workers = (count if launcher else 1) * (gpus if gpu else 1) if launcher or gpu else None
        option = "--snapshot" if snapshot else "--weights" if weights else "--solver"
        yield TrainLine(solver, snapshot or weights, option, workers, bool(launcher) and count > 1)


def _option(words: Sequence[Word], name: str) -> Word | None:
    """The value of -name or --name, after `=` or as the next word."""
    for word, after in itertools.zip_longest(words, words[1:]):
        option, equals, value = word.text.partition("=")
        if option in (f"-{name}", f"--{name}"):
            return after if not equals else Word(value, word.span) if value else None
    return None
