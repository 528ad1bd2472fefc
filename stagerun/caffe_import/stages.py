"""Which solvers are the stages, and how they are named. Pure."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.text import CaffeText
from stagerun.caffe_import.train_lines import TrainLine
from stagerun.errors import Problem, Span, UsageError, listing, nearest
from stagerun.spec.tree import SCHEDULE, Entry


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
    """What to say where nothing tells the order."""
    files = ", ".join(f"{file} ({name})" for file, name in names.items())
    hint = f"give it with `--order {','.join(names.values())}`, say"
    return Problem(f"no `caffe train` line tells the order of the solvers: {files}", Span(folder, 1, 1), hint=hint)
