"""Faults at calls of the store. What is counted: RESULTS.md."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import processes
import warm
from reliability import brief, faults
from reliability.trial import Trial

KINDS = ("kill", "ENOSPC", "EIO", "ENOSPC+", "EIO+", "EIO-")  # at a call, from it on, or for a while
MOST_CALLS = 60  # for which the disk is away
WORKERS = {1: 0.6, 2: 0.25, 4: 0.15}  # and how often each
DONE, PEER, STORAGE = 0, 69, 74

PATIENCE_S, HUNG = 180, 1000  # until a life counts as hung, generously; what is then in the place of its exit code


@dataclass(frozen=True)
class Life:
    """Exit codes and what was printed, by rank."""

    codes: tuple[int, ...]
    texts: tuple[str, ...]


class Wrong(Exception):
    """What a life did that it must not."""


def fault_at(kind: str, call: int, rng: random.Random) -> str:
    if kind.endswith("-"):
        return f"{kind[:-1]}@{call}-{call + rng.randint(1, MOST_CALLS)}"
    return f"{kind.rstrip('+')}@{call}{'+' * kind.endswith('+')}"


class Runs:
    """The runs of one schedule in one output folder, with the ends of one that was left alone for each number of workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.schedule = brief.make_schedule(folder)
        self.out = folder / "out"
        self.straight: dict[int, tuple[dict[str, str], int]] = {}

    def life(self, workers: int, fault: str = "") -> Life:
        """The run, to its end. `fault`: as of `faults.FaultyDisk`, of rank 0."""
        words = ["run", str(self.schedule), "--out", str(self.out), "--threads", "1"]
        if workers == 1:
            return self._alone(words, fault)
        world = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
        started, files = [], [self.folder / f"{rank}.txt" for rank in range(workers)]
        for rank, file in enumerate(files):
            program = [str(faults.__file__), fault] if fault and rank == 0 else ["-m", "stagerun"]
            own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            env = {**os.environ, **own, **world, "RANK": str(rank)}
            command = [sys.executable, *program, *words]
            with file.open("wb") as printed:
                started.append(subprocess.Popen(command, stdout=printed, stderr=printed, env=env, cwd=self.folder))
        codes, end = [], time.monotonic() + PATIENCE_S
        for one in started:
            try:
                codes.append(one.wait(max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
                codes.append(HUNG)
        return Life(tuple(codes), tuple(file.read_text(errors="replace") for file in files))

    def _alone(self, words: list[str], fault: str) -> Life:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            done = warm.run(words, cwd=self.folder, env=env, fault=fault, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Life((HUNG,), ("",))
        return Life((done.returncode,), (done.stdout + done.stderr,))

    def left_alone(self, workers: int) -> tuple[dict[str, str], int]:
        """The content of its last snapshots, and the calls of the store in it."""
        if workers not in self.straight:
            life = self.life(workers, "count@1+")
            called = life.texts[0].count("\a")
            if any(life.codes) or not called:
                raise RuntimeError(f"the run without a fault ended with {life.codes}: {life.texts}")
            self.straight[workers] = processes.ends(self.out), called
            shutil.rmtree(self.out)
        return self.straight[workers]


def faulty(runs: Runs, workers: int, fault: str) -> str:
    """A life with a fault: how it ended, in a word. Wrong if it did what it must not."""
    start, before = brief.expected_start(runs.out), brief.begun(runs.out)[0]
    life = runs.life(workers, fault)
    came = faults.CAME in life.texts[0]
    first, others = life.codes[0], life.codes[1:]
    if said := brief.bug(life.texts, life.codes):
        raise Wrong(said)
    if not came:
        right, word = not any(life.codes), "not reached"
    elif fault.startswith("kill"):
        # The others may be done when rank 0 is killed while it clears up.
        right, word = first == -9 and set(others) <= {PEER, DONE}, "killed"
    else:
        allowed = {DONE} if first == DONE else {PEER, STORAGE}
        if brief.expected_start(runs.out) is None:
            allowed.add(DONE)  # the others had nothing left to do
        right, word = first in (DONE, STORAGE) and set(others) <= allowed, "ended with 74" if first else "went on"
    if not right:
        hung = " (hung)" if HUNG in life.codes else ""
        raise Wrong(f"exit codes {life.codes}{hung}: {' / '.join(text[-600:] for text in life.texts)}")
    if gone := brief.lost(runs.out):
        raise Wrong(f"lost: {gone}")
    # A file that can't be read for now may lead to the one before: then the fault decides where it begins.
    lives, begun = brief.begun(runs.out)
    if lives > before and begun not in (None, start) and not (came and fault.startswith("EIO")):
        raise Wrong(f"began at {begun}, the newest complete snapshot is {start}")
    return word


def healed(runs: Runs, workers: int) -> None:
    """The same command without a fault. Wrong if it doesn't lead to the end that a run left alone has."""
    start = brief.expected_start(runs.out)
    life = runs.life(workers)
    if any(life.codes):
        raise Wrong(f"the next life ended with {life.codes}: {' / '.join(text[-600:] for text in life.texts)}")
    if said := brief.bug(life.texts, life.codes):
        raise Wrong(said)
    begun = brief.begun(runs.out)[1]
    if start not in (None, begun):
        raise Wrong(f"the next life began at {begun}, the newest complete snapshot is {start}")
    if processes.ends(runs.out) != runs.left_alone(workers)[0]:
        raise Wrong("other bits at the end than those of a run that was left alone")


def trial(runs: Runs, workers: int, faults: list[str]) -> Trial:
    runs.left_alone(workers)
    counts: Counter[str] = Counter()
    injected = 0
    what = f"{workers} worker{'s' * (workers > 1)}, {', then '.join(faults)}"
    try:
        for fault in faults:
            word = faulty(runs, workers, fault)
            injected += word != "not reached"
            counts[word] += 1
        healed(runs, workers)
    except Exception as wrong:  # also of the checks themselves: what they can't read is no right end
        kind = "lost" if str(wrong).startswith("lost") else "wrong"
        named = "" if isinstance(wrong, Wrong) else f"{type(wrong).__name__} "
        return Trial(max(1, injected), counts | {kind: 1}, wrong=f"{what}: {named}{wrong}")
    finally:
        shutil.rmtree(runs.out, ignore_errors=True)
    return Trial(injected, counts | {f"{workers} workers": 1})


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    runs = Runs(folder)
    left: dict[int, list[str]] = {}
    while True:
        workers = rng.choices([*WORKERS], [*WORKERS.values()])[0]
        calls = runs.left_alone(workers)[1]
        if not left.get(workers):  # every point once before any comes again
            left[workers] = [fault_at(kind, n, rng) for kind in KINDS for n in range(1, calls + 1)]
            rng.shuffle(left[workers])
        faults = [left[workers].pop()]
        if rng.random() < 1 / 3:
            faults.append(fault_at(rng.choice(KINDS), rng.randint(1, calls), rng))
        yield trial(runs, workers, faults)
