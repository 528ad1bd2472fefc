"""The `caffe train` commands of a README or a shell script: read, never run. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.errors import Span


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, variables put in, quotes taken off."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class TrainLine:
    """One command. `workers`: processes under MPI times GPUs; None where it doesn't say."""

    solver: Word
    weights: Word | None
    snapshot: Word | None
    workers: int | None


_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_ASSIGNMENT = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s"'$`;]*)\s*;?\s*(?:#.*)?$""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_OPTION_LINE = re.compile(r"\s*--?[A-Za-z]")
_CAFFE = re.compile(r"(?:.*/)?caffe(?:\.bin|\.exe)?$")
_MPI = re.compile(r"(?:.*/)?(?:mpirun|mpiexec|srun|prun|ibrun)(?:\.\w+)?$")
_COUNT = ("-n", "-np", "--n", "--np", "--ntasks")


def train_lines(path: str, text: str) -> list[TrainLine]:
    """The commands in the order of the file.

    A command goes on in the next line after a backslash, and where the next line begins with an option, as READMEs break
    it. Variables that the file sets to a plain text are put in; others stay as they are.
    """
    known: dict[str, str] = {}
    found = []
    for parts in _commands(text):
        if len(parts) == 1 and (match := _ASSIGNMENT.match(parts[0][1])):
            known[match[1]] = match[2].strip("\"'")
            continue
        words = [w for line, part in parts for w in _words(path, line, part, known)]
        command = _command(words)
        if command is not None:
            found.append(command)
    return found


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
    for match in _WORD.finditer(text):
        raw = match[0]
        plain = _VARIABLE.sub(lambda m: known.get(m[1] or m[2], m[0]), raw)
        plain = re.sub(r"[\"'`]", "", plain).rstrip(";\\,&")
        if plain:
            yield Word(plain, Span(path, line, match.start() + 1, max(1, len(raw.rstrip(";\\,&`")))))


def _command(words: list[Word]) -> TrainLine | None:
    at = next((i for i, w in enumerate(words) if _CAFFE.match(w.text)), None)
    if at is None or not any(w.text == "train" for w in words[at + 1 :]):
        return None
    solver, weights, snapshot, gpu = (_option(words[at + 1 :], n) for n in ("solver", "weights", "snapshot", "gpu"))
    if solver is None:
        return None
    return TrainLine(solver, weights, snapshot, _workers(words[:at], gpu))


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


def _workers(before: list[Word], gpu: Word | None) -> int | None:
    """Processes that an MPI launcher starts, times the GPUs of each. None where neither is said as a number."""
    ranks = _ranks(before)
    if gpu is None:
        return ranks
    if not re.fullmatch(r"\d+(,\d+)*", gpu.text):
        return None  # `all`: as many as that machine had
    return (ranks or 1) * len(gpu.text.split(","))


def _ranks(before: list[Word]) -> int | None:
    if not any(_MPI.match(w.text) for w in before):
        return None
    for number, word in enumerate(before):
        option, _, value = word.text.partition("=")
        if option in _COUNT:
            if not value and number + 1 < len(before):
                value = before[number + 1].text
            return int(value) if value.isascii() and value.isdecimal() and int(value[:9]) > 0 else None
    return None
