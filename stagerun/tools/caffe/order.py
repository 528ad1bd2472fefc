"""What the `caffe train` lines of a folder's scripts and READMEs say: the stages in their order, what each starts from, and its workers.
Lines are read, never run. What they leave open is a mistake with the candidates: `--order` or `--workers` says it."""

import posixpath
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from stagerun.base.errors import Problem, RecipeError, Span, listing, nearest
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.names import names_in_order, names_of
from stagerun.tools.caffe.text import Findings, is_solver, read_solver

MOST_NAMED = 6  # files in one entry of what is left out


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class TrainLine:
    """A command. `file`: its solver's, without folders. `start`: what `option` names, --weights or --snapshot, a file that ends in
    `ending`. `workers`: None if the command is silent, 0 if the number is unknown. `nodes`: whether an MPI launcher starts several."""

    file: str
    solver: Word
    start: Word | None
    option: str
    ending: str
    workers: int | None
    nodes: bool

    @property
    def place(self) -> Span:
        return (self.start or self.solver).span


# A line end, `;`, `&&` and `|` stand between two commands; `2>&1` belongs to one.
_COMMAND = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*'|[<>]&|&>|[^\n;|&])+""")
_ASSIGNMENT = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s"'$`]*)\s*""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_TRAIN = re.compile(r"(?<!\S)(\S++)\s++train(?!\S)")
_CAFFE = re.compile(r"[`(\"']*(?!-)(?:.*/)?caffe(?:\.bin|\.exe)?[\"']?")
# A variable that no line sets may stand for a launcher.
_LAUNCHER = re.compile(r"(?<![\w-])(?:mpirun|mpiexec|srun|prun|ibrun)(?:\.\w+)?(?!\S)|(?<!\S)\$(?!\w*DOCKER)\w+(?!\S)")
# A command goes on after a comment, a backslash, and, as READMEs break lines, where the next line begins with an option,
# or with `caffe` below a launcher and its options.
_GOES_ON = re.compile(r"(?m)(?:^|(?<=[ \t]))#.*|\\[ \t\r]*\n|\n(?=[ \t]*-)")
_OPTION = r"[ \t]+(?:--?(?:genv|env|mca)[ \t]+\S+[ \t]+\S+|-\S+(?:[ \t]+[^-\s]\S*)?)"
_CAFFE_BELOW = re.compile(rf"(?:{_LAUNCHER.pattern})(?:{_OPTION})*+[ \t\r]*\n(?=[ \t]*\S*caffe(?:\.bin|\.exe)?[ \t])")


def train_lines(path: str, text: str) -> Iterator[TrainLine]:
    """The commands in the order of the file."""
    variables: dict[str, str] = {}
    joined = _GOES_ON.sub(lambda match: " " * len(match[0]), text)  # places stay
    joined = _CAFFE_BELOW.sub(lambda match: match[0][:-1] + " ", joined)

    def put_in(part: str) -> str:
        return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), part)

    def word(match: re.Match[str] | None) -> Word | None:
        if match is None:
            return None
        begin = match.start() if match[1] == "=" else match.start(2)
        raw = text[begin : match.end()].rstrip("\\,.)`")
        span = Span(path, text.count("\n", 0, begin) + 1, begin - text.rfind("\n", 0, begin), len(raw) or 1)
        return Word(re.sub(r"[\"'`]", "", put_in(match[2])).rstrip("\\,.)"), span)

    for command in _COMMAND.finditer(joined):
        if assignment := _ASSIGNMENT.fullmatch(command[0]):
            variables[assignment[1]] = assignment[2].strip("\"'")
        programs = [m for m in _TRAIN.finditer(joined, *command.span()) if _CAFFE.fullmatch(put_in(m[1]))]
        begins = [command.start(), *(program.end() for program in programs)]
        ends = [*(program.start() for program in programs[1:]), command.end()]
        for begin, program, end in zip(begins, programs, ends, strict=False):
            solver, weights, snapshot, gpu = (
                word(_option(joined, name, program.end(), end)) for name in ("solver", "weights", "snapshot", "gpu")
            )
            if solver is None:
                continue
            before = put_in(joined[begin : program.start()])
            launched = _LAUNCHER.search(before) is not None
            number = _option(before, "np?|ntasks")
            nodes = int(number[2]) if number and re.fullmatch(r"[0-9]{1,9}", number[2]) else 0
            gpus = gpu.text.count(",") + 1 if gpu and re.fullmatch(r"\d+(,\d+)*", gpu.text) else 0
            workers = (nodes if launched else 1) * (gpus if gpu else 1) if launched or gpu else None
            option = "--snapshot" if snapshot else "--weights" if weights else "--solver"
            file, ending = posixpath.basename(solver.text), ".solverstate" if snapshot else ".caffemodel"
            yield TrainLine(file, solver, snapshot or weights, option, ending, workers, launched and nodes > 1)


def _option(text: str, name: str, begin: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
    """-name or --name, and its value, after `=` or as the next word."""
    return re.compile(rf"(?<!\S)--?(?:{name})(=|\s+)(\S+)").search(text, begin, end)


# -- the stages


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


def ordered_steps(
    folder: CaffeFolder, prototxts: Mapping[str, bytes], order: Sequence[str], found: Findings
) -> list[Step]:
    """Return the stages, parents first. `prototxts`: those of the folder, by name. `order`: --order. UsageError where that is wrong;
    RecipeError if nothing tells the order."""
    names = names_of([file for file, data in prototxts.items() if is_solver(data)])
    place = Span(folder.shown or ".", 1, 1)
    if not names:
        hint = "a solver is a .prototxt with `base_lr`, `lr_policy`, `max_iter` and `net`"
        raise RecipeError([Problem("there is no solver file in this folder", place, hint=hint)])
    lines: list[TrainLine] = []
    for script, data in folder.scripts().items():
        path, text = posixpath.join(folder.shown, script), data.decode(errors="replace").replace("\0", " ")
        lines += train_lines(path, text)
        found.mistakes.file(path, text)
    lines.sort(key=lambda line: line.start is not None)  # what starts from nothing comes first
    single: dict[tuple[str, ...], TrainLine] = {}
    for line in lines:  # scripts and READMEs say the same
        single.setdefault((line.file, line.option, posixpath.basename(line.start.text if line.start else "")), line)
    saved = {file: _saved(posixpath.join(folder.shown, file), prototxts[file]) for file in names}
    chain = Chain(folder, names, saved, found)
    roots = {line.solver.span.path: line for line in single.values() if line.start is None and line.file in names}
    if order:
        chain.follow(names_in_order(order, names), single.values())
    elif not lines and len(names) == 1:
        chain.steps = {file: Step(name, file) for file, name in names.items()}
    elif len(roots) <= 1:
        chain.read(single.values())
    if not chain.steps and not found.mistakes:
        files = ", ".join(f"{file} ({name})" for file, name in names.items())
        what = "no `caffe train` line says the order of the solvers"
        if len(roots) > 1:
            what = f"{listing([*roots], 'and')} each train something from the beginning; the solvers are"
        hint = f"give it with `--order {','.join(names.values())}`, say; `--order {next(iter(names.values()))}` imports that one alone"
        raise RecipeError([Problem(f"{what}: {files}", place, hint=hint)])
    if chain.steps and (unused := [file for file in names if file not in chain.steps]):
        named = ", ".join(unused[:MOST_NAMED]) + (" ..." if len(unused) > MOST_NAMED else "")
        by = "`--order` does not name them" if order else "no `caffe train` line names them"
        found.leave(replace(place, line=0), f"{len(unused)} other solvers", f"they are left out: {by} ({named})")
    return [replace(s, lines=tuple(line for line in lines if line.file == s.file)) for s in chain.steps.values()]


class Saved(NamedTuple):
    """The snapshots that a solver leaves, at iterations as Caffe counts them: every `every`, and `length`. 0 is open, after a mistake."""

    prefix: str = ""
    length: int = 0
    every: int = 0

    def has(self, iteration: int) -> bool:
        regular = self.every > 0 and iteration % self.every == 0 and iteration < self.length
        return regular or iteration == self.length


def _saved(path: str, data: bytes) -> Saved:
    view = View(read_solver(path, data, Findings()).block)  # its mistakes are found again if it is a stage
    with suppress(Doubtful):
        # Without a prefix, Caffe takes the solver's own name (BVLC), or fails.
        prefix = view.text("snapshot_prefix") or posixpath.basename(path).removesuffix(".prototxt")
        return Saved(prefix, view.whole("max_iter") or 0, view.whole("snapshot") or 0)
    return Saved()


class Chain:
    """The stages so far, by solver file. `names` and `saved`: of all solvers."""

    def __init__(
        self, folder: CaffeFolder, names: Mapping[str, str], saved: Mapping[str, Saved], found: Findings
    ) -> None:
        self.folder, self.names, self.saved, self.found = folder, names, saved, found
        self.steps: dict[str, Step] = {}

    def read(self, lines: Collection[TrainLine]) -> None:
        """Each starts from what those before it make, else from a file that is there."""
        for line in lines:
            if line.file not in self.names:
                hint = nearest(line.file, self.names) or "the solver files there are " + ", ".join(self.names)
                self.found.mistakes.add(line.solver.span, f"there is no solver file `{line.file}` in this folder", hint)
                continue
            step, before = self.start(line), self.steps.get(line.file)
            if step is None:
                self.found.mistakes.add(line.place, *self.why_not(line))
                self.steps.setdefault(line.file, Step(self.names[line.file], line.file))
            elif before is None:
                self.steps[line.file] = step
            elif before.parents and step.parents and not before.begins and not step.begins:
                self.steps[line.file] = replace(before, parents=(*before.parents, *step.parents))
            elif not step.own:
                message = f"`{line.solver.text}` starts here from something else than in a line before"
                self.found.mistakes.add(line.solver.span, message, "give each a solver file of its own, or --order")

    def follow(self, order: Mapping[str, str], lines: Collection[TrainLine]) -> None:
        """Each starts from the end of the one before, or where a line says so in it; a line that says something else is listed.
        `order`: the names of the stages by solver file."""
        parents: tuple[str, ...] = ()
        for file, name in order.items():
            for line in (line for line in lines if line.file == file):
                step = self.start(line)
                if step and tuple(parent.partition("@")[0] for parent in step.parents) == parents:
                    self.steps.setdefault(file, replace(step, name=name))
                elif not (step and step.own):
                    why = "the command starts from something else" if step else self.why_not(line)[0]
                    start = f"from the end of `{parents[0]}`" if parents else "from fresh weights"
                    self.found.leave(line.place, line.option, f"{why}; with `--order` `{name}` starts {start}")
            self.steps.setdefault(file, Step(name, file, parents))
            parents = (name,)

    def start(self, line: TrainLine) -> Step | None:
        """The stage with its start; None if no stage makes what the line names, and there is no such file."""
        step, word, snapshot = Step(self.names[line.file], line.file), line.start, line.option == "--snapshot"
        if word is None:
            return step
        match = re.fullmatch(r"(?:(.*)_iter_(\d{1,18})|.*?)(\.\w+)(?:\.h5)?", word.text, re.DOTALL)
        if match is None or match[3] != line.ending:
            return None
        prefix, iteration = match[1] or "", int(match[2] or 0)
        fitting = [file for file, saved in self.saved.items() if saved.prefix == prefix]
        base = posixpath.basename(prefix)
        fitting = fitting or [file for file, saved in self.saved.items() if posixpath.basename(saved.prefix) == base]
        if snapshot and step.file in fitting and step.file in self.steps:
            return replace(step, own=True)
        others = [(self.steps[file], self.saved[file]) for file in fitting if file in self.steps and file != step.file]
        makers = [(parent, saved) for parent, saved in others if parent.begins < iteration and saved.has(iteration)]
        if len(makers) == 1 and len(makers[0][0].parents) < 2:
            ((parent, saved),) = makers
            at = "" if iteration == saved.length else f"@{iteration - parent.begins}"
            begins = iteration if snapshot else 0
            goes_on = begins < (self.saved[step.file].length or begins + 1)
            return replace(step, parents=(parent.name + at,), begins=begins, start=word) if goes_on else None
        # Weights from elsewhere may be copied there later.
        later = match[1] is None and not snapshot and not {",", "$"} & {*word.text}
        return replace(step, start=word, given=True) if later or self.folder.file(word.text) else None

    def why_not(self, line: TrainLine) -> tuple[str, str]:
        """Why a line has no start: the message, and a hint with the candidates."""
        text = line.start.text if line.start else ""
        saved = [self.saved[file] for file in self.saved if file in self.steps and file != line.file]
        made = [f"{one.prefix}_iter_{one.length}{line.ending}" for one in saved if one.length]
        there = self.folder.beside(text, line.ending)
        hints = [f"stages make {listing(made)}"] if made else []
        hints += [f"there are {listing(there)}"] if there else []
        message = f"`{line.option}` names `{text}`: no single stage before makes it, and no {line.ending} of that name is here"
        return message, "; ".join([*hints, "`--order` trains without it"])


# -- workers


class Workers(NamedTuple):
    """Those of a stage. `nodes`: whether an MPI launcher starts several, or --workers says so: Intel's several nodes."""

    number: int
    nodes: bool


def workers_of(step: Step, steps: Sequence[Step], given: int | None, batch: Span, found: Findings) -> Workers:
    """The workers of a stage, one of `steps`. `given`: --workers, which counts for all stages, whatever commands say. `batch`: the
    place of the net's batch. A number that can't be told is a mistake, for which the hint is --workers."""
    if given is not None:
        return Workers(given, given > 1)
    said = {line.workers: line for line in reversed(step.lines) if line.workers is not None}
    others = {line.workers for s in steps for line in s.lines} - {None, 1}
    if not said and not others:
        why = "taken for a whole update, since nothing says how many workers there were"
        found.leave(batch, "batch_size", why, "import again with `--workers N` if there were several")
    elif not said and not step.lines:
        why = f"stage {step.name}: taken for a whole update, of one worker; other stages had several"
        found.leave(batch, "batch_size", why, f"write batch_size in {step.name}.prototxt if it had, too")
    elif 0 in said or len(said) != 1:
        known = " or ".join(str(n) for n in sorted(n for n in {*said, *others} if n))
        message = f"how many workers stage {step.name} had isn't known" + (f": commands have {known}" if known else "")
        hint = "give `--workers N`, and write batch_size in stages that had another number"
        found.mistakes.add((said.get(0) or step.lines[0]).solver.span, message, hint)
    line = next(iter(said.values()), None)
    return Workers(line.workers or 1, line.nodes) if line else Workers(1, False)
