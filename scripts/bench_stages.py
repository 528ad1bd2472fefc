"""What a stage costs beside its iterations, on Fashion-MNIST: a trunk and short branches off it, on one worker with one thread.

The cost of a stage is the time from its StageStarted to the next one's in log.jsonl, less its iterations at the median second of one. So it
has the plan, the start from a snapshot, the threads that read, the snapshot at the end with its fsyncs, and an evaluation of one batch, whole.
The first and the last quarter of the stages show whether it grows with their number.

With --parallel N the same schedule is trained with `run --parallel N` and without, in turn, and the ratio of the two times is printed: from the
first stage's start to the end of the last, without the start of Python and torch, which both have.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stagerun.data.records import LmdbSource
from stagerun.data.write import write_lmdb
from stagerun.tools.data import fashion

SCHEDULE = """
name: "stages"  seed: 1
model {{ name: "{network}" num_classes: 10 channels: 1 }}
data {{
  train {{ source: "{images}/train_lmdb" images: 60000 }}
  val {{ source: "{folder}/val_lmdb" images: 250 }}
}}
solver {{
  batch_size: 64  device_batch_size: 64  momentum: 0.9  lr_policy: "poly"  power: 1
  transform_param {{ mean_value: 73 scale: 0.0111 }}
  test_batch_size: 250  max_iter: {iterations}
}}
stage {{ name: "trunk"  solver_param {{ base_lr: 0.05 }} }}
"""
BRANCH = 'stage {{ name: "s{n}"  from: "trunk"  solver_param {{ base_lr: {rate:.6f} weight_decay: 1e-4 }} }}\n'


def write_schedule(folder: Path, images: Path, stages: int, iterations: int, network: str) -> None:
    """A schedule with so many stages, and an LMDB of 250 images beside it that they are evaluated on."""
    folder.mkdir()
    records = LmdbSource(str(images / "test_lmdb"))
    write_lmdb(str(folder / "val_lmdb"), [records.get(n)[1] for n in range(250)])
    branches = (BRANCH.format(n=n, rate=0.05 + 0.0001 * n) for n in range(1, stages))
    text = SCHEDULE.format(images=images.resolve(), folder=folder, iterations=iterations, network=network)
    (folder / "schedule.prototxt").write_text(text + "".join(branches))


def run(folder: Path, out: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """The events of a run, from its log."""
    command = [sys.executable, "-m", "stagerun", "run", str(folder), "--out", str(out), "--threads", "1", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def costs(log: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds of each stage but the first beside its iterations."""
    second = statistics.median(event["seconds"] for event in log if event["event"] == "Iterated")
    starts = [event for event in log if event["event"] == "StageStarted"]
    times = [event["time"] for event in starts] + [log[-1]["time"]]
    spans = zip(starts, times, times[1:], strict=False)
    return [end - begin - start["max_iter"] * second for start, begin, end in spans][1:]


def shown(name: str, seconds: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{name}: median {1000 * middle:.0f} ms (quartiles {1000 * low:.0f} to {1000 * high:.0f})"


def side_by_side(folder: Path, work: Path, options: argparse.Namespace) -> str:
    """A line: how much faster the stages are trained with --parallel."""
    ratios = []
    for pair in range(options.pairs):
        seconds = {}
        # Who goes first changes, so that what a run leaves behind (heat, caches) falls on both alike.
        for words in ([], ["--parallel", str(options.parallel)])[:: 1 if pair % 2 == 0 else -1]:
            log = run(folder, work / f"out-{pair}-{len(words)}", words)
            started = [e["time"] for e in log if e["event"] == "StageStarted"]
            ended = [e["time"] for e in log if e["event"] == "StageFinished"]
            seconds[len(words)] = max(ended) - min(started)
        ratios.append(seconds[0] / seconds[2])
        print(
            f"  one after the other {seconds[0]:.1f} s, {options.parallel} side by side {seconds[2]:.1f} s", flush=True
        )
    return f"{options.stages} stages: {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f}) with --parallel {options.parallel}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=20, help="of each stage, 64 images each")
    parser.add_argument("--network", default="resnet_small")
    parser.add_argument("--out", type=Path, help="where the run is left; default: a temporary folder")
    parser.add_argument("--parallel", type=int, help="stages side by side, against one after the other")
    parser.add_argument("--pairs", type=int, default=3, help="of runs, with --parallel")
    options = parser.parse_args()
    images = Path(".data/fashion-mnist")
    fashion.make(str(images))
    with tempfile.TemporaryDirectory(prefix="stagerun-bench-") as name:
        folder = Path(name) / "schedule"
        write_schedule(folder, images, options.stages, options.iterations, options.network)
        if options.parallel:
            print(side_by_side(folder, Path(name), options))
            return
        found = costs(run(folder, options.out or Path(name) / "out", []))
    quarter = max(2, len(found) // 4)
    print(shown(f"{options.stages} stages, cost of a stage beside its iterations", found))
    print(shown("  the first quarter", found[:quarter]))
    print(shown("  the last quarter", found[-quarter:]))


if __name__ == "__main__":
    main()
