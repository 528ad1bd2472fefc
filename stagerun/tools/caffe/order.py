"""The stages in their order, and what each starts from: fresh weights, a stage, or a file. From --order, or from the `caffe train`
lines of the folder's READMEs and scripts."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.errors import Problem, RecipeError, Span, listing, nearest
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.stages import Saved, Step, by_order, names_of, saved
from stagerun.tools.caffe.text import Findings, is_solver, read_solver
from stagerun.tools.caffe.train_lines import TrainLine, train_lines

ITERATION = re.compile(r"(.*)_iter_(\d{1,18})\.\w+(?:\.h5)?")
MOST_NAMED = 6  # files in one entry of what is left out


def ordered_steps(
    folder: CaffeFolder, prototxts: Mapping[str, bytes], order: Sequence[str], found: Findings
) -> list[Step]:
    """Return the stages, parents first. `prototxts`: those of the folder, by name. UsageError for a wrong --order; RecipeError if
    nothing tells the order."""
    shown = Span(folder.shown or ".", 0, 0)
    solvers = [name for name, data in prototxts.items() if is_solver(data)]
    if not solvers:
        hint = "a solver is a .prototxt with `base_lr`, `lr_policy`, `max_iter` and `net`"
        raise RecipeError(
            [Problem("there is no solver file in this folder", replace(shown, line=1, column=1), hint=hint)]
        )
    names = names_of(solvers)
    # Mistakes in files that turn out to be no stage do not count; those of stages are found again when they are read.
    texts = (read_solver(posixpath.join(folder.shown, name), prototxts[name], Findings()) for name in solvers)
    starts = Starts(folder, {name: s for name, text in zip(solvers, texts, strict=True) if (s := saved(text))})
    lines = _lines(folder, found)
    if order:
        steps = _as_ordered(by_order(order, names), lines, starts, found)
    elif not lines and len(solvers) == 1:
        steps = [Step(names[solvers[0]], solvers[0])]
    elif not (steps := _as_said(lines, names, starts, found)) and not found.mistakes:
        files = ", ".join(f"{file} ({name})" for file, name in names.items())
        hint = f"give it with `--order {','.join(names.values())}`, say; `--order {names[solvers[0]]}` imports that one alone"
        message = f"no `caffe train` line says the order of the solvers: {files}"
        raise RecipeError([Problem(message, replace(shown, line=1, column=1), hint=hint)])
    if steps and (unused := [file for file in solvers if file not in {step.file for step in steps}]):
        named = ", ".join(unused[:MOST_NAMED]) + (" ..." if len(unused) > MOST_NAMED else "")
        by = "`--order` does not name them" if order else "no `caffe train` line names them"
        found.leave(shown, f"{len(unused)} other solvers", f"they are left out: {by} ({named})")
    return [replace(s, lines=tuple(line for line in lines if line.file == s.file)) for s in steps]


def _lines(folder: CaffeFolder, found: Findings) -> list[TrainLine]:
    """The commands of all scripts, then of all READMEs, what starts from nothing first. Of those that differ in the launcher alone
    one that has it is kept; of two numbers none."""
    kept: dict[tuple[str, ...], TrainLine] = {}
    for name, data in folder.scripts().items():
        path, text = posixpath.join(folder.shown, name), data.decode(errors="replace").replace("\0", " ")
        for line in train_lines(path, text):
            found.mistakes.file(path, text)
            key = (line.file, line.option, posixpath.basename(line.start.text if line.start else ""))
            if key not in kept or kept[key].workers is None:
                kept[key] = line
            elif line.workers not in (None, kept[key].workers):
                kept[key] = replace(line, workers=0)
    return sorted(kept.values(), key=lambda line: line.start is not None)


def _as_said(lines: Sequence[TrainLine], names: Mapping[str, str], starts: "Starts", found: Findings) -> list[Step]:
    """The stages of commands: each starts from what those before it make, else from a file that is there."""
    roots = {line.solver.span.path: line for line in lines if line.start is None and line.file in names}
    if len(roots) > 1:
        message = f"{listing(list(roots), 'and')} each train something from the beginning"
        hint = (
            f"name what is meant, in its order, with `--order`: {', '.join(dict.fromkeys(line.file for line in lines))}"
        )
        found.mistakes.add(next(iter(roots.values())).solver.span, message, hint)
        return []
    steps: dict[str, Step] = {}
    for line in lines:
        if line.file not in names:
            hint = nearest(line.file, names) or "the solver files there are " + ", ".join(names)
            found.mistakes.add(line.solver.span, f"there is no solver file `{line.file}` in this folder", hint)
            continue
        fresh = Step(names[line.file], line.file)
        step, before = starts.step(fresh, line, steps), steps.setdefault(line.file, fresh)
        if step is None:
            found.mistakes.add(line.place, *starts.why_not(line, steps))
        elif before is fresh:
            steps[line.file] = step
        elif before.parents and step.parents and not before.begins and not step.begins:
            steps[line.file] = replace(before, parents=(*before.parents, *step.parents))
        elif not step.own:
            message = f"`{line.solver.text}` starts here from something else than in a line before"
            found.mistakes.add(line.solver.span, message, "give each a solver file of its own, or --order")
    return list(steps.values())


def _as_ordered(ordered: Sequence[Step], lines: Sequence[TrainLine], starts: "Starts", found: Findings) -> list[Step]:
    """The stages of --order. A command tells where in the stage before it starts; one that says something else is listed."""
    steps: dict[str, Step] = {}
    for step in ordered:
        for line in (line for line in lines if line.file == step.file):
            said = starts.step(Step(step.name, step.file), line, steps)
            if said and [parent.partition("@")[0] for parent in said.parents] == list(step.parents):
                steps.setdefault(step.file, said)
            elif said is None or not said.own:
                start = f"from the end of `{step.parents[0]}`" if step.parents else "from fresh weights"
                why = "the command starts from something else" if said else starts.why_not(line, steps)[0]
                found.leave(line.place, line.option, f"{why}; with `--order` `{step.name}` starts {start}")
        steps.setdefault(step.file, step)
    return list(steps.values())


@dataclass(frozen=True, slots=True)
class Starts:
    """What a command starts from. `saved`: the snapshots of each solver."""

    folder: CaffeFolder
    saved: Mapping[str, Saved]

    def step(self, step: Step, line: TrainLine, steps: Mapping[str, Step]) -> Step | None:
        """Return `step` with its start, where `steps` are trained before; None if none of them makes what the command names, and
        there is no such file."""
        word = line.start
        if word is None:
            return step
        if not word.text.removesuffix(".h5").endswith(line.ending):
            return None
        match = ITERATION.fullmatch(word.text)
        prefix, iteration = (match[1], int(match[2])) if match else ("", 0)
        fitting = [f for f, s in self.saved.items() if s.prefix == prefix] or [
            f for f, s in self.saved.items() if posixpath.basename(s.prefix) == posixpath.basename(prefix)
        ]
        snapshot = line.option == "--snapshot"
        if snapshot and step.file in fitting and step.file in steps:
            return replace(step, own=True)
        makers = [f for f in fitting if f in steps and f != step.file and self.saved[f].has(iteration, steps[f].begins)]
        if len(makers) == 1 and len(steps[makers[0]].parents) < 2:
            parent, own = steps[makers[0]], self.saved.get(step.file)
            at = "" if iteration == self.saved[makers[0]].length else f"@{iteration - parent.begins}"
            goes_on = own is None or not snapshot or own.length > iteration
            begins = iteration if snapshot else 0
            return replace(step, parents=(parent.name + at,), begins=begins, start=word) if goes_on else None
        # Weights from elsewhere may be copied there later.
        later = match is None and not snapshot and not {",", "$"} & {*word.text}
        return replace(step, start=word, given=True) if later or self.folder.file(word.text) else None

    def why_not(self, line: TrainLine, steps: Mapping[str, Step]) -> tuple[str, str]:
        """Why `step` has no answer: the message, and a hint with the candidates."""
        text, ending = line.start.text if line.start else "", line.ending
        made = [f"{s.prefix}_iter_{s.length}{ending}" for f, s in self.saved.items() if f in steps and f != line.file]
        there = self.folder.beside(text, ending)
        hints = [f"stages make {listing(made)}"] if made else []
        hints += [f"there are {listing(there)}"] if there else []
        message = (
            f"`{line.option}` names `{text}`: no single stage before makes it, and no {ending} of that name is here"
        )
        return message, "; ".join([*hints, "`--order` trains without it"])
