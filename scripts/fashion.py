"""Fashion-MNIST as LMDBs for the quickstart: `.venv/bin/python scripts/fashion.py DIR [--split | --long-tail]`.

Zalando's 60,000 + 10,000 pictures of clothes, 28 x 28, grey, 10 classes (MIT licence). DIR/train_lmdb and DIR/test_lmdb hold them in the
order of the published files, as Caffe's own converter writes them, each with a side file. It may be killed, and run again: complete LMDBs
stay. With --split DIR gets data sets for fine-tuning, too: six of the classes, and four others, of which 80 images are to be trained on.
With --long-tail DIR/../fashion-longtail gets 1,000 images of class 0 down to 10 of class 9, by the same factor from class to class, as in
Cui et al., Class-Balanced Loss (arXiv:1901.05555).

The files come from the first of: $FASHION_MNIST_DIR, Debian's package where it is installed, the mirror that torchvision uses, Debian's
package unpacked into a temporary folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from stagerun.base.errors import DataError, StagerunError
from stagerun.data.datum import raw_datum
from stagerun.data.index import save
from stagerun.data.records import LmdbSource
from stagerun.language.proto import caffe_pb2
from stagerun.tools.data.importer import read_idx
from stagerun.tools.data.records import build, write_lmdb

SYSTEM_FOLDER = "/usr/share/datasets/fashion-mnist"
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
PACKAGE = "dataset-fashion-mnist"
SETS = {"train_lmdb": ("train", 60_000), "test_lmdb": ("t10k", 10_000)}
PARTS = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def _downloaded(folder: Path) -> Path:
    for name in (f"{first}-{part}" for first, _ in SETS.values() for part in PARTS):
        with urllib.request.urlopen(MIRROR + name, timeout=10) as reply, (folder / name).open("wb") as file:
            shutil.copyfileobj(reply, file)
    return folder


def _unpacked(folder: Path) -> Path:
    """Debian's files below `folder`; nothing is installed, and root is not needed."""
    for command in (f"apt-get -q -o APT::Sandbox::User= download {PACKAGE}", "dpkg-deb -x *.deb files"):
        subprocess.run(command, shell=True, cwd=folder, capture_output=True, check=True)
    return folder / "files" / SYSTEM_FOLDER.lstrip("/")


def _records(folder: Path, first: str, images: int) -> list[bytes]:
    """The records of a set. DataError if its files are missing, damaged, or hold another number of images."""
    pictures, labels = (read_idx(str(folder / f"{first}-{part}")) for part in PARTS)
    if pictures.shape != (images, 28, 28) or labels.shape != (images,):
        raise DataError(f"{folder}: {first} holds {pictures.shape}, not {images} pictures", "get the published files")
    pairs = zip(pictures[:, :, :, None], labels.tolist(), strict=True)
    return [raw_datum(picture, label).SerializeToString() for picture, label in pairs]


def make(target: Path) -> None:
    """Make the two LMDBs."""
    with tempfile.TemporaryDirectory() as cache:
        sources: list[Callable[[], Path]] = [
            lambda: Path(SYSTEM_FOLDER), lambda: _downloaded(Path(cache)), lambda: _unpacked(Path(cache))
        ]  # fmt: skip
        if named := os.environ.get("FASHION_MNIST_DIR"):
            sources = [lambda: Path(named)]
        for name, (first, images) in SETS.items():
            while not (target / name).exists():
                try:
                    _write(target / name, _records(sources[0](), first, images))
                except (DataError, OSError, subprocess.CalledProcessError) as error:
                    print(f"no: {error}")
                    if len(sources) == 1:
                        hint = f"name the folder of the four .gz files as $FASHION_MNIST_DIR, or install Debian's {PACKAGE}"
                        raise DataError("Fashion-MNIST is not available", hint) from None
                    del sources[0]
    print(f"{target}: Fashion-MNIST is ready")


def _write(out: Path, records: list[bytes] | Iterator[bytes], classes: tuple[str, ...] = CLASSES) -> None:
    print(f"{out}: {write_lmdb(str(out), records)} records")
    save(build(str(out), classes=classes), str(out))


def _relabelled(source: Path, labels: range, most: int) -> Iterator[bytes]:
    """At most `most` images of some classes, with labels that count these classes."""
    records = LmdbSource(str(source))
    for i in range(len(records)):
        datum = caffe_pb2.Datum.FromString(records.get(i)[1])
        if datum.label in labels and most > 0:
            most -= 1
            datum.label -= labels.start
            yield datum.SerializeToString()


def _long_tailed(source: Path) -> Iterator[bytes]:
    records, counts = LmdbSource(str(source)), Counter[int]()
    for i in range(len(records)):
        record = records.get(i)[1]
        label = caffe_pb2.Datum.FromString(record).label
        if counts[label] < round(1000 * (10 / 1000) ** (label / 9)):
            counts[label] += 1
            yield record


def main(folder: str, *options: str) -> None:
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    make(target)
    if "--split" in options:
        for name, labels, most in (("six", range(6), 60_000), ("four", range(6, 10), 80)):
            for part, limit in (("train_lmdb", most), ("test_lmdb", 60_000)):
                if not (out := target / f"{name}_{part}").exists():
                    _write(out, _relabelled(target / part, labels, limit), CLASSES[labels.start : labels.stop])
    if "--long-tail" in options and not (out := target.parent / "fashion-longtail" / "train_lmdb").exists():
        out.parent.mkdir(exist_ok=True)
        _write(out, _long_tailed(target / "train_lmdb"))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except StagerunError as failure:
        print(f"error: {failure.render()}", file=sys.stderr)
        sys.exit(int(failure.exit_code))
