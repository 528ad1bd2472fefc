"""Fashion-MNIST as two LMDBs, for the quickstart and for trying things out: `python -m stagerun.tools.data.fashion DIR`.

Zalando's 60,000 + 10,000 pictures of clothes, 28 x 28, grey, 10 classes (MIT licence). DIR/train_lmdb and
DIR/test_lmdb hold them in the order of the published files, as Caffe's own converter writes them, each with a side file. May be run again,
and killed, at any time: what is complete stays, what isn't is made anew. With `--split` DIR also gets six of the classes and four others,
of which 80 images are to be trained on, as data sets of their own.
"""

import contextlib
import fcntl
import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from stagerun.base.errors import DataError, PeerError, PermissionDenied, StagerunError, StorageError
from stagerun.data.index import save
from stagerun.data.records import LmdbSource
from stagerun.language.proto import caffe_pb2
from stagerun.tools.data.indexing import build
from stagerun.tools.data.new_lmdb import write_lmdb
from stagerun.tools.data.sources.idx import import_idx, read_idx

Say = Callable[[str], None]

ENVIRONMENT = "FASHION_MNIST_DIR"
SYSTEM_FOLDER = "/usr/share/datasets/fashion-mnist"
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
PACKAGE = "dataset-fashion-mnist"
_TIMEOUT_S = 10

# sha256 of what is inside: Debian compresses the files anew, so theirs differ from the published ones.
DIGESTS = {
    "train-images-idx3-ubyte.gz": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
    "train-labels-idx1-ubyte.gz": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "t10k-images-idx3-ubyte.gz": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
    "t10k-labels-idx1-ubyte.gz": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
}
# Folder, files' first word, number of images.
PARTS = (("train_lmdb", "train", 60_000), ("test_lmdb", "t10k", 10_000))

# By label, as Zalando names them.
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Share:
    """The images of some classes, at most `most` of them, with labels that count these classes."""

    folder: str
    of: str
    labels: range
    most: int | None = None


# Six classes to train on, and four others with few images: `--split`, for fine-tuning.
SHARES = (
    Share("six_train_lmdb", "train_lmdb", range(6)),
    Share("six_test_lmdb", "test_lmdb", range(6)),
    Share("four_train_lmdb", "train_lmdb", range(6, 10), 80),
    Share("four_test_lmdb", "test_lmdb", range(6, 10)),
)


class Unavailable(Exception):
    """A place that the files can't be had from, and why; the next one is tried."""


def make(folder: str, say: Say = print) -> None:
    """Makes sure that folder/train_lmdb and folder/test_lmdb are there and complete.

    The files come from the first of: the folder in $FASHION_MNIST_DIR, Debian's package where it is installed, the
    mirror that torchvision uses, Debian's package unpacked into a temporary folder. `say` gets each step.
    PeerError if none of them works; DataError if the folder that the variable names hasn't got them.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            lock = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            for partial in target.glob("*.partial-*"):  # of a run that was killed: the lock says that none is alive
                shutil.rmtree(partial)
            missing = [part for part in PARTS if not (target / part[0]).exists()]
            files = _find(Path(cache), say) if missing else Path()
            for name, first, count in missing:
                say(f"writing {count} records to {target / name}")
                images, labels = (files / f"{first}-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1"))
                import_idx(str(images), str(labels), str(target / name))
    except PermissionError as error:
        raise PermissionDenied(f"{error.filename}: no permission", "give a folder that you may write to") from None
    except OSError as error:
        raise StorageError(f"{error.filename or folder}: {error.strerror}", "check the disk") from None
    for name, _, count in PARTS:
        folder = str(target / name)
        if LmdbSource(folder, count).index is None:
            try:
                save(build(folder, classes=CLASSES).index, folder)
            except PermissionDenied as error:
                say(f"no names of classes, no mean: {error.message}")
    say(f"{target}: Fashion-MNIST is " + ("ready" if missing else "there already; nothing to do"))


def split(folder: str, say: Say = print) -> None:
    """Makes those of SHARES that are not in the folder yet. Raises as `make` does."""
    make(folder, say)
    for share in SHARES:
        out = os.path.join(folder, share.folder)
        if not os.path.exists(out):
            records = LmdbSource(os.path.join(folder, share.of))
            count = write_lmdb(out, islice(_of_classes(records, share.labels), share.most))
            say(f"wrote {count} records to {out}")
            save(build(out, classes=CLASSES[share.labels.start : share.labels.stop]).index, out)


def _of_classes(records: LmdbSource, labels: range) -> Iterator[bytes]:
    for i in range(len(records)):
        datum = caffe_pb2.Datum.FromString(records.get(i)[1])
        if datum.label in labels:
            datum.label -= labels.start
            yield datum.SerializeToString()


def _find(cache: Path, say: Say) -> Path:
    """A folder with the four files, their contents compared."""
    if named := os.environ.get(ENVIRONMENT):
        # Asked for by name: another source in its place would be a guess.
        say(f"using the files in {named} (${ENVIRONMENT})")
        try:
            return _compared(Path(named))
        except Unavailable as why:
            raise DataError(f"${ENVIRONMENT}: {why}", "name a folder with the four .gz files, or unset it") from None
    sources: tuple[tuple[str, Callable[[], Path]], ...] = (
        (f"Debian's package in {SYSTEM_FOLDER}", lambda: Path(SYSTEM_FOLDER)),
        (f"a download from {MIRROR}", lambda: _download(cache, say)),
        (f"Debian's package {PACKAGE}, unpacked but not installed", lambda: _unpack(cache)),
    )
    tried: list[str] = []
    for name, get in sources:
        try:
            say(f"trying {name}")
            return _compared(get())
        except Unavailable as why:
            tried.append(f"{name}: {why}")
            say(f"  no: {why}")
    raise PeerError(
        "Fashion-MNIST can't be had from anywhere:\n  " + "\n  ".join(tried),
        f"get the four files ({', '.join(DIGESTS)}) on another machine and put their folder into ${ENVIRONMENT}, "
        f"or install Debian's package {PACKAGE}",
    )


def _compared(folder: Path) -> Path:
    for name, expected in DIGESTS.items():
        file = folder / name
        if not file.is_file():
            raise Unavailable(f"{file} is not there")
        try:
            found = hashlib.sha256(read_idx(str(file)).tobytes()).hexdigest()
        except DataError as error:
            raise Unavailable(error.message) from None
        if found != expected:
            raise Unavailable(f"{file} holds something else than Fashion-MNIST's file of this name")
    return folder


def _download(folder: Path, say: Say) -> Path:
    for name in DIGESTS:
        try:
            with urllib.request.urlopen(MIRROR + name, timeout=_TIMEOUT_S) as reply, (folder / name).open("wb") as file:
                shutil.copyfileobj(reply, file)
        except http.client.HTTPException as error:
            raise Unavailable(f"{name}: the transfer broke off ({type(error).__name__})") from None
        except OSError as error:  # URLError and time-outs are OSErrors
            raise Unavailable(f"{name}: {getattr(error, 'reason', error)}") from None
        say(f"  {name}: {(folder / name).stat().st_size} bytes")
    return folder


def _unpack(folder: Path) -> Path:
    """The package's files below `folder`. Nothing is installed; root is not needed."""
    for command in (f"apt-get -q -o APT::Sandbox::User= download {PACKAGE}", "dpkg-deb -x *.deb files"):
        done = subprocess.run(
            command, shell=True, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise Unavailable(f"`{command}` failed: {lines[-1]}; `apt-get update` gets Debian's list of packages")
    return folder / "files" / SYSTEM_FOLDER.lstrip("/")


def main(arguments: list[str]) -> int:
    shared = "--split" in arguments
    folders = [argument for argument in arguments if argument != "--split"]
    if len(folders) != 1 or folders[0].startswith("-"):
        print("usage: python -m stagerun.tools.data.fashion DIR [--split]", file=sys.stderr)
        return 64
    try:
        (split if shared else make)(folders[0])
    except StagerunError as error:
        print(f"error: {error.render()}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
