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

import processes
import small
import tiny
from click.testing import CliRunner
from reliability.kills import ended
from reliability.trial import Scenario, Trial

from stagerun import store
from stagerun.base.errors import ExitCode
from stagerun.cli import main as command

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

    @property
    def out(self) -> Path:
        return self.folder / f"out{self.nproc}"

    @property
    def scratch(self) -> Path:
        return self.folder / f"scratch{self.nproc}"

    def start(self) -> processes.Run:
        words = (f'data.scratch="{self.scratch}"', "data.scratch_reserve=0", "data.cache=DISK")
        options = [word for field in words for word in ("--set", field)]
        return small.start(self.folder / "schedule", self.out, "--grace", f"{GRACE}s", *options, nproc=self.nproc)

    def begin(self) -> None:
        for folder in (self.out, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
        self.scratch.mkdir()
        self.stops = 0

    def alone(self) -> None:
        """Runs it through once."""
        self.begin()
        begun = time.monotonic()
        run = self.start()
        with ended(run):
            code, text = run.wait()
        assert code == 0, text
        self.length, self.ends = time.monotonic() - begun, processes.ends(self.out)
        self.begin()


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
        met, saved = totals[MET], totals[SAVED]
        if met + saved >= ENOUGH and met > MOST_ENDED * (met + saved) and not done.wrong:
            done = replace(
                done, wrong=f"{met} of {met + saved} runs came to their end after a signal: that is no chance"
            )
        yield done


def trial(schedule: Schedule, rng: random.Random) -> Trial:
    """One stop. When there have been several, or the run had come to its end, the bits, too."""
    number, target = rng.choice(SIGNALS), rng.choice(TARGETS)
    when, moment = _moment(schedule, rng)
    one = rng.random()
    words = f"{schedule.nproc} workers, stop {schedule.stops + 1}: {number.name} to {target} {when}"
    run = schedule.start()
    with ended(run):
        moment(run)
        left_to_train = iterations_left(schedule.out)
        alive = run.process.poll() is None
        _send(run, number, target, one)
        begun = time.monotonic()
        try:
            code, text = run.wait(timeout=GRACE + LATE)
        except subprocess.TimeoutExpired:
            words = f"{words}: still there {GRACE + LATE} s after the signal"
            schedule.begin()
            return Trial(faults=0, counts={"hung": 1}, wrong=words)
        seconds = time.monotonic() - begun
        left = [] if run.gone(within=2.0) else run.pids()
    wrong = judged(schedule, code, text, seconds, left, left_to_train if alive else 0)
    how = SAVED if code == ExitCode.SAVED else "other" if code else MET if alive else "had ended before the signal"
    counts = {how: 1, f"to {target}": 1}
    schedule.stops += 1
    if not wrong and (code == 0 or schedule.stops >= STOPS):
        counts["schedules compared"] = 1
        wrong = _to_the_end(schedule, code)
        schedule.begin()
    if wrong:
        schedule.begin()
        wrong = f"{words}: exit {code} after {seconds:.1f} s: {wrong}"
    return Trial(
        faults=int(alive and how == SAVED),
        counts=counts,
        largest={"seconds from the signal to the end": seconds},
        wrong=wrong,
    )


def iterations_left(out: Path) -> int:
    """How many the log does not tell of, of the stage that is trained last; a number above MOST_LEFT before that has begun."""
    try:
        lines = (out / "log.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return MOST_LEFT + 1
    for line in reversed(lines):
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
    if kind == 0:
        seconds = rng.uniform(0.0, 1.0)
        return f"{seconds:.3f} s after its first instruction", lambda run: _after(run, seconds)
    if kind == 1:
        seconds = rng.uniform(0.0, 0.8) * schedule.length
        return f"{seconds:.3f} s after its first instruction", lambda run: _after(run, seconds)
    lines, seconds = rng.randrange(1, 20), rng.uniform(0.0, 0.1)
    return f"{seconds:.3f} s after line {lines} of its log", lambda run: _after_line(schedule.out, run, lines, seconds)


def _after(run: processes.Run, seconds: float) -> None:
    while run.process.poll() is None and not answers(run.process.pid):
        time.sleep(0.001)
    end = time.monotonic() + seconds
    while run.process.poll() is None and time.monotonic() < end:
        time.sleep(min(0.005, max(0.0, end - time.monotonic())))


def _after_line(out: Path, run: processes.Run, lines: int, seconds: float) -> None:
    def count() -> int:
        try:
            return (out / "log.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    before = count()
    while run.process.poll() is None and count() < before + lines:
        time.sleep(0.005)
    _after(run, seconds)


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
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        if target == "group":
            os.killpg(run.process.pid, number)
            return
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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
    if code not in (ExitCode.DONE, ExitCode.SAVED):
        return f"neither saved nor done:\n{text}"
    if code == ExitCode.DONE and to_train > MOST_LEFT:
        return f"it went on to its end, and more than {MOST_LEFT} iterations were left:\n{text}"
    if seconds > GRACE:
        return f"{seconds:.1f} s, and the grace period is {GRACE} s"
    if left:
        return f"left behind: {left}"
    if "Traceback" in text or "bug of stagerun" in text:
        return f"a bug:\n{text}"
    if sum(line.startswith(("SIGTERM: ", "SIGUSR1: ", "SIGINT: ")) for line in text.splitlines()) > 1:
        return f"told more than once:\n{text}"
    if code == ExitCode.SAVED and "run the same command again" not in text:
        return f"doesn't say how to go on:\n{text}"
    return _log_says(schedule, code) or _status_says(schedule)


def _log_says(schedule: Schedule, code: int) -> str:
    """What the last life says that came so far as to write into the log."""
    log = schedule.out / "log.jsonl"
    if not log.exists():
        return "" if code == ExitCode.SAVED else "done without a log"
    lines = log.read_text().splitlines()
    try:
        told = [json.loads(line) for line in lines]
    except ValueError as error:
        return f"the log can't be read: {error}"
    events = [event["event"] for event in told]
    if lost := _not_saved(schedule, told):
        return lost
    last = events[-1] if events else ""
    if last != ("RunFinished" if code == 0 else "Stopped") and not (code == ExitCode.SAVED and not events):
        return f"exit {code}, and the log ends with {last}: {lines[-1]}"
    return ""


def _not_saved(schedule: Schedule, told: list[dict]) -> str:
    """What was trained last and is in no snapshot; '' if there is nothing."""
    trained = next(((e["stage"], e["iter"]) for e in reversed(told) if e["event"] == "Iterated"), None)
    saved = [(ref.stage, ref.iter) for ref in store.inventory(store.LocalDisk(), schedule.out).snapshots]
    if trained is None or any(stage == trained[0] and iter >= trained[1] for stage, iter in saved):
        return ""
    return f"{trained} is in no snapshot: {saved}"


def _status_says(schedule: Schedule) -> str:
    words = ["status", str(schedule.folder / "schedule"), "--out", str(schedule.out), "--json"]
    said = CliRunner().invoke(command, words, prog_name="stagerun").output
    state = json.loads(said)["state"] if said.startswith("{") else said
    return "" if state in ("stopped", "finished", "nothing") else f"`status` says {state}"


def _to_the_end(schedule: Schedule, code: int) -> str:
    """The same command until it is done, and the bits."""
    if code != 0:
        run = schedule.start()
        with ended(run):
            code, text = run.wait()
        if code != 0:
            return f"the same command, left alone, ended with {code}:\n{text}"
    return (
        "" if processes.ends(schedule.out) == schedule.ends else "other bits than those of the run that was left alone"
    )


SCENARIO = Scenario(
    name="sigterm",
    fault="SIGTERM, SIGUSR1, SIGINT at random moments, evaluation, copying to scratch and imports among them",
    aim="100 of 100 saved, exit 75 (0 where the run was at its end), within the grace period of 120 s",
    wanted=100,
    trials=trials,
)
