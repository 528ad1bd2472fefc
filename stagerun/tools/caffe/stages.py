"""The stages: their names, which snapshots each leaves, and how many workers it had. Pure."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stagerun.base.errors import Span, UsageError, listing, nearest
from stagerun.language.tree import SCHEDULE
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.text import CaffeText, Findings
from stagerun.tools.caffe.train_lines import TrainLine, Word


@dataclass(frozen=True, slots=True)
class Step:
    """A stage: its solver's file name, and what it starts from: `main`, `main@7638`; without parents fresh weights, or the file that
    `start` names if it is `given`. `begins`: its first iteration as Caffe counts, after another solver's snapshot. `own`: it goes on
    from a snapshot that its solver saved. `lines` are its commands."""

    name: str
    file: str
    parents: tuple[str, ...] = ()
    begins: int = 0
    start: Word | None = None
    given: bool = False
    own: bool = False
    lines: tuple[TrainLine, ...] = ()


def names_of(files: Sequence[str]) -> dict[str, str]:
    """A short name of each solver file: what their names have in common at the start is left out, up to a `_` or `-`, and
    the word `solver`. solver_custom_lr_init.prototxt and solver_custom_lr_cyc1.prototxt are `init` and `cyc1`; one that
    has no name left is `main`, as solver.prototxt is beside solver_collapse.prototxt.
    """
    stems = {file: posixpath.basename(file).removesuffix(".prototxt") for file in files}
    short = {f: re.sub(r"(^|[_-])solver(?=[_-]|$)", "", stem).lstrip("_-") for f, stem in stems.items()}
    trunk, start = min(short.values(), key=len), ""
    if trunk and len(short) > 1:  # where one is `solver.prototxt` the others keep their names
        whole = all(re.match(re.escape(trunk) + "([_-]|$)", name) for name in short.values())
        start = trunk if whole else re.sub(r"[^_-]*$", "", posixpath.commonprefix(list(short.values())))
    names = {file: _legal(name.removeprefix(start).lstrip("_-")) or "main" for file, name in short.items()}
    if len(set(names.values())) < len(names):
        names = {file: _legal(stem) or f"stage{number}" for number, (file, stem) in enumerate(stems.items(), 1)}
    taken: dict[str, str] = {}
    for file, name in names.items():
        while name in taken.values() or name == "schedule" or name in SCHEDULE.fields_by_name:
            name += "_"
        taken[file] = name
    return taken


def _legal(name: str) -> str:
    """Characters and length that a stage's name may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]


def by_order(order: Sequence[str], names: Mapping[str, str]) -> list[Step]:
    """The stages that --order names, each from the end of the one before: by stage, by file, or by file without its ending. Where it
    names files only, stages are called by what is not common to those. UsageError for words that name none, several, or one twice."""
    if "" in order:
        raise UsageError("`--order` leaves a name out", "write names with a comma between two: `init,cyc1,collapse`")
    words = {file: {name, file, file.removesuffix(".prototxt")} for file, name in names.items()}
    named = [file for file, known in words.items() if known & {*order}]
    if len(named) > 1 and {*order} <= {*named, *(file.removesuffix(".prototxt") for file in named)}:
        names = {**names, **names_of(named)}
    steps: list[Step] = []
    for word in order:
        fitting = [file for file, known in words.items() if word in known]
        if len(fitting) != 1:
            listed = f"the solver files are {listing(list(names))}, as stages {listing(list(names.values()))}"
            message = f"--order names `{word}`, which is {'several' if fitting else 'no'} of the solver files"
            raise UsageError(message, nearest(word, [*names.values(), *names]) or listed)
        if any(step.file == fitting[0] for step in steps):
            raise UsageError(f"--order names `{word}` twice", "each solver is one stage")
        steps.append(Step(names[fitting[0]], fitting[0], (steps[-1].name,) if steps else ()))
    return steps


# -- what solvers leave behind: their snapshots


@dataclass(frozen=True, slots=True)
class Saved:
    """The snapshots of a solver, at iterations as Caffe counts them. `length`: the one that it ends at."""

    prefix: str
    length: int
    every: int

    def has(self, iteration: int, begins: int) -> bool:
        regular = self.every > 0 and iteration % self.every == 0
        return begins < iteration and (iteration == self.length or (regular and iteration < self.length))


def saved(text: CaffeText) -> Saved | None:
    """None where a mistake, which is reported, leaves it open."""
    view = View(text.block)
    with suppress(Doubtful):
        # Without a prefix, Caffe takes the solver's own name (BVLC), or fails.
        prefix = view.text("snapshot_prefix") or posixpath.basename(text.path).removesuffix(".prototxt")
        length = view.whole("max_iter")
        return Saved(prefix, length, view.whole("snapshot") or 0) if length is not None else None
    return None


# -- workers


@dataclass(frozen=True, slots=True)
class Workers:
    """Those of a stage. `nodes`: whether an MPI launcher starts several, or --workers says so: Intel's several nodes."""

    number: int
    nodes: bool


def workers_of(step: Step, steps: Sequence[Step], given: int | None, batch: Span, found: Findings) -> Workers:
    """The workers of a stage, one of `steps`. `given`: --workers, which counts for all stages, whatever commands say. `batch`: the
    place of the net's batch. A number that can't be told is a mistake, for which the hint is --workers."""
    if given is not None:
        return Workers(given, given > 1)
    numbers = {line.workers: line for line in reversed(step.lines) if line.workers is not None}
    others = {line.workers: line for s in steps for line in s.lines if line.workers not in (None, 1)}
    if not numbers and not others:
        why = "taken for a whole update, since nothing says how many workers there were"
        found.leave(batch, "batch_size", why, "import again with `--workers N` if there were several")
    elif 0 in numbers or len(numbers) > 1 or (not numbers and step.lines):
        line = numbers.get(0) or next(iter(numbers.values()), step.lines[0])
        known = " or ".join(str(n) for n in sorted({n or 1 for n in {*numbers, *others}}))
        message = f"how many workers stage {step.name} had isn't known: commands have {known}"
        hint = "give `--workers N`, and write batch_size in stages that had another number"
        found.mistakes.add(line.solver.span, message, hint)
    elif not numbers:
        why = f"stage {step.name}: taken for a whole update, of one worker; other stages had several"
        found.leave(batch, "batch_size", why, f"write batch_size in {step.name}.prototxt if it had, too")
    said = next(iter(numbers.values()), None)
    return Workers((said.workers or 1) if said else 1, bool(said and said.nodes))
