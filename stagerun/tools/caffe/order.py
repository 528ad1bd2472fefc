"""The stages in their order, and what each starts from: fresh weights, a stage, or a file. From --order, or from the `caffe train`
lines of the folder's READMEs and scripts."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.errors import Problem, RecipeError, Span, listing, nearest
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.stages import Saved, Step, by_order, names_of, saved
from stagerun.tools.caffe.text import SOLVER, Findings, is_solver, read_text
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
    texts = (read_text(posixpath.join(folder.shown, name), prototxts[name], SOLVER, Findings()) for name in solvers)
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
    """The commands of all scripts, then of all READMEs. Of those that differ in the launcher alone one that has it is kept;
    of two numbers none."""
    kept: dict[tuple[str, ...], TrainLine] = {}
    for name, data in folder.scripts().items():
        path, text = posixpath.join(folder.shown, name), data.decode(errors="replace").replace("\0", " ")
        for line in train_lines(path, text):
            found.mistakes.file(path, text)
            key = (line.file, *(posixpath.basename(w.text) if w else "" for w in (line.weights, line.snapshot)))
            if key not in kept or kept[key].workers is None:
                kept[key] = line
            elif line.workers not in (None, kept[key].workers):
                kept[key] = replace(line, processes=0, doubt=line.solver)
    return list(kept.values())


def _as_said(lines: Sequence[TrainLine], names: Mapping[str, str], starts: "Starts", found: Findings) -> list[Step]:
    """The stages of commands: each starts from what others make, else from a file that is there."""
    pending = [line for line in lines if line.file in names]
    for line in (line for line in lines if line.file not in names):
        hint = nearest(line.file, names) or "the solver files there are " + ", ".join(names)
        found.mistakes.add(line.solver.span, f"there is no solver file `{line.file}` in this folder", hint)
    roots = {line.solver.span.path: line for line in pending if line.start is None}
    if len(roots) > 1:
        message = f"{listing(list(roots), 'and')} each train something from the beginning"
        hint = f"name what is meant, in its order, with `--order`: {', '.join(dict.fromkeys(line.file for line in pending))}"
        found.mistakes.add(next(iter(roots.values())).solver.span, message, hint)
        return []
    steps, folder = dict[str, Step](), starts.folder
    for read in (False, True):  # a file only where no stage makes it
        tried: list[TrainLine] = []
        while pending != tried:
            tried, pending = pending, []
            for line in tried:
                before, step = steps.get(line.file), starts.step(Step(names[line.file], line.file), line, steps, read)
                if step is None:
                    pending.append(line)
                elif before is None or step.own:
                    steps[line.file] = before or step
                    if step.own and (there := folder.file(line.start.text if line.start else "")):
                        why = "one stage, from its beginning, is made of what the solver saved itself"
                        todo = f'to go on from the file, write `solverstate: "{there}"`'
                        found.leave(line.place, line.option, why, todo)
                elif before.parents and step.parents and not before.begins and not step.begins:
                    steps[line.file] = replace(before, parents=(*before.parents, *step.parents))
                else:
                    message = f"`{line.solver.text}` starts from {before.origin} in one line and from {step.origin} in another"
                    found.mistakes.add(line.solver.span, message, "give each a solver file of its own, or --order")
    for line in pending:
        found.mistakes.add(line.place, *starts.why_not(line, steps))
    for line in pending:  # their solvers are read for mistakes, too
        steps.setdefault(line.file, Step(names[line.file], line.file))
    return list(steps.values())


def _as_ordered(ordered: Sequence[Step], lines: Sequence[TrainLine], starts: "Starts", found: Findings) -> list[Step]:
    """The stages of --order. A command tells where in the stage before it starts; one that says something else is listed."""
    steps: dict[str, Step] = {}
    for step in ordered:
        chosen: Step | None = None
        for line in (line for line in lines if line.file == step.file):
            said = starts.step(replace(step, parents=()), line, steps, read=True)
            parents = [parent.partition("@")[0] for parent in said.parents] if said else []
            if said and not said.own and parents == list(step.parents) and not chosen:
                chosen = said
            elif said is None or not said.own:
                why = f"`{step.name}` starts from {said.origin} here" if said else starts.why_not(line, steps)[0]
                found.leave(line.place, line.option, f"{why}; with `--order` it starts from {(chosen or step).origin}")
        steps[step.file] = chosen or step
    return list(steps.values())


@dataclass(frozen=True, slots=True)
class Starts:
    """What a command starts from. `saved`: the snapshots of each solver."""

    folder: CaffeFolder
    saved: Mapping[str, Saved]

    def step(self, step: Step, line: TrainLine, steps: Mapping[str, Step], read: bool) -> Step | None:
        """Return `step` with its start, where `steps` are trained before; None if none of them makes what the command names, and,
        with `read`, there is no such file."""
        word = line.start
        if word is None:
            return step
        step = replace(step, start=word)
        if not word.text.removesuffix(".h5").endswith(line.ending) and "$" not in word.text:
            return None
        match = ITERATION.fullmatch(word.text)
        prefix, iteration = (match[1], int(match[2])) if match else ("", 0)
        fitting = [f for f, s in self.saved.items() if s.prefix == prefix] or [
            f for f, s in self.saved.items() if posixpath.basename(s.prefix) == posixpath.basename(prefix)
        ]
        if line.snapshot and step.file in fitting and step.file in steps:
            return replace(step, own=True)
        makers = [f for f in fitting if f in steps and f != step.file and self.saved[f].has(iteration, steps[f].begins)]
        if len(makers) == 1 and len(steps[makers[0]].parents) < 2:
            parent, own = steps[makers[0]], self.saved.get(step.file)
            at = "" if iteration == self.saved[makers[0]].length else f"@{iteration - parent.begins}"
            made = replace(step, parents=(parent.name + at,), begins=iteration if line.snapshot else 0)
            return made if own is None or own.length > made.begins else None
        # Weights from elsewhere may be copied there later.
        later = match is None and line.weights is not None and not {",", "$"} & {*word.text}
        return replace(step, given=True) if later or (read and self.folder.file(word.text)) else None

    def why_not(self, line: TrainLine, steps: Mapping[str, Step]) -> tuple[str, str]:
        """Why `step` has no answer: the message, and a hint with the candidates."""
        assert line.start is not None
        text, ending = line.start.text, line.ending
        made = [f"{s.prefix}_iter_{s.length}{ending}" for f, s in self.saved.items() if f in steps]
        there = self.folder.beside(text, ending)
        hints = [f"stages make {listing(made)}"] if made else []
        hints += [f"there are {listing(there)}"] if there else []
        what = "which no stage before makes, and no such file is here"
        if any(posixpath.basename(text) == posixpath.basename(name) for name in made):
            what = "which several stages make, or its solver's max_iter is no longer"
        elif "$" in text:
            what = "and no line sets the variable to a plain text"
        elif not text.removesuffix(".h5").endswith(ending):
            what = f"which is not a {ending}"
        return f"`{line.option}` names `{text}`, {what}", "; ".join([*hints, "`--order` trains without it"])
