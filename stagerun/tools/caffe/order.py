"""The stages of a folder of Caffe's in their order, what each starts from, and its workers: by the `caffe train` lines of scripts and READMEs,
which are read and never run. What they leave open is a mistake with the candidates: `--order` or `--workers` says it."""

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from stagerun.base.errors import Problem, RecipeError, Span, UsageError, listing, nearest
from stagerun.language.tree import SCHEDULE
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.text import Findings, is_solver, read_solver

# A line end, `;`, `&&` and `|` stand between two commands; `2>&1` belongs to one.
_COMMAND = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*'|[<>]&|&>|[^\n;|&])+""")
_ASSIGNMENT = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s"'$`]*)\s*""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_TRAIN = re.compile(r"(?<!\S)(\S++)\s++train(?!\S)")
_OPTION = r"(?<!\S)--?(?:%s)(=|\s+)(\S+)"  # its value comes after `=` or as the next word
_CAFFE = re.compile(r"[`(\"']*(?!-)(?:.*/)?caffe(?:\.bin|\.exe)?[\"']?")
# A variable that no line sets may stand for a launcher.
_LAUNCHER = re.compile(r"(?<![\w-])(?:mpirun|mpiexec|srun|prun|ibrun)(?:\.\w+)?(?!\S)|(?<!\S)\$(?!\w*DOCKER)\w+(?!\S)")
# A command goes on after a comment, a backslash, and, as READMEs break lines, where the next line begins with an option,
# or with `caffe` below a launcher and its options.
_GOES_ON = re.compile(r"(?m)(?:^|(?<=[ \t]))#.*|\\[ \t\r]*\n|\n(?=[ \t]*-)")
_LAUNCHED_WITH = r"[ \t]+(?:--?(?:genv|env|mca)[ \t]+\S+[ \t]+\S+|-\S+(?:[ \t]+[^-\s]\S*)?)"
_CAFFE_BELOW = re.compile(
    rf"(?:{_LAUNCHER.pattern})(?:{_LAUNCHED_WITH})*+[ \t\r]*\n(?=[ \t]*\S*caffe(?:\.bin|\.exe)?[ \t])"
)


class Word(NamedTuple):
    text: str
    span: Span


class Workers(NamedTuple):
    """`number`: 0 is unknown. `nodes`: whether an MPI launcher starts several, or --workers says so: Intel's several nodes."""

    number: int
    nodes: bool


class TrainLine(NamedTuple):
    """A command. `file`: its solver's, without folders. `start`: what `option` names, --weights or --snapshot. `workers`: None if unsaid."""

    file: str
    solver: Word
    start: Word | None
    option: str
    workers: Workers | None


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
        at = match.start() if match[1] == "=" else match.start(2)
        raw = text[at : match.end()].rstrip("\\,.)`")
        span = Span(path, text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at), len(raw) or 1)
        return Word(re.sub(r"[\"'`]", "", put_in(match[2])).rstrip("\\,.)"), span)

    for command in _COMMAND.finditer(joined):
        if assignment := _ASSIGNMENT.fullmatch(command[0]):
            variables[assignment[1]] = assignment[2].strip("\"'")
        programs = [m for m in _TRAIN.finditer(joined, *command.span()) if _CAFFE.fullmatch(put_in(m[1]))]
        begin = command.start()
        for program, end in zip(programs, [*(p.start() for p in programs[1:]), command.end()], strict=False):
            options = [re.compile(_OPTION % name) for name in ("solver", "weights", "snapshot", "gpu")]
            solver, weights, snapshot, gpu = (word(one.search(joined, program.end(), end)) for one in options)
            before, begin = put_in(joined[begin : program.start()]), program.end()
            if solver is None:
                continue
            launched, number = _LAUNCHER.search(before) is not None, re.search(_OPTION % "np?|ntasks", before)
            nodes = int(number[2]) if number and re.fullmatch(r"[0-9]{1,9}", number[2]) else 0
            gpus = gpu.text.count(",") + 1 if gpu and re.fullmatch(r"\d+(,\d+)*", gpu.text) else 0
            workers = Workers((nodes if launched else 1) * (gpus if gpu else 1), launched and nodes > 1)
            named = "--snapshot" if snapshot else "--weights" if weights else "--solver"
            file, start = posixpath.basename(solver.text), snapshot or weights
            yield TrainLine(file, solver, start, named, workers if launched or gpu else None)


class Step(NamedTuple):
    """A stage: its solver's file name, and what it starts from: `main` or `main@7638`; without parents the file that `start` names, or
    fresh weights. It saves PREFIX_iter_N at iterations as Caffe counts: each `every`, and `length`; 0 is open, after a mistake. `begins`:
    its first iteration, after another solver's snapshot. `lines` are its commands."""

    name: str
    file: str
    prefix: str = ""
    length: int = 0
    every: int = 0
    parents: tuple[str, ...] = ()
    begins: int = 0
    start: Word | None = None
    lines: tuple[TrainLine, ...] = ()


def ordered_steps(folder: CaffeFolder, texts: Mapping[str, bytes], order: Sequence[str], found: Findings) -> list[Step]:
    """Return the stages, parents first. `texts`: the .prototxt files of the folder, by name. `order`: --order. UsageError where that is
    wrong; RecipeError if nothing tells the order."""
    names = names_of([file for file, data in texts.items() if is_solver(data)])
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
    roots = {line.solver.span.path: line for line in single.values() if line.start is None and line.file in names}
    named = names if len(names) == 1 and not (order or lines) else names_in_order(order, names)
    if not named and (not lines or len(roots) > 1):
        what = "no `caffe train` line says the order of the solvers"
        if lines:
            what = f"{listing([*roots], 'and')} each train something from the beginning; the solvers are"
        candidates = ", ".join(f"{file} ({name})" for file, name in names.items())
        hint = f"give it with `--order {','.join(names.values())}`, say; `--order {next(iter(names.values()))}` imports that one alone"
        raise RecipeError([Problem(f"{what}: {candidates}", place, hint=hint)])
    chain = Chain(folder, {file: _step(name, file, texts[file]) for file, name in {**names, **named}.items()}, found)
    if named:
        chain.follow([chain.solvers[file] for file in named], single.values())
    else:
        chain.read(single.values())
    if chain.steps and (unused := [file for file in names if file not in chain.steps]):
        by = "`--order` does not name them" if order else "no `caffe train` line names them"
        first = ", ".join(unused[:6]) + (" ..." if len(unused) > 6 else "")
        found.leave(Span(place.path, 0, 1), f"{len(unused)} other solvers", f"they are left out: {by} ({first})")
    return [s._replace(lines=tuple(line for line in lines if line.file == s.file)) for s in chain.steps.values()]


def _step(name: str, file: str, data: bytes) -> Step:
    view = View(read_solver(file, data, Findings()).block)  # its mistakes are found again if it is a stage
    with suppress(Doubtful):
        # Without a prefix, Caffe takes the solver's own name (BVLC), or fails.
        prefix = view.text("snapshot_prefix") or file.removesuffix(".prototxt")
        return Step(name, file, prefix, view.whole("max_iter") or 0, view.whole("snapshot") or 0)
    return Step(name, file)


class Chain:
    """The stages so far, by solver file. `solvers`: each solver as a stage without a start."""

    def __init__(self, folder: CaffeFolder, solvers: Mapping[str, Step], found: Findings) -> None:
        self.folder, self.solvers, self.found = folder, solvers, found
        self.steps: dict[str, Step] = {}

    def read(self, lines: Collection[TrainLine]) -> None:
        """Each starts from what those before it make, else from a file that is there."""
        for line in lines:
            step = self.start(line)
            if isinstance(step, Problem):
                self.found.mistakes.add(step.span, step.message, step.hint)
                if line.file in self.solvers:
                    self.steps.setdefault(line.file, self.solvers[line.file])
                continue
            before = self.steps.setdefault(line.file, step)
            if before.parents and step.parents and before is not step and not (before.begins or step.begins):
                self.steps[line.file] = before._replace(parents=(*before.parents, *step.parents))
            elif before is not step:
                message = f"`{line.solver.text}` starts here from something else than in a line before"
                self.found.mistakes.add(line.solver.span, message, "give each a solver file of its own, or --order")

    def follow(self, order: Collection[Step], lines: Collection[TrainLine]) -> None:
        """Each starts from the end of the one before, or where a line says so in it; a line that says something else is listed."""
        parents: tuple[str, ...] = ()
        for stage in order:
            for line in (line for line in lines if line.file == stage.file):
                step, why = self.start(line), "the command starts from something else"
                if isinstance(step, Problem):
                    why = step.message
                elif parents == tuple(p.partition("@")[0] for p in step.parents) and step is self.steps.setdefault(
                    step.file, step
                ):
                    continue
                start = f"from the end of `{parents[0]}`" if parents else "from fresh weights"
                place, why = (line.start or line.solver).span, f"{why}; with `--order` `{stage.name}` starts {start}"
                self.found.leave(place, line.option, why)
            self.steps.setdefault(stage.file, stage._replace(parents=parents))
            parents = (stage.name,)

    def start(self, line: TrainLine) -> Step | Problem:
        """The stage with its start; the one that there is where the line goes on from its own snapshot."""
        if line.file not in self.solvers:
            hint = nearest(line.file, self.solvers) or "the solver files there are " + ", ".join(self.solvers)
            return Problem(f"there is no solver file `{line.file}` in this folder", line.solver.span, hint=hint)
        step, word, snapshot = self.solvers[line.file], line.start, line.option == "--snapshot"
        if word is None:
            return step
        ending = ".solverstate" if snapshot else ".caffemodel"
        match = re.fullmatch(r"(?:(.*)_iter_(\d{1,18})|.*?)(\.\w+)(?:\.h5)?", word.text, re.DOTALL)
        makers: list[Step] = []
        if match and match[3] == ending:
            prefix, iteration = match[1] or "", int(match[2] or 0)
            fitting = [one.file for one in self.solvers.values() if one.prefix == prefix]
            base = posixpath.basename(prefix)
            fitting = fitting or [one.file for one in self.solvers.values() if posixpath.basename(one.prefix) == base]
            if snapshot and line.file in fitting and line.file in self.steps:
                return self.steps[line.file]
            makers = [self.steps[file] for file in fitting if file in self.steps and file != line.file]
            makers = [one for one in makers if one.begins < iteration <= one.length]
            makers = [one for one in makers if iteration == one.length or (one.every and iteration % one.every == 0)]
            if len(makers) == 1 and len(makers[0].parents) < 2 and (not snapshot or not 0 < step.length <= iteration):
                at = "" if iteration == makers[0].length else f"@{iteration - makers[0].begins}"
                return step._replace(parents=(makers[0].name + at,), begins=iteration if snapshot else 0, start=word)
            # Weights from elsewhere may be copied there later.
            later = match[1] is None and not snapshot and not {",", "$"} & {*word.text}
            if len(makers) != 1 and (later or self.folder.file(word.text)):
                return step._replace(start=word)
        others = [one for file, one in self.steps.items() if file != line.file and one.length]
        made = [f"{one.prefix}_iter_{one.length}{ending}" for one in others]
        there = self.folder.beside(word.text, ending)
        hints = [f"stages make {listing(made)}"] if made else []
        hints += [f"there are {listing(there)}"] if there else []
        message = f"`{line.option}` names `{word.text}`: no single stage before makes it, and no {ending} of that name is here"
        return Problem(message, word.span, hint="; ".join([*hints, "`--order` trains without it"]))


def workers_of(step: Step, steps: Sequence[Step], given: int | None, batch: Span, found: Findings) -> Workers:
    """The workers of a stage, one of `steps`. `given`: --workers, which counts for all stages, whatever commands say. `batch`: the
    place of the net's batch. A number that can't be told is a mistake, for which the hint is --workers."""
    if given is not None:
        return Workers(given, given > 1)
    said = {line.workers.number: line for line in reversed(step.lines) if line.workers}
    others = {line.workers.number for s in steps for line in s.lines if line.workers} - {1}
    if not said and not (others and step.lines):
        why = "taken for a whole update, since nothing says how many workers there were"
        todo = "if there were several, give `--workers N`, or write batch_size in the stage"
        found.leave(batch, "batch_size", why, todo)
    elif 0 in said or len(said) != 1:
        known = " or ".join(str(n) for n in sorted(n for n in {*said, *others} if n))
        message = f"how many workers stage {step.name} had isn't known" + (f": commands have {known}" if known else "")
        hint = "give `--workers N`, and write batch_size in stages that had another number"
        found.mistakes.add((said.get(0) or step.lines[0]).solver.span, message, hint)
    return next((line.workers for line in said.values() if line.workers), Workers(1, False))


def names_of(files: Sequence[str]) -> dict[str, str]:
    """A short name of each solver file: what their names have in common at the start is left out, up to a `_` or `-`, and
    the word `solver`. solver_custom_lr_init.prototxt and solver_custom_lr_cyc1.prototxt are `init` and `cyc1`; one that
    has no name left is `main`, as solver.prototxt is beside solver_collapse.prototxt.
    """
    stems = {file: file.removesuffix(".prototxt") for file in files}
    short = {f: re.sub(r"(^|[_-])solver(?=[_-]|$)", "", stem).lstrip("_-") for f, stem in stems.items()}
    trunk = min(short.values(), key=len, default="")
    start = re.sub(r"[^_-]*$", "", posixpath.commonprefix(list(short.values()))) if len(short) > 1 else ""
    if len(short) > 1 and trunk and all(re.match(re.escape(trunk) + "([_-]|$)", name) for name in short.values()):
        start = trunk
    names = {file: name.removeprefix(start).lstrip("_-") or "main" for file, name in short.items()}
    taken: dict[str, str] = {}
    for file, name in (names if len(set(names.values())) == len(names) else stems).items():
        name = re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]  # what the name of a stage may have
        while name in {"", "schedule", *taken.values()} or name in SCHEDULE.fields_by_name:
            name += "_"
        taken[file] = name
    return taken


def names_in_order(order: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """The solver files that --order names, by stage, by file, or by file without its ending; and their stages' names. Where it names
    files only, stages are called by what is not common to those. UsageError for words that name none, several, or one twice."""
    files: list[str] = []
    for word in order:
        fitting = [file for file, name in names.items() if word in (name, file, file.removesuffix(".prototxt"))]
        if len(fitting) != 1 or fitting[0] in files:
            why = " twice" if len(fitting) == 1 else f", which is {'several' if fitting else 'no'} of the solver files"
            hint = f"the solver files are {listing(list(names))}, as stages {listing(list(names.values()))}"
            near = nearest(word, [*names.values(), *names])
            raise UsageError(f"--order names `{word}`{why}", (near if not fitting else None) or hint)
        files += fitting
    only_files = all(word in (file, file.removesuffix(".prototxt")) for word, file in zip(order, files, strict=True))
    named = {**names, **names_of(files)} if len(files) > 1 and only_files else names
    return {file: named[file] for file in files}
