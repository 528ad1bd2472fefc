"""What a snapshot costs: stagerun's, part by part, against torch.save and fsync of the same state.

The state is a network's with momentum (ResNet-50: 205 MB). Both save it in turn to new files in one folder, and delete them. With
stagerun, training waits only for `copy` and `check`; a thread does the rest, such as reading every byte back from the disk.
With several workers it waits for `copy and digest` on rank 0, meanwhile for `digest and check` on the others, and
for one sum of a few bytes. With a plain torch.save it waits for everything. It prints the median and quartiles of the time on the clock and of processor
time, in milliseconds; what that is of one snapshot a minute; and the ratios of the pairs.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bench_step import CASES, LR, MOMENTUM
from disks import commit
from facade import Capture, TrainState, combined, digests, make_state, momentum, recipe, weights

from stagerun import store
from stagerun.models import build
from stagerun.store import File

CPU = torch.device("cpu")
MINUTE_MS = 60_000


@dataclass
class Times:
    """Milliseconds on the clock and of this process's processors, by part; one of each per snapshot."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, part: str, more: bool = False) -> Iterator[None]:
        """`more`: adds to the part of the snapshot that was counted last."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        taken = 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)
        for times, one in ((self.wall, taken[0]), (self.cpu, taken[1])):
            kept = times.setdefault(part, [])
            if more and kept:
                kept[-1] += one
            else:
                kept.append(one)

    def line(self, part: str) -> str:
        return f"  {part:<34} {spread(self.wall[part])}   {spread(self.cpu[part])}"


class TimedFile:
    def __init__(self, file: File, times: Times) -> None:
        self.file, self.times = file, times

    def write(self, data: memoryview) -> None:
        with self.times.of("write", more=True):
            self.file.write(data)

    def sync(self) -> None:
        with self.times.of("sync", more=True):
            self.file.sync()

    def close(self) -> None:
        self.file.close()


class TimedDisk(store.LocalDisk):
    def __init__(self, times: Times) -> None:
        self.times = times

    def create(self, path: Path) -> File:  # type: ignore[override]
        return TimedFile(super().create(path), self.times)


def make(name: str) -> TrainState:
    about = {"lr_policy": "fixed", "momentum": MOMENTUM, "weight_decay": 5e-4, "transform": recipe.Transform()}
    sizes = dict.fromkeys(("max_iter", "batch_size", "device_batch_size", "test_batch_size", "random_seed"), 1)
    solver = recipe.Solver(base_lr=LR, **about, **sizes)
    torch.manual_seed(1)
    return make_state(build(CASES[name].model), solver, CPU)


def save_ours(disk: store.LocalDisk, out: Path, capture: Capture, iter: int) -> store.SnapshotRef:
    """All of the writing thread but reading it back; like it, with files of the copy's own memory."""
    model, optim, *_ = capture.files()
    files = {"model.safetensors": model, "optim.safetensors": optim}
    return commit(disk, out, "bench", iter, 1, files)


def ours_once(state: TrainState, capture: Capture, out: Path, iter: int, times: Times) -> None:
    with times.of("stagerun"):
        with times.of("stands still"):
            with times.of("copy"):
                capture.take(state)
            with times.of("check"):
                assert capture.finite()
        for part in ("write", "sync"):
            with times.of(part):  # 0 so far
                pass
        with times.of("commit"):
            ref = save_ours(TimedDisk(times), out, capture, iter)
        with times.of("read back"):
            store.verify(store.LocalDisk(), out, ref.name)
        with times.of("delete"):
            store.drop(store.LocalDisk(), out, ref)
    with times.of("several: copy and digest"):
        found: dict[str, int] = {}
        capture.take(state, found)
        combined(found)
    with times.of("several: digest and check"):
        found, good = digests(state)
        combined(found)
        assert good
    for kept in (times.wall, times.cpu):
        kept.setdefault("digest and the rest", []).append(kept["commit"][-1] - kept["write"][-1] - kept["sync"][-1])


def torchs_once(state: TrainState, out: Path, times: Times) -> None:
    path = out / "torch.pt"
    with times.of("torch.save"):
        with times.of("torch.save and fsync"), path.open("xb") as file:
            torch.save({"model": weights(state), "momentum": momentum(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        path.unlink()


def compare(name: str, out: Path, rounds: int) -> None:
    state, times = make(name), Times()
    with times.of("make room (once a stage)"):
        capture = Capture(state)
    store.prepare(store.LocalDisk(), out)
    warm = Times()
    ours_once(state, capture, out, 1 << 20, warm)
    torchs_once(state, out, warm)
    for n in range(rounds):
        # Who goes first changes, so that what one leaves behind (dirty pages, caches) falls on both alike.
        sides: list[Callable[[], None]] = [
            lambda n=n: ours_once(state, capture, out, n + 1, times),  # type: ignore[misc]
            lambda: torchs_once(state, out, times),
        ]
        for side in sides[:: 1 if n % 2 == 0 else -1]:
            side()
    size = sum(len(file) for file in capture.files() if file is not None) / 1e6
    print(f"{name} with momentum, {size:.1f} MB, {torch.get_num_threads()} threads, {rounds} rounds, in {out.parent}")
    print(f"  {'milliseconds, median (quartiles)':<34} {'on the clock':<24}   of processors")
    for part in times.wall:
        print(times.line(part))
    still, cpu = times.wall["stands still"], times.cpu["stagerun"]
    for what, spent in (("training stands still, % of the time", still), ("processor time, % of one core", cpu)):
        print(f"of one a minute: {what}: {spread([100 * one / MINUTE_MS for one in spent], 3)}")
    for what, ours, others in (
        ("of several workers to one, training stands still on rank 0", times.wall["several: copy and digest"], still),
        ("to torch.save and fsync, training stands still", still, times.wall["torch.save and fsync"]),
        ("to torch.save and fsync, processor time", cpu, times.cpu["torch.save"]),
    ):
        print(f"ratio {what}: {spread([a / b for a, b in zip(ours, others, strict=True)], 3)}")


def spread(values: list[float], digits: int = 1) -> str:
    if len(values) == 1:
        return f"{values[0]:7.{digits}f}{'':17}"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:7.{digits}f} {f'({low:.{digits}f} - {high:.{digits}f})':<16}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="resnet50")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder unless given")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        compare(options.case, Path(folder) / "out", options.rounds)


if __name__ == "__main__":
    main()
