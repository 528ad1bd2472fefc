"""Kills runs at random moments and goes on with the same command, until the schedule is done; then compares the bits.

scripts/kill-test [--kills 20] [--workers 1 2 3 4] [--seed 1]. Prints one line per life and a table; exit 1 if anything
was lost, differed, or was left behind.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import processes
import tiny


@dataclass
class Tally:
    workers: int
    kills: int = 0
    finished: int = 0  # schedules carried to their end
    different: int = 0
    orphans: int = 0
    failures: int = 0  # lives that ended by themselves with anything but success


def uninterrupted(schedule: Path, out: Path, workers: int) -> tuple[dict[str, str], float]:
    begun = time.monotonic()
    code, text = processes.Run(arguments(schedule, out, workers)).start().wait()
    if code:
        raise SystemExit(f"the uninterrupted run ended with {code}:\n{text}")
    return processes.ends(out), time.monotonic() - begun


def arguments(schedule: Path, out: Path, workers: int) -> list[str]:
    return ["run", str(schedule), "--out", str(out), "--nproc", str(workers), "--threads", "1"]


def attack(schedule: Path, out: Path, workers: int, kills: int, rng: random.Random, say=print) -> Tally:
    """`kills` kills, with 1, all or the launcher as target in turn, and as many schedules carried to the end as come out."""
    expected, length = uninterrupted(schedule, out.with_name(out.name + "-straight"), workers)
    tally = Tally(workers)
    while True:
        last = tally.kills >= kills
        run = processes.Run(arguments(schedule, out, workers)).start()
        what = ("one", "all", "launcher")[tally.kills % 3]
        if not last:
            # A wait that the run may outlive or not; both happen.
            waited = rng.uniform(0.1, 1.0) * length
            deadline = time.monotonic() + waited
            while time.monotonic() < deadline and run.process.poll() is None:
                time.sleep(0.02)
        if last or run.process.poll() is not None:
            code, text = run.wait()
            if code:
                tally.failures += 1
                say(f"  ended by itself with {code}:\n{text}")
        else:
            processes.kill(run, what, rng)
            tally.kills += 1
            code, text = run.wait()
            if not run.gone(within=1.0):
                tally.orphans += 1
                run.gone(within=60)
            count = len(processes.content(out)) if (out / "snapshots").exists() else 0
            say(
                f"  {workers} workers, kill {tally.kills} ({what}) after {waited:.1f} s: exit {code}, {count} snapshots"
            )
        if code == 0:
            tally.finished += 1
            tally.different += processes.ends(out) != expected
            shutil.rmtree(out)
            if last:
                return tally
        elif last:
            return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    tallies = []
    with tempfile.TemporaryDirectory(prefix="stagerun-kill-") as folder:
        base = Path(folder)
        tiny.make_data(base / "data")
        schedule = tiny.make_schedule(base / "schedule", base / "data")
        for workers in options.workers:
            tallies.append(attack(schedule, base / f"out{workers}", workers, options.kills, rng))
    print(
        "workers  kills  schedules finished  different bits  ended by themselves with an error  left behind after 1 s"
    )
    for t in tallies:
        print(f"{t.workers:7}  {t.kills:5}  {t.finished:18}  {t.different:14}  {t.failures:34}  {t.orphans:22}")
    return any(t.different or t.failures or t.orphans for t in tallies)


if __name__ == "__main__":
    sys.exit(main())
