"""CIFAR's binary version and IDX pairs: the right pixels under the right labels."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facade import SourceOptions, UsageError, open_source
from made_images import refused

NONE, TEST = SourceOptions(), SourceOptions(split="test")
CHANCE = np.random.default_rng(5)
TEN = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]


def rows(n: int, label_bytes: int, labels: list[int]) -> tuple[bytes, np.ndarray]:
    """(a binary file, its pictures as [n, 32, 32, R G B])."""
    pictures = CHANCE.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    out = b""
    for i, picture in enumerate(pictures):
        out += bytes([77, labels[i]][-label_bytes:]) + picture.transpose(2, 0, 1).tobytes()
    return out, pictures


def ten(folder: Path) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    pictures = {}
    for k, name in enumerate(TEN):
        data, pictures[name] = rows(3, 1, [k, 9, 0])
        (folder / name).write_bytes(data)
    (folder / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n\n")
    return pictures


def pixels(source: Any, i: int) -> np.ndarray:
    found = source.read(i).array
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    return np.asarray(found)


def test_cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    pictures = ten(folder)
    source = open_source(str(folder), NONE)
    assert source.kind == "cifar" and len(source) == 15 and source.classes[9] == "class9"
    assert [source.item(i).label for i in range(15)] == [0, 9, 0, 1, 9, 0, 2, 9, 0, 3, 9, 0, 4, 9, 0]
    assert source.item(7).name == "data_batch_3/00001"
    np.testing.assert_array_equal(pixels(source, 7), pictures["data_batch_3.bin"][1][:, :, ::-1])
    for split in ("test", "val"):
        source = open_source(str(folder), SourceOptions(split=split))
        assert [source.item(i).label for i in range(3)] == [5, 9, 0] and len(source) == 3


def test_cifar100_has_the_fine_labels(tmp_path):
    data, pictures = rows(2, 2, [99, 4])
    (tmp_path / "train.bin").write_bytes(data)
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"c{i}" for i in range(100)))
    source = open_source(str(tmp_path), NONE)
    assert [source.item(i).label for i in range(2)] == [99, 4] and source.classes[99] == "c99"
    assert source.item(1).name == "train/00001"
    np.testing.assert_array_equal(pixels(source, 0), pictures[0][:, :, ::-1])
    assert "test.bin" in refused(tmp_path, split="test")


def test_damaged_cifar(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    ten(folder)
    (folder / "data_batch_2.bin").write_bytes((folder / "data_batch_2.bin").read_bytes()[:-1])
    assert "not a whole number of pictures" in refused(folder)
    (folder / "data_batch_2.bin").write_bytes(b"\x0b" + bytes(3072))
    assert "the labels go to 11" in refused(folder)
    (folder / "data_batch_2.bin").unlink()
    assert "data_batch_2.bin: can't be read" in refused(folder)


# IDX


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def put_pair(folder: Path, images: bytes) -> Path:
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(LABELS))
    (folder / "train-images-idx3-ubyte").write_bytes(images)
    return folder / "train-images-idx3-ubyte"


PICTURES = CHANCE.integers(0, 256, (12, 5, 7), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8)


@pytest.mark.parametrize(
    "images, labels",
    [
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
        ("train-images.idx3-ubyte", "train-labels.idx1-ubyte.gz"),
        ("emnist-letters-train-images-idx3-ubyte.gz", "emnist-letters-train-labels-idx1-ubyte"),
    ],
)
def test_a_pair_is_found_by_name(tmp_path, images, labels):
    for name, array in ((images, PICTURES), (labels, LABELS)):
        (tmp_path / name).write_bytes(gzip.compress(idx(array), mtime=0) if name.endswith(".gz") else idx(array))
    for path in (tmp_path, tmp_path / images):
        source = open_source(str(path), NONE)
        assert source.kind == "idx" and len(source) == 12 and source.classes == ()
        assert source.item(7).label == 7 and source.item(7).name == images.removesuffix(".gz") + "/00007"
        np.testing.assert_array_equal(pixels(source, 7), PICTURES[7][:, :, None])
    assert "0 files of the split `test`" in refused(tmp_path, split="test")


def test_the_test_split_is_t10k(tmp_path):
    for split, n in (("train", 3), ("t10k", 2)):
        (tmp_path / f"{split}-images-idx3-ubyte").write_bytes(idx(PICTURES[:n]))
        (tmp_path / f"{split}-labels-idx1-ubyte").write_bytes(idx(LABELS[:n]))
    assert [len(open_source(str(tmp_path), SourceOptions(split=s))) for s in ("train", "val", "test")] == [3, 2, 2]
    with pytest.raises(UsageError, match="--split means nothing for"):
        open_source(str(tmp_path / "train-images-idx3-ubyte"), SourceOptions(split="test"))


WHOLE = idx(LABELS)


@pytest.mark.parametrize(
    "data",
    [
        bytes([0, 0, 8, 3]) + b"\xff" * 12,
        bytes([0, 0, 8, 200]) + b"\xff" * 800,
        bytes([0, 0, 8, 4]) + b"\0\0\0\1" * 4 + b"x",
        bytes([0, 0, 8, 3]) + b"\0\0\0\0" + b"\xff" * 8,
        bytes([0, 0, 8, 3]) + b"\0\0\0\1" * 2,
        WHOLE[:6],
        WHOLE[:-1],
        WHOLE + b"\0",
        WHOLE,
        b"",
        b"\0\0\x0d\1" + WHOLE[4:],
        gzip.compress(WHOLE, mtime=0)[:-9],
        gzip.compress(WHOLE, mtime=0)[:12] + b"\xff\xff" + gzip.compress(WHOLE, mtime=0)[14:],
    ],
)
def test_a_damaged_idx_file(tmp_path, data):
    path = put_pair(tmp_path, images=data)
    refused(path, format="idx")
    path.write_bytes(gzip.compress(data, mtime=0))
    refused(path, format="idx")


def test_a_small_gzip_that_would_fill_the_memory_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("stagerun.tools.data.importer.LARGEST", 1 << 16)
    path = put_pair(tmp_path, images=gzip.compress(idx(np.zeros((12, 100, 100), np.uint8))))
    assert "or larger than" in refused(path, format="idx")
