"""Each trial carries a schedule of four stages and 17 iterations to its end, on 1 to 4 workers under stagerun's own launcher. Up to
six of its lives are met by SIGKILL at a random moment, from the start of Python on: one rank, rank 0, all processes, or the launcher. The
next life is the same command. Lost: a schedule that doesn't come to its end. Different: other bits in the last snapshots of its
stages than those of a run left alone. Left behind: a process that is there 1 s after the last of the killed ones.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import processes
import small
import tiny
from processes import Run
from reliability.trial import Scenario, Trial

WHAT = ("one", "rank 0", "all", "launcher")
WORKERS = {1: 0.25, 2: 0.35, 3: 0.25, 4: 0.15}  # and how often each
MOST_KILLS = 6  # in one schedule
PEER = 69  # a worker is gone: what the launcher says after its ranks were killed
ALONE_S = 1.0  # what the aim gives the processes that are left


class Kills:
    """Runs of one schedule in one folder, and the ends, and the seconds, of those that were left alone."""

    def __init__(self, rng: random.Random, folder: Path, patience: float = ALONE_S) -> None:
        """`patience`: seconds that the processes have to be gone."""
        self.rng, self.folder, self.out, self.patience = rng, folder, folder / "out", patience
        tiny.make_data(folder / "data")
        self.schedule = small.make_schedule(folder / "schedule", folder / "data")
        self.straight: dict[int, tuple[dict[str, str], float]] = {}

    def start(self, workers: int) -> Run:
        """With --retry, since several may be killed before they have got any further."""
        words = ["run", self.schedule, "--out", self.out, "--nproc", workers, "--threads", 1, "--retry"]
        return Run([str(word) for word in words]).start()

    def left_alone(self, workers: int) -> tuple[dict[str, str], float]:
        if workers not in self.straight:
            shutil.rmtree(self.out, ignore_errors=True)
            begun = time.monotonic()
            run = self.start(workers)
            with ended(run):
                code, text = run.wait()
            if code:
                raise RuntimeError(f"the run that was left alone ended with {code}:\n{text}")
            self.straight[workers] = processes.ends(self.out), time.monotonic() - begun
            shutil.rmtree(self.out)
        return self.straight[workers]

    def trial(self, workers: int) -> Trial:
        """A schedule from its beginning to its end."""
        expected, length = self.left_alone(workers)
        shutil.rmtree(self.out, ignore_errors=True)
        counts: Counter[str] = Counter({f"schedules on {workers} workers": 1})
        slowest, told = 0.0, []
        for _ in range(self.rng.randint(2, MOST_KILLS)):
            what, wait = self.rng.choice(WHAT), self.rng.uniform(0.02, 0.8) * length
            run = self.start(workers)
            with ended(run):
                pause(run, wait)
                killed = run.process.poll() is None and kill(run, what, self.rng)
                # How long it takes is counted from here, where the signals are sent; after that of a rank, from the
                # launcher's end on.
                seconds = until_gone(run) if killed and what in ("all", "launcher") else 0.0
                code, text = run.wait()
                seconds = max(seconds, until_gone(run))
            told.append(f"{what} after {wait:.2f} s: exit {code}")
            counts[what] += killed
            slowest = max(slowest, seconds)
            if wrong := judged(code, text, what, killed, seconds <= self.patience):
                return self.wrong(counts, workers, told, wrong)
            if code == 0:
                break
        run = self.start(workers)
        with ended(run):
            code, text = run.wait()
        if code:
            return self.wrong(counts, workers, told, f"lost: the last life ended with {code}: {text[-1500:]}")
        if processes.ends(self.out) != expected:
            return self.wrong(counts, workers, told, "different bits")
        counts["bit-identical"] += 1
        return Trial(kills_of(counts), counts, {"seconds until the last was seen": slowest})

    def wrong(self, counts: Counter[str], workers: int, told: list[str], why: str) -> Trial:
        counts["wrong"] += 1
        return Trial(kills_of(counts), counts, wrong=f"{workers} workers; {'; '.join(told)}: {why}")


def kills_of(counts: Counter[str]) -> int:
    return sum(counts[what] for what in WHAT)


def judged(code: int, text: str, what: str, killed: bool, gone: bool) -> str:
    """What is wrong with a life that was killed, or was over before; '' if nothing is."""
    if "Traceback" in text or "this is a bug" in text:
        return f"a bug of stagerun: {text[-1500:]}"
    if not gone:
        return "left behind: a process was there when the others had long gone"
    # The work may have been done when the signal came; its launcher then says so.
    allowed = {0, PEER, -signal.SIGKILL} if killed else {0}
    if what == "launcher" and killed:
        allowed = {-signal.SIGKILL}
    return "" if code in allowed else f"exit code {code}: {text[-1500:]}"


class ended:
    """Kills what is left of a run when the block ends, however it does."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        processes.kill_all(self.run.pids())
        self.run.process.wait()
        if self.run.process.stdout is not None:
            self.run.process.stdout.close()


def pause(run: Run, seconds: float) -> None:
    """Returns after that time, or when the run is over."""
    with suppress(processes.subprocess.TimeoutExpired):
        run.process.wait(seconds)


def kill(run: Run, what: str, rng: random.Random) -> bool:
    """SIGKILL. Whether there was anything of that kind: a launcher has no ranks before it starts them."""
    if what == "launcher":
        targets = [run.process.pid]
    elif what == "all":
        targets = run.pids()
    else:
        ranks = run.ranks()
        targets = [ranks[0]] if what == "rank 0" and 0 in ranks else []
        if what == "one" and ranks:
            targets = [ranks[rng.choice(sorted(ranks))]]
    return processes.kill_all(targets)


def until_gone(run: Run, patience: float = 60) -> float:
    """Seconds from now on at which a process of the run was there for the last time. To look at all of /proc takes a moment, on a
    crowded machine a second: what counts is when a look began that found one."""
    begun = time.monotonic()
    seen = 0.0
    while (look := time.monotonic() - begun) < patience and run.pids():
        seen = look
        time.sleep(0.01)
    return seen


def numbers_of_workers() -> dict[int, float]:
    """Those of WORKERS that this machine has GPUs for, where it has any, and how often each."""
    try:
        gpus = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return WORKERS
    return {number: often for number, often in WORKERS.items() if number <= max(1, gpus)}


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    kills, workers = Kills(rng, folder), numbers_of_workers()
    while True:
        yield kills.trial(rng.choices([*workers], [*workers.values()])[0])


SCENARIO = Scenario(
    name="kills",
    fault="SIGKILL at random moments of whole schedules: one rank, rank 0, all, the launcher",
    aim="0 runs lost, 100 % bit-identical",
    wanted=300,
    trials=trials,
)
