"""Which solvers are the stages, how they are named, and what each starts from. Pure."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.text import CaffeText
from stagerun.caffe_import.train_lines import TrainLine, Word
from stagerun.errors import Problem, Span, UsageError, listing, nearest
from stagerun.spec.tree import SCHEDULE, Entry
from stagerun.spec.view import Doubtful, View


@dataclass(frozen=True, slots=True)
class Step:
    """A stage: its solver's file name, and what it starts from: `main`, `main@7638`; nothing is fresh weights. `workers` is
    None where no command says it."""

    name: str
    file: str
    parents: tuple[str, ...]
    workers: int | None = None


def names_of(files: Sequence[str]) -> dict[str, str]:
    """A short name of each solver file: what their names have in common at the start is left out, up to a `_` or `-`, and
    `solver` at either end. solver_custom_lr_init.prototxt and solver_custom_lr_cyc1.prototxt are `init` and `cyc1`; one that
    has no name left is `main`, as solver.prototxt is beside solver_collapse.prototxt.
    """
    stems = {file: posixpath.basename(file).removesuffix(".prototxt") for file in files}
    short = {file: _without_solver(stem) for file, stem in stems.items()}
    named = [name for name in short.values() if name]
    trunk = min(named, key=len, default="")
    if len(named) < len(short):
        start = ""  # one is `solver.prototxt`: the others keep their names
    elif len(named) > 1 and all(re.match(re.escape(trunk) + "([_-]|$)", name) for name in named):
        start = trunk
    elif len(named) > 1:
        start = re.sub(r"[^_-]*$", "", posixpath.commonprefix(named))
    else:
        start = ""
    names = {file: _legal(name.removeprefix(start).lstrip("_-")) or "main" for file, name in short.items()}
    if len(set(names.values())) < len(names):
        names = {file: _legal(stem) or f"stage{number}" for number, (file, stem) in enumerate(stems.items(), 1)}
    taken: dict[str, str] = {}
    for file, name in names.items():
        while name in taken.values() or name == "schedule" or name in SCHEDULE.fields_by_name:
            name += "_"
        taken[file] = name
    return taken


def _without_solver(stem: str) -> str:
    return re.sub(r"(^|[_-])solver$", "", re.sub(r"^solver([_-]|$)", "", stem))


def _legal(name: str) -> str:
    """Characters and length that a stage's name may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]


def by_order(order: Sequence[str], names: Mapping[str, str]) -> list[Step]:
    """The stages that --order names, each from the end of the one before: by stage, by file, or by file without its ending.

    Where it names files only, stages are called by what is not common to those files, whatever others there are.

    UsageError for a word that names none, or several, and for one that comes twice.
    """
    words = {
        file: {name, file, posixpath.basename(file), file.removesuffix(".prototxt")} for file, name in names.items()
    }
    steps: list[Step] = []
    named = [file for file, known in words.items() if known & {*order}]
    if len(named) > 1 and {*order} <= {*named, *(file.removesuffix(".prototxt") for file in named)}:
        names = {**names, **names_of(named)}
    for word in order:
        fitting = [file for file, known in words.items() if word in known]
        if len(fitting) != 1:
            listed = f"the solver files are {listing(list(names))}" if names else "there are no solver files"
            hint = nearest(word, [*names.values(), *names]) or f"{listed}, as stages {listing(list(names.values()))}"
            raise UsageError(
                f"--order names `{word}`, which is {'several' if fitting else 'no'} of the solver files", hint
            )
        if any(step.file == fitting[0] for step in steps):
            raise UsageError(f"--order names `{word}` twice", "each solver is one stage")
        steps.append(Step(names[fitting[0]], fitting[0], (steps[-1].name,) if steps else ()))
    return steps


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a stage leaves behind: the prefix of its snapshots, and at which iterations there is one."""

    prefix: str
    length: int
    every: int
    at_end: bool

    def has(self, iteration: int) -> bool:
        if iteration == self.length:
            return self.at_end or (self.every > 0 and iteration % self.every == 0)
        return 0 < iteration < self.length and self.every > 0 and iteration % self.every == 0


def _saved(text: CaffeText) -> _Saved | None:
    """None where a mistake, which is reported, leaves it open."""
    view = View(text.block)
    try:
        prefix, length = view.text("snapshot_prefix"), view.whole("max_iter")
        # Without a prefix, Caffe takes the solver's own name (BVLC), or fails.
        prefix = prefix if prefix is not None else posixpath.basename(text.path).removesuffix(".prototxt")
        if length is None:
            return None
        return _Saved(prefix, length, view.whole("snapshot") or 0, view.flag("snapshot_after_train"))
    except Doubtful:
        return None


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
        before = steps.get(file)
        if line.snapshot is not None:
            _resumed(line.snapshot, file, before, texts, found)
            if before is None:
                steps[file] = Step(names[file], file, (), line.workers)
            continue
        parent = _parent(line.weights, steps, texts, found) if line.weights else None
        if line.weights and parent is None:
            steps.setdefault(file, Step(names[file], file, ()))  # that what starts from it is not reported, too
            continue
        if before is None:
            steps[file] = Step(names[file], file, (parent,) if parent else (), line.workers)
        elif parent and parent not in before.parents and before.parents:
            steps[file] = Step(before.name, file, (*before.parents, parent), before.workers)
        elif bool(parent) != bool(before.parents):
            message = f"`{line.solver.text}` starts from fresh weights in one line and from a stage's in another"
            found.mistakes.add(line.solver.span, message, "give each a solver file of its own, or --order")
    return list(steps.values())


def _resumed(snapshot: Word, file: str, before: Step | None, texts: Mapping[str, CaffeText], found: Findings) -> None:
    """`--snapshot`: the same solver goes on, which is one stage here."""
    match = re.fullmatch(r"(.*)_iter_(\d+)\.solverstate(?:\.h5)?", snapshot.text)
    if match is None:
        hint = "write `..._iter_N.solverstate`; weights alone are `--weights`"
        found.mistakes.add(snapshot.span, f"`--snapshot` names `{snapshot.text}`, which is no .solverstate", hint)
        return
    own = _saved(texts[file]) if file in texts else None
    if own is not None and posixpath.basename(match[1]) != posixpath.basename(own.prefix):
        message = f"`{file}` goes on in the middle of another solver: {snapshot.text}"
        hint = "a stage begins at its own iteration 0: take `--weights` with the .caffemodel, and rewrite its policy"
        found.mistakes.add(snapshot.span, message, hint)
    elif own is not None and not own.has(int(match[2][:18])):
        found.mistakes.add(
            snapshot.span, f"`{file}` makes no snapshot at iteration {match[2]}", _when(own, int(match[2][:18]))
        )


def _parent(weights: Word, steps: Mapping[str, Step], texts: Mapping[str, CaffeText], found: Findings) -> str | None:
    """The stage whose weights these are, `main` or `main@7638`; None after a mistake."""
    if "," in weights.text:
        found.mistakes.add(weights.span, "`--weights` names several files", "a stage starts from one; give --order")
        return None
    match = re.fullmatch(r"(.*)_iter_(\d+)(\.\w+(?:\.h5)?)?", weights.text)
    ending = match[3] or "" if match else posixpath.splitext(weights.text)[1]
    if ending not in (".caffemodel", ".caffemodel.h5"):
        right = (weights.text.removesuffix(ending) if ending else weights.text) + ".caffemodel"
        hint = f"write {right}" + ("; a .solverstate is for `--snapshot`" if ending == ".solverstate" else "")
        found.mistakes.add(weights.span, f"`--weights` names `{weights.text}`, which is no .caffemodel", hint)
    if match is None:
        if ending in (".caffemodel", ".caffemodel.h5"):
            hint = "stagerun starts from a stage or from fresh weights: take `--weights` out, or add the stage that made them"
            found.mistakes.add(weights.span, f"no stage makes `{weights.text}`", hint)
        return None
    prefix, iteration = match[1], int(match[2][:18])
    saved = {file: s for file in texts if (s := _saved(texts[file])) is not None}
    fitting = [f for f, s in saved.items() if s.prefix == prefix] or [
        f for f, s in saved.items() if posixpath.basename(s.prefix) == posixpath.basename(prefix)
    ]
    earlier = [f for f in fitting if f in steps]
    makers = [f for f in earlier if saved[f].has(iteration)]
    if len(makers) == 1:
        return _named(steps[makers[0]], iteration, saved[makers[0]], weights, found)
    if len(makers) > 1:
        message = f"{listing(makers)} write to one `snapshot_prefix`, and each makes iteration {iteration}"
        found.mistakes.add(weights.span, message.replace(" or ", " and "), "give each a prefix of its own, or --order")
    elif earlier:
        message = f"`{earlier[0]}` makes no snapshot at iteration {iteration}"
        found.mistakes.add(weights.span, message, _when(saved[earlier[0]], iteration))
    elif fitting:
        message = f"`{weights.text}` is made by `{fitting[0]}`, which is not trained before"
        found.mistakes.add(weights.span, message, "put its `caffe train` line first, or give --order")
    else:
        known = [f"{s.prefix}_iter_{s.length}.caffemodel" for f, s in saved.items() if f in steps]
        hint = nearest(weights.text, known) or (f"the stages before make {listing(known)}" if known else "")
        found.mistakes.add(weights.span, f"no stage makes `{weights.text}`", hint)
    return None


def _named(step: Step, iteration: int, saved: _Saved, weights: Word, found: Findings) -> str | None:
    if len(step.parents) > 1:
        message = f"`{step.file}` is trained from {listing(list(step.parents))}; which of them is meant can't be told"
        found.mistakes.add(weights.span, message.replace(" or ", " and "), "give each a solver file of its own")
        return None
    return step.name if iteration == saved.length else f"{step.name}@{iteration}"


def _when(saved: _Saved, iteration: int) -> str:
    """Where there are snapshots, as a hint."""
    there = []
    if saved.every > 0:
        below = min(iteration, saved.length) // saved.every * saved.every
        there = [i for i in (below, below + saved.every) if saved.has(i)]
    there += [saved.length] if saved.at_end and saved.length not in there else []
    said = "snapshot: every " + str(saved.every) if saved.every else "only at the end" if saved.at_end else "none"
    return f"{said} of {saved.length} iterations" + (
        f"; there is one at {' and '.join(map(str, there))}" if there else ""
    )


def note_prefixes(steps: Sequence[Step], texts: Mapping[str, CaffeText], found: Findings) -> None:
    """Stages that wrote over each other's snapshots."""
    by_prefix: dict[str, list[Entry]] = {}
    for step in steps:
        entry = texts[step.file].block.entries.get("snapshot_prefix") if step.file in texts else None
        if entry is not None:
            by_prefix.setdefault(str(entry.values[0].value), []).append(entry)
    for entries in by_prefix.values():
        if len(entries) > 1:
            why = f"{len(entries)} solvers have this one, and wrote over each other's snapshots"
            found.leave(entries[1].place, "snapshot_prefix", why, "here every stage has its own")


def no_order(folder: str, names: Mapping[str, str]) -> Problem:
    """What to say where nothing tells the order."""
    files = ", ".join(f"{file} ({name})" for file, name in names.items())
    hint = f"give it with `--order {','.join(names.values())}`, say"
    return Problem(f"no `caffe train` line tells the order of the solvers: {files}", Span(folder, 1, 1), hint=hint)
