"""SIGTERM, SIGUSR1 or SIGINT at a random moment of a run: from its first instruction on, while it imports, joins, copies its images to
scratch, trains, saves and evaluates; to the launcher, to its process group, to every process, or to one worker alone. A run of 1 to 3
workers goes on where the one before was stopped, by the same command, until a schedule is done; its bits are then compared with those of an
uninterrupted run. Strict: exit 75, or 0 where at most two iterations were left when the signal was sent; every iteration that the
log tells of is in a snapshot (there is none yet where nothing was begun); within the grace period, which is 120 s; no process
left; a log that can be read and says Stopped; and what `status` says of it. Injected: the signals after which it ended with 75.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import processes
import small
import tiny
from contract import stagerun
from reliability.kills import ended, wait_until
from reliability.trial import Scenario, Trial

from stagerun import store

DONE, STOPPED = 0, 75
GRACE = 120  # seconds; a busy machine of two processors imports torch in 20
LATE = 60  # more seconds, and it hangs
SAVED, MET = "saved, exit 75", "came to its end in that moment, exit 0"
STOPS = 5  # of one schedule; then it is left to come to its end
SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Of the last stage, when a signal was sent to a run that then comes to its end: the iteration it is in the midst of, and one that it began
# before the signal arrived, or before all workers had agreed.
MOST_LEFT = 2
# Of all signals, at most so many may be met by such an end, once there were enough to tell.
MOST_ENDED, ENOUGH = 0.3, 20
LAST, LAST_ITERS = "early", 3  # the stage of `small` that is trained last
TARGETS = ("launcher", "launcher", "group", "all", "one")


@dataclass
class Schedule:
    """One schedule under attack, with `nproc` workers."""

    folder: Path
    nproc: int
    ends: dict[str, str] = field(default_factory=dict)  # of the run that was left alone
    length: float = 0.0  # seconds that it took
    stops: int = 0

    def __post_init__(self) -> None:
        self.out, self.scratch = self.folder / f"out{self.nproc}", self.folder / f"scratch{self.nproc}"

    def start(self) -> processes.Run:
        words = (f'data.scratch="{self.scratch}"', "data.scratch_reserve=0", "data.cache=DISK")
        options = [word for setting in words for word in ("--set", setting)]
        return small.start(self.folder / "schedule", self.out, "--grace", f"{GRACE}s", *options, nproc=self.nproc)

    def begin(self) -> None:
        for folder in (self.out, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
        self.scratch.mkdir()
        self.stops = 0

    def through(self) -> str:
        """Runs it to its end; what is wrong with that, '' if nothing."""
        with ended(self.start()) as run:
            code, text = run.wait()
        return f"the command, left alone, ended with {code}:\n{text}" if code else ""

    def alone(self) -> None:
        self.begin()
        begun = time.monotonic()
        wrong = self.through()
        assert not wrong, wrong
        self.length, self.ends = time.monotonic() - begun, processes.ends(self.out)
        self.begin()

    def log(self) -> list[str]:
        with contextlib.suppress(OSError):
            return (self.out / "log.jsonl").read_text().splitlines(keepends=True)
        return []


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    tiny.make_data(folder / "data")
    small.make_schedule(folder / "schedule", folder / "data")
    schedules: dict[int, Schedule] = {}
    totals: Counter[str] = Counter()
    while True:
        nproc = rng.choice((1, 1, 2, 2, 3))
        if nproc not in schedules:
            schedules[nproc] = Schedule(folder, nproc)
            schedules[nproc].alone()
        done = trial(schedules[nproc], rng)
        totals.update(done.counts)
        met, both = totals[MET], totals[MET] + totals[SAVED]
        if both >= ENOUGH and met > MOST_ENDED * both and not done.wrong:
            done = replace(done, wrong=f"{met} of {both} runs came to their end after a signal: that is no chance")
        yield done


def trial(schedule: Schedule, rng: random.Random) -> Trial:
    """One stop. When there have been several, or the run had come to its end, the bits, too."""
    number, target = rng.choice(SIGNALS), rng.choice(TARGETS)
    when, moment = _moment(schedule, rng)
    one = rng.random()
    words = f"{schedule.nproc} workers, stop {schedule.stops + 1}: {number.name} to {target} {when}"
    with ended(schedule.start()) as run:
        moment(run)
        left_to_train, alive = iterations_left(schedule.out), run.process.poll() is None
        _send(run, number, target, one)
        begun = time.monotonic()
        try:
            code, text = run.wait(timeout=GRACE + LATE)
        except subprocess.TimeoutExpired:
            schedule.begin()
            return Trial(0, {"hung": 1}, wrong=f"{words}: still there {GRACE + LATE} s after the signal")
        seconds = time.monotonic() - begun
        left = [] if run.gone(within=2.0) else run.pids()
    wrong = judged(schedule, code, text, seconds, left, left_to_train if alive else 0)
    how = SAVED if code == STOPPED else "other" if code else MET if alive else "had ended before the signal"
    counts = {how: 1, f"to {target}": 1}
    schedule.stops += 1
    if not wrong and (code == DONE or schedule.stops >= STOPS):
        counts["schedules compared"] = 1
        wrong = schedule.through() if code else ""
        if not wrong and processes.ends(schedule.out) != schedule.ends:
            wrong = "other bits than those of the run that was left alone"
        schedule.begin()
    if wrong:
        schedule.begin()
        wrong = f"{words}: exit {code} after {seconds:.1f} s: {wrong}"
    return Trial(int(alive and how == SAVED), counts, {"seconds from the signal to the end": seconds}, wrong)


def iterations_left(out: Path) -> int:
    """How many the log does not tell of, of the stage that is trained last; a number above MOST_LEFT before that has begun."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((out / "log.jsonl").read_text().splitlines()):
            with contextlib.suppress(ValueError):  # a line that is just being written
                event = json.loads(line)
                if event["event"] == "RunFinished":
                    return 0
                if event["event"] == "Iterated":
                    return LAST_ITERS - event["iter"] if event["stage"] == LAST else MOST_LEFT + 1
    return MOST_LEFT + 1


# -- the moment


def _moment(schedule: Schedule, rng: random.Random) -> tuple[str, Callable[[processes.Run], None]]:
    """In words, and what waits for it. A third each: the first second, any time, and a while after so many lines of the log, by
    which evaluations and snapshots are met however fast the machine is."""
    kind = rng.randrange(3)
    lines = rng.randrange(1, 20) if kind == 2 else 0
    seconds = rng.uniform(0.0, (1.0, 0.8 * schedule.length, 0.1)[kind])

    def wait(run: processes.Run) -> None:
        before = len(schedule.log())
        wait_until(run, lambda: answers(run.process.pid) and (not lines or len(schedule.log()) >= before + lines))
        end = time.monotonic() + seconds
        wait_until(run, lambda: time.monotonic() >= end)

    return f"{seconds:.3f} s after {f'line {lines} of its log' if lines else 'its first instruction'}", wait


def answers(pid: int) -> bool:
    """Whether the process has come to its first instruction: before, it is the interpreter alone, which dies of a signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True  # it has ended
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigBlk:"))]
    return all(any(mask >> (number - 1) & 1 for mask in masks) for number in SIGNALS)


def _send(run: processes.Run, number: signal.Signals, target: str, one: float) -> None:
    workers = [pid for pid in run.pids() if pid != run.process.pid and _is_worker(pid)]
    pids = run.pids() if target == "all" else [run.process.pid]
    if target == "one" and workers:
        pids = [workers[int(one * len(workers))]]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            (os.killpg if target == "group" else os.kill)(pid, number)


def _is_worker(pid: int) -> bool:
    """Not one that watches a worker, or is about to become a worker."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"stagerun" in words and b"run" in words


# -- the verdict


def judged(schedule: Schedule, code: int, text: str, seconds: float, left: list[int], to_train: int) -> str:
    """What is wrong, '' if nothing is. `to_train`: the iterations that were left when the signal was sent."""
    told = sum(line.startswith(("SIGTERM: ", "SIGUSR1: ", "SIGINT: ")) for line in text.splitlines())
    for wrong, why in (
        (code not in (DONE, STOPPED), f"neither saved nor done:\n{text}"),
        (code == DONE and to_train > MOST_LEFT, f"it went on to its end, and more than {MOST_LEFT} iterations were left:\n{text}"),
        (seconds > GRACE, f"{seconds:.1f} s, and the grace period is {GRACE} s"),
        (left, f"left behind: {left}"),
        ("Traceback" in text or "bug of stagerun" in text, f"a bug:\n{text}"),
        (told > 1, f"told more than once:\n{text}"),
        (code == STOPPED and "run the same command again" not in text, f"doesn't say how to go on:\n{text}"),
    ):  # fmt: skip
        if wrong:
            return why
    return _log_says(schedule, code) or _status_says(schedule)


def _log_says(schedule: Schedule, code: int) -> str:
    """What the last life says that came so far as to write into the log."""
    lines = schedule.log()
    if not lines:
        return "" if code == STOPPED else "done without a log"
    try:
        told = [json.loads(line) for line in lines]
    except ValueError as error:
        return f"the log can't be read: {error}"
    last = "RunFinished" if code == DONE else "Stopped"
    if told[-1]["event"] != last:
        return f"exit {code}, and the log ends with {lines[-1]}"
    return _not_saved(schedule, told)


def _not_saved(schedule: Schedule, told: list[dict[str, Any]]) -> str:
    """What was trained last and is in no snapshot; '' if there is nothing."""
    trained = next(((e["stage"], e["iter"]) for e in reversed(told) if e["event"] == "Iterated"), None)
    saved = [(ref.stage, ref.iter) for ref in store.inventory(store.LocalDisk(), schedule.out).snapshots]
    if trained is None or any(stage == trained[0] and iter >= trained[1] for stage, iter in saved):
        return ""
    return f"{trained} is in no snapshot: {saved}"


def _status_says(schedule: Schedule) -> str:
    said = stagerun(["status", schedule.folder / "schedule", "--out", schedule.out, "--json"], schedule.folder).output
    state = json.loads(said)["state"] if said.startswith("{") else said
    return "" if state in ("stopped", "finished", "nothing") else f"`status` says {state}"


SCENARIO = Scenario(
    name="sigterm",
    fault="SIGTERM, SIGUSR1, SIGINT at random moments, evaluation, copying to scratch and imports among them",
    aim="100 of 100 saved, exit 75 (0 where the run was at its end), within the grace period of 120 s",
    wanted=100,
    trials=trials,
)
