"""The stages of a folder of Caffe's in their order, what each starts from, and its workers: by the `caffe train` lines of scripts and READMEs,
which are read and never run. What they leave open is a mistake with the candidates: `--order` or `--workers` says it."""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from stagerun.base.errors import Problem, RecipeError, Span, UsageError, listing, nearest
from stagerun.language.tree import SCHEDULE
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.text import Findings, is_solver, read_solver

# A line end, `;`, `&&` and `|` stand between two commands; `2>&1` belongs to one.
_COMMAND = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*'|[<>]&|&>|[^\n;|&])+""")
_ASSIGNMENT = re.compile(r"""\s*(?:export\s+)?([A-Za-z_]\w*)=("[^"$`]*"|'[^']*'|[^\s"'$`]*)\s*""")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_TRAIN = re.compile(r"""(?<!\S)[`("']*(?!-)(?:\S*/)?caffe(?:\.bin|\.exe)?["']?\s++train(?!\S)""")
_OPTION = re.compile(r"(?<!\S)--?(solver|snapshot|weights|gpu|np?|ntasks)(=|\s+)(\S+)")
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
    for command in _COMMAND.finditer(joined):
        expanded = _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), command[0])
        if assignment := _ASSIGNMENT.fullmatch(expanded):
            variables[assignment[1]] = assignment[2].strip("\"'")
        for before, after in pairwise(_TRAIN.split(expanded)):
            said: dict[str, Word] = {}
            for match in _OPTION.finditer(after):
                raw = (match[0] if match[2] == "=" else match[3]).rstrip("\\,.)`")
                begin = max(text.find(raw, *command.span()), command.start())  # the command's if it is a variable's
                span = Span(path, text.count("\n", 0, begin) + 1, begin - text.rfind("\n", 0, begin), len(raw) or 1)
                said.setdefault(match[1], Word(re.sub(r"[\"'`]", "", match[3]).rstrip("\\,.)"), span))
            if "solver" not in said:
                continue
            option = next((name for name in ("snapshot", "weights") if name in said), "solver")
            launched, gpu = _LAUNCHER.search(before) is not None, said.get("gpu")
            numbers = [match[3] for match in _OPTION.finditer(before) if match[1] in ("n", "np", "ntasks")]
            nodes = int(numbers[0]) if numbers and re.fullmatch(r"[0-9]{1,9}", numbers[0]) else 0
            gpus = gpu.text.count(",") + 1 if gpu and re.fullmatch(r"\d+(,\d+)*", gpu.text) else 0
            workers = Workers((nodes if launched else 1) * (gpus if gpu else 1), launched and nodes > 1)
            file, start = posixpath.basename(said["solver"].text), said[option] if option != "solver" else None
            yield TrainLine(file, said["solver"], start, f"--{option}", workers if launched or gpu else None)


class Step(NamedTuple):
    """A stage: its solver's file name, and what it starts from: `main` or `main@7638`; without a parent the file that `start` names, or
    fresh weights. It saves PREFIX_iter_N at iterations as Caffe counts: each `every`, and `length`; 0 is open, after a mistake. `begins`:
    its first iteration, after another solver's snapshot. `lines` are its commands."""

    name: str
    file: str
    prefix: str = ""
    length: int = 0
    every: int = 0
    parent: str = ""
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
    files = [*names] if len(names) == 1 and not (order or lines) else _files_in(order, names)
    if not files and (not lines or len(roots) > 1):
        what = "no `caffe train` line says the order of the solvers"
        if lines:
            what = f"{listing([*roots], 'and')} each train something from the beginning; the solvers are"
        candidates = ", ".join(f"{file} ({name})" for file, name in names.items())
        hint = f"give it with `--order {','.join(names.values())}`, say; `--order {next(iter(names.values()))}` imports that one alone"
        raise RecipeError([Problem(f"{what}: {candidates}", place, hint=hint)])
    solvers = {file: _step(name, file, texts[file]) for file, name in names.items()}
    steps = _chain(folder, solvers, list(single.values()), files, found)
    if steps and (unused := [file for file in names if file not in steps]):
        by = "`--order` does not name them" if order else "no `caffe train` line names them"
        named = ", ".join(unused[:6]) + (" ..." if len(unused) > 6 else "")
        found.leave(Span(place.path, 0, 1), f"{len(unused)} other solvers", f"they are left out: {by} ({named})")
    return [step._replace(lines=tuple(line for line in lines if line.file == file)) for file, step in steps.items()]


def names_of(files: Sequence[str]) -> dict[str, str]:
    """A short name of each solver file: what their names have in common at the start is left out, up to a `_` or `-`, and
    the word `solver`. solver_custom_lr_init.prototxt and solver_custom_lr_cyc1.prototxt are `init` and `cyc1`; one that
    has no name left is `main`, as solver.prototxt is beside solver_collapse.prototxt."""
    stems = {file: file.removesuffix(".prototxt") for file in files}
    short = {f: re.sub(r"(^|[_-])solver(?=[_-]|$)", "", stem).lstrip("_-") for f, stem in stems.items()}
    words = [name.replace("-", "_") + "_" for name in short.values()]
    common = posixpath.commonprefix(words).rpartition("_")[0] if len(words) > 1 else ""
    names = {file: name[len(common) :].lstrip("_-") or "main" for file, name in short.items()}
    taken: dict[str, str] = {}
    for file, name in (names if len(set(names.values())) == len(names) else stems).items():
        name = re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]  # what the name of a stage may have
        while name in taken.values() or name == "schedule" or name in SCHEDULE.fields_by_name:
            name += "_"
        taken[file] = name
    return taken


def _files_in(order: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The solver files that --order names, by stage or by file. UsageError for words that name none, several, or one twice."""
    files: list[str] = []
    for word in order:
        fitting = [file for file, name in names.items() if word in (name, file, file.removesuffix(".prototxt"))]
        if len(fitting) != 1 or fitting[0] in files:
            why = " twice" if len(fitting) == 1 else f", which is {'several' if fitting else 'no'} of the solver files"
            known = f"the solver files are {listing(list(names))}, as stages {listing(list(names.values()))}"
            raise UsageError(f"--order names `{word}`{why}", known)
        files += fitting
    return files


def _step(name: str, file: str, data: bytes) -> Step:
    view = View(read_solver(file, data, Findings()).block)  # its mistakes are found again if it is a stage
    with suppress(Doubtful):
        # Without a prefix, Caffe takes the solver's own name (BVLC), or fails.
        prefix = view.text("snapshot_prefix") or file.removesuffix(".prototxt")
        return Step(name, file, prefix, view.whole("max_iter") or 0, view.whole("snapshot") or 0)
    return Step(name, file)


def _chain(
    folder: CaffeFolder, solvers: dict[str, Step], lines: Sequence[TrainLine], order: Sequence[str], found: Findings
) -> dict[str, Step]:
    """Each starts from what those before it make, else from a file that is there. With `order`, each starts from the end of the one
    before, or where a line says so in it; a line that says something else is listed."""
    steps, before = dict[str, Step](), ""
    for file in order or dict.fromkeys(line.file for line in lines):
        for line in (line for line in lines if line.file == file):
            step, place = _start(line, steps, solvers, folder), (line.start or line.solver).span
            if isinstance(step, Step) and order and step.parent.partition("@")[0] != before:
                step = Problem("the command starts from something else", place)
            elif isinstance(step, Step) and steps.setdefault(file, step) is not step:
                text = f"`{line.solver.text}` starts here from something else than in a line before"
                step = Problem(text, line.solver.span, hint="give each a solver file of its own, or --order")
            if isinstance(step, Problem) and order:
                start = f"from the end of `{before}`" if before else "from fresh weights"
                found.leave(place, line.option, f"{step.message}; with `--order` `{solvers[file].name}` starts {start}")
            elif isinstance(step, Problem):
                found.mistakes.add(step.span, step.message, step.hint)
        if file in solvers:
            before = steps.setdefault(file, solvers[file]._replace(parent=before if order else "")).name
    return steps


def _start(line: TrainLine, steps: dict[str, Step], solvers: dict[str, Step], folder: CaffeFolder) -> Step | Problem:
    """The stage with its start, or as it is among `steps` where it goes on from a snapshot of its own."""
    if line.file not in solvers:
        hint = nearest(line.file, solvers) or "the solver files there are " + ", ".join(solvers)
        return Problem(f"there is no solver file `{line.file}` in this folder", line.solver.span, hint=hint)
    step, word, snapshot = solvers[line.file], line.start, line.option == "--snapshot"
    if word is None:
        return step
    ending = ".solverstate" if snapshot else ".caffemodel"
    match = re.fullmatch(r"(?:(.*)_iter_(\d{1,18})|.*?)(\.\w+)(?:\.h5)?", word.text, re.DOTALL)
    if match and match[3] == ending:
        base, iteration = posixpath.basename(match[1] or ""), int(match[2] or 0)
        made = {s.file: s for s in steps.values() if posixpath.basename(s.prefix) == base}
        if snapshot and line.file in made:
            return made[line.file]
        parents = [s for s in made.values() if s.file != line.file and s.begins < iteration <= s.length]
        parents = [s for s in parents if iteration == s.length or (s.every > 0 and iteration % s.every == 0)]
        # Weights from elsewhere may be copied there later.
        later = match[1] is None and not snapshot and not {",", "$"} & {*word.text}
        if len(parents) == 1 and (not snapshot or not 0 < step.length <= iteration):
            at = "" if iteration == parents[0].length else f"@{iteration - parents[0].begins}"
            return step._replace(parent=parents[0].name + at, begins=iteration if snapshot else 0, start=word)
        if len(parents) != 1 and (later or folder.file(word.text)):
            return step._replace(start=word)
    made_names = [f"{s.prefix}_iter_{s.length}{ending}" for s in steps.values() if s.file != line.file and s.length]
    there = folder.beside(word.text, ending)
    hints = [f"stages make {listing(made_names)}"] if made_names else []
    hints += [f"there are {listing(there)}"] if there else []
    text = f"`{line.option}` names `{word.text}`: no single stage before makes it, and no {ending} of that name is here"
    return Problem(text, word.span, hint="; ".join([*hints, "`--order` trains without it"]))


def workers_of(step: Step, steps: Sequence[Step], given: int | None, batch: Span, found: Findings) -> Workers:
    """The workers of a stage, one of `steps`. `given`: --workers, which counts for all stages, whatever commands say. `batch`: the
    place of the net's batch. A number that can't be told is a mistake, for which the hint is --workers."""
    if given is not None:
        return Workers(given, given > 1)
    said = {line.workers.number: line for line in reversed(step.lines) if line.workers}
    others = {line.workers.number for s in steps for line in s.lines if line.workers} - {1}
    if not said and not (others and step.lines):
        why = "taken for a whole update, since nothing says how many workers there were"
        todo = "import again with `--workers N` if there were several"
        if others:
            why = f"stage {step.name}: taken for a whole update, of one worker; other stages had several"
            todo = f"write batch_size in {step.name}.prototxt if it had, too"
        found.leave(batch, "batch_size", why, todo)
    elif 0 in said or len(said) != 1:
        known = " or ".join(str(n) for n in sorted(n for n in {*said, *others} if n))
        message = f"how many workers stage {step.name} had isn't known" + (f": commands have {known}" if known else "")
        hint = "give `--workers N`, and write batch_size in stages that had another number"
        found.mistakes.add((said.get(0) or step.lines[0]).solver.span, message, hint)
    return next((line.workers for line in said.values() if line.workers), Workers(1, False))
