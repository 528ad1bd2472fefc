"""The stages: their names, which snapshots each leaves, and how many workers it had. Pure."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.errors import Problem, Span, UsageError, listing, nearest
from stagerun.language.tree import SCHEDULE, Entry
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.text import CaffeText, Findings, Left
from stagerun.tools.caffe.train_lines import TrainLine, Word


@dataclass(frozen=True, slots=True)
class Resumed:
    """Caffe's `--snapshot` with what another solver saved: the momentum goes on, and iterations are counted from there."""

    iteration: int
    span: Span


@dataclass(frozen=True, slots=True)
class Step:
    """A stage: its solver's file name, and what it starts from: `main`, `main@7638`; nothing is fresh weights. `lines` are
    its commands, as far as they say different things."""

    name: str
    file: str
    parents: tuple[str, ...]
    resumed: Resumed | None = None
    lines: tuple[TrainLine, ...] = ()
    given: Word | None = None  # a file of weights, or a solverstate, that no stage makes

    @property
    def begins(self) -> int:
        """The stage's first iteration, as Caffe counts."""
        return self.resumed.iteration if self.resumed else 0


def names_of(files: Sequence[str]) -> dict[str, str]:
    """A short name of each solver file: what their names have in common at the start is left out, up to a `_` or `-`, and
    the word `solver`. solver_custom_lr_init.prototxt and solver_custom_lr_cyc1.prototxt are `init` and `cyc1`; one that
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
    return re.sub(r"(^|[_-])solver(?=[_-]|$)", "", stem).lstrip("_-")


def _legal(name: str) -> str:
    """Characters and length that a stage's name may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]


def by_order(order: Sequence[str], names: Mapping[str, str]) -> list[Step]:
    """The stages that --order names, each from the end of the one before: by stage, by file, or by file without its ending.

    Where it names files only, stages are called by what is not common to those files, whatever others there are.

    UsageError for a name that is left out, a word that names none, or several, and for one that comes twice.
    """
    words = {
        file: {name, file, posixpath.basename(file), file.removesuffix(".prototxt")} for file, name in names.items()
    }
    if "" in order:
        raise UsageError("`--order` leaves a name out", "write names with a comma between two: `init,cyc1,collapse`")
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


def note_prefixes(steps: Sequence[Step], texts: Mapping[str, CaffeText], found: Findings) -> None:
    """Stages that wrote over each other's snapshots."""
    by_prefix: dict[str, list[Entry]] = {}
    for step in steps:
        entry = texts[step.file].block.entries.get("snapshot_prefix") if step.file in texts else None
        if entry is not None and step.resumed is None:
            by_prefix.setdefault(str(entry.values[0].value), []).append(entry)
    for entries in by_prefix.values():
        if len(entries) > 1:
            why = f"{len(entries)} solvers have this one: they wrote over each other's snapshots, or went on from them"
            todo = "here every stage has its own; that one went on, a `caffe train` line with `--snapshot` says"
            found.leave(entries[1].place, "snapshot_prefix", why, todo)


def no_order(folder: str, names: Mapping[str, str]) -> Problem:
    """What to say if nothing says the order."""
    files = ", ".join(f"{file} ({name})" for file, name in names.items())
    hint = f"give it with `--order {','.join(names.values())}`, say; `--order {next(iter(names.values()))}` imports that one alone"
    return Problem(f"no `caffe train` line says the order of the solvers: {files}", Span(folder, 1, 1), hint=hint)


# -- what solvers leave behind: their snapshots


@dataclass(frozen=True, slots=True)
class Saved:
    """The snapshots of a solver, at iterations as Caffe counts them. `begins`: the one that it starts at, 0 unless it goes on
    from another solver's; `length`: the one that it ends at."""

    prefix: str
    begins: int
    length: int
    every: int
    at_end: bool

    def has(self, iteration: int) -> bool:
        regular = self.every > 0 and iteration % self.every == 0
        if iteration == self.length > self.begins:
            return self.at_end or regular
        return self.begins < iteration < self.length and regular


def saved(text: CaffeText, begins: int = 0) -> Saved | None:
    """None where a mistake, which is reported, leaves it open."""
    view = View(text.block)
    try:
        prefix, length = view.text("snapshot_prefix"), view.whole("max_iter")
        # Without a prefix, Caffe takes the solver's own name (BVLC), or fails.
        prefix = prefix if prefix is not None else posixpath.basename(text.path).removesuffix(".prototxt")
        if length is None:
            return None
        return Saved(prefix, begins, length, view.whole("snapshot") or 0, view.flag("snapshot_after_train"))
    except Doubtful:
        return None


@dataclass(frozen=True, slots=True)
class Sought:
    """Solvers that may have made a snapshot. `saved`: all, by file. `fitting`: those with its prefix; `earlier`: those of them
    that are trained before; `makers`: those of them that save that iteration."""

    saved: Mapping[str, Saved]
    fitting: tuple[str, ...]
    earlier: tuple[str, ...]
    makers: tuple[str, ...]


def seek(prefix: str, iteration: int, steps: Mapping[str, Step], texts: Mapping[str, CaffeText]) -> Sought:
    """Who makes PREFIX_iter_N. `steps` are what is trained before, by file. The prefix may stand in another folder."""
    known = {file: s for file in texts if (s := saved(texts[file], _begins(steps.get(file)))) is not None}
    fitting = [f for f, s in known.items() if s.prefix == prefix] or [
        f for f, s in known.items() if posixpath.basename(s.prefix) == posixpath.basename(prefix)
    ]
    earlier = tuple(f for f in fitting if f in steps)
    return Sought(known, tuple(fitting), earlier, tuple(f for f in earlier if known[f].has(iteration)))


def _begins(step: Step | None) -> int:
    return step.begins if step else 0


def when(found: Saved, iteration: int) -> str:
    """Where there are snapshots, as a hint."""
    there = []
    if found.every > 0:
        below = min(iteration, found.length) // found.every * found.every
        there = [i for i in (below, below + found.every) if found.has(i)]
    there += [found.length] if found.at_end and found.length not in there else []
    said = "snapshot: every " + str(found.every) if found.every else "only at the end" if found.at_end else "none"
    return f"{said} of {found.length} iterations" + (
        f"; there is one at {' and '.join(map(str, there))}" if there else ""
    )


def saved_by(sought: Sought, wanted: str, steps: Mapping[str, Step]) -> str:
    """What the stages before make, as a hint to a name that none makes."""
    ending = ".solverstate" if ".solverstate" in wanted else ".caffemodel"
    known = [f"{s.prefix}_iter_{s.length}{ending}" for f, s in sought.saved.items() if f in steps]
    return nearest(wanted, known) or (f"the stages before make {listing(known)}" if known else "")


# -- workers

ONE_FOR_ALL = "import again with `--workers N`"


@dataclass(frozen=True, slots=True)
class Workers:
    """`number` is None where the batch is to be asked for. `factors` are those of the batch: `8 workers`; of a question what is
    known, and what isn't: `8 processes`, `the GPUs of each`."""

    number: int | None
    factors: tuple[str, ...] = ()
    doubts: tuple[Left, ...] = ()


def workers_of(step: Step, steps: Sequence[Step], given: int | None, batch: Span) -> Workers:
    """The workers of a stage, one of `steps`. `given`: --workers, which counts for all stages, whatever commands say. `batch`: the
    place of the net's batch.

    They are asked for where a command has a number that can't be read, as `--gpu all`; where commands of the stage have
    different ones; and where its commands start one alone and those of other stages several, which may have been left out.
    """
    if given is not None:
        return _known(given)
    todo = f"fill in its batch_size, or {ONE_FOR_ALL}"
    if doubts := _open(step, todo):
        line = next(line for line in step.lines if line.launch.number is None)
        return Workers(None, _factors(line), doubts)
    numbers = {line.launch.number or 1: line for line in reversed(step.lines)}
    if len(numbers) > 1:
        first, *more = sorted(numbers.values(), key=step.lines.index)
        counts = " or ".join(str(number) for number in sorted(numbers))
        before = f"{_workers(first.launch.number)} in {_at(first)}"
        why = f"stage {step.name} has {_workers(more[0].launch.number)} here and {before}"
        return Workers(None, (f"{counts} workers",), (Left(more[0].solver.span, "batch_size", why, todo),))
    if any(line.launch.says for line in step.lines):
        return _known(next(iter(numbers)))
    return _unsaid(step, [s for s in steps if any(line.launch.says for line in s.lines)], todo, batch)


def _known(number: int) -> Workers:
    return Workers(number, (f"{number} workers",) if number > 1 else ())


def _open(step: Step, todo: str) -> tuple[Left, ...]:
    """What the stage's commands say, but not as a number."""
    doubts: list[Left] = []
    for line in step.lines:
        launch = line.launch
        if launch.processes == 0 and launch.launcher is not None:
            why = f"stage {step.name}: the command does not say how many processes it starts"
            doubts.append(Left(launch.launcher.span, f"`{launch.launcher.text}`", why, todo))
        if launch.gpus == 0 and launch.gpu is not None:
            each = f"each of the {launch.processes} processes" if (launch.processes or 1) > 1 else "each process"
            who = "it" if launch.processes is None else each
            why = f"stage {step.name}: the command does not say how many GPUs {who} had"
            doubts.append(Left(launch.gpu.span, f"`--gpu {launch.gpu.text}`", why, todo))
    return tuple(doubts)


def _factors(line: TrainLine) -> tuple[str, ...]:
    """The factors of a question about a command with an unknown number."""
    processes, gpus = line.launch.processes, line.launch.gpus
    found = []
    if processes is not None and processes != 1:
        found.append(f"{processes} processes" if processes else "the processes")
    if gpus is not None and gpus != 1:
        found.append(f"{gpus or 'the'} GPUs" + (" of each" if found else ""))
    return tuple(found)


def _unsaid(step: Step, telling: Sequence[Step], todo: str, batch: Span) -> Workers:
    """A stage none of whose commands says anything of workers. `telling` are the stages where one does."""
    if not telling:
        why = "taken for a whole update, since nothing says how many workers there were"
        return Workers(1, (), (Left(batch, "batch_size", why, f"{ONE_FOR_ALL} if there were several"),))
    other = next((s for s in telling if _number(s) != 1), telling[0])
    number = _number(other)
    theirs = f"{other.name} had {_workers(number)}" if number else f"how many {other.name} had is not known"
    if step.lines and number != 1:
        place = step.lines[0].solver.span
        why = f"stage {step.name}: the command starts one worker, without `mpirun -n` and `--gpu`; {theirs}"
        return Workers(
            None, (f"1 or {number} workers" if number else "the workers",), (Left(place, "batch_size", why, todo),)
        )
    why = f"stage {step.name}: taken for a whole update, of one worker, since nothing says how many it had; {theirs}"
    todo = f"write batch_size in {step.name}.prototxt if there were several"
    return Workers(1, (), (Left(step.lines[0].solver.span if step.lines else batch, "batch_size", why, todo),))


def _number(step: Step) -> int | None:
    """The workers that its commands say; None if that isn't known."""
    numbers = {line.launch.number for line in step.lines}
    return numbers.pop() if len(numbers) == 1 else None


def _workers(number: int | None) -> str:
    return "one worker" if number == 1 else f"{number} workers"


def _at(line: TrainLine) -> str:
    return f"{line.solver.span.path}:{line.solver.span.line}"
