"""Order, starts and workers of the stages in a folder of Caffe's: read from the `caffe train` lines of scripts and READMEs, which are never
run. Whatever they leave open is a mistake that lists the candidates for `--order` or `--workers`."""

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from stagerun.base.errors import Problem, Problems, RecipeError, Span, UsageError, listing, nearest
from stagerun.caffe.importer.folder import CaffeFolder, is_solver, read_solver
from stagerun.language.tree import SCHEDULE, Doubtful

# A line end, `;`, `&&` and `|` stand between two commands; `2>&1` belongs to one.
_COMMAND = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*'|[<>]&|&>|[^\n;|&])+""")
_ASSIGNMENT = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s"'$`]*)\s*""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_TRAIN = re.compile(r"(?<!\S)(\S++)\s++train(?!\S)")
_OPTION = r"(?<!\S)--?%s(?:=|\s+)(\S+)"  # its value comes after `=` or as the next word
_PROCESSES = re.compile(r"(?<!\S)--?(?:np?|ntasks)(?:=|\s+)(?:([0-9]{1,9})(?!\S))?")
_CAFFE = re.compile(r"[`(\"']*(?!-)(?:.*/)?caffe(?:\.bin|\.exe)?[\"']?")
# A variable that no line sets may be a launcher.
_LAUNCHER = re.compile(r"(?<![\w-])(?:mpirun|mpiexec|srun|prun|ibrun)(?:\.\w+)?(?!\S)|(?<!\S)\$(?!\w*DOCKER)\w+(?!\S)")
# A command continues after a comment, a backslash, and, as READMEs break lines, if the next line begins with an option,
# or with `caffe train` below a launcher and its options.
_CONTINUED = re.compile(r"(?m)(?:^|(?<=[ \t]))#.*|\\[ \t\r]*\n|\n(?=[ \t]*-)")
_LAUNCHED_WITH = r"[ \t]+(?:--?(?:genv|env|mca)[ \t]+\S+[ \t]+\S+|-\S+(?:[ \t]+[^-\s]\S*)?)"
_BELOW = re.compile(rf"(?:{_LAUNCHER.pattern})(?:{_LAUNCHED_WITH})*+[ \t\r]*\n(?=[ \t]*\S+[ \t]+train\s)")
_SNAPSHOT = re.compile(r"(?:(.*)_iter_(\d{1,18})|.*?)(\.\w+)(?:\.h5)?", re.DOTALL)


class Word(NamedTuple):
    text: str
    span: Span


class Workers(NamedTuple):
    """A stage's workers. `number`: 0 if unknown. `nodes`: several processes of an MPI launcher or by --workers, Intel's several nodes."""

    number: int
    nodes: bool


ALONE = Workers(1, False)


class TrainLine(NamedTuple):
    """A command. `file`: its solver's name without folders. `start`: the value of `option`, --weights or --snapshot. `workers`: None if
    unknown."""

    file: str
    solver: Word
    start: Word | None
    option: str
    workers: Workers | None


def train_lines(path: str, text: str) -> Iterator[TrainLine]:
    """Yield the commands in the order of the file."""
    variables: dict[str, str] = {}
    joined = _CONTINUED.sub(lambda match: " " * len(match[0]), text)  # positions stay
    joined = _BELOW.sub(lambda match: match[0][:-1] + " ", joined)

    def put_in(part: str) -> str:
        return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), part, count=100)

    def value(option: str, begin: int, end: int) -> Word | None:
        if (match := re.compile(_OPTION % option).search(joined, begin, end)) is None:
            return None
        word, at = match[1].rstrip("\\,.)`"), match.start(1)
        span = Span(path, text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at), len(word) or 1)
        return Word(re.sub(r"[\"'`]", "", put_in(word)).rstrip("\\,.)"), span)

    for command in _COMMAND.finditer(joined):
        if assignment := _ASSIGNMENT.fullmatch(command[0]):
            name, content = assignment.groups()
            # With the count above at most 100,000 characters are put in.
            variables[name] = content.strip("\"'") if len(content) < 1000 else f"${name}"
        programs = [m for m in _TRAIN.finditer(joined, *command.span()) if _CAFFE.fullmatch(put_in(m[1]))]
        last = command.start()
        for program, end in zip(programs, [*(p.start() for p in programs[1:]), command.end()], strict=False):
            options = ("solver", "weights", "snapshot", "gpu")
            solver, weights, snapshot, gpu = (value(option, program.end(), end) for option in options)
            before, last = put_in(joined[last : program.start()]), program.end()
            if solver is None:
                continue
            launched, number = _LAUNCHER.search(before) is not None, _PROCESSES.search(before)
            nodes = int(number[1] or 0) if number else 0
            gpus = gpu.text.count(",") + 1 if gpu and re.fullmatch(r"\d+(,\d+)*", gpu.text) else 0
            workers = Workers((nodes if launched else 1) * (gpus if gpu else 1), launched and nodes > 1)
            option = "--snapshot" if snapshot else "--weights" if weights else "--solver"
            counted = workers if launched or gpu else None
            yield TrainLine(posixpath.basename(solver.text), solver, snapshot or weights, option, counted)


class Step(NamedTuple):
    """A stage. `parents`: `main` or `main@7638`; without parents it starts from `start`, or fresh weights. It saves PREFIX_iter_N at each
    `every` and at `length`, in Caffe's count; 0 is unknown. `begins`: its first iteration, after another solver's snapshot."""

    name: str
    file: str
    prefix: str = ""
    length: int = 0
    every: int = 0
    parents: tuple[str, ...] = ()
    begins: int = 0
    start: Word | None = None

    def saves(self, iteration: int) -> bool:
        due = iteration == self.length or (self.every > 0 and iteration % self.every == 0)
        return due and self.begins < iteration <= self.length


def ordered_steps(
    folder: CaffeFolder, texts: Mapping[str, bytes], order: Sequence[str]
) -> tuple[list[Step], list[TrainLine]]:
    """Return the stages, parents first, and the commands. `texts`: the .prototxt files. UsageError, RecipeError."""
    names = names_of([file for file, data in texts.items() if is_solver(data)])
    span = Span(folder.shown or ".", 1, 1)
    if not names:
        hint = "a solver is a .prototxt with `base_lr`, `lr_policy`, `max_iter` and `net`"
        raise RecipeError([Problem("this folder has no solver file", span, hint=hint)])
    lines: list[TrainLine] = []
    for script, data in folder.scripts().items():
        path, text = posixpath.join(folder.shown, script), data.decode(errors="replace").replace("\0", " ")
        lines += train_lines(path, text)
        folder.mistakes.file(path, text)
    lines.sort(key=lambda line: line.start is not None)  # fresh starts come first
    single: dict[tuple[str, ...], TrainLine] = {}
    for line in lines:  # scripts and READMEs repeat each other
        single.setdefault((line.file, line.option, posixpath.basename(line.start.text if line.start else "")), line)
    roots = {line.solver.span.path for line in single.values() if line.start is None and line.file in names}
    named = list(names) if len(names) == 1 and not (order or lines) else _in_order(order, names)
    if not named and (not lines or len(roots) > 1):
        several = "`caffe train` lines start several solvers from fresh weights; the solvers are"
        what = several if lines else "no `caffe train` line names the order of the solvers"
        candidates = ", ".join(f"{file} ({name})" for file, name in names.items())
        first = next(iter(names.values()))
        hint = f"for example, give `--order {','.join(names.values())}`; `--order {first}` imports only that one"
        raise RecipeError([Problem(f"{what}: {candidates}", span, hint=hint)])
    chain = Chain(folder, {file: _step(name, file, texts[file]) for file, name in names.items()})
    if named:
        chain.follow(named, single.values())
    else:
        chain.read(single.values())
    if chain.steps and (unused := [file for file in names if file not in chain.steps]):
        why = "`--order` does not name them" if order else "no `caffe train` line names them"
        folder.leave(Span(span.path, 0, 1), "other solvers are left out", f"{why}: {', '.join(unused)}")
    return list(chain.steps.values()), lines


def _step(name: str, file: str, data: bytes) -> Step:
    solver = read_solver(file, data, Problems())  # its mistakes are reported later, if it is a stage
    with suppress(Doubtful):
        # Without a prefix, Caffe uses the solver's name (BVLC), or fails.
        prefix = solver.text("snapshot_prefix") or file.removesuffix(".prototxt")
        return Step(name, file, prefix, solver.whole("max_iter"), solver.whole("snapshot"))
    return Step(name, file)


class Chain:
    """The stages so far, by solver file. `solvers`: each solver as a stage without a start."""

    def __init__(self, folder: CaffeFolder, solvers: Mapping[str, Step]) -> None:
        self.folder, self.solvers = folder, solvers
        self.steps: dict[str, Step] = {}

    def read(self, lines: Collection[TrainLine]) -> None:
        """Add the stages of `lines`; each starts from a snapshot of an earlier stage, else from an existing file."""
        for line in lines:
            step = self.start(line)
            if isinstance(step, Problem):
                self.folder.mistakes.add(step.span, step.message, step.hint)
                if line.file in self.solvers:
                    self.steps.setdefault(line.file, self.solvers[line.file])
                continue
            before = self.steps.setdefault(line.file, step)
            if before.parents and step.parents and before is not step and not (before.begins or step.begins):
                self.steps[line.file] = before._replace(parents=(*before.parents, *step.parents))
            elif before is not step:
                message = f"`{line.solver.text}` starts here from something other than in an earlier line"
                self.folder.mistakes.add(line.solver.span, message, "give each its solver file, or use --order")

    def follow(self, order: Collection[str], lines: Collection[TrainLine]) -> None:
        """Add the stages of `order`; each starts from the previous one's end, or within it if a line does. Contradicting lines are listed."""
        before: tuple[str, ...] = ()
        for file in order:
            for line in (line for line in lines if line.file == file):
                step = self.start(line)
                parents = () if isinstance(step, Problem) else tuple(p.partition("@")[0] for p in step.parents)
                if isinstance(step, Problem) or parents != before or step is not self.steps.setdefault(file, step):
                    why = f"`--order` starts stage {self.solvers[file].name} from {''.join(before) or 'fresh weights'} instead"
                    self.folder.leave((line.start or line.solver).span, line.option, why)
            before = (self.steps.setdefault(file, self.solvers[file]._replace(parents=before)).name,)

    def start(self, line: TrainLine) -> Step | Problem:
        """Return the stage with its start; the stage so far if the line resumes from that stage's snapshot."""
        if line.file not in self.solvers:
            hint = nearest(line.file, self.solvers) or "the solver files are " + ", ".join(self.solvers)
            return Problem(f"this folder has no solver file `{line.file}`", line.solver.span, hint=hint)
        step, word, snapshot = self.solvers[line.file], line.start, line.option == "--snapshot"
        if word is None:
            return step
        ending, match = ".solverstate" if snapshot else ".caffemodel", _SNAPSHOT.fullmatch(word.text)
        others = [one for file, one in self.steps.items() if file != line.file]
        if match and match[3] == ending:
            prefix, iteration = match[1] or "", int(match[2] or 0)
            for part in (posixpath.normpath, posixpath.basename):
                if makers := {file for file, one in self.solvers.items() if part(one.prefix) == part(prefix)}:
                    break
            if snapshot and line.file in makers and line.file in self.steps:
                return self.steps[line.file]
            made = [one for one in others if one.file in makers and one.saves(iteration)]
            if len(made) == 1 and len(made[0].parents) < 2 and (not snapshot or not 0 < step.length <= iteration):
                at = "" if iteration == made[0].length else f"@{iteration - made[0].begins}"
                return step._replace(parents=(made[0].name + at,), begins=iteration if snapshot else 0, start=word)
            # Weights from elsewhere may be copied to the folder later.
            later = match[1] is None and not snapshot and not {",", "$"} & {*word.text}
            if len(made) != 1 and (later or self.folder.file(word.text)):
                return step._replace(start=word)
        ends = [f"{one.prefix}_iter_{one.length}{ending}" for one in others if one.length]
        hint = f"stages make {listing(ends)}; " if ends else ""
        message = f"`{line.option}` names `{word.text}`: no single earlier stage makes it, and no {ending} of that name exists"
        return Problem(message, word.span, hint=f"{hint}`--order` trains without it")


def workers_of(step: Step, lines: Sequence[TrainLine], option: int | None, batch: Span, folder: CaffeFolder) -> Workers:
    """Return the workers of a stage. `lines`: all commands. `option`: --workers, which overrides them. `batch`: the net's `batch_size`."""
    if option is not None:
        return Workers(option, option > 1)
    of_step = [line for line in lines if line.file == step.file]
    candidates = {line.workers for line in of_step if line.workers}
    numbers = {line.workers.number for line in lines if line.workers} - {0}
    if not candidates and not (of_step and numbers - {1}):
        why = "taken for a whole update, since the number of workers is unknown"
        todo = "if there were several, give `--workers N`, or write batch_size in the stage"
        folder.leave(batch, "batch_size", why, todo)
    elif len(of_stage := {workers.number for workers in candidates}) != 1 or 0 in of_stage:
        message = f"the number of workers of stage {step.name} is unknown"
        message += f": commands have {' or '.join(map(str, sorted(numbers)))}" if numbers else ""
        hint = "give `--workers N`, and write batch_size in stages that had another number"
        folder.mistakes.add(of_step[0].solver.span, message, hint)
    return max(candidates, default=ALONE)


def names_of(files: Sequence[str]) -> dict[str, str]:
    """Return a short name of each file, without their common start and `solver`: solver_lr_init.prototxt and solver_lr_cyc1.prototxt
    are `init` and `cyc1`; an empty name becomes `main`."""
    stems = {file: file.removesuffix(".prototxt") for file in files}
    short = {f: re.sub(r"(^|[_-])solver(?=[_-]|$)", "", stem).lstrip("_-") for f, stem in stems.items()}
    start = posixpath.commonprefix(list(short.values())) if len(short) > 1 else ""
    start = start if start in short.values() else re.sub(r"[^_-]*$", "", start)
    names = {file: name.removeprefix(start).lstrip("_-") or "main" for file, name in short.items()}
    taken: dict[str, str] = {}
    for file, name in (names if len(set(names.values())) == len(names) else stems).items():
        name = re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]  # characters that stage names allow
        while name in {"", "schedule", *taken.values()} or name in SCHEDULE.fields_by_name:
            name += "_"
        taken[file] = name
    return taken


def _in_order(order: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Return the solver files that --order names, by stage, by file, or by file without its ending. UsageError."""
    files: list[str] = []
    for word in order:
        fitting = [file for file, name in names.items() if word in (name, file, file.removesuffix(".prototxt"))]
        if len(fitting) != 1 or fitting[0] in files:
            why = " twice" if len(fitting) == 1 else f", which is {'several' if fitting else 'no'} of the solver files"
            hint = f"the solver files are {listing(list(names))}, as stages {listing(list(names.values()))}"
            raise UsageError(f"--order names `{word}`{why}", hint)
        files += fitting
    return files
