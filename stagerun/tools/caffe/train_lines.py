"""The `caffe train` commands of a README or a shell script: read, never run. Pure."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stagerun.base.errors import Span


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, variables put in, quotes taken off."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Launch:
    """What a command says of its workers. `processes`: those that an MPI launcher starts, `gpus`: those that each has. None is:
    none of it is written, which is one; 0: written, but not as a number, by the words `launcher` and `gpu`."""

    processes: int | None = None
    launcher: Word | None = None
    gpus: int | None = None
    gpu: Word | None = None

    @property
    def says(self) -> bool:
        return self.processes is not None or self.gpus is not None

    @property
    def number(self) -> int | None:
        """The number of workers; None if it isn't known."""
        return (1 if self.processes is None else self.processes) * (1 if self.gpus is None else self.gpus) or None


@dataclass(frozen=True, slots=True)
class TrainLine:
    """One command."""

    solver: Word
    weights: Word | None
    snapshot: Word | None
    launch: Launch = Launch()
    there: bool = False  # what it starts from is a file on this machine


# In a shell's line what sends output elsewhere belongs to a command (`2>&1`), and what stands between two commands does not.
_REDIRECTED = r"[<>]&|&>"
_BETWEEN = r"[;|&]+"
_WORD = re.compile(rf"""(?:"[^"]*"|'[^']*'|{_REDIRECTED}|[^\s"';|&])+|{_BETWEEN}""")
_SENTENCE = ";\\,&.)`"  # what may follow a command's last word in prose
_SCRIPTS = (".sh", ".bash")
_PAGES = (".html", ".htm")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_ASSIGNMENT = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s"'$`;]*)\s*;?\s*(?:#.*)?$""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_OPTION_LINE = re.compile(r"\s*--?[A-Za-z]")
_CAFFE = re.compile(r"(?!-)(?:.*/)?caffe(?:\.bin|\.exe)?$")
_MPI = re.compile(r"(?:.*/)?(?:mpirun|mpiexec|srun|prun|ibrun)(?:\.\w+)?$")
_BEFORE = re.compile(r"[$%>]$|[A-Za-z_]\w*=")  # a prompt, and variables of one command
_COUNT = ("-n", "-np", "--n", "--np", "--ntasks")
# Options of launchers that are followed by so many words.
_VALUES = dict.fromkeys((*_COUNT, "-ppn", "-perhost", "-f", "-x", "-H", "-N", "-c", "-p", "-t", "-wdir"), 1)
_LONG = ("host", "hosts", "hostfile", "machinefile", "map-by", "bind-to")
_VALUES |= {f"{dash}{name}": 1 for dash in ("-", "--") for name in _LONG}
_VALUES |= dict.fromkeys(("-genv", "-env", "-mca", "--mca"), 2)


def train_lines(path: str, text: str) -> list[TrainLine]:
    """The commands in the order of the file.

    A command goes on in the next line after a backslash. As READMEs break lines, it also goes on if the next line begins with an
    option, or with `caffe` when a launcher still has no program. It ends at `;`, `&&`, `||`, `|`, and at the next `caffe`.
    Variables that the file sets to a plain text are put in; others stay as they are.
    """
    known: dict[str, str] = {}
    found: list[TrainLine] = []
    above: list[Word] = []  # a launcher's command without a program
    for parts in _commands(text):
        if len(parts) == 1 and (match := _ASSIGNMENT.match(parts[0][1])):
            known[match[1]] = match[2].strip("\"'")
            continue
        words = [w for line, part in parts for w in _words(path, line, part, known)]
        first, *more = _split(words)
        its: list[TrainLine] = []
        if above and _starts_caffe(first) and first[0].span.line == above[-1].span.line + 1:
            its = [*_caffes([*above, *first])]
            if its and _unfinished(above) is None:
                # It may be a command of its own: how many workers there were is asked.
                its[0] = replace(its[0], launch=replace(its[0].launch, processes=0))
        found += its or _caffes(first)
        found += [caffe for command in more for caffe in _caffes(command)]
        last = [first, *more][-1]
        above = last if _unfinished(last) is not False else []
    return found


def _starts_caffe(command: list[Word]) -> bool:
    return bool((word := next((w for w in command if not _BEFORE.match(w.text)), None)) and _CAFFE.match(word.text))


def _unfinished(command: list[Word]) -> bool | None:
    """Whether a launcher is there, and no program behind its options. None where a word is a program or the value of an option that
    isn't known here."""
    words = [text for word in command for text in word.text.split()]
    at = next((i for i, text in enumerate(words) if _MPI.match(text)), None)
    if at is None or any(_CAFFE.match(text) for text in words):
        return False
    unsure, at = False, at + 1
    while at < len(words):
        option, equals, _ = words[at].partition("=")
        if not option.startswith("-"):
            if not words[at - 1].startswith("-"):
                return False
            unsure = True
        at += 1 + (0 if equals else _VALUES.get(option, 0))
    return None if unsure else True


def _commands(text: str) -> Iterator[list[tuple[int, str]]]:
    """Lines that belong together, each with its number. Comments and headings, which begin with #, are left out."""
    parts: list[tuple[int, str]] = []
    goes_on = False
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if line.lstrip().startswith("#"):
            continue
        if parts and (goes_on or _OPTION_LINE.match(line)):
            parts.append((number, line))
        else:
            if parts:
                yield parts
            parts = [(number, line)]
        goes_on = line.rstrip().endswith("\\")
    if parts:
        yield parts


def _words(path: str, line: int, text: str, known: dict[str, str]) -> Iterator[Word]:
    if path.endswith(_PAGES):
        text = _TAG.sub(lambda tag: " " * len(tag[0]), text)
    for match in _WORD.finditer(text):
        raw = match[0]
        if raw.startswith("#") and path.endswith(_SCRIPTS):
            return  # a comment
        if re.fullmatch(_BETWEEN, raw):
            yield Word(";", Span(path, line, match.start() + 1, len(raw)))
            continue
        plain = _VARIABLE.sub(lambda m: known.get(m[1] or m[2], m[0]), raw)
        plain = re.sub(r"[\"'`]", "", plain).rstrip(_SENTENCE).lstrip("(")
        if plain:
            start = len(raw) - len(raw.lstrip("("))
            width = len(raw.rstrip(_SENTENCE)) - start
            yield Word(plain, Span(path, line, match.start() + start + 1, max(1, width)))


def _split(words: list[Word]) -> Iterator[list[Word]]:
    """The commands of a line: what stands between the words that are `;`."""
    command: list[Word] = []
    for word in words:
        if word.text == ";":
            yield command
            command = []
        else:
            command.append(word)
    yield command


def _caffes(words: list[Word]) -> Iterator[TrainLine]:
    """The `caffe train` in a command: more than one where prose goes on to the next without a mark between them."""
    starts = [i for i, word in enumerate(words) if _CAFFE.match(word.text)]
    before = 0
    for at, end in itertools.pairwise([*starts, len(words)]):
        inside = words[at + 1 : end]
        if any(word.text == "train" for word in inside):
            solver, weights, snapshot, gpu = (_option(inside, n) for n in ("solver", "weights", "snapshot", "gpu"))
            if solver is not None:
                yield TrainLine(solver, weights, snapshot, _launch(words[before:at], gpu))
            before = at + 1


def _option(words: list[Word], name: str) -> Word | None:
    """The value of -name or --name, with its own place, after `=` or as the next word."""
    for number, word in enumerate(words):
        option, equals, value = word.text.partition("=")
        if option not in (f"-{name}", f"--{name}"):
            continue
        if equals:
            # The place of the value, where the word stands as it is written.
            width = word.span.width - len(option) - 1
            span = Span(word.span.path, word.span.line, word.span.column + len(option) + 1, max(1, width))
            return Word(value, span) if value else None
        return words[number + 1] if number + 1 < len(words) else None
    return None


def _launch(before: list[Word], gpu: Word | None) -> Launch:
    """`before` are the words before `caffe`; a variable that holds several stands for them."""
    words = [replace(word, text=text) for word in before for text in word.text.split()]
    at = next((i for i, word in enumerate(words) if _MPI.match(word.text)), None)
    if at is None:  # a command that begins with a variable which the file does not set may be one, too
        at = next((i for i, word in enumerate(words) if not _BEFORE.match(word.text)), None)
        at = (
            at if at is not None and words[at].text.startswith("$") and "DOCKER" not in words[at].text.upper() else None
        )
    gpus = None if gpu is None else len(gpu.text.split(",")) if re.fullmatch(r"\d+(,\d+)*", gpu.text) else 0
    if at is None:
        return Launch(gpus=gpus, gpu=gpu)
    return Launch(*_processes(words[at:]), gpu=gpu, gpus=gpus)


def _processes(words: list[Word]) -> tuple[int, Word]:
    """The number given to a launcher, the first word, and the words that say it; 0 if there is none."""
    for number, word in enumerate(words):
        option, _, value = word.text.partition("=")
        if option in _COUNT:
            if not value and number + 1 < len(words):
                value = words[number + 1].text
            count = int(value[:9]) if value.isascii() and value.isdecimal() else 0
            return count, replace(word, text=f"{option} {value}".rstrip())
    return 0, words[0]
