"""ResNet-50 with momentum (205 MB) trains on 32-pixel images in one worker with one thread, and saves about once a minute, with
`keep_snapshots: 1`, so that each snapshot is read back from the disk before the one before it is deleted. A trial is one snapshot: how
long training stood still for it, and the processor time that all of it took, as the run's own log states them, both against the time
on the clock since the snapshot before. The interval is found by the run's own pace, in a first run of a few iterations.
"""

import itertools
import json
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
from reliability.kills import ended
from reliability.trial import Scenario, Trial

from stagerun.data.write import write_lmdb
from stagerun.language.proto import caffe_pb2

INTERVAL_S = 60.0
PROBE = 6  # iterations, of which the first, which is slow, does not count
LIMIT_S = 900.0  # until an expected line has come, on a machine that is busy with something else
BLOCKING, CPU = 0.002, 0.01  # the aims, as parts of the time on the clock and of one core
STATE_BYTES = 200_000_000

SCHEDULE = """
name: "blocking"
keep_snapshots: 1
model {{ name: "resnet50" num_classes: 1000 }}
data {{
  train {{ source: "{data}" images: 64 }}
  val {{ source: "{data}" images: 64 }}
}}
solver {{
  batch_size: 8
  device_batch_size: 8
  momentum: 0.9
  weight_decay: 5e-5
  transform_param {{ mirror: true mean_value: 110 scale: 0.0156 }}
  display: 100
  test_batch_size: 8
}}
stage {{ name: "trunk" solver: "trunk.prototxt" }}
"""


def make(folder: Path) -> Path:
    rng = np.random.default_rng(1)

    def datum(i: int) -> bytes:
        pixels = rng.integers(0, 256, (3, 32, 32), dtype=np.uint8)
        return caffe_pb2.Datum(channels=3, height=32, width=32, data=pixels.tobytes(), label=i).SerializeToString()

    write_lmdb(str(folder / "data"), [datum(i) for i in range(64)])
    schedule = folder / "schedule"
    schedule.mkdir()
    (schedule / "schedule.prototxt").write_text(SCHEDULE.format(data=folder / "data"))
    (schedule / "trunk.prototxt").write_text('base_lr: 0.001 lr_policy: "fixed" max_iter: 10000000\n')
    return schedule


def start(schedule: Path, out: Path, snapshot: int) -> processes.Run:
    shutil.rmtree(out, ignore_errors=True)
    words = ["run", schedule, "--out", out, "--nproc", 1, "--threads", 1, "--set", f"trunk.snapshot={snapshot}"]
    return processes.Run([str(word) for word in words]).start()


def lines(run: processes.Run, out: Path) -> Iterator[dict[str, Any]]:
    """Lines of the run's log, as they come. An AssertionError with what it printed when it ends, or nothing comes for long."""
    seen, last = 0, time.monotonic()
    while True:
        text = (out / "log.jsonl").read_text() if (out / "log.jsonl").exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        for line in whole[seen:]:
            seen, last = seen + 1, time.monotonic()
            yield json.loads(line)
        assert run.process.poll() is None, run.wait()[1][-1500:]
        assert time.monotonic() - last < LIMIT_S, "nothing has come for long"
        time.sleep(0.2)


def pace(schedule: Path, out: Path) -> float:
    """Seconds of an iteration."""
    run, times = start(schedule, out, 10**6), []
    with ended(run):
        for line in lines(run, out):
            if line["event"] == "Iterated":
                times.append(line["time"])
            if len(times) == PROBE:
                break
    return statistics.median(b - a for a, b in itertools.pairwise(times[1:]))


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    schedule, out = make(folder), folder / "out"
    every = max(1, round(INTERVAL_S / pace(schedule, out)))
    run, before = start(schedule, out, every), 0.0
    with ended(run):
        for line in lines(run, out):
            if line["event"] == "SnapshotFailed":
                yield Trial(wrong=f"a snapshot failed: {line['message']}")
            if line["event"] != "SnapshotWritten":
                continue
            if before:  # the first has none to be read back for
                yield trial(line, line["time"] - before)
            before = line["time"]


def trial(written: dict[str, Any], interval: float) -> Trial:
    blocked, cpu = written["blocked_seconds"] / interval, written["cpu_seconds"] / interval
    misses = [
        f"{what} {100 * found:.3f} % of {interval:.0f} s"
        for what, found, aim in (("training stood still", blocked, BLOCKING), ("processor time", cpu, CPU))
        if found > aim
    ]
    if written["bytes"] < STATE_BYTES:
        misses.append(f"the state has only {written['bytes']} bytes")
    counts = {
        "seconds trained": round(interval),
        "milliseconds stood still": round(1000 * written["blocked_seconds"]),
        "milliseconds of processor": round(1000 * written["cpu_seconds"]),
    }
    largest = {"% stood still": 100 * blocked, "% of one core": 100 * cpu}
    return Trial(1, counts, largest, "; ".join(misses))


SCENARIO = Scenario(
    name="blocking",
    fault="a 200-MB state saved every 60 s",
    aim="accounted blocking <= 0.2 % of wall time, processor time in all <= 1 % of one core",
    wanted=10,
    trials=trials,
)
