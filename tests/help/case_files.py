"""What the lines of a case may do besides calling stagerun: pictures and LMDBs that a text can't hold, damage to them, what lies in a folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import made_images
from facade import Datum


def picture(file: Path, seed: str, height: str = "40", width: str = "56", channels: str = "3") -> None:
    """By its name a JPEG or a PNG; with 4 channels half of it can be seen through."""
    file.parent.mkdir(parents=True, exist_ok=True)
    encoded = made_images.png if file.suffix == ".png" else made_images.jpeg
    file.write_bytes(encoded(int(seed), int(height), int(width), int(channels)))


def pictures(folder: Path, images: str, classes: str = "3") -> None:
    made_images.class_folders(folder, int(images), int(classes))


def record(folder: Path, key: str, length: str = "-0", label: str = "1") -> None:
    """One more record, a JPEG of which `length` bytes are left: -50 are all but 50."""
    whole = made_images.jpeg(0)
    datum = Datum(data=whole[: int(length) or None], encoded=True, label=int(label))
    with lmdb.open(str(folder), map_size=1 << 27) as env, env.begin(write=True) as txn:
        txn.put(key.encode(), datum.SerializeToString())
    (folder / "lock.mdb").unlink()


def flip(folder: Path, number: str) -> None:
    """One bit in the picture of the record of that number."""
    with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as txn:
        value = list(txn.cursor())[int(number)][1]
    data = (folder / "data.mdb").read_bytes()
    at = data.index(value) + len(value) - 40
    (folder / "data.mdb").write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])


def cut(file: Path, length: str) -> None:
    os.truncate(file, int(length))


def write(file: Path, *lines: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))


def remove(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink()


def move(file: Path, to: str) -> None:
    file.rename(file.parent / to)


def link(file: Path, to: str) -> None:
    file.symlink_to(to)


def ls(folder: Path) -> str:
    return "".join(f"{name}\n" for name in sorted(os.listdir(folder)))


_VERBS: dict[str, Callable[..., str | None]] = {
    made.__name__: made for made in (picture, pictures, record, flip, cut, write, remove, move, link, ls)
}


def done(folder: Path, verb: str, file: str, *rest: str) -> str | None:
    """What the line says; None where there is no such verb."""
    return (_VERBS[verb](folder / file, *rest) or "") if verb in _VERBS else None
