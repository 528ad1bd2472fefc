"""Small pictures, and folders of them, for the tests of `stagerun data`."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import facade
import lmdb
import numpy as np
import pytest
import simplejpeg
from click.testing import CliRunner
from facade import (
    DataError,
    Datum,
    ListRecords,
    Loader,
    SourceOptions,
    StagerunError,
    Training,
    Transform,
    open_source,
    write_lmdb,
)
from numpy.typing import NDArray

from stagerun.cli import main


def picture(seed: int, height: int = 40, width: int = 56, channels: int = 3) -> NDArray[np.uint8]:
    """uint8[height, width, channels]: soft spots and some grain."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, channels), dtype=np.uint8)
    soft = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR).reshape(height, width, channels)
    return np.clip(soft + rng.normal(0, 6, soft.shape), 0, 255).astype(np.uint8)


def jpeg(seed: int, height: int = 40, width: int = 56, channels: int = 3) -> bytes:
    image = picture(seed, height, width, channels)
    colours = ("BGR", "420") if channels == 3 else ("GRAY", "Gray")
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image), 90, *colours))


def png(seed: int, height: int = 40, width: int = 56, channels: int = 3) -> bytes:
    return cv2.imencode(".png", picture(seed, height, width, channels))[1].tobytes()


def raw(image: NDArray[np.uint8], label: int = 0) -> bytes:
    """A record of pixels, [height, width, channels]."""
    height, width, channels = image.shape
    data = image.transpose(2, 0, 1).tobytes()
    return Datum(channels=channels, height=height, width=width, data=data, label=label).SerializeToString()


def stored(data: bytes, label: int = 0) -> bytes:
    """A record of a file."""
    return Datum(data=data, label=label, encoded=True).SerializeToString()


def loader(
    source: Any, param: Transform, *, train: bool = False, shuffle: bool = False, seed: int = 0, **settings: Any
) -> Loader:
    """A loader by the settings of `NetworkInput`, `LoaderOptions` and `Training`."""
    settings = {"seed": seed, "sampling": facade.order.EveryRecord(seed, len(source), shuffle), **settings}
    network, options, training = (
        kind(**{name: value for name, value in settings.items() if name in kind.__dataclass_fields__})
        for kind in (facade.pictures.NetworkInput, facade.pictures.LoaderOptions, Training)
    )
    return Loader(source, param, network, training=training if train else None, options=options)


def decoded(record: bytes, channels: int = 3, classes: int = 10) -> tuple[NDArray[np.uint8], int]:
    """Image and label, as the loader gives them to a network."""
    batch = loader(ListRecords([record]), Transform(), channels=channels, num_classes=classes).batch(0, 1)
    return batch.images[0], int(batch.labels[0])


def records(path: Path | str) -> dict[bytes, bytes]:
    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
        return dict(txn.cursor())


def prepared(files: Sequence[bytes]) -> list[bytes]:
    """What `data import --prepare` makes of these JPEGs; nothing on a machine that can't."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = f"{name}/lmdb", f"{name}/out"
        write_lmdb(folder, [stored(data) for data in files])
        done = CliRunner().invoke(main, ["data", "import", folder, out, "--prepare"])
        if done.exit_code == 64 and "can't prepare JPEGs" in done.output:
            return []
        assert done.exit_code == 0, done.output
        return [Datum.FromString(value).data for value in records(out).values()]


def refused(path: Path | str, kind: type[StagerunError] = DataError, **options: str) -> str:
    """What is said of a source that `data import` doesn't take."""
    format = options.pop("format", None)
    with pytest.raises(kind) as error:
        open_source(str(path), SourceOptions(**options), format)
    text = error.value.render()
    assert "hint: " in text
    assert any(str(file) in text for file in (path, *options.values()))
    return text


def everything(source: Any) -> list[tuple[str, int, bytes]]:
    """Name, label and bytes of each item."""
    found = []
    for i in range(len(source)):
        item, data = source.item(i), source.read(i)
        assert isinstance(data, bytes)
        found.append((item.name, item.label, data))
    return found


def class_folders(root: Path, images: int = 30, classes: int = 3) -> Path:
    """JPEGs of several sizes, image i in class i modulo `classes`."""
    for i in range(images):
        folder = root / f"n{i % classes:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.JPEG").write_bytes(jpeg(i, 30 + i, 70 - i))
    return root
