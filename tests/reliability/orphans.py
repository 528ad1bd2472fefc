"""Each trial starts a run without an end on 2, 3 or 4 workers, kills its launcher (SIGKILL), and looks for processes of the run until
1 s after the launcher was dead, and once more then: workers, their helpers, and what watches them, found by a mark in their environment.
Half of the moments are drawn from its first child on, while it starts, the others after its first iteration; one in ten from the
start of Python on. Injected: the kills that met a launcher with other processes beside it.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import processes
import small
import tiny
from reliability.kills import ended, pause, until_gone, wait_until
from reliability.trial import Scenario, Trial

LIMIT_S = 1.0
MOMENTS = {"beginning": 0.1, "starting": 0.45, "training": 0.45}
LATEST_S = {"beginning": 1.0, "starting": 3.0, "training": 1.0}  # of the kill, after what it waits for


def trial(rng: random.Random, schedule: Path, out: Path, when: str, limit: float = LIMIT_S) -> Trial:
    workers, wait = rng.choice((2, 2, 3, 4)), rng.uniform(0.02, LATEST_S[when])
    words = ["run", schedule, "--out", out, "--nproc", workers, "--threads", 1, *small.ENDLESS]
    run = processes.Run([str(word) for word in words]).start()
    with ended(run):
        if when == "starting":
            wait_until(run, lambda: len(run.pids()) > 1)
        elif when == "training":
            wait_until(run, lambda: trains(out))
        pause(run, wait)
        beside = len(set(run.pids()) - {run.process.pid})
        code = run.process.poll()
        if code is not None:
            return Trial(0, {}, wrong=f"{workers} workers: it ended by itself with {code}: {run.wait()[1][-1500:]}")
        run.process.kill()
        run.process.wait()
        seconds = until_gone(run, least=LIMIT_S)
    at = "while training" if trains(out) else "while starting" if beside else "before there was any process beside it"
    counts = {at: 1, "processes beside the launcher": beside, "left after 1 s": int(seconds > limit)}
    wrong = f"{workers} workers, killed {wait:.2f} s into {when}: the last was there after {seconds:.2f} s"
    return Trial(
        int(beside > 0), counts, {"seconds until the last was seen": seconds}, wrong if seconds > limit else ""
    )


def trains(out: Path) -> bool:
    try:
        return '"event": "Iterated"' in (out / "log.jsonl").read_text()
    except FileNotFoundError:
        return False


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    tiny.make_data(folder / "data")
    schedule = small.make_schedule(folder / "schedule", folder / "data")
    out = folder / "out"
    while True:
        shutil.rmtree(out, ignore_errors=True)
        yield trial(rng, schedule, out, rng.choices([*MOMENTS], [*MOMENTS.values()])[0])


SCENARIO = Scenario(
    name="orphans",
    fault="SIGKILL of the launcher",
    aim="0 processes left after 1 s",
    wanted=100,
    trials=trials,
)
