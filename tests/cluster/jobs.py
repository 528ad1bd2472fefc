"""The job of the tests on several hosts: `solvers/fashion_collapse`, five stages, on the real images that are kept in this repository, with
few iterations; how it is started, and how its end is looked at."""

import re
import shutil
import sys
import time
from pathlib import Path

import processes
import small
import tiny
from facade import Iterated, Log

from cluster.host import Started
from cluster.hosts import Cluster

SOLVERS = Path(__file__).resolve().parents[2] / "solvers" / "fashion_collapse"
LENGTHS = {"init": 12, "cyc1": 8, "cyc2": 8, "cyc3": 8, "collapse": 8}
# Of the published lengths a hundredth, and so the warm-ups. Eight device batches.
SHORT = {
    **{f"{stage}.max_iter": length for stage, length in LENGTHS.items()},
    **{f"{stage}.lr_iter": 2 * length for stage, length in LENGTHS.items() if stage != "collapse"},
    "init.warmup_iter": 3,
    "cyc2.warmup_iter": 2,
    "cyc3.warmup_iter": 2,
    "solver.device_batch_size": 16,
    "solver.snapshot": 3,
    "solver.display": 1,
    "solver.test_batch_size": 50,
}
ELASTIC = ("--set", "determinism=ELASTIC")
STAGERUN = (sys.executable, "-m", "stagerun")
# A worker's, or a launcher's that reads the schedule.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def prepare(folder: Path) -> Path:
    """The schedule, with images and solver files in `folder`."""
    schedule = folder / "schedule"
    if not schedule.exists():
        tiny.make_data(folder / "data")
        making = folder / "making"
        shutil.copytree(SOLVERS, making)
        file = making / "schedule.prototxt"
        text = re.sub(r'"\S*/(train|test)_lmdb"', rf'"{folder}/data/\1_lmdb"', file.read_text())
        text = text.replace("test_lmdb", "val_lmdb").replace("images: 60000", f"images: {tiny.TRAIN_IMAGES}")
        file.write_text(text.replace("images: 10000", f"images: {tiny.VAL_IMAGES}"))
        making.rename(schedule)
    return schedule


def words(schedule: Path, out: Path, *more: str, **init: int) -> list[str]:
    """`run ...`, without how many workers. `init`: other lengths of that stage."""
    lengths = {**SHORT, **{f"init.{field}": value for field, value in init.items()}}
    short = [word for key, value in lengths.items() for word in ("--set", f"{key}={value}")]
    return ["run", str(schedule), "--out", str(out), "--threads", "1", *short, *more]


def locally(schedule: Path, out: Path, workers: int, *more: str, **init: int) -> dict[str, str]:
    """`processes.ends` of an uninterrupted run on this machine."""
    done = small.stagerun(*words(schedule, out, *more, **init), "--nproc", workers, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return processes.ends(out)


def wait_for(out: Path, stage: str, iter: int, started: Started | None = None, timeout: float = 300) -> None:
    """Returns when the log tells of this iteration, or a later one of its stage."""
    until, tail = time.monotonic() + timeout, Log(out / "log.jsonl")
    while True:
        if any(isinstance(e, Iterated) and e.stage == stage and e.iter >= iter for _, e in tail):
            return
        ended = started is not None and started.process.poll() is not None
        assert not ended, f"ended before {stage} {iter}: {started and started.wait()}"
        assert time.monotonic() < until, f"no {stage} {iter} after {timeout:.0f} s"
        time.sleep(0.01)


def seen(tail: Log) -> list[tuple[str, int]]:
    """The iterations that the log tells of since the last look."""
    return [(event.stage, event.iter) for _, event in tail if isinstance(event, Iterated)]


def nothing_left(cluster: Cluster, within_s: float = 10.0) -> str:
    """What of stagerun is left on hosts that are on; '' if nothing."""
    if all(host.gone("stagerun", within_s) for host in cluster.hosts):
        return ""
    return "\n".join(
        f"{host.name}: {line}" for host in cluster.hosts if host.life for line in host.processes("stagerun").values()
    )
