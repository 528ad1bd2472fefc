"""Images per second of a processor: stagerun's loader against the usual ones, on the same JPEGs.

Each side turns the same photographs into uint8 batches of 64: a rectangle as torchvision's RandomResizedCrop draws it, resized to
224 x 224, flipped half of the time. Each is a process of its own; they take turns in blocks of a few seconds, and each round gives
one ratio per pair, so that a machine whose speed drifts slows all. It counts the processor time, user and system, of the whole tree
of processes from one moment of rest to the next. It prints the medians, and the median and quartiles of the ratios.

  stagerun       its loader on an LMDB, by each way of decoding asked for, on files as they are (plain) and after
                 `stagerun data import --prepare`
  pillow         torch's DataLoader, one worker process per thread, with torchvision's transforms on Pillow's pictures
  opencv         the same with cv2.imdecode and cv2.resize (linear)
  bare decode    simplejpeg in threads: the whole picture, and nothing else

The two give tensors of 3 x 224 x 224, as their users do; stagerun's 224 x 224 x 3 is what torch calls channels_last. Both
read the LMDB that stagerun reads, through py-lmdb; the bare decode has its files in memory. Other things to measure: --cold, --order, --wait.
"""

import argparse
import io
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import lmdb
import numpy as np
import simplejpeg
import torch
from bench_photos import make as make_photos
from bench_sides import Counted, Side, compare, ratio
from PIL import Image
from torch.utils.data import DataLoader

from stagerun.base import order
from stagerun.base.recipe import InterpMode, RandomResizedCrop, Transform
from stagerun.data import jpeg
from stagerun.data.loader import Loader
from stagerun.data.records import LmdbSource, Room
from stagerun.data.write import write_lmdb
from stagerun.language.proto.caffe_pb2 import Datum
from stagerun.models.vision import torchvision_part
from stagerun.tools.data import prepare

SIDE, BATCH = 224, 64


@dataclass(frozen=True)
class Setting:
    plain: str  # LMDBs
    prepared: str
    files: list[bytes]
    threads: int
    interp: InterpMode


def stagerun(setting: Setting, tier: str, prepared: bool, threads: int = 0) -> Counted:
    loader = our_loader(setting, tier, prepared, threads or setting.threads)
    with loader.stream((n * BATCH, BATCH) for n in range(1 << 40)) as batches:
        for batch in batches:
            yield len(batch.labels)


def our_loader(setting: Setting, tier: str | None, prepared: bool, threads: int) -> Loader:
    records = LmdbSource(setting.prepared if prepared else setting.plain)
    return Loader(
        records,
        Transform(crop_size=SIDE, mirror=True, random_resized_crop=RandomResizedCrop(interp_mode=setting.interp)),
        train=True,
        channels=3,
        num_classes=1000,
        seed=1,
        images=len(records),
        shuffle=True,
        threads=threads,
        tier=tier,
    )


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
    for _, labels in DataLoader(data(setting.plain), BATCH, shuffle=False, num_workers=workers):  # type: ignore[arg-type, var-annotated]
        yield len(labels)


def bare_decode(setting: Setting) -> Counted:
    memory = threading.local()

    def decode(n: int) -> None:
        if not hasattr(memory, "pixels"):
            memory.pixels = np.empty(3 * 4096 * 4096, np.uint8)
        simplejpeg.decode_jpeg(setting.files[n % len(setting.files)], colorspace="BGR", buffer=memory.pixels)

    with ThreadPoolExecutor(setting.threads) as pool:
        at = 0
        while True:
            list(pool.map(decode, range(at, at + BATCH)))
            at += BATCH
            yield BATCH


def rates(setting: Setting, options: argparse.Namespace) -> None:
    available = [tier.name for tier in jpeg.tiers() if tier.available]
    tiers = options.tier or ([available[0], "simplejpeg"] if available[0] != "simplejpeg" else available[:1])
    sides = []
    for prepared in (False, True):
        if (options.prepared == "no" and prepared) or (options.prepared == "only" and not prepared):
            continue
        for tier in tiers:
            name = f"stagerun {'prepared' if prepared else 'plain'} {tier}"
            sides.append(Side(name, lambda t=tier, p=prepared: stagerun(setting, t, p)))  # type: ignore[misc]
            if options.scale:
                name = f"{name}, {options.scale} threads"
                sides.append(Side(name, lambda t=tier, p=prepared: stagerun(setting, t, p, options.scale)))  # type: ignore[misc]
    if not options.scale:
        sides.append(Side("pillow", lambda: data_loader(setting, WithPillow)))
        sides.append(Side("opencv", lambda: data_loader(setting, WithOpenCV)))
        sides.append(Side("bare decode", lambda: bare_decode(setting)))
    try:
        compare(sides, options.rounds, options.seconds)
    finally:
        for side in sides:
            side.end()


def cold(setting: Setting, rounds: int, folder: Path) -> None:
    """Shuffled reads of records that are not in memory: ours with what lies ahead announced, and LMDB's own get."""
    path = str(folder / "cold")
    write_lmdb(path, (datum(data, i) for i, data in enumerate(setting.files * 10)))
    file, records = f"{path}/data.mdb", LmdbSource(path)
    room, rng = Room(), random.Random(1)
    times: dict[str, list[float]] = {"stagerun": [], "lmdb": []}
    for n in range(rounds + 1):
        for name in times:
            wanted = rng.sample(range(len(records)), 300)
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            keys = [records.key(i) for i in wanted]
            started = time.perf_counter()
            if name == "stagerun":
                for at in range(0, len(wanted), 8):
                    records.expect(wanted[:40] if at == 0 else wanted[at + 32 : at + 40])
                    for i in wanted[at : at + 8]:
                        records.read(i, room)
            else:
                with lmdb.open(path, readonly=True, lock=False) as env, env.begin(buffers=True) as txn:
                    for key in keys:
                        bytes(txn.get(key))
            if n:  # the first round is for warming up
                times[name].append((time.perf_counter() - started) / len(wanted) * 1e6)
    for name, taken in times.items():
        print(f"cold, shuffled, {name}: {statistics.median(taken):.0f} us a record")
    print(f"lmdb / stagerun: {ratio(times['lmdb'], times['stagerun'])}")


def orders(count: int, images: int = 10**9) -> None:
    """Time and memory of the order of `count` positions in an epoch of a billion images, a batch after the other."""
    program = (
        "import resource, sys, time\n"
        "from stagerun.base import order\n"
        f"count, images, step = {count}, {images}, {BATCH}\n"
        "order.indices(1, images, 0, step, True)\n"
        "before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()\n"
        "for at in range(0, count, step): order.indices(1, images, at * 7 % images, step, True)\n"
        "taken = time.process_time() - started\n"
        "print(taken / count * 1e9, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    nanoseconds, kilobytes = map(float, done.stdout.split())
    started = time.process_time()
    order.indices(1, images, 0, 1 << 20, True)
    large = (time.process_time() - started) / (1 << 20) * 1e9
    print(
        f"order of {images:,} images: {nanoseconds:.0f} ns a position in batches of {BATCH}, {large:.0f} ns in one piece of a "
        f"million; memory grew by {kilobytes:.0f} kB over {count:,} positions"
    )


def waiting(setting: Setting, steps: int) -> None:
    """Share of a ResNet-50 training step that waits for images."""
    import bench_step

    case = bench_step.Case(bench_step.recipe.Model(name="resnet50", num_classes=1000), side=SIDE, batch=16)
    waited = 0.0

    class Timed:
        def __iter__(self) -> Iterator[object]:
            nonlocal waited
            loader = our_loader(setting, None, False, 1)
            with loader.stream((n * 16, 16) for n in range(1 << 40)) as batches:
                while True:
                    started = time.perf_counter()
                    batch = next(batches)
                    waited += time.perf_counter() - started
                    yield batch

    train = bench_step.ours(case, Timed())  # type: ignore[arg-type]
    train(3)
    waited, started = 0.0, time.perf_counter()
    train(steps)
    taken = time.perf_counter() - started
    print(
        f"ResNet-50, batch 16, {steps} steps: {1000 * taken / steps:.0f} ms a step, of which {1e6 * waited / steps:.0f} us "
        f"({100 * waited / taken:.3f} %) wait for images"
    )


def datum(data: bytes, i: int) -> bytes:
    return Datum(data=data, label=i % 1000, encoded=True).SerializeToString()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a block")
    parser.add_argument("--threads", type=int, default=1, help="of each side; worker processes of the DataLoaders")
    parser.add_argument("--tier", nargs="+", help="ways of decoding; default: the fastest here, and simplejpeg")
    parser.add_argument(
        "--prepared", choices=("yes", "no", "only"), default="yes", help="stagerun on prepared files too"
    )
    parser.add_argument("--interp", choices=("LINEAR", "ANTIALIAS", "AUTO"), default="LINEAR", help="stagerun's")
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs; default: made by scripts/photos")
    parser.add_argument("--scale", type=int, help="stagerun alone: --threads against so many threads")
    parser.add_argument("--cold", action="store_true", help="shuffled reads that are not in memory, against LMDB's get")
    parser.add_argument("--order", type=int, nargs="?", const=10_000_000, help="time and memory of the order")
    parser.add_argument("--wait", type=int, nargs="?", const=10, help="share of so many training steps that wait")
    options = parser.parse_args()
    if options.order:
        orders(options.order)
        return
    photos = options.photos or make_photos(Path(".data/photos"), 300)
    files = [file.read_bytes() for file in sorted(photos.glob("*.jp*g"))]
    if not files:
        sys.exit(f"there are no JPEGs in {photos}")
    if why := prepare.can_prepare():
        print(f"nothing is prepared: {why}")
        options.prepared = "no"
    with tempfile.TemporaryDirectory(prefix="stagerun-bench-") as folder:
        setting = Setting(f"{folder}/plain", f"{folder}/prepared", files, options.threads, InterpMode(options.interp))
        write_lmdb(setting.plain, (datum(data, i) for i, data in enumerate(files)))
        if options.prepared != "no":
            write_lmdb(setting.prepared, (datum(prepare.prepare(data), i) for i, data in enumerate(files)))
        if options.cold:
            cold(setting, options.rounds, Path(folder))
        elif options.wait:
            waiting(setting, options.wait)
        else:
            print(f"{len(files)} JPEGs of {np.mean([len(f) for f in files]) / 1e3:.0f} kB, {options.threads} thread(s)")
            rates(setting, options)


if __name__ == "__main__":
    main()
