"""The order of the stages: from --order, or from the `caffe train` lines of the folder's READMEs and scripts. Pure."""

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.scripts import different, lines_of, said_by, together
from stagerun.caffe_import.stages import Step, by_order, names_of, no_order, note_prefixes
from stagerun.caffe_import.starts import as_ordered, by_commands
from stagerun.caffe_import.text import SOLVER, CaffeText, is_solver, read_text
from stagerun.caffe_import.train_lines import TrainLine, Word
from stagerun.errors import Problem, RecipeError, Span, nearest

MOST_NAMED = 6  # files in one entry of what is left out


def ordered_steps(
    shown: str,
    name: str,
    prototxts: Mapping[str, bytes],
    scripts: Mapping[str, bytes],
    order: Sequence[str],
    found: Findings,
) -> list[Step]:
    """The stages in their order, each with what it starts from. `shown` is the folder as it was given, `name` its own name;
    `prototxts` and `scripts` are files in it by name.

    UsageError for a wrong --order; RecipeError where nothing tells the order.
    """
    solvers = [name for name, data in prototxts.items() if is_solver(data)]
    if not solvers:
        hint = "a solver is a .prototxt with `base_lr`, `lr_policy`, `max_iter` and `net`"
        raise RecipeError([Problem("there is no solver file in this folder", Span(shown or ".", 1, 1), hint=hint)])
    names = names_of(solvers)
    # Mistakes in files that turn out to be no stage do not count; those of stages are found again when they are read.
    texts = {name: read_text(posixpath.join(shown, name), prototxts[name], SOLVER, Findings()) for name in solvers}
    said = said_by(shown, scripts, found)
    if order:
        steps = as_ordered(by_order(order, names), different(said), texts, found)
    else:
        steps = _from_scripts(said, name, prototxts, names, texts, found)
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
            message = f"`{base}` is no solver file"
            found.mistakes.add(line.solver.span, message, "a solver has `base_lr`, `lr_policy`, `max_iter` and `net`")
        else:
            hint = nearest(base, names) or "the solver files there are " + ", ".join(names)
            found.mistakes.add(line.solver.span, f"there is no solver file `{base}` in this folder", hint)
    return files
