"""Interrupted with 1, 2, 3, 4 and 8 workers; and, with `determinism: ELASTIC`, continued with other numbers of workers, inside a stage and
between two. Each time the end of every stage must have the bits of a run that nobody interrupted."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import processes
import small
import tiny
from reliability.trial import Scenario, Trial

from stagerun.base.events import Iterated, StageStarted
from stagerun.train.log_file import Tail

WORKERS = (1, 2, 3, 4, 8)
ELASTIC = ("--set", "determinism=ELASTIC")
LENGTHS = {"init": 6, "cyc1": 5, "collapse": 3, "early": 3}
# From four workers to fewer and back: killed inside stages; or each time between two.
CHANGES = tuple((4, fewer, 4) for fewer in (1, 2, 3))
BORDERS = (("--until", "init"), ("--until", "cyc1"), ())


def prepare(folder: Path) -> Path:
    """The schedule, with eight device batches per iteration."""
    schedule = folder / "schedule"
    if not schedule.exists():
        tiny.make_data(folder / "data")
        making = folder / "making"
        small.make_schedule(making, folder / "data")
        file = making / "schedule.prototxt"
        file.write_text(file.read_text().replace("\n  batch_size: 16", "\n  batch_size: 32"))
        making.rename(schedule)
    return schedule


def reference(folder: Path, schedule: Path, workers: int, options: Sequence[str] = ()) -> dict[str, str]:
    """`processes.ends` of an uninterrupted run, made once."""
    kept = folder / f"reference-{workers}{'-elastic' * bool(options)}.json"
    if not kept.exists():
        out = kept.with_suffix("")
        shutil.rmtree(out, ignore_errors=True)
        done = small.run(schedule, out, *options, nproc=workers, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        kept.write_text(json.dumps(processes.ends(out)))
        shutil.rmtree(out)
    return json.loads(kept.read_text())


def interrupted(
    run: processes.Run, out: Path, stage: str, iter: int, what: str, rng: random.Random
) -> tuple[bool, str]:
    """Hits a run when its log tells of an iteration, or of one after it. Whether it was hit while it lived, and what is wrong
    with its end, '' if nothing."""
    places = [(s, i) for s, length in LENGTHS.items() for i in range(1, length + 1)]
    wanted = set(places[places.index((stage, iter)) :])
    tail = Tail(out / "log.jsonl")
    try:
        while run.process.poll() is None:
            if any(isinstance(e, Iterated) and (e.stage, e.iter) in wanted for _, e in tail()):
                break
            time.sleep(0.003)
        if run.process.poll() is not None:
            code, text = run.wait(timeout=600)
            return False, "" if code == 0 else f"ended by itself with {code}: {text[-500:]}"
        if what == "stop":
            run.process.send_signal(signal.SIGTERM)
        else:
            processes.kill(run, what, rng)
        code, text = run.wait(timeout=600)
        run.gone(within=30)
        expected = {"stop": {0, 75}, "one": {0, 69, -9}, "all": {-9}, "launcher": {-9}}[what]
        return code != 0, "" if code in expected else f"ended with {code} after `{what}`: {text[-500:]}"
    finally:
        for pid in run.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def finish(schedule: Path, out: Path, workers: int, expected: dict[str, str], *options: str) -> tuple[str, str, int]:
    """Carries the run to its end: what is wrong, what it said, the iteration of its stage at which it went on."""
    tail = Tail(out / "log.jsonl")
    tail()
    done = small.run(schedule, out, *options, nproc=workers, timeout=600)
    started = [event.iter for _, event in tail() if isinstance(event, StageStarted)]
    if done.returncode != 0:
        return f"could not go on: {done.returncode}: {done.stderr[-500:]}", done.stdout, 0
    found = processes.ends(out)
    differ = [stage for stage in expected if found.get(stage) != expected[stage]]
    return f"other bits in {', '.join(differ)}" if differ else "", done.stdout, started[0] if started else 0


def same_workers(rng: random.Random, folder: Path, workers: int) -> Trial:
    """Killed or stopped once at a random iteration, and continued with as many workers."""
    schedule = prepare(folder)
    expected = reference(folder, schedule, workers)
    stage = rng.choice(list(LENGTHS))
    iter, what = rng.randint(1, LENGTHS[stage]), rng.choice(("one", "all", "launcher", "stop"))
    how = f"{workers} workers, `{what}` at {stage} {iter}"
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    hit, wrong = interrupted(small.start(schedule, out, nproc=workers), out, stage, iter, what, rng)
    resumed = 0
    if not wrong:
        wrong, said, resumed = finish(schedule, out, workers, expected)
        if not wrong and resumed and "resume is BIT-EXACT" not in said:
            wrong = "resumed inside a stage, and did not say BIT-EXACT"
    shutil.rmtree(out, ignore_errors=True)
    counts = {f"{workers} workers": int(hit), "inside a stage": int(bool(resumed))}
    return Trial(faults=int(hit), counts=counts, wrong=f"{how}: {wrong}" if wrong else "")


def other_workers(rng: random.Random, folder: Path, change: tuple[int, ...], inside: bool) -> Trial:
    """ELASTIC, with another number of workers in each life: killed inside stages, or sent from border to border."""
    schedule = prepare(folder)
    expected = reference(folder, schedule, 4, ELASTIC)
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    changes, wrong, said = 0, "", ""
    places = sorted(rng.sample([("init", i) for i in range(1, 6)], 2))
    for number, workers in enumerate(change[:-1]):
        if inside:
            run = small.start(schedule, out, *ELASTIC, nproc=workers)
            hit, wrong = interrupted(run, out, *places[number], rng.choice(("one", "all", "launcher", "stop")), rng)
        else:
            done = small.run(schedule, out, *ELASTIC, *BORDERS[number], nproc=workers, timeout=600)
            hit = True
            wrong = "" if done.returncode == 0 else f"ended with {done.returncode}: {done.stderr[-500:]}"
        changes += hit
        if wrong:
            break
    if not wrong:
        wrong, said, resumed = finish(schedule, out, change[-1], expected, *ELASTIC)
        if not wrong and "EQUIVALENT" in said:
            wrong = "said EQUIVALENT of an ELASTIC run in the same environment"
        if not wrong and resumed and "resume is BIT-EXACT" not in said:
            wrong = "resumed inside a stage, and did not say BIT-EXACT"
    shutil.rmtree(out, ignore_errors=True)
    where = "inside a stage" if inside else "between stages"
    how = f"ELASTIC, {' -> '.join(map(str, change))} workers {where}, {places}"
    counts = {f"ELASTIC, changes {where}": changes}
    # Sent from border to border it was not interrupted: such a change is none of the faults.
    return Trial(faults=changes if inside else 0, counts=counts, wrong=f"{how}: {wrong}" if wrong else "")


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    """In turn, without end: every number of workers, and every change."""
    for old in folder.glob("reference-*"):  # of another version, perhaps, with other bits
        old.unlink() if old.is_file() else shutil.rmtree(old)
    while True:
        for workers in WORKERS:
            yield tried(same_workers, rng, folder, workers)
        for change in CHANGES:
            for inside in (True, False):
                yield tried(other_workers, rng, folder, change, inside)


def tried(trial: Callable[..., Trial], rng: random.Random, folder: Path, *what: object) -> Trial:
    """The trial; one that could not even be made misses the aim, too."""
    try:
        return trial(rng, folder, *what)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return Trial(faults=0, wrong=f"{trial.__name__} {what}: {error}")


SCENARIO = Scenario(
    name="world",
    fault="bit-exact resume with 1, 2, 3, 4, 8 workers; ELASTIC from 4 to 1, 2, 3 and back",
    aim="all bits equal",
    wanted=100,
    trials=trials,
)
