"""The order of the stages: from --order, or from the `caffe train` lines of the folder's READMEs and scripts; and what each starts
from: fresh weights, a stage's weights, or its snapshot. Pure."""

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.errors import Problem, RecipeError, Span, listing, nearest
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.stages import (
    Resumed,
    Sought,
    Step,
    by_order,
    names_of,
    no_order,
    note_prefixes,
    saved,
    saved_by,
    seek,
    when,
)
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
    said = {
        name: [replace(line, there=_there(line, folder)) for line in lines]
        for name, lines in said_by(shown, folder.scripts(), found).items()
    }
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
        by = "`--order` does not name" if order else "no `caffe train` line names"
        _note_unused(shown, solvers, steps, by, found)
    return [replace(step, lines=lines_of(step.file, said)) for step in steps]


def _there(line: TrainLine, folder: CaffeFolder) -> bool:
    word = line.snapshot or line.weights
    return word is not None and bool(folder.file(word.text))


def _note_unused(shown: str, solvers: Sequence[str], steps: Sequence[Step], by: str, found: Findings) -> None:
    used = {step.file for step in steps}
    unused = [file for file in solvers if file not in used]
    if len(unused) == 1:
        found.leave(Span(posixpath.join(shown, unused[0]), 1, 1), "solver", f"it is left out: {by} it")
    elif unused:
        named = ", ".join(unused[:MOST_NAMED]) + (" ..." if len(unused) > MOST_NAMED else "")
        why = f"they are left out: {by} them ({named})"
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
    lines: Sequence[TrainLine], folder: str, prototxts: Mapping[str, bytes], names: Mapping[str, str], found: Findings
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
            _conflict(said, ordered[0], free[0], found)
            return []
        ordered.append(free[0])
        rest.remove(free[0])
    for number, name in enumerate(ordered):
        for other in ordered[:number]:
            if _solvers(said[name]) & _solvers(said[other]):
                _conflict(said, other, name, found)
                return []
    return [line for name in ordered for line in said[name]]


def _conflict(said: Said, first: str, other: str, found: Findings) -> None:
    message = f"its `caffe train` lines differ from those of {first}"
    files = dict.fromkeys(posixpath.basename(line.solver.text) for lines in said.values() for line in lines)
    hint = f"name the one that is meant, or several, with `--order`: {', '.join(files)}"
    found.mistakes.add(said[other][0].solver.span, message, hint)


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


ITERATION = r"(.*)_iter_(\d+)"
DIGITS = 18  # of an iteration that are read: more than any that there is


@dataclass(frozen=True, slots=True)
class Start:
    """`parent`: `main`, `main@7638`; '' is fresh weights, or those of the `given` file. `own`: from a snapshot that the solver saved itself, which is one
    stage with what it did before."""

    parent: str = ""
    resumed: Resumed | None = None
    own: bool = False
    given: Word | None = None

    @property
    def stage(self) -> str:
        return self.parent.partition("@")[0]

    def __str__(self) -> str:
        if self.given is not None:
            return self.given.text
        if not self.parent:
            return "fresh weights"
        return f"{'a snapshot' if self.resumed else 'the weights'} of `{self.parent}`"


def by_commands(
    lines: Sequence[TrainLine],
    files: Mapping[Word, str],
    names: Mapping[str, str],
    texts: Mapping[str, CaffeText],
    found: Findings,
) -> list[Step]:
    """The stages of `caffe train` commands. `files` has the solver's file for the word that names it; a command whose solver is
    not there has been reported. Weights that no stage makes, and the like, are mistakes.
    """
    steps: dict[str, Step] = {}
    for line in lines:
        file = files.get(line.solver)
        if file is None:
            continue
        before, start = steps.get(file), _start(line, file, steps, texts, found)
        if start is None:
            steps.setdefault(file, Step(names[file], file, ()))  # that what starts from it is not reported, too
        elif before is None:
            _note_own(start, line, file, found)
            steps[file] = _begun(Step(names[file], file, ()), start)
        elif not start.own:
            steps[file] = _once_more(before, start, line, found)
    return list(steps.values())


def _note_own(start: Start, line: TrainLine, file: str, found: Findings) -> None:
    if start.own and line.snapshot is not None:
        why = f"no line starts {file}, and it goes on from what it saved itself: one stage, from its beginning"
        found.leave(line.snapshot.span, "--snapshot", why)


def _begun(step: Step, start: Start) -> Step:
    return replace(step, parents=(start.parent,) if start.parent else (), resumed=start.resumed, given=start.given)


def _once_more(before: Step, start: Start, line: TrainLine, found: Findings) -> Step:
    """A stage after a further command with its solver: the same one again, or one with weights of another stage."""
    if _same(before, start):
        return before
    if before.parents and start.parent and not before.resumed and not start.resumed and start.stage != before.name:
        return replace(before, parents=(*before.parents, start.parent))
    message = f"`{line.solver.text}` starts from {_first(before)} in one line and from {start} in another"
    found.mistakes.add(line.solver.span, message, "give each a solver file of its own, or --order")
    return before


def _same(step: Step, start: Start) -> bool:
    parents = step.parents or ("",)
    given = [word and word.text for word in (step.given, start.given)]
    begins = start.resumed.iteration if start.resumed else 0
    return start.parent in parents and step.begins == begins and given[0] == given[1]


def _first(step: Step) -> Start:
    return Start(step.parents[0] if step.parents else "", step.resumed, given=step.given)


def as_ordered(
    ordered: Sequence[Step], lines: Sequence[TrainLine], texts: Mapping[str, CaffeText], found: Findings
) -> list[Step]:
    """The stages of --order with what it leaves open and the commands say: where in the stage before each starts. Where --order
    says something else, that counts, and the command is listed."""
    steps: dict[str, Step] = {}
    for step in ordered:
        own = [line for line in lines if posixpath.basename(line.solver.text) == step.file]
        steps[step.file] = _as_said(step, own, steps, texts, found)
    return list(steps.values())


def _as_said(
    step: Step, lines: Sequence[TrainLine], steps: Mapping[str, Step], texts: Mapping[str, CaffeText], found: Findings
) -> Step:
    said, taken = step, None
    for line in lines:
        trial = Findings()
        start = _start(line, step.file, {**steps, step.file: said} if taken else steps, texts, trial)
        wrong = next((problem.message for problem in trial.mistakes.all()), "")
        if start is None or wrong:
            _note_other(line, wrong, said, found)
        elif start.own and not taken:
            _note_own(start, line, step.file, found)
        elif not taken and start.stage == _first(step).stage:
            said, taken = _begun(step, start), line
        elif not (start.own or (taken and _same(said, start))):
            _note_other(line, f"`{step.name}` starts from {start} here", said, found)
    return said


def _note_other(line: TrainLine, why: str, said: Step, found: Findings) -> None:
    option = "--snapshot" if line.snapshot else "--weights" if line.weights else "--solver"
    place = (line.snapshot or line.weights or line.solver).span
    found.leave(place, option, f"{why}; with `--order` it starts from {_first(said)}")


def _start(
    line: TrainLine, file: str, steps: Mapping[str, Step], texts: Mapping[str, CaffeText], found: Findings
) -> Start | None:
    """What a command starts from, where `steps` were trained before; None after a mistake."""
    if line.snapshot is not None:
        if _of_no_stage(line.snapshot, ".solverstate", line.there, texts):
            return Start(given=line.snapshot)
        return _of_snapshot(line.snapshot, file, steps, texts, found)
    if line.weights is None:
        return Start()
    if _of_no_stage(line.weights, ".caffemodel", line.there, texts):
        return Start(given=line.weights)
    parent = _of_weights(line.weights, steps, texts, found)
    return Start(parent) if parent else None


def _of_no_stage(word: Word, ending: str, there: bool, texts: Mapping[str, CaffeText]) -> bool:
    """Whether a file of that kind is of none of the solvers, by its name. One that is called like a solver's and isn't `there` may be meant
    for one."""
    stem = word.text.removesuffix(".h5")
    if not stem.endswith(ending) or "," in stem:
        return False
    match = re.fullmatch(ITERATION, stem.removesuffix(ending))
    prefixes = {posixpath.basename(s.prefix) for text in texts.values() if (s := saved(text)) is not None}
    return match is None or (there and posixpath.basename(match[1]) not in prefixes)


def _of_snapshot(
    snapshot: Word, file: str, steps: Mapping[str, Step], texts: Mapping[str, CaffeText], found: Findings
) -> Start | None:
    """`--snapshot`: the solver goes on itself, or with what another saved."""
    match = re.fullmatch(ITERATION + r"\.solverstate(?:\.h5)?", snapshot.text)
    if match is None:
        hint = "write `..._iter_N.solverstate`; weights alone are `--weights`"
        found.mistakes.add(snapshot.span, f"`--snapshot` names `{snapshot.text}`, which is not a .solverstate", hint)
        return None
    iteration = int(match[2][:DIGITS])
    sought = seek(match[1], iteration, steps, texts)
    makes = file in sought.fitting and sought.saved[file].has(iteration)
    others = [maker for maker in sought.makers if maker != file]
    if makes and (file in steps or not others):
        return Start(own=True)
    if len(others) == 1:
        parent = _named(steps[others[0]], iteration, sought, snapshot, found)
        length = sought.saved[file].length if file in sought.saved else None
        if parent and length is not None and length <= iteration:
            message = f"`{file}` has nothing to do from iteration {iteration} on: its max_iter is {length}"
            found.mistakes.add(snapshot.span, message, "max_iter counts from the beginning of what it goes on from")
            return None
        return Start(parent, Resumed(iteration, snapshot.span)) if parent else None
    _not_made(sought, others, snapshot, iteration, steps, found)
    return None


def _of_weights(weights: Word, steps: Mapping[str, Step], texts: Mapping[str, CaffeText], found: Findings) -> str:
    """The stage whose weights these are, `main` or `main@7638`; '' after a mistake."""
    if "," in weights.text:
        found.mistakes.add(weights.span, "`--weights` names several files", "a stage starts from one; give --order")
        return ""
    match = re.fullmatch(ITERATION + r"(\.\w+(?:\.h5)?)?", weights.text)
    ending = match[3] or "" if match else posixpath.splitext(weights.text)[1]
    if ending not in (".caffemodel", ".caffemodel.h5"):
        right = (weights.text.removesuffix(ending) if ending else weights.text) + ".caffemodel"
        hint = f"write {right}" + ("; a .solverstate is for `--snapshot`" if ending == ".solverstate" else "")
        found.mistakes.add(weights.span, f"`--weights` names `{weights.text}`, which is not a .caffemodel", hint)
    if match is None:
        if ending in (".caffemodel", ".caffemodel.h5"):
            hint = "stagerun starts from a stage or from fresh weights: take `--weights` out, or add the stage that made them"
            found.mistakes.add(weights.span, f"no stage makes `{weights.text}`", hint)
        return ""
    iteration = int(match[2][:DIGITS])
    sought = seek(match[1], iteration, steps, texts)
    if len(sought.makers) == 1:
        return _named(steps[sought.makers[0]], iteration, sought, weights, found)
    _not_made(sought, sought.makers, weights, iteration, steps, found)
    return ""


def _named(step: Step, iteration: int, sought: Sought, word: Word, found: Findings) -> str:
    """What `from` says of a stage at Caffe's iteration; '' after a mistake."""
    if len(step.parents) > 1:
        message = (
            f"`{step.file}` is trained from {listing(list(step.parents), 'and')}; which of them is meant is not known"
        )
        found.mistakes.add(word.span, message, "give each a solver file of its own")
        return ""
    ends = iteration == sought.saved[step.file].length
    return step.name if ends else f"{step.name}@{iteration - step.begins}"


def _not_made(
    sought: Sought, makers: Sequence[str], word: Word, iteration: int, steps: Mapping[str, Step], found: Findings
) -> None:
    """Why what a command names is not what one stage made before: several did, or none."""
    able = [file for file, saved in sought.saved.items() if file in sought.fitting and saved.has(iteration)]
    if len(makers) > 1:
        message = f"{listing(makers, 'and')} write to one `snapshot_prefix`, and each makes iteration {iteration}"
        found.mistakes.add(word.span, message, "give each a prefix of its own, or --order")
    elif able:
        message = f"`{word.text}` is made by `{able[0]}`, which is not trained before"
        found.mistakes.add(word.span, message, "put its `caffe train` line first, or give --order")
    elif sought.fitting:
        file = (sought.earlier or sought.fitting)[0]
        message = f"`{file}` makes no snapshot at iteration {iteration}"
        found.mistakes.add(word.span, message, when(sought.saved[file], iteration))
    else:
        found.mistakes.add(word.span, f"no stage makes `{word.text}`", saved_by(sought, word.text, steps))
