"""numpy's .npz with the arrays of a split: the right pixels under the right labels, nothing pickled, no memory for what isn't there."""

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from test_sources_pixels import pixels, refused

from stagerun.base.errors import UsageError
from stagerun.data.importing.images import ImportOptions, ImportWork
from stagerun.tools.data.sources import SourceOptions, open_source

CHANCE = np.random.default_rng(6)
GREY = CHANCE.integers(0, 256, (6, 5, 7), dtype=np.uint8)
COLOUR = CHANCE.integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
LABELS = np.array([3, 0, 200, 1, 1, 2], np.uint8)


def saved(path: Path, **arrays: np.ndarray) -> str:
    np.savez_compressed(path, **arrays)
    return str(path)


def medmnist(path: Path, images: np.ndarray = COLOUR, labels: np.ndarray = LABELS[:, None]) -> str:
    """As MedMNIST's files are: labels stand in a column."""
    parts = {"train": slice(0, 3), "val": slice(3, 4), "test": slice(4, 6)}
    arrays = {f"{part}_images": images[rows] for part, rows in parts.items()}
    return saved(path, **arrays, **{f"{part}_labels": labels[rows] for part, rows in parts.items()})


def npy(header: str, body: bytes = b"", version: int = 1) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + body


def npz(mode: int, **members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", mode) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return out.getvalue()


def zipped(path: Path, mode: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    path.write_bytes(npz(mode, **members))
    return path


def plain(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def header(type: str, shape: tuple[int, ...]) -> str:
    return f"{{'descr': '{type}', 'fortran_order': False, 'shape': {shape}, }}"


def test_the_parts_of_medmnist_and_its_red_green_and_blue(tmp_path: Path) -> None:
    path = medmnist(tmp_path / "bloodmnist.npz")
    for split, first, n in ((None, 0, 3), ("train", 0, 3), ("val", 3, 1), ("test", 4, 2)):
        source = open_source(path, SourceOptions(split=split))
        assert source.kind == "npz" and len(source) == n and source.classes == ()
        assert [source.item(i).label for i in range(n)] == LABELS[first : first + n].tolist()
        assert source.item(0).name == f"{split or 'train'}_images/00000"
        for i in range(n):
            np.testing.assert_array_equal(pixels(source, i), COLOUR[first + i][:, :, ::-1])


def test_grey_pictures_and_kerass_names(tmp_path: Path) -> None:
    path = saved(tmp_path / "mnist.npz", x_train=GREY, y_train=LABELS, x_test=GREY[:2], y_test=LABELS[:2])
    source = open_source(path, SourceOptions())
    assert len(source) == 6 and source.item(2).label == 200
    np.testing.assert_array_equal(pixels(source, 2), GREY[2][:, :, None])
    assert len(open_source(path, SourceOptions(split="test"))) == 2
    text = refused(path, split="val")
    assert "no val_images with val_labels, nor x_val with y_val" in text and "train or test" in text
    assert "--split" not in refused(saved(tmp_path / "x.npz", x=GREY, y=LABELS))
    both = saved(tmp_path / "2.npz", x_train=GREY, y_train=LABELS, train_images=GREY, train_labels=LABELS)
    assert "both train_images and x_train" in refused(both)


@pytest.mark.parametrize("type", ["int64", ">i4", "uint64", "int8"])
def test_labels_of_any_whole_numbers_and_arrays_in_any_order(tmp_path: Path, type: str) -> None:
    labels = np.array([5, 0, 1, 2, 3, 4]).astype(type)
    np.savez(tmp_path / "a.npz", x_train=np.asfortranarray(COLOUR), y_train=labels)
    source = open_source(str(tmp_path / "a.npz"), SourceOptions())
    assert [source.item(i).label for i in range(6)] == [5, 0, 1, 2, 3, 4]
    np.testing.assert_array_equal(pixels(source, 4), COLOUR[4][:, :, ::-1])


def test_it_is_imported_as_pixels(tmp_path: Path) -> None:
    path = medmnist(tmp_path / "a.npz")
    work = ImportWork(open_source(path, SourceOptions()), path, ImportOptions(seed=None))
    made = work.make(2)
    assert made.key == b"00000002_train_images/00002" and made.label == 200
    with pytest.raises(UsageError, match="npz holds pixels"):
        ImportWork(open_source(path, SourceOptions()), path, ImportOptions(quality=90), pixels_alone=True)


def test_several_labels_for_each_picture_are_not_made_one(tmp_path: Path) -> None:
    several = np.zeros((6, 14), np.uint8)
    text = refused(medmnist(tmp_path / "chestmnist.npz", GREY, several))
    assert "14 labels for each picture" in text and "argmax" in text


@pytest.mark.parametrize(
    "images, labels, words",
    [
        (GREY / 255, LABELS, "float64[6, 5, 7], not unsigned bytes"),
        (GREY.astype("int8"), LABELS, "not unsigned bytes"),
        (np.zeros((6, 4, 4, 4), np.uint8), LABELS, "uint8[6, 4, 4, 4], which are not pictures"),
        (COLOUR.transpose(0, 3, 1, 2), LABELS, "which are not pictures"),
        (GREY[:0], LABELS[:0], "which are not pictures"),
        (GREY, LABELS.astype(float), "not whole numbers"),
        (GREY, LABELS[:5], "uint8[5] for 6 pictures"),
        (GREY, LABELS.astype(np.int64) - 1, "picture 1 has the label -1"),
        (GREY, LABELS.astype(np.uint64) + (1 << 63), "picture 0 has the label 9223372036854775811"),
        (GREY, np.array([*"abcdef"]), "not whole numbers"),
    ],
)
def test_arrays_that_are_not_pictures_with_a_label(
    tmp_path: Path, images: np.ndarray, labels: np.ndarray, words: str
) -> None:
    assert words in refused(saved(tmp_path / "a.npz", x_train=images, y_train=labels))


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was read",))


@pytest.mark.parametrize("name", ["x_train", "y_train"])
def test_an_array_of_objects_is_not_unpickled(tmp_path: Path, name: str) -> None:
    arrays = {"x_train": GREY, "y_train": LABELS} | {name: np.array([Bomb()] * 6, object)}
    text = refused(saved(tmp_path / "a.npz", **arrays))
    assert f"`{name}`: holds Python objects" in text and "run code" in text


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "not an .npy"),
        (b"\x93NUMPY\x09\0" + bytes(90), "not an .npy"),
        (npy("[" * 9000), "not that of a plain array"),
        (npy(header("|u1", (6, 5, 7)).ljust(20_000)), "not that of a plain array"),
        (npy("{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (6,), }", bytes(6)), "not that of a plain"),
        (npy(header("|u1", (-6, 5, 7)), bytes(210)), "not that of a plain array"),
        (npy(header("<i3", (6, 5, 7)), bytes(630)), "is not a type of numbers"),
        (npy(header("|u1", (6, 5, 7)), bytes(209)), "its length is another"),
        (npy(header("|u1", (6, 5, 7)), bytes(211), version=2), "its length is another"),
        (npy(header("|u1", (10**15, 10**15, 10**15))), "its length is another"),
    ],
)
def test_a_header_that_can_not_be(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refused(zipped(tmp_path / "a.npz", x_train=data, y_train=plain(LABELS)))


def test_damaged_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=GREY, y_train=LABELS)
    whole = (tmp_path / "a.npz").read_bytes()
    path = tmp_path / "b.npz"
    path.write_bytes(whole.replace(GREY.tobytes(), GREY[::-1].tobytes()))
    assert "Bad CRC-32" in refused(path)
    path.write_bytes(whole[:-30])
    assert "can't be read as a zip" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/1.jpg", b"x")
    assert "unpack it" in refused(path)
    zipped(path, zipfile.ZIP_BZIP2, x_train=plain(GREY), y_train=plain(LABELS))
    assert "packed as numpy doesn't" in refused(path)


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    """The table of contents says 3 GB for an array that has 50 bytes, in a file of 500."""
    path = zipped(tmp_path / "a.npz", x_train=npy(header("|u1", (3000, 1000, 1000)), b"x"), y_train=plain(LABELS))
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (3 * 10**9 + len(npy(header("|u1", (3000, 1000, 1000))))).to_bytes(4, "little")
    path.write_bytes(data)
    tracemalloc.start()
    assert "would become 30000" in refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24
    data[entry + 20 : entry + 24] = (3 * 10**9).to_bytes(4, "little")
    path.write_bytes(data)
    assert f"but the file only {len(data)}" in refused(path)
