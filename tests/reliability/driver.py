"""scripts/reliability: injects faults, scenario by scenario, adds up what comes of them, and writes tests/reliability/RESULTS.md.

Each trial is added to the counts when it is over, so it can be stopped at any time (Ctrl-C) and loses one trial at most. Two of
it may run at once, also on the same scenario. Exit 1 if anything came out that must not; 130 if it was stopped.
"""

import argparse
import fcntl
import importlib.metadata
import json
import os
import platform
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from reliability import calls, flips, hangs, hostile, kills, links, power, records, sigterm, solvers
from reliability.trial import Scenario, Trial

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The rows of the table. Each module has a SCENARIO, and a first paragraph that says what is counted.
MODULES: tuple[ModuleType, ...] = (calls, power, kills, flips, sigterm, hangs, links, solvers, records, hostile)
# The sums of the trials of one scenario: one object for each commit and machine.
Sums = list[dict[str, Any]]


# ---- the counts, a JSON file for each scenario


def read(name: str) -> Sums:
    path = HERE / "counts" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def record(name: str, commit: str, machine: str, seed: int, trial: Trial, number: int, seconds: float) -> Sums:
    """Adds the `number`th trial of this start to the counts and writes the table anew."""
    day = time.strftime("%Y-%m-%d")
    with alone():
        sums = read(name)
        one = next((s for s in sums if (s["commit"], s["machine"]) == (commit, machine)), None)
        if one is None:
            one = {"commit": commit, "machine": machine, "first": day, "last": day, "trials": 0, "faults": 0}
            one |= {"seconds": 0.0, "seeds": [], "wrong": [], "counts": {}, "largest": {}}
            sums.append(one)
        one["last"] = max(day, one["last"])
        one["seeds"] = list(dict.fromkeys([*one["seeds"], seed]))
        one["trials"] += 1
        one["faults"] += trial.faults
        one["seconds"] = round(one["seconds"] + seconds, 1)
        for word, times in trial.counts.items():
            one["counts"][word] = one["counts"].get(word, 0) + times
        for word, value in trial.largest.items():
            one["largest"][word] = round(max(value, one["largest"].get(word, value)), 4)
        if trial.wrong:
            one["wrong"].append(f"seed {seed}, trial {number}: {trial.wrong}")
        sums.sort(key=lambda s: (s["first"], s["commit"], s["machine"]))
        text = json.dumps(sums, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        replace_file(HERE / "counts" / f"{name}.json", text)
        replace_file(HERE / "RESULTS.md", render())
    return sums


@contextmanager
def alone() -> Iterator[None]:
    """No other process changes the counts or the table meanwhile."""
    (HERE / "counts").mkdir(exist_ok=True)
    fd = os.open(HERE / "counts", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def replace_file(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.tmp")
    temp.write_text(text)
    os.replace(temp, path)


def faults(sums: Sums) -> int:
    return sum(s["faults"] for s in sums)


# ---- the table

FIRST, LAST = "| | fault |", "## What this does not show"  # what is above and below is written by hand


def render() -> str:
    """RESULTS.md, with the part between as the counts give it."""
    path = HERE / "RESULTS.md"
    text = path.read_text() if path.exists() else f"{FIRST}{LAST}\n"
    above, below = text.partition(FIRST)[0], text.partition(LAST)[2]
    sums = {module.SCENARIO.name: read(module.SCENARIO.name) for module in MODULES}
    machines = list(dict.fromkeys(s["machine"] for found in sums.values() for s in found))
    lines = [
        f"{FIRST} aim | faults wanted | injected | what came out | aim is | when, commit, machine: injected there |",
        "|---|---|---|--:|--:|---|---|---|",
        *(_row(module.SCENARIO, sums[module.SCENARIO.name], machines) for module in MODULES),
        "", "Machines:", "", *(f"{n}. {machine}" for n, machine in enumerate(machines, 1)), "",
    ]  # fmt: skip
    errors = [(name, f"{s['commit']}, {text}") for name, found in sums.items() for s in found for text in s["wrong"]]
    if errors:
        lines += ["## Where an aim is missed", ""]
        lines += [*(f"- `{name}`, commit {' '.join(text.split())[:400]}" for name, text in errors), ""]
    lines += ["## What is counted", ""]
    for module in MODULES:
        first = (module.__doc__ or "").strip().split("\n\n")[0]
        lines += [f"**{module.SCENARIO.name}.** {' '.join(first.split())}", ""]
    return above + "\n".join([*lines, LAST + below])


def _row(scenario: Scenario, sums: Sums, machines: Sequence[str]) -> str:
    counts, largest = Counter[str](), dict[str, float]()
    for s in sums:
        counts.update(s["counts"])
        largest |= {word: max(value, largest.get(word, value)) for word, value in s["largest"].items()}
    came = [f"{number:,} {word}" for word, number in sorted(counts.items())]
    came += [f"{word}: at most {value:.4g}" for word, value in sorted(largest.items())]
    trials, minutes = sum(s["trials"] for s in sums), sum(s["seconds"] for s in sums) / 60
    came.append(f"{trials:,} trials in {minutes:.0f} min" if sums else "not yet run")
    wrong = sum(len(s["wrong"]) for s in sums)
    verdict = "met" if faults(sums) >= scenario.wanted else "met so far" if sums else ""
    where = []
    for s in sums:
        days = " to ".join(dict.fromkeys((s["first"], s["last"])))
        where.append(f"{days}, {s['commit']}, {machines.index(s['machine']) + 1}: {s['faults']:,}")
    cells = [
        f"`{scenario.name}`", scenario.fault, scenario.aim, f"{scenario.wanted:,}", f"{faults(sums):,}", "; ".join(came),
        f"**missed** ({wrong} wrong)" if wrong else verdict, "; ".join(where),
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---- where trials are made


def commit() -> str:
    """`1e3acc5`, with a `+` if the program or its tests differ from that; the counts themselves don't count."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # core.fsmonitor and the like aside, `status` may write the index: --no-optional-locks leaves it to others.
        changed = git("--no-optional-locks", "status", "--porcelain", "stagerun", "tests", "protos", "scripts")
        own = ("tests/reliability/counts", "RESULTS.md")
        real = [line for line in changed.splitlines() if not any(name in line for name in own)]
        return git("rev-parse", "--short=8", "HEAD") + "+" * bool(real)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """`2 cores of AMD EPYC, Linux 6.18.44, Python 3.11.7, torch 2.13.0+cpu`."""
    text = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    model = names[0] if names else platform.machine()  # aarch64 names no model
    return f"{cores} core{'s' * (cores > 1)} of {model}, {system}, torch {importlib.metadata.version('torch')}"


# ---- the command


def run(scenario: Scenario, seed: int, trials: int | None, until: float | None) -> Iterator[str]:
    """What was wrong in trials, as it comes: `trials` of them, until that time, or as many as the aim speaks of. What is left running
    ends with it."""
    rng, number = random.Random(f"{seed} {scenario.name}"), 0
    sums = read(scenario.name)

    def enough() -> bool:
        if trials is not None and number >= trials:
            return True
        if until is not None:
            return time.monotonic() >= until
        return trials is None and faults(sums) >= scenario.wanted

    with (
        tempfile.TemporaryDirectory(prefix=f"reliability-{scenario.name}-") as folder,
        closing(scenario.trials(rng, Path(folder))) as made,  # type: ignore[type-var]
    ):
        while not enough():
            begun, at = time.monotonic(), commit()  # each time: files may be changed meanwhile
            broken = False
            try:
                trial = next(made)
            except StopIteration:
                return
            except Exception as error:  # is wrong, and nothing comes after it
                broken, trial = True, Trial(0, wrong=f"the trial itself broke: {type(error).__name__}: {error}")
            seconds, number = time.monotonic() - begun, number + 1
            sums = record(scenario.name, at, machine(), seed, trial, number, seconds)
            text = f"{trial.faults} in {seconds:.1f} s; {faults(sums):,} of {scenario.wanted:,}"
            wrong = f": WRONG: {trial.wrong}" if trial.wrong else ""
            print(f"{scenario.name} {number}: {text}{wrong}", file=sys.stderr, flush=True)
            if trial.wrong:
                yield trial.wrong
            if broken:
                return


def main(arguments: Sequence[str] | None = None) -> int:
    known = {module.SCENARIO.name: module.SCENARIO for module in MODULES}
    options = parse(arguments, list(known))
    if options.list:
        for name, scenario in known.items():
            missing = f" (not here: it needs {scenario.needs()})" if scenario.needs() else ""
            print(f"{name:10} {scenario.fault}; {scenario.aim}{missing}")
        return 0
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    # A shell has what it starts with `&` ignore SIGINT, and so would the runs, which it is sent to in `sigterm`.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    found: list[str] = []
    stopped, begun = False, time.monotonic()
    try:
        for n, name in enumerate(options.scenarios, 1):
            if missing := known[name].needs():
                print(f"{name}: not here, it needs {missing}", file=sys.stderr)
                continue
            share = options.minutes and begun + 60 * options.minutes * n / len(options.scenarios)
            for text in run(known[name], seed, options.trials, share):
                found.append(text)
    except KeyboardInterrupt:
        stopped = True
    finally:
        with alone():
            replace_file(HERE / "RESULTS.md", render())
    for text in found:
        print(f"WRONG: {text}")
    print(f"seed {seed}; the table is in {HERE / 'RESULTS.md'}")
    return 1 if found else 130 if stopped else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parse(arguments: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("scenarios", nargs="*", metavar="SCENARIO", help=f"of these: {', '.join(names)}  [default: all]")
    add("--minutes", type=float, metavar="M", help="in all, shared evenly by the scenarios")
    add("--trials", type=int, metavar="N", help="of each scenario; 0 writes the table anew, and no more")
    add("--seed", type=int, metavar="S", help="[default: a new one, which is kept with the counts]")
    add("--list", action="store_true", help="the scenarios, and what this machine lacks for them")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.scenarios) - set(names)):
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(names)}")
    options.scenarios = list(dict.fromkeys(options.scenarios)) or list(names)
    return options
