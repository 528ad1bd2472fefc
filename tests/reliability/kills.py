"""SIGKILL at random moments of whole schedules. What is counted: RESULTS.md."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import processes
import small
import tiny
from processes import Run
from reliability.trial import Trial

WHAT = ("one", "rank 0", "all", "launcher")
ALONE = ("the only worker", "all")  # a single worker is the run's first process: there is no launcher
MOST_LINES = 14  # of a life's log before a kill: several iterations and snapshots, fewer than a life writes
WORKERS = {1: 0.25, 2: 0.3, 3: 0.2, 4: 0.15, 8: 0.1}  # and how often each
ELASTIC, OFTEN = ("--set", "determinism=ELASTIC"), 1 / 3
MOST_KILLS = 6  # in one schedule, of at least two
PEER = 69  # a worker is gone: what the launcher says after its ranks were killed
GIVE_UP_S = 60  # a process that was killed and is there still
PATIENCE_S = 1.0  # what the aim gives the processes that are left


class Runs:
    """Runs of one schedule in one folder, and the ends, and the seconds, of those that were left alone."""

    def __init__(self, schedule: Path, out: Path, *options: str) -> None:
        self.schedule, self.out, self.options = schedule, out, options
        self.straight: dict[tuple[int, Sequence[str]], tuple[dict[str, str], float]] = {}

    def start(self, workers: int, more: Sequence[str] = ()) -> Run:
        return small.start(self.schedule, self.out, *self.options, *more, nproc=workers)

    def begin(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def through(self, workers: int, more: Sequence[str] = ()) -> tuple[int, str]:
        """Exit code and what is said of a life that nothing meets."""
        with ended(self.start(workers, more)) as run:
            return run.wait()

    def left_alone(self, workers: int, more: Sequence[str] = ()) -> tuple[dict[str, str], float]:
        if (workers, more) not in self.straight:
            self.begin()
            begun = time.monotonic()
            code, text = self.through(workers, more)
            if code:
                raise RuntimeError(f"the run that was left alone ended with {code}:\n{text}")
            self.straight[workers, more] = processes.ends(self.out), time.monotonic() - begun
            self.begin()
        return self.straight[workers, more]

    def log(self) -> list[str]:
        """Its lines, of all lives; the last may be cut short."""
        with suppress(FileNotFoundError):
            return (self.out / "log.jsonl").read_text(errors="replace").splitlines()
        return []


class Kills(Runs):
    def __init__(self, rng: random.Random, folder: Path) -> None:
        """With eight device batches per iteration; and with --retry, since several may be killed before they have got any further."""
        tiny.make_data(folder / "data")
        super().__init__(small.make_schedule(folder / "schedule", folder / "data"), folder / "out", "--retry")
        self.rng = rng
        file = self.schedule / "schedule.prototxt"
        file.write_text(file.read_text().replace("\n  batch_size: 16", "\n  batch_size: 32"))

    def trial(self, numbers: dict[int, float], elastic: bool) -> Trial:
        """A schedule from its beginning to its end."""

        def drawn() -> int:
            return self.rng.choices([*numbers], [*numbers.values()])[0]

        workers, more = drawn(), ELASTIC if elastic else ()
        expected, length = self.left_alone(workers, more)
        self.begin()
        counts: Counter[str] = Counter({"schedules, ELASTIC" if elastic else f"schedules on {workers} workers": 1})
        slowest, told, wrong, code = 0.0, list[str](), "", -1
        for number in range(self.rng.randint(2, MOST_KILLS)):
            workers = drawn() if elastic else workers
            what = self.rng.choice(WHAT if workers > 1 else ALONE)
            lines = self.rng.randint(1, MOST_LINES) if number % 2 == 0 else 0
            wait = self.rng.uniform(0.0, 0.1) if lines else self.rng.uniform(0.02, 0.8) * length
            before = len(self.log())
            with ended(self.start(workers, more)) as run:
                if lines:
                    wait_until(run, lambda: len(self.log()) >= before + lines)  # noqa: B023
                with suppress(processes.subprocess.TimeoutExpired):
                    run.process.wait(wait)
                trains = any('"event": "Iterated"' in line for line in self.log()[before:])
                killed = run.process.poll() is None and kill(run, what, self.rng)
                # How long it takes is counted from here, where the signals are sent; after that of a rank, from the
                # launcher's end on.
                seconds = 0.0
                if killed and what in ("all", "launcher"):
                    run.process.wait(GIVE_UP_S)
                    seconds = until_gone(run)
                code, text = run.wait()
                seconds = max(seconds, until_gone(run))
            when = f"line {lines} of its log" if lines else "its start"
            told.append(f"{workers} workers, {what} {wait:.2f} s after {when}: exit {code}")
            counts.update({what: killed, "while training" if trains else "while starting": killed})
            slowest = max(slowest, seconds)
            if (wrong := judged(code, text, what, killed, seconds <= PATIENCE_S)) or code == 0:
                break
        if not wrong:
            code, text = self.through(drawn() if elastic else workers, more)
            wrong = (
                f"lost: the last life ended with {code}: {text[-1500:]}" if code else judged(0, text, "", False, True)
            )
        if not wrong and processes.ends(self.out) != expected:
            wrong = "different bits"
        counts["wrong" if wrong else "bit-identical"] += 1
        faults = sum(counts[what] for what in {*WHAT, *ALONE})
        largest = {"seconds until the last was seen": slowest}
        return Trial(faults, counts, largest, wrong=f"{'; '.join(told)}: {wrong}" if wrong else "")


def judged(code: int, text: str, what: str, killed: bool, gone: bool) -> str:
    """What is wrong with a life that was killed, or was over before; '' if nothing is."""
    if "Traceback" in text or "this is a bug" in text:
        return f"a bug of stagerun: {text[-1500:]}"
    if "EQUIVALENT" in text:
        return f"a resume in the same environment is called EQUIVALENT: {text[-1500:]}"
    if not gone:
        return "left behind: a process was there when the others had long gone"
    # The work may have been done when the signal came; its launcher then says so.
    allowed = {0, PEER, -signal.SIGKILL} if killed else {0}
    if what == "launcher" and killed:
        allowed = {-signal.SIGKILL}
    return "" if code in allowed else f"exit code {code}: {text[-1500:]}"


@contextmanager
def ended(run: Run) -> Iterator[Run]:
    """Kills what is left of a run when the block ends, however it does."""
    try:
        yield run
    finally:
        processes.kill_all(run.pids())
        run.process.wait()
        if run.process.stdout is not None:
            run.process.stdout.close()


def wait_until(run: Run, there: Callable[[], bool]) -> None:
    """Returns then, or when the run is over."""
    while run.process.poll() is None and not there():
        time.sleep(0.005)


def kill(run: Run, what: str, rng: random.Random) -> bool:
    """SIGKILL. Whether there was anything of that kind: a launcher has no ranks before it starts them."""
    if what in ("launcher", "all"):
        return processes.kill_all([run.process.pid] if what == "launcher" else run.pids())
    ranks = run.ranks()
    rank = 0 if what == "rank 0" or not ranks else rng.choice(sorted(ranks))
    return processes.kill_all([ranks[rank]] if rank in ranks else [])


def until_gone(run: Run, patience: float = 60) -> float:
    """Seconds from now on at which a process of the run was there for the last time. To look at all of /proc takes a moment, on a
    crowded machine a second: what counts is when a look began that found one."""
    begun, seen = time.monotonic(), 0.0
    while True:
        look = time.monotonic() - begun
        if not run.pids():
            return seen
        seen = look
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
    kills = Kills(rng, folder)
    while True:
        yield kills.trial(numbers_of_workers(), rng.random() < OFTEN)
