"""What a snapshot costs: stagerun's, part by part, against torch.save and fsync of the same state.

The state is a network's with momentum (ResNet-50: 205 MB). Both save it in turn to new files in one folder, and delete them. With
stagerun, training waits only for `copy` and `check`; a thread does the rest, such as reading every byte back from the disk.
With several workers it waits for `copy and digest` on rank 0, meanwhile for `digest and check` on the others, and
for one sum of a few bytes. With a plain torch.save it waits for everything. Milliseconds, on the clock and of processors.
"""

import contextlib
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_step import CASES, LR, MOMENTUM
from disks import HookedDisk, commit
from facade import Capture, TrainState, combined, digests, finite, make_state, momentum, recipe, weights
from turns import parser, ratio, spread, turns

from stagerun import store
from stagerun.models import build

MINUTE_MS = 60_000
Parts = dict[str, tuple[float, float]]  # milliseconds by part, on the clock and of this process's processors


@contextlib.contextmanager
def timed(parts: Parts, part: str) -> Iterator[None]:
    """Adds to the part, which may come several times in a snapshot."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    before = parts.get(part, (0.0, 0.0))
    parts[part] = before[0] + 1000 * (time.perf_counter() - wall), before[1] + 1000 * (time.process_time() - cpu)


class TimedDisk(HookedDisk):
    def __init__(self, parts: Parts) -> None:
        super().__init__(store.LocalDisk())
        self.parts = parts

    def call(self, name, do, *args):
        with timed(self.parts, name):
            return super().call(name, do, *args)


def make(name: str) -> TrainState:
    about = {"lr_policy": "fixed", "momentum": MOMENTUM, "weight_decay": 5e-4, "transform": recipe.Transform()}
    sizes = dict.fromkeys(("max_iter", "batch_size", "device_batch_size", "test_batch_size", "random_seed"), 1)
    torch.manual_seed(1)
    return make_state(build(CASES[name].model), recipe.Solver(base_lr=LR, **about, **sizes), torch.device("cpu"))


def ours(state: TrainState, capture: Capture, out: Path, iter: int) -> Parts:
    """All of the writing thread; like it, with files of the copy's own memory."""
    parts: Parts = {}
    with timed(parts, "stagerun"):
        with timed(parts, "stands still"):
            with timed(parts, "copy"):
                capture.take(state)
            with timed(parts, "check"):
                assert capture.finite()
        files = dict(zip(("model.safetensors", "optim.safetensors"), capture.files(), strict=False))
        with timed(parts, "commit"):
            ref = commit(TimedDisk(parts), out, "bench", iter, 1, files)
        with timed(parts, "read back"):
            store.verify(store.LocalDisk(), out, ref.name)
        with timed(parts, "delete"):
            store.discard(store.LocalDisk(), out, ref.name)
    found: dict[str, int] = {}
    with timed(parts, "several: copy and digest"):
        capture.take(state, found)
        combined(found)
    with timed(parts, "several: digest and check"):
        found, good = digests(state), finite(state)
        combined(found)
        assert good
    return parts


def torchs(state: TrainState, out: Path) -> Parts:
    parts: Parts = {}
    with timed(parts, "torch.save"):
        with timed(parts, "torch.save and fsync"), open(out / "torch.pt", "xb") as file:
            torch.save({"model": weights(state), "momentum": momentum(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        (out / "torch.pt").unlink()
    return parts


def compare(name: str, out: Path, rounds: int) -> None:
    state = make(name)
    capture = Capture(state)
    store.prepare(store.LocalDisk(), out)
    wall, cpu = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    sides = lambda n: ours(state, capture, out, n), lambda n: torchs(state, out)
    for n, side in enumerate((*sides, *turns(sides, rounds)), 1):
        for part, (seen, used) in side(n).items() if n > len(sides) else ():  # the first of each warms up
            wall[part].append(seen)
            cpu[part].append(used)
    size = sum(len(file) for file in capture.files() if file is not None) / 1e6
    print(f"{name} with momentum, {size:.1f} MB, {torch.get_num_threads()} threads, {rounds} rounds, in {out.parent}")
    print(f"{'milliseconds, median (quartiles)':<34} {'on the clock':<26} of processors")
    for part in wall:
        if max(wall[part]) > 0.05:
            print(f"{part:<34} {spread(wall[part], 1):<26} {spread(cpu[part], 1)}")
    still = wall["stands still"]
    print(f"of one a minute, training stands still, % of the time: {spread([100 * ms / MINUTE_MS for ms in still])}")
    for what, these, others in (
        ("of several workers to one, training stands still on rank 0", wall["several: copy and digest"], still),
        ("to torch.save and fsync, training stands still", still, wall["torch.save and fsync"]),
        ("to torch.save and fsync, processor time", cpu["stagerun"], cpu["torch.save"]),
    ):
        print(f"ratio {what}: {ratio(these, others)}")


def main() -> None:
    asked = parser(__doc__, rounds=15)
    asked.add_argument("--case", choices=CASES, default="resnet50")
    asked.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder unless given")
    options = asked.parse_args()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        compare(options.case, Path(folder) / "out", options.rounds)


if __name__ == "__main__":
    main()
