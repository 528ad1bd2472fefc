"""`stagerun bench compression`: runs a stage once for each method and seed, each into a folder of its own, and shows what came out."""

import json
import sys
import time
from dataclasses import MISSING, dataclass
from pathlib import Path

import click

from stagerun.base.errors import EXIT_MEANINGS, ExitCode, Problem, RecipeError, StagerunError, UsageError
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.text import count, listed
from stagerun.command.ending import say, tell
from stagerun.command.options import command, option
from stagerun.command.shared import Duration, FiniteRange, Folder, Json, Overrides, Threads
from stagerun.language import load
from stagerun.store.given import looked_at
from stagerun.system.files import write_output
from stagerun.system.process import program
from stagerun.system.world import launched, started_by
from stagerun.tools.bench.accuracy import accuracy_picture
from stagerun.tools.bench.cases import Case, Wanted, cases, overrides, path, wanted
from stagerun.tools.bench.outcome import Bench, Outcome, as_csv, as_record, diverged, outcome, render
from stagerun.tools.retry.command import Commanded
from stagerun.train.first_look import look
from stagerun.train.options import RunOptions
from stagerun.train.output import LOG
from stagerun.train.results import nothing_to_do


class Methods(click.ParamType):
    """`TOP_K,TOP_K ratio: 0.1,SIGN`."""

    name = "methods"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Wanted, ...]:
        try:
            return value if isinstance(value, tuple) else wanted(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    folder: Folder
    overrides: Overrides = ()
    methods: tuple[Wanted, ...] = option(
        "--methods TOP_K,SIGN",
        "The methods to try, each beside dense. Settings may follow: `TOP_K,TOP_K ratio: 0.1,QSGD qstates: 15`.",
        type=Methods(),
        default=MISSING,
    )
    scopes: bool = option("--scopes", "Each method in both scopes.", default=False)
    memory: bool = option("--memory", "Each method with and without memory.", default=False)
    stage: str | None = option(
        "--stage STAGE", "Up to which stage is trained.  [default: the last that no other starts from]"
    )
    seeds: int = option("--seeds N", "Seeds, from that of the schedule on.", least=1, default=3)
    accuracy: float | None = option(
        "--accuracy SHARE",
        "Also the time to this top-1, such as 0.85, by the stage's evaluations (`test_interval`).",
        type=FiniteRange(0, 1),
    )
    workers: int | None = option("--workers N", "Workers on this machine.  [default: those of `run`]", least=1)
    threads: Threads = None
    out: str | None = option("--out FOLDER", "Where the runs and the results go.  [default: ./out/NAME-compression]")
    stop_after: float | None = option(
        "--stop-after TIME",
        "Stop and save (75) after so long; the same command goes on.",
        type=Duration(least=1.0),
    )
    show: bool = option("--show", "Train nothing: the table of the runs that are done so far.", default=False)
    as_json: Json = False


class RunFailed(StagerunError):
    """A run that ended as none should, with its own exit code."""

    def __init__(self, message: str, hint: str, code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = ExitCode(code) if code in EXIT_MEANINGS else ExitCode.BUG


@command()
def compression(options: CompressionOptions) -> int:
    """Trains the last stage of a schedule, and those it starts from, once for each method of `compress_param`, scope, memory and seed;
    shows accuracy, bytes, and time per step.

    Every run is a `stagerun run` with `--set STAGE.compress_param={...}`, in FOLDER/METHOD/SEED. All methods get the first seed, then all the
    second. Interrupted, the same command goes on where it was; with more methods or seeds it trains those. The table is also left in
    FOLDER as compression.json, compression.csv (a line per run), and compression.svg: accuracy against bytes.
    """
    if launched():
        raise UsageError(
            f"a launcher has started this process as one of several ({started_by()})",
            "this bench starts its workers itself, on one machine: run it once, without a launcher",
        )
    schedule = load(options.folder, options.overrides)
    stages = path(schedule, options.stage)
    trial = _Trial(options, schedule, stages)
    code = trial.look() if options.show else trial.run()
    _tell(options, trial)
    return code


class _Trial:
    """One bench."""

    def __init__(self, options: CompressionOptions, schedule: Schedule, stages: list[Stage]) -> None:
        self.options, self.schedule, self.stages = options, schedule, stages
        self.cases = cases(options.methods, options.scopes, options.memory)
        self.out = Path(options.out or f"out/{schedule.name}-compression")
        self.seeds = range(schedule.seed, schedule.seed + options.seeds)
        self.outcomes: dict[Case, list[Outcome]] = {case: [] for case in self.cases}
        self.lost: dict[Case, list[int]] = {case: [] for case in self.cases}
        self._check()

    def _check(self) -> None:
        """RecipeError with the mistakes of all cases, before the first run."""
        found: list[Problem] = []
        for case in self.cases:
            try:
                load(self.options.folder, self._set(case, self.schedule.seed))
            except RecipeError as error:
                found += error.problems
        if found:
            raise RecipeError(found)

    @property
    def bench(self) -> Bench:
        return Bench(
            schedule=self.schedule.name,
            stage=self.stages[-1].name,
            accuracy=self.options.accuracy,
            cases=self.cases,
            outcomes=self.outcomes,
            lost=self.lost,
        )

    @property
    def _todo(self) -> list[tuple[Case, int]]:
        return [(case, seed) for seed in self.seeds for case in self.cases]

    def look(self) -> int:
        """Takes what is done, while another process trains, too."""
        for case, seed in self._todo:
            log = self._folder(case, seed) / LOG
            if not log.exists():
                continue
            if (found := self._read(case, seed)) is not None:
                self.outcomes[case].append(found)
                continue
            with open(log, "rb") as lines:
                self.lost[case] += [seed] if diverged(lines) else []
        return ExitCode.DONE

    def run(self) -> int:
        """The exit code: all is done, or saved after a signal or --stop-after. RunFailed."""
        stop, end = Commanded(), None
        if self.options.stop_after is not None:
            end = time.monotonic() + self.options.stop_after
        todo = self._todo
        self._say(
            f"{self.schedule.name}, stage {self.stages[-1].name}: {count(len(self.cases), 'case')}, "
            f"{count(self.options.seeds, 'seed')}, {count(len(todo), 'run')} in {self.out}"
        )
        for number, (case, seed) in enumerate(todo, start=1):
            left = None if end is None else end - time.monotonic()
            if stop.asked is not None or (left is not None and left < 1):
                return ExitCode.SAVED
            code = self._one(case, seed, stop, left)
            if code == ExitCode.SAVED:
                return code
            self._take(case, seed, code, f"{number}/{len(todo)}")
        return ExitCode.DONE

    def _set(self, case: Case, seed: int) -> tuple[str, ...]:
        return *self.options.overrides, *overrides(self.stages, case, seed)

    def _one(self, case: Case, seed: int, stop: Commanded, left: float | None) -> int:
        """The exit code of a run that was not done yet; DONE, SAVED or DIVERGED."""
        folder = self._folder(case, seed)
        only = tuple(stage.name for stage in self.stages)
        run = RunOptions(
            self.options.folder,
            self._set(case, seed),
            str(folder),
            only=only,
            nproc=self.options.workers,
            threads=self.options.threads,
            stop_after=left,
        )
        schedule = looked_at(load(run.folder, run.overrides), folder)
        if nothing_to_do(look(schedule, folder, run)[0], folder):
            return ExitCode.DONE
        said = folder.with_suffix(".txt")
        with open(said, "ab") as file:
            code = stop.run([sys.executable, *program("stagerun"), *_words(run)], file)
        if code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.DIVERGED):
            meaning = EXIT_MEANINGS[ExitCode(code)] if code in EXIT_MEANINGS else "it was killed"
            raise RunFailed(
                f"{case.text}, seed {seed}: the run ended with {code}: {meaning}",
                f"{said} has what it printed; the same command goes on",
                code,
            )
        return code

    def _take(self, case: Case, seed: int, code: int, number: str) -> None:
        """What a run left."""
        what = f"  {number}  seed {seed}, {case.text}: "
        if code == ExitCode.DIVERGED:
            self.lost[case].append(seed)
            self._say(what + "diverged")
            return
        found = self._read(case, seed)
        if found is None:
            raise UsageError(
                f"stage `{self.stages[-1].name}` was not evaluated, so its accuracy is not known",
                "give the schedule images to test on: `data { val { ... } }`",
            )
        self.outcomes[case].append(found)
        self._say(f"{what}top-1 {found.top1:.2%}, {1000 * found.seconds:.1f} ms per step")

    def _read(self, case: Case, seed: int) -> Outcome | None:
        with open(self._folder(case, seed) / LOG, "rb") as lines:
            return outcome(lines, self.stages[-1].name, seed, self.options.accuracy)

    def _folder(self, case: Case, seed: int) -> Path:
        return self.out / case.folder / f"seed{seed}"

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            say(text)


def _words(run: RunOptions) -> list[str]:
    """The command line of a run, what only its launcher reads included."""
    words = run.arguments()
    if run.nproc is not None:
        words += ["--nproc", str(run.nproc)]
    if run.threads is not None:
        words += ["--threads", str(run.threads)]
    if run.stop_after is not None:
        words += ["--stop-after", f"{run.stop_after:f}s"]
    return words


def _tell(options: CompressionOptions, trial: _Trial) -> None:
    """Writes the results, and prints them. StorageError, PermissionDenied."""
    bench = trial.bench
    if not bench.rows:
        tell("nothing is done yet; the same command goes on")
        return
    record = json.dumps(as_record(bench), indent=2)
    files = {"compression.json": record.encode(), "compression.csv": as_csv(bench).encode()}
    note = ""
    try:
        picture = accuracy_picture(bench)
        files |= {} if picture is None else {"compression.svg": picture}
    except UsageError as error:  # without matplotlib
        note = f"\nnote: no picture: {error}"
    for name, data in files.items():
        write_output(trial.out / name, data)
    say(record if options.as_json else f"\n{render(bench)}{note}\n\nin {trial.out}: {listed(list(files))}")
