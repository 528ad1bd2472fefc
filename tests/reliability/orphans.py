"""Each trial starts a run without an end on 2, 3 or 4 workers, kills its launcher (SIGKILL) at a random moment, from the start of Python
on, and looks for processes of the run 1 s after the launcher was dead: workers, their helpers, and what watches them, found by a mark
in their environment.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import processes
import small
import tiny
from reliability.kills import ended, pause, until_gone
from reliability.trial import Scenario, Trial

LIMIT_S = 1.0
LATEST_S = 15.0  # of the kill, after the start: by then the run trains, on a busy machine too


def trial(rng: random.Random, schedule: Path, out: Path, latest: float = LATEST_S, limit: float = LIMIT_S) -> Trial:
    workers, wait = rng.choice((2, 2, 3, 4)), rng.uniform(0.2, latest)
    words = ["run", schedule, "--out", out, "--nproc", workers, "--threads", 1, *small.ENDLESS]
    run = processes.Run([str(word) for word in words]).start()
    with ended(run):
        pause(run, wait)
        there = len(run.pids())
        code = run.process.poll()
        if code is not None:
            return Trial(0, {}, wrong=f"{workers} workers: it ended by itself with {code}: {run.wait()[1][-1500:]}")
        run.process.kill()
        run.process.wait()
        seconds = until_gone(run)
    at = "training" if (out / "log.jsonl").exists() else "starting"
    counts = {f"while {at}": 1, "processes beside the launcher": there - 1, "left after 1 s": int(seconds > limit)}
    wrong = f"{workers} workers, killed after {wait:.2f} s: the last was there after {seconds:.2f} s"
    return Trial(1, counts, {"seconds until the last was seen": seconds}, wrong if seconds > limit else "")


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    tiny.make_data(folder / "data")
    schedule = small.make_schedule(folder / "schedule", folder / "data")
    out = folder / "out"
    while True:
        shutil.rmtree(out, ignore_errors=True)
        yield trial(rng, schedule, out)


SCENARIO = Scenario(
    name="orphans",
    fault="SIGKILL of the launcher",
    aim="0 processes left after 1 s",
    wanted=100,
    trials=trials,
)
