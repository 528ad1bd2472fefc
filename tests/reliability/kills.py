"""Each trial carries a schedule of four stages and 17 iterations to its end, on 1 to 4 workers under stagerun's own launcher. Up to
six of its lives are met by SIGKILL at a random moment: one rank, rank 0, all processes, or the launcher; with one worker, which has no
launcher, that one, or all. Half of the moments are drawn from the start of Python on, the others after so many lines of the life's log, so
that it trains. The next life is the same command. Lost: a schedule that doesn't come to its end. Different: other bits in the last snapshots of its
stages than those of a run left alone. Left behind: a process that is there 1 s after the signals, or, where a rank was killed, after the
launcher's end.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import processes
import small
import tiny
from processes import Run
from reliability.trial import Scenario, Trial

WHAT = ("one", "rank 0", "all", "launcher")
ALONE = ("the only worker", "all")  # a single worker is the run's first process: there is no launcher
MOST_LINES = 14  # of a life's log before a kill: several iterations and snapshots, fewer than a life writes
WORKERS = {1: 0.25, 2: 0.35, 3: 0.25, 4: 0.15}  # and how often each
MOST_KILLS = 6  # in one schedule
PEER = 69  # a worker is gone: what the launcher says after its ranks were killed
GIVE_UP_S = 60  # a process that was killed and is there still
ALONE_S = 1.0  # what the aim gives the processes that are left


class Kills:
    """Runs of one schedule in one folder, and the ends, and the seconds, of those that were left alone."""

    def __init__(self, rng: random.Random, folder: Path, patience: float = ALONE_S, most: int = MOST_KILLS) -> None:
        """`patience`: seconds that the processes have to be gone; `most` kills in one schedule, of at least two."""
        self.rng, self.folder, self.out, self.patience, self.most = rng, folder, folder / "out", patience, most
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
        for number in range(self.rng.randint(2, self.most)):
            what = self.rng.choice(WHAT if workers > 1 else ALONE)
            lines = self.rng.randint(1, MOST_LINES) if number % 2 == 0 else 0
            wait = self.rng.uniform(0.0, 0.1) if lines else self.rng.uniform(0.02, 0.8) * length
            before = len(self.log())
            run = self.start(workers)
            with ended(run):
                if lines:
                    wait_until(run, lambda: len(self.log()) >= before + lines)  # noqa: B023
                pause(run, wait)
                at = (
                    "while training"
                    if any('"event": "Iterated"' in line for line in self.log()[before:])
                    else "while starting"
                )
                killed = run.process.poll() is None and kill(run, what, self.rng)
                # How long it takes is counted from here, where the signals are sent; after that of a rank, from the
                # launcher's end on.
                seconds = 0.0
                if killed and what in ("all", "launcher"):
                    run.process.wait(GIVE_UP_S)
                    seconds = until_gone(run)
                code, text = run.wait()
                seconds = max(seconds, until_gone(run))
            told.append(
                f"{what} {wait:.2f} s after {f'line {lines} of its log' if lines else 'its start'}: exit {code}"
            )
            counts.update({what: killed, at: killed})
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

    def log(self) -> list[str]:
        """Its lines, of all lives; the last may be cut short."""
        try:
            return (self.out / "log.jsonl").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def wrong(self, counts: Counter[str], workers: int, told: list[str], why: str) -> Trial:
        counts["wrong"] += 1
        return Trial(kills_of(counts), counts, wrong=f"{workers} workers; {'; '.join(told)}: {why}")


def kills_of(counts: Counter[str]) -> int:
    return sum(counts[what] for what in {*WHAT, *ALONE})


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


def wait_until(run: Run, there: Callable[[], bool]) -> None:
    """Returns then, or when the run is over."""
    while run.process.poll() is None and not there():
        time.sleep(0.005)


def kill(run: Run, what: str, rng: random.Random) -> bool:
    """SIGKILL. Whether there was anything of that kind: a launcher has no ranks before it starts them."""
    if what == "launcher":
        targets = [run.process.pid]
    elif what == "all":
        targets = run.pids()
    else:
        ranks = run.ranks()
        targets = [ranks[0]] if what == "rank 0" and 0 in ranks else []
        if what != "rank 0" and ranks:
            targets = [ranks[rng.choice(sorted(ranks))]]
    return processes.kill_all(targets)


def until_gone(run: Run, patience: float = 60) -> float:
    """Seconds from now on at which a process of the run was there for the last time. To look at all of /proc takes a moment, on a
    crowded machine a second: what counts is when a look began that found one."""
    begun = time.monotonic()
    seen = 0.0
    while True:
        look = time.monotonic() - begun
        if run.pids():
            seen = look
        else:
            return seen
        if look > patience:
            return seen
        time.sleep(0.01)


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
