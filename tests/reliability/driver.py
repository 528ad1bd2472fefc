"""scripts/dev reliability: injects faults, scenario by scenario, and prints what came of them, each a row of tests/reliability/RESULTS.md.

It can be stopped at any time (Ctrl-C), and loses one trial at most. Exit 1 if anything came out that must not; 130 if it was stopped.
"""

import argparse
import importlib.metadata
import os
import platform
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from reliability import calls, flips, hangs, hostile, kills, power, records, sigterm, solvers
from reliability.trial import Trial


@dataclass(frozen=True)
class Scenario:
    """A row of the table. `trials(rng, folder)` goes on for as long as it is asked, or until there is nothing left to try; it works in
    `folder`, which is its own, and draws from `rng` alone. Each trial takes seconds, so that the whole can be stopped and
    continued. `wanted`: faults in all that the aim speaks of. `needs` says what is missing here ('' if nothing)."""

    name: str
    fault: str
    aim: str
    wanted: int
    trials: Callable[[random.Random, Path], Iterator[Trial]]
    needs: Callable[[], str] = lambda: ""


# fmt: off
SCENARIOS = {one.name: one for one in (
    Scenario("calls", "SIGKILL, ENOSPC, EIO at a call of the store, in runs of 1, 2 and 4 workers",
             "0 lost, 0 wrong loads", 500, calls.trials),
    Scenario("power", "modelled power cuts: what was not synced is dropped, torn, or reordered between folders and files",
             "0 lost", 1000, power.trials),
    Scenario("kills", "SIGKILL at random moments of whole schedules: one rank, rank 0, all, the launcher",
             "0 runs lost, 100 % bit-identical", 300, kills.trials),
    Scenario("flips", "random flips, truncations, zeroed pages in snapshots",
             "10,000, 100 % found, fallback used", 10_000, flips.trials),
    Scenario("sigterm", "SIGTERM, SIGUSR1, SIGINT at random moments, evaluation, copying to scratch and imports among them",
             "100 of 100 saved, exit 75 (0 where the run was at its end), within the grace period of 120 s", 100, sigterm.trials),
    Scenario("hangs", "SIGSTOP of a rank",
             "raised within time-out + 1 s, right rank named, 100 %", 100, partial(hangs.endless, hangs.trial)),
    Scenario("links", "a link down between two network namespaces",
             "raised within time-out + 1 s, right rank named, 100 %", 25, partial(hangs.endless, hangs.cut), hangs.no_namespaces),
    Scenario("solvers", "mutated solver files", "0 tracebacks, every mistake with its place", 100_000, solvers.trials),
    Scenario("records", "damaged records", "an image, or an error with the record's key", 100_000, records.trials),
    Scenario("hostile", "audit hook while loading hostile snapshots",
             "0 unpickling, exec, subprocess events", 1000, hostile.trials),
)}
# fmt: on


@dataclass
class Sums:
    """What came of the trials of a scenario."""

    scenario: Scenario
    begun: float = field(default_factory=time.monotonic)
    trials: int = 0
    faults: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def row(self) -> str:
        """The scenario, the fault, the aim, how many are wanted and were injected, what came out, whether the aim is met."""
        one = self.scenario
        came = [f"{number:,} {word}" for word, number in sorted(self.counts.items())]
        came += [f"{word}: at most {value:.4g}" for word, value in sorted(self.largest.items())]
        came.append(f"{self.trials:,} trials in {(time.monotonic() - self.begun) / 60:.0f} min")
        met = "met" if self.faults >= one.wanted else "met so far"
        aim = f"**missed** ({len(self.wrong)} wrong)" if self.wrong else met
        cells = [f"`{one.name}`", one.fault, one.aim, f"{one.wanted:,}", f"{self.faults:,}", "; ".join(came), aim]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def machine() -> str:
    """`2 cores of AMD EPYC, Linux 6.18.44, Python 3.11.7, torch 2.13.0+cpu`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    system = f"{platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    model = names[0] if names else platform.machine()  # aarch64 names no model
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {system}, torch {importlib.metadata.version('torch')}"


def run(sums: Sums, seed: int, trials: int | None, until: float | None) -> None:
    """Makes `trials` trials, or goes on until that time, or for as many faults as the aim speaks of. What is left running ends with it."""
    name, wanted = sums.scenario.name, sums.scenario.wanted
    with (
        tempfile.TemporaryDirectory(prefix=f"reliability-{name}-") as folder,
        closing(sums.scenario.trials(random.Random(f"{seed} {name}"), Path(folder))) as made,
    ):
        while True:
            if trials is not None or until is not None:
                if (trials is not None and sums.trials >= trials) or (until is not None and time.monotonic() >= until):
                    return
            elif sums.faults >= wanted:
                return
            begun = time.monotonic()
            try:
                trial = next(made)
            except StopIteration:
                return
            except Exception as error:  # is wrong, and nothing comes after it
                sums.wrong.append(f"the trial itself broke: {type(error).__name__}: {error}")
                return
            sums.trials += 1
            sums.faults += trial.faults
            sums.counts.update(trial.counts)
            for word, value in trial.largest.items():
                sums.largest[word] = max(value, sums.largest.get(word, value))
            sums.wrong += [f"seed {seed}, trial {sums.trials}: {trial.wrong}"] * bool(trial.wrong)
            wrong = f": WRONG: {trial.wrong}" if trial.wrong else ""
            text = f"{trial.faults} in {time.monotonic() - begun:.1f} s; {sums.faults:,} of {wanted:,}{wrong}"
            print(f"{name} {sums.trials}: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for name, one in SCENARIOS.items():
            missing = f" (not here: it needs {one.needs()})" if one.needs() else ""
            print(f"{name:10} {one.fault}; {one.aim}{missing}")
        return 0
    # A shell has what it starts with `&` ignore SIGINT, and so would the runs, which it is sent to in `sigterm`.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    found: list[Sums] = []
    stopped, begun = False, time.monotonic()
    try:
        for n, name in enumerate(options.scenarios, 1):
            if missing := SCENARIOS[name].needs():
                print(f"{name}: not here, it needs {missing}", file=sys.stderr)
                continue
            found.append(Sums(SCENARIOS[name]))
            share = options.minutes and begun + 60 * options.minutes * n / len(options.scenarios)
            run(found[-1], options.seed, options.trials, share)
    except KeyboardInterrupt:
        stopped = True
    print(f"seed {options.seed}, on {machine()}:", *(sums.row() for sums in found), sep="\n")
    wrong = [text for sums in found for text in sums.wrong]
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 130 if stopped else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/dev reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("scenarios", nargs="*", metavar="SCENARIO", help=f"of these: {', '.join(SCENARIOS)}  [default: all]")
    add("--minutes", type=float, metavar="M", help="in all, shared evenly by the scenarios")
    add("--trials", type=int, metavar="N", help="of each scenario")
    add("--seed", type=int, metavar="S", default=secrets.randbelow(2**32), help="[default: a new one]")
    add("--list", action="store_true", help="the scenarios, and what this machine lacks for them")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.scenarios) - set(SCENARIOS)):
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    options.scenarios = list(dict.fromkeys(options.scenarios)) or list(SCENARIOS)
    return options
