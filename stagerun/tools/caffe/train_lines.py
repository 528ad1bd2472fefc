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
    """One command. `processes` are those of an MPI launcher, `gpus` those of each: None where it has no launcher or no `--gpu`,
    0 where it has one without a number. `doubt` is the word in question."""

    solver: Word
    weights: Word | None = None
    snapshot: Word | None = None
    processes: int | None = None
    gpus: int | None = None
    doubt: Word | None = None

    @property
    def file(self) -> str:
        return posixpath.basename(self.solver.text)

    @property
    def start(self) -> Word | None:
        return self.snapshot or self.weights

    @property
    def place(self) -> Span:
        return (self.start or self.solver).span

    @property
    def option(self) -> str:
        return "--snapshot" if self.snapshot else "--weights" if self.weights else "--solver"

    @property
    def ending(self) -> str:
        return ".solverstate" if self.snapshot else ".caffemodel"

    @property
    def workers(self) -> int | None:
        """None if the command is silent, 0 if the number is unknown."""
        if self.processes is None and self.gpus is None:
            return None
        return (1 if self.processes is None else self.processes) * (1 if self.gpus is None else self.gpus)


# `2>&1` belongs to a command; `;`, `&&` and `|` stand between two.
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[<>]&|&>|[^\s"';|&])+|[;|&]+""")
_ASSIGNMENT = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s"'$`;]*)\s*;?\s*(?:#.*)?$""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_CAFFE = re.compile(r"(?!-)(?:.*/)?caffe(?:\.bin|\.exe)?$")
_MPI = re.compile(r"(?:.*/)?(?:mpirun|mpiexec|srun|prun|ibrun)(?:\.\w+)?$")
_COUNT = ("-n", "-np", "--n", "--np", "--ntasks")
# Words that follow an option of a launcher.
_VALUES = dict.fromkeys((*_COUNT, "-ppn", "-perhost", "-f", "-x", "-H", "-N", "-hostfile", "--hostfile"), 1)
_VALUES |= dict.fromkeys(("-genv", "-env", "-mca", "--mca"), 2)


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
        if not (goes_on or first.startswith("-") or (_CAFFE.match(first) and _is_launcher(command))):
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


def _is_launcher(command: Sequence[Word]) -> bool:
    """Whether a command ends in a launcher's options, its program still to come."""
    at = next((i for i, word in enumerate(command) if _MPI.match(word.text)), len(command))
    rest = [word.text for word in command[at + 1 :]]
    while rest and rest[0].startswith("-"):
        rest = rest[1 + _VALUES.get(rest[0], 0) :]
    return at < len(command) and not rest


def _commands(words: Sequence[Word]) -> Iterator[TrainLine]:
    """The `caffe train` commands in a logical line."""
    ends = [i for i, word in enumerate(words) if not word.text.strip(";|&")]
    caffes = [i for i, word in enumerate(words) if _CAFFE.match(word.text)]
    for at in caffes:
        begin = max((i + 1 for i in (*ends, *caffes) if i < at), default=0)
        end = min((i for i in (*ends, *caffes) if i > at), default=len(words))
        inside = words[at + 1 : end]
        solver, weights, snapshot, gpu = (_option(inside, n) for n in ("solver", "weights", "snapshot", "gpu"))
        if solver is not None and any(word.text == "train" for word in inside):
            processes, launcher = _processes(words[begin:at])
            gpus = len(gpu.text.split(",")) if gpu and re.fullmatch(r"\d+(,\d+)*", gpu.text) else 0 if gpu else None
            yield TrainLine(solver, weights, snapshot, processes, gpus, launcher if processes == 0 else gpu)


def _option(words: Sequence[Word], name: str) -> Word | None:
    """The value of -name or --name, after `=` or as the next word."""
    for word, after in itertools.zip_longest(words, words[1:]):
        option, equals, value = word.text.partition("=")
        if option in (f"-{name}", f"--{name}"):
            return after if not equals else Word(value, word.span) if value else None
    return None


def _processes(before: Sequence[Word]) -> tuple[int | None, Word | None]:
    """The number given to a launcher, and its word: 0 if it has none. A variable that no line sets may stand for a launcher."""
    mpi = next((i for i, word in enumerate(before) if _MPI.match(word.text)), None)
    unset = next((i for i, w in enumerate(before) if re.match(r"\$(?!\w*DOCKER)\w", w.text)), None)
    if (at := unset if mpi is None else mpi) is None:
        return None, None
    number = next(filter(None, (_option(before[at:], name.lstrip("-")) for name in _COUNT)), None)
    count = number.text[:9] if number and number.text.isascii() and number.text.isdecimal() else "0"
    return int(count), number or before[at]
