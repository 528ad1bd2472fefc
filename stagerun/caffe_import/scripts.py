"""The `caffe train` lines of a folder's scripts and READMEs: which of them belong together, and in which order. Pure."""

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.saved import saved
from stagerun.caffe_import.text import CaffeText
from stagerun.caffe_import.train_lines import TrainLine, Word, train_lines

Said = Mapping[str, Sequence[TrainLine]]  # by the name of the file


def said_by(shown: str, scripts: Mapping[str, bytes], found: Findings) -> Said:
    """The lines of each file that has any. `shown` is the folder as it was given."""
    said = {}
    for name, data in scripts.items():
        path = posixpath.join(shown, name)
        text = data.decode(errors="replace").replace("\0", " ")
        lines = train_lines(path, text)
        if lines:
            said[name] = lines
            found.mistakes.file(path, text)
    return said


def different(said: Said) -> list[TrainLine]:
    """All lines, those that say the same as another once."""
    kept: dict[tuple[str, ...], TrainLine] = {}
    for line in (line for lines in said.values() for line in lines):
        kept.setdefault(_key(line), line)
    return list(kept.values())


def lines_of(file: str, said: Said) -> tuple[TrainLine, ...]:
    """The commands with a solver. Of those that are the same otherwise, ones that say nothing of the workers are left out
    where another does, as a README leaves out how a script starts it."""
    lines = [line for lines in said.values() for line in lines if posixpath.basename(line.solver.text) == file]
    telling = {_key(line) for line in lines if line.launch.says}
    return tuple(line for line in lines if line.launch.says or _key(line) not in telling)


def together(said: Said, texts: Mapping[str, CaffeText], found: Findings) -> list[TrainLine]:
    """The lines of the one file, or of several with solvers of their own, where all but one go on from what others make, and come
    after those. A file is passed over where another says all that it says. `texts` are the solvers' by name.

    A mistake where files contradict each other, or have nothing to do with each other.
    """
    kept = _without_repeats(said)
    makes = {name: _made(said[name], texts) for name in kept}
    needs = {name: {_prefix(word) for line in said[name] if (word := line.weights or line.snapshot)} for name in kept}
    ordered: list[str] = []
    rest = sorted(kept, key=_in_numbers)
    while rest:
        free = [n for n in rest if not any(needs[n] & makes[o] for o in rest if o != n)] or rest
        if ordered and not any(needs[free[0]] & makes[o] for o in ordered):
            _report(said, ordered[0], free[0], found)
            return []
        ordered.append(free[0])
        rest.remove(free[0])
    for number, name in enumerate(ordered):
        for other in ordered[:number]:
            if _solvers(said[name]) & _solvers(said[other]):
                _report(said, other, name, found)
                return []
    return [line for name in ordered for line in said[name]]


def _report(said: Said, first: str, other: str, found: Findings) -> None:
    message = f"its `caffe train` lines are others than those of {first}"
    found.mistakes.add(said[other][0].solver.span, message, "say with `--order` what is meant")


def _without_repeats(said: Said) -> list[str]:
    keys = {name: {_key(line) for line in lines} for name, lines in said.items()}
    kept: list[str] = []
    for name in said:
        if not any(keys[name] < keys[o] for o in said) and not any(keys[name] == keys[o] for o in kept):
            kept.append(name)
    return kept


def _key(line: TrainLine) -> tuple[str, ...]:
    return tuple(posixpath.basename(w.text) if w else "" for w in (line.solver, line.weights, line.snapshot))


def _solvers(lines: Iterable[TrainLine]) -> set[str]:
    return {posixpath.basename(line.solver.text) for line in lines}


def _made(lines: Iterable[TrainLine], texts: Mapping[str, CaffeText]) -> set[str]:
    """The prefixes of what the solvers of the lines save."""
    left = [saved(texts[file]) for file in _solvers(lines) if file in texts]
    return {posixpath.basename(s.prefix) for s in left if s is not None}


def _prefix(word: Word) -> str:
    return re.sub(r"_iter_\d+.*$", "", posixpath.basename(word.text))


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """2_collapse.sh comes before 10_again.sh."""
    return [(int(part[:18]), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]
