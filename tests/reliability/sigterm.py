"""Signals at random moments of a run. What is counted: RESULTS.md."""

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
from dataclasses import replace
from pathlib import Path

import processes
import small
import tiny
from contract import stagerun
from reliability.kills import Runs, ended, wait_until
from reliability.trial import Trial

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


class Schedule(Runs):
    """One schedule under attack, with `nproc` workers."""

    def __init__(self, folder: Path, nproc: int) -> None:
        self.nproc, self.stops, self.scratch = nproc, 0, folder / f"scratch{nproc}"
        settings = (f'data.scratch="{self.scratch}"', "data.scratch_reserve=0", "data.cache=DISK")
        options = [word for setting in settings for word in ("--set", setting)]
        super().__init__(folder / "schedule", folder / f"out{nproc}", "--grace", f"{GRACE}s", *options)

    def begin(self) -> None:
        super().begin()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        self.stops = 0


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    tiny.make_data(folder / "data")
    small.make_schedule(folder / "schedule", folder / "data")
    schedules: dict[int, Schedule] = {}
    totals: Counter[str] = Counter()
    while True:
        nproc = rng.choice((1, 1, 2, 2, 3))
        if nproc not in schedules:
            schedules[nproc] = Schedule(folder, nproc)
            schedules[nproc].left_alone(nproc)
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
    with ended(schedule.start(schedule.nproc)) as run:
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
    told = f"{words}: exit {code} after {seconds:.1f} s"
    if not wrong and (code == DONE or schedule.stops >= STOPS):
        counts["schedules compared"] = 1
        code, text = schedule.through(schedule.nproc) if code else (0, "")
        wrong = f"the command, left alone, ended with {code}:\n{text}" if code else ""
        if not wrong and processes.ends(schedule.out) != schedule.left_alone(schedule.nproc)[0]:
            wrong = "other bits than those of the run that was left alone"
        schedule.begin()
    if wrong:
        schedule.begin()
        wrong = f"{told}: {wrong}"
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
    seconds = rng.uniform(0.0, (1.0, 0.8 * schedule.left_alone(schedule.nproc)[1], 0.1)[kind])

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
    workers = [pid for _, pid in sorted(run.ranks().items())]
    pids = run.pids() if target == "all" else [run.process.pid]
    if target == "one" and workers:
        pids = [workers[int(one * len(workers))]]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            (os.killpg if target == "group" else os.kill)(pid, number)


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
    trained = next(((e["stage"], e["iter"]) for e in reversed(told) if e["event"] == "Iterated"), None)
    saved = [(ref.stage, ref.iter) for ref in store.inventory(store.LocalDisk(), schedule.out).snapshots]
    if trained is None or any(stage == trained[0] and iter >= trained[1] for stage, iter in saved):
        return ""
    return f"{trained} is in no snapshot: {saved}"


def _status_says(schedule: Schedule) -> str:
    said = stagerun(["status", schedule.schedule, "--out", schedule.out, "--json"], schedule.out.parent).output
    state = json.loads(said)["state"] if said.startswith("{") else said
    return "" if state in ("stopped", "finished", "nothing") else f"`status` says {state}"
