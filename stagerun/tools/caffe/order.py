"""The order of the stages: from --order, or from the `caffe train` lines of the folder's READMEs and scripts. Pure."""

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from stagerun.base.errors import Problem, RecipeError, Span, nearest
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.stages import Step, by_order, names_of, no_order, note_prefixes, saved
from stagerun.tools.caffe.starts import as_ordered, by_commands
from stagerun.tools.caffe.text import SOLVER, CaffeText, Findings, is_solver, read_text
from stagerun.tools.caffe.train_lines import TrainLine, Word, train_lines

Said = Mapping[str, Sequence[TrainLine]]  # by the name of the file
MOST_NAMED = 6  # files in one entry of what is left out


def ordered_steps(
    folder: CaffeFolder, prototxts: Mapping[str, bytes], order: Sequence[str], found: Findings
) -> list[Step]:
    """The stages in their order, each with what it starts from. `prototxts`: those of the folder, by name. UsageError for a wrong
    --order; RecipeError if nothing says the order."""
    shown = folder.shown
    solvers = [name for name, data in prototxts.items() if is_solver(data)]
    if not solvers:
        hint = "a solver is a .prototxt with `base_lr`, `lr_policy`, `max_iter` and `net`"
        raise RecipeError([Problem("there is no solver file in this folder", Span(shown or ".", 1, 1), hint=hint)])
    names = names_of(solvers)
    # Mistakes in files that turn out to be no stage do not count; those of stages are found again when they are read.
    texts = {name: read_text(posixpath.join(shown, name), prototxts[name], SOLVER, Findings()) for name in solvers}
    said = said_by(shown, folder.scripts(), found)
    if order:
        steps = as_ordered(by_order(order, names), different(said), texts, found)
    else:
        steps = _from_scripts(said, folder.name, prototxts, names, texts, found)
        if not steps and len(solvers) == 1:
            steps = [Step(names[solvers[0]], solvers[0], ())]
        if not steps and not found.mistakes:
            raise RecipeError([no_order(shown or ".", names)])
    note_prefixes(steps, texts, found)
    if steps:
        _note_unused(shown, solvers, steps, found)
    return [replace(step, lines=lines_of(step.file, said)) for step in steps]


def _note_unused(shown: str, solvers: Sequence[str], steps: Sequence[Step], found: Findings) -> None:
    used = {step.file for step in steps}
    unused = [file for file in solvers if file not in used]
    if len(unused) == 1:
        found.leave(Span(posixpath.join(shown, unused[0]), 1, 1), "solver", "no stage: the order does not name it")
    elif unused:
        named = ", ".join(unused[:MOST_NAMED]) + (" ..." if len(unused) > MOST_NAMED else "")
        why = f"no stages: the order does not name them ({named})"
        found.leave(Span(shown or ".", 0, 0), f"{len(unused)} other solvers", why)


def _from_scripts(
    said: Mapping[str, Sequence[TrainLine]],
    folder: str,
    prototxts: Mapping[str, bytes],
    names: Mapping[str, str],
    texts: Mapping[str, CaffeText],
    found: Findings,
) -> list[Step]:
    """The stages that the commands of one file are, or of several that belong together."""
    lines = together(said, texts, found)
    files = _files(lines, folder, prototxts, names, found)
    return by_commands(lines, files, names, texts, found)


def _files(
    lines: Sequence[TrainLine],
    folder: str,
    prototxts: Mapping[str, bytes],
    names: Mapping[str, str],
    found: Findings,
) -> dict[Word, str]:
    """The solver's file for each word that names one: the one in the folder, by its name, wherever the path says that it is."""
    files = {}
    for line in lines:
        base = posixpath.basename(line.solver.text)
        above = posixpath.basename(posixpath.dirname(line.solver.text))
        if base in names:
            files[line.solver] = base
            if above not in ("", ".", "..", folder) and "$" not in line.solver.text:
                why = f"{line.solver.text} is in another folder than `{folder}`; the file of that name here is taken"
                found.leave(line.solver.span, "--solver", why)
        elif base in prototxts:
            message = f"`{base}` is not a solver file"
            found.mistakes.add(line.solver.span, message, "a solver has `base_lr`, `lr_policy`, `max_iter` and `net`")
        else:
            hint = nearest(base, names) or "the solver files there are " + ", ".join(names)
            found.mistakes.add(line.solver.span, f"there is no solver file `{base}` in this folder", hint)
    return files


# -- the `caffe train` lines of scripts and READMEs: which of them belong together, and in which order


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
    """The commands with a solver. One that says nothing of the workers is left out if another that is otherwise the same does:
    a README leaves out how a script starts it."""
    lines = [line for lines in said.values() for line in lines if posixpath.basename(line.solver.text) == file]
    telling = {_key(line) for line in lines if line.launch.says}
    return tuple(line for line in lines if line.launch.says or _key(line) not in telling)


def together(said: Said, texts: Mapping[str, CaffeText], found: Findings) -> list[TrainLine]:
    """The lines of one file, or of several that each have solvers of their own, where a file that goes on from what another makes
    comes after it. A file is passed over if another says everything in it. `texts` are the solvers' by name.

    It is a mistake if files contradict each other, or have nothing to do with each other.
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
