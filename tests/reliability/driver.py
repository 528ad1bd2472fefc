"""scripts/reliability: injects faults, scenario by scenario, adds up what comes of them, and writes tests/reliability/RESULTS.md.

Each trial is added to the counts when it is over, so it can be stopped at any time (Ctrl-C) and loses one trial at most. Two of
it may run at once, also on the same scenario. Exit 1 if anything came out that must not; 130 if it was stopped.
"""

import argparse
import importlib.metadata
import os
import platform
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType, ModuleType

from reliability import (
    blocking,
    calls,
    counted,
    flips,
    hangs,
    hostile,
    kills,
    links,
    orphans,
    power,
    sigterm,
    solvers,
    witness,
    world,
)
from reliability.counted import Counted, Place
from reliability.files import Counts
from reliability.trial import Scenario, Trial

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# The rows of the table. Each module has a SCENARIO, and a first paragraph that says what is counted.
MODULES: tuple[ModuleType, ...] = (
    calls, witness, power, kills, world, flips, sigterm, hangs, links, orphans, blocking, solvers, hostile,
)  # fmt: skip
SHORT = 3  # trials of each with --short


def scenarios() -> dict[str, Scenario]:
    return {module.SCENARIO.name: module.SCENARIO for module in MODULES}


def rows() -> list[tuple[Scenario, str]]:
    return [(module.SCENARIO, (module.__doc__ or "").strip().split("\n\n")[0]) for module in MODULES]


def place() -> Place:
    return Place(commit(), machine())


def commit() -> str:
    """`1e3acc5`, with a `+` if the program or its tests differ from that; the counts themselves don't count."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # core.fsmonitor and the like aside, `status` may write the index: --no-optional-locks leaves it to others.
        changed = git("--no-optional-locks", "status", "--porcelain", "stagerun", "tests", "protos", "scripts")
        real = [
            line for line in changed.splitlines() if "tests/reliability/counts" not in line and "RESULTS.md" not in line
        ]
        return git("rev-parse", "--short=8", "HEAD") + "+" * bool(real)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """`2 cores of AMD EPYC, Linux 6.18.44, Python 3.11.7, torch 2.13.0+cpu`."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        model = next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):  # aarch64 names no model
        model = platform.machine()
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{cores} core{'s' * (cores > 1)} of {model}, {system}, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"


# ---- one scenario


def run(
    scenario: Scenario,
    seed: int,
    enough: Callable[[int, list[Counted]], bool],
    counts: Counts,
    where: Callable[[], Place],
    found: list[str],
) -> None:
    """Trials until `enough(trials of this start, sums)`. What was wrong in them comes to `found` at once, so that Ctrl-C does not
    lose it. What is left running ends with it."""
    rng = random.Random(f"{seed} {scenario.name}")
    sums, number = counts.read(scenario.name), 0
    with tempfile.TemporaryDirectory(prefix=f"reliability-{scenario.name}-") as folder:
        trials = scenario.trials(rng, Path(folder))
        with closing(trials):  # type: ignore[type-var]
            while not enough(number, sums):
                begun, at = time.monotonic(), where()  # each time: files may be changed meanwhile
                trial, over = next_trial(trials)
                if trial is None:
                    break
                seconds, number = time.monotonic() - begun, number + 1
                sums = counts.change(
                    scenario.name,
                    lambda old: counted.add(old, at, today(), seed, trial, seconds, number),  # noqa: B023
                )
                tell(scenario, sums, number, trial, seconds)
                if trial.wrong:
                    found.append(trial.wrong)
                if over:
                    break


def next_trial(trials: Iterator[Trial]) -> tuple[Trial | None, bool]:
    """The next one, None when there is none; and whether it is the last: a trial that breaks is wrong, and nothing comes after."""
    try:
        return next(trials), False
    except StopIteration:
        return None, True
    except Exception as error:
        return Trial(0, {}, wrong=f"the trial itself broke: {type(error).__name__}: {error}"), True


def today() -> str:
    return time.strftime("%Y-%m-%d")


def tell(scenario: Scenario, sums: Sequence[Counted], number: int, trial: Trial, seconds: float) -> None:
    text = (
        f"{scenario.name} {number}: {trial.faults} in {seconds:.1f} s; {counted.faults(sums):,} of {scenario.wanted:,}"
    )
    print(f"{text}: WRONG: {trial.wrong}" if trial.wrong else text, file=sys.stderr, flush=True)


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    known = scenarios()
    if options.list:
        for name, scenario in known.items():
            missing = scenario.needs()
            print(
                f"{name:10} {scenario.fault}; {scenario.aim}" + (f" (not here: it needs {missing})" if missing else "")
            )
        return 0
    counts = Counts(HERE / "counts", rows())
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    if again := [name for name in options.scenarios if options.trials != 0 and seen(counts.read(name), seed)]:
        print(f"seed {seed} is counted for {', '.join(again)} already, at this commit: choose another", file=sys.stderr)
        return 2
    # A shell has what it starts with `&` ignore SIGINT, and so would the runs, which it is sent to in `sigterm`.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    found: list[str] = []
    stopped = False
    try:
        for n, name in enumerate(options.scenarios):
            if missing := known[name].needs():
                print(f"{name}: not here, it needs {missing}", file=sys.stderr)
                continue
            run(known[name], seed, enough(options, known[name], len(options.scenarios) - n), counts, place, found)
    except KeyboardInterrupt:
        stopped = True
    finally:
        counts.write_table()
    for text in found:
        print(f"WRONG: {text}")
    print(f"seed {seed}; the table is in {HERE / 'RESULTS.md'}")
    return 1 if found else 130 if stopped else 0


def seen(sums: Sequence[Counted], seed: int) -> bool:
    """Whether the trials that this seed draws were counted at this commit: they would be the same again."""
    return any(seed in c.seeds for c in sums if c.commit == commit())


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(scenarios())
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help="of these: " + ", ".join(names) + "  [default: all]"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="in all, shared evenly by the scenarios")
    parser.add_argument(
        "--trials", type=int, metavar="N", help="of each scenario; 0 writes the table anew, and no more"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="[default: a new one, which is kept with the counts]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT} trials of each: a few minutes")
    parser.add_argument("--list", action="store_true", help="the scenarios, and what this machine lacks for them")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.scenarios) - set(names))
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(names)}")
    if (options.trials or 0) < 0 or (options.minutes or 0) < 0:
        parser.error("--trials and --minutes are not negative")
    options.scenarios = list(dict.fromkeys(options.scenarios)) or names
    if options.short and options.trials is None:
        options.trials = SHORT
    return options


def enough(options: argparse.Namespace, scenario: Scenario, left: int) -> Callable[[int, list[Counted]], bool]:
    """When a scenario is done: its share of the minutes is over, it had its trials, or, if nothing is said, as many faults as
    its aim speaks of. `left`: the scenarios that are not done, this one too."""
    now = time.monotonic()
    if "until" not in options and options.minutes is not None:
        options.until = now + options.minutes * 60
    share = (options.until - now) / left if options.minutes is not None else 0.0

    def enough(trials: int, sums: list[Counted]) -> bool:
        if options.trials is not None and trials >= options.trials:
            return True
        if options.minutes is not None:
            return time.monotonic() - now >= share
        return options.trials is None and counted.faults(sums) >= scenario.wanted

    return enough
