"""Images per second of a processor: stagerun's loader against the usual ones, on the same JPEGs.

Each side turns the same photographs into uint8 batches of 64: a rectangle as torchvision's RandomResizedCrop draws it, resized to
224 x 224, flipped half of the time. Each is a process of its own; they take turns in blocks of a few seconds. It counts the processor time,
user and system, of the whole tree of processes from one moment of rest to the next.

  stagerun       its loader on an LMDB, by the fastest way of decoding here and by simplejpeg, on files as they are (plain) and after
                 `stagerun data import --prepare`
  pillow         torch's DataLoader, one worker process per thread, with torchvision's transforms on Pillow's pictures
  opencv         the same with cv2.imdecode and cv2.resize (linear)

The two give tensors of 3 x 224 x 224, as their users do; stagerun's 224 x 224 x 3 is what torch calls channels_last. Both
read the LMDB that stagerun reads, through py-lmdb.
"""

import contextlib
import io
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import contract
import cv2
import lmdb
import made_images
import numpy as np
import torch
from bench_photos import make as make_photos
from facade import Datum, InterpMode, LmdbSource, RandomResizedCrop, Transform, torchvision_part, write_lmdb
from PIL import Image
from torch.utils.data import DataLoader
from turns import parser, ratio, turns

from stagerun.data import jpeg

SIDE, BATCH = 224, 64
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
    stats: dict[int, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            stats[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    tree = [root]
    for pid in tree:
        tree += [child for child, fields in stats.items() if int(fields[1]) == pid]
    return sum(int(field) for pid in tree for field in stats[pid][11:15]) / os.sysconf("SC_CLK_TCK")


def compare(sides: Sequence[Side], rounds: int, seconds: float) -> None:
    for side in sides:
        side.work(min(1.0, seconds), counts=False)
    for side in turns(sides, rounds):
        side.work(seconds)
    print("images per second and processor; per second on the clock:")
    for side in sides:
        print(f"  {side.name:<36} {statistics.median(side.per_cpu):7.0f} {statistics.median(side.per_wall):9.0f}")
    print("ratios per processor, median (quartiles):")
    for ours in (side for side in sides if side.ours):
        for other in sides:
            if not other.ours:
                print(f"  {ours.name} / {other.name}: {ratio(ours.per_cpu, other.per_cpu)}")


@dataclass(frozen=True)
class Setting:
    plain: str  # LMDBs
    prepared: str
    threads: int


def stagerun(setting: Setting, tier: str, prepared: bool) -> Counted:
    records = LmdbSource(setting.prepared if prepared else setting.plain)
    param = Transform(crop_size=SIDE, mirror=True, random_resized_crop=RandomResizedCrop(interp_mode=InterpMode.LINEAR))
    options = {"channels": 3, "num_classes": 1000, "seed": 1, "shuffle": True, "threads": setting.threads, "tier": tier}
    loader = made_images.loader(records, param, train=True, **options)
    with loader.stream((n * BATCH, BATCH) for n in range(1 << 40)) as batches:
        for batch in batches:
            yield len(batch.labels)


def rectangle(height: int, width: int) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params: top, left, height, width."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


class WithPillow:
    """As a user of torchvision writes it: uint8[3, 224, 224] and a label, from the same LMDB."""

    def __init__(self, path: str) -> None:
        transforms = torchvision_part("torchvision.transforms")
        self._path = path
        self._env: lmdb.Environment | None = None
        self._transform = transforms.Compose(
            [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
        )

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        record = self._record(i)
        return self._transform(Image.open(io.BytesIO(record.data)).convert("RGB")), record.label

    def _record(self, i: int) -> Datum:
        if self._env is None:  # in the worker: an environment doesn't go through a fork
            self._env = lmdb.open(self._path, readonly=True, lock=False)
        with self._env.begin(buffers=True) as txn:
            return Datum.FromString(txn.get(b"%08d" % (i % self._env.stat()["entries"])))


class WithOpenCV(WithPillow):
    """As one writes it to be faster."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        cv2.setNumThreads(0)
        record = self._record(i)
        image = cv2.imdecode(np.frombuffer(record.data, np.uint8), cv2.IMREAD_COLOR)
        top, left, height, width = rectangle(*image.shape[:2])
        image = cv2.resize(image[top : top + height, left : left + width], (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
        if random.random() < 0.5:
            image = cv2.flip(image, 1)
        return torch.from_numpy(image).permute(2, 0, 1), record.label


def data_loader(setting: Setting, data: type[WithPillow]) -> Counted:
    torch.set_num_threads(1)
    workers = setting.threads
    for _, labels in DataLoader(data(setting.plain), BATCH, shuffle=False, num_workers=workers):
        yield len(labels)


def rates(setting: Setting, rounds: int, seconds: float) -> None:
    fastest = next(tier.name for tier in jpeg.tiers() if tier.available)
    sides = []
    for prepared in (False, True) if Path(setting.prepared).exists() else (False,):
        for tier in dict.fromkeys((fastest, "simplejpeg")):
            name = f"stagerun {'prepared' if prepared else 'plain'} {tier}"
            sides.append(Side(name, lambda t=tier, p=prepared: stagerun(setting, t, p)))
    sides.append(Side("pillow", lambda: data_loader(setting, WithPillow)))
    sides.append(Side("opencv", lambda: data_loader(setting, WithOpenCV)))
    try:
        compare(sides, rounds, seconds)
    finally:
        for side in sides:
            side.end()


def main() -> None:
    asked = parser(__doc__, rounds=9, threads=1)
    asked.add_argument("--seconds", type=float, default=3.0, help="length of a block")
    asked.add_argument("--photos", type=Path, help="a folder of JPEGs; default: made by `scripts/dev bench photos`")
    options = asked.parse_args()
    photos = options.photos or make_photos(Path(".data/photos"), 300)
    files = [file.read_bytes() for file in sorted(photos.glob("*.jp*g"))]
    if not files:
        sys.exit(f"there are no JPEGs in {photos}")
    with tempfile.TemporaryDirectory(prefix="stagerun-bench-") as folder:
        setting = Setting(f"{folder}/plain", f"{folder}/prepared", options.threads)
        datums = (Datum(data=data, label=i % 1000, encoded=True) for i, data in enumerate(files))
        write_lmdb(setting.plain, (datum.SerializeToString() for datum in datums))
        done = contract.stagerun(["data", "import", "--prepare", setting.plain, setting.prepared], Path(folder))
        if done.exit_code:
            print(f"nothing is prepared: {done.output}")
        print(f"{len(files)} JPEGs of {np.mean([len(f) for f in files]) / 1e3:.0f} kB, {options.threads} thread(s)")
        rates(setting, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
