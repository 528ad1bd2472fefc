"""`stagerun data import` with several threads against one, in turn, on the same class folders of JPEGs.

The files are those of scripts/photos (or --photos), repeated under other names until there are --images. Each import is a process of its
own and makes a whole LMDB with its side file; every picture is decoded, digested and counted into the mean. It prints images per
second on the clock of each, and the median and quartiles of the ratios, one per round.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_photos import make as make_photos
from bench_sides import ratio


def class_folders(photos: Path, images: int, folder: Path) -> Path:
    """`images` names in ten class folders, each a link to one of the photographs."""
    files = sorted(photos.glob("*.jp*g"))
    if not files:
        sys.exit(f"there are no JPEGs in {photos}")
    for n in range(images):
        target = folder / f"class{n % 10}" / f"{n:06}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(files[n % len(files)].resolve())
    return folder


def imported(source: Path, out: Path, threads: int) -> float:
    """Seconds that an import takes, from the command to its end."""
    command = [sys.executable, "-m", "stagerun", "data", "import", str(source), str(out), "--threads", str(threads)]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    taken = time.perf_counter() - started
    shutil.rmtree(out)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs; default: made by scripts/photos")
    options = parser.parse_args()
    photos = options.photos or make_photos(Path(".data/photos"), 300)
    rates: dict[int, list[float]] = {options.threads: [], 1: []}
    with tempfile.TemporaryDirectory(prefix="stagerun-bench-") as name:
        source = class_folders(photos, options.images, Path(name) / "source")
        imported(source, Path(name) / "warm", options.threads)
        for n in range(options.rounds):
            for threads in sorted(rates, reverse=n % 2 == 1):
                rates[threads].append(options.images / imported(source, Path(name) / "out", threads))
    for threads, found in rates.items():
        print(f"{threads} thread(s): {statistics.median(found):.0f} images/s")
    if options.threads != 1:
        print(f"{options.threads} threads / 1, median (quartiles): {ratio(rates[options.threads], rates[1])}")


if __name__ == "__main__":
    main()
