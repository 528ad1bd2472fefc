"""Programs that make batches, each in a process of its own, in turn: images per second of a processor, and on the clock."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

AHEAD = 8  # batches, no less than any side makes ahead
REST_S = 0.3  # a tree of processes that used no time for so long is at rest
Counted = Iterator[int]  # images of each batch, without end


def serve(make: Callable[[], Counted], pipe: Connection) -> None:
    """A side's process: it reads a number of seconds, works so long, and sends how many images, and images per second.

    The clock starts when what was made ahead at rest is used up.
    """
    batches = make()
    next(batches)
    while (seconds := pipe.recv()) is not None:
        ahead = sum(next(batches) for _ in range(AHEAD))
        images, started = 0, time.perf_counter()
        while (taken := time.perf_counter() - started) < seconds:
            images += next(batches)
        pipe.send((ahead + images, images / taken))
    os._exit(0)  # a DataLoader's workers end when their parent does


class Side:
    """One of those compared, in a process of its own."""

    def __init__(self, name: str, make: Callable[[], Counted]) -> None:
        self.name, self.ours = name, name.startswith("stagerun")
        self._pipe, other = get_context("fork").Pipe()
        self._process = get_context("fork").Process(target=serve, args=(make, other))
        self._process.start()
        self.per_cpu: list[float] = []
        self.per_wall: list[float] = []

    def work(self, seconds: float, counts: bool = True) -> None:
        before = self._at_rest()
        self._pipe.send(seconds)
        images, rate = self._pipe.recv()
        if counts:
            self.per_cpu.append(images / (self._at_rest() - before))
            self.per_wall.append(rate)

    def _at_rest(self) -> float:
        """Processor seconds of the tree, when it uses no more: what it makes ahead is then as much as it was before."""
        last, since = -1.0, time.monotonic()
        while time.monotonic() - since < REST_S:
            now = tree_seconds(self._process.pid or 0)
            if now != last:
                last, since = now, time.monotonic()
            time.sleep(REST_S / 10)
        return last

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join()


def tree_seconds(root: int) -> float:
    """User and system time of a process, its living descendants, and those of them that were waited for."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone meanwhile
                continue
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    tree, added = {root}, True
    while added:
        added = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree |= added
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


def compare(sides: Sequence[Side], rounds: int, seconds: float) -> None:
    for side in sides:
        side.work(min(1.0, seconds), counts=False)
    for n in range(rounds):
        # Who goes first changes, so that what a block leaves behind (heat, caches) falls on all alike.
        for side in (*sides[n % len(sides) :], *sides[: n % len(sides)]):
            side.work(seconds)
    print("images per second and processor; per second on the clock:")
    for side in sides:
        print(f"  {side.name:<36} {statistics.median(side.per_cpu):7.0f} {statistics.median(side.per_wall):9.0f}")
    print("ratios per processor, median (quartiles):")
    for ours in (side for side in sides if side.ours):
        for other in sides:
            if not other.ours:
                print(f"  {ours.name} / {other.name}: {ratio(ours.per_cpu, other.per_cpu)}")
    for few, many in itertools.pairwise(sides):
        if many.name.startswith(f"{few.name}, "):
            print(f"  {many.name} / {few.name}: {ratio(many.per_cpu, few.per_cpu)}")
            print(f"  the same on the clock: {ratio(many.per_wall, few.per_wall)}")


def ratio(a: list[float], b: list[float]) -> str:
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}"
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.2f} ({low:.2f} - {high:.2f})"
