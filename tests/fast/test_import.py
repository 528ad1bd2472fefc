"""`stagerun data import`: what becomes of each image of a source."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import made_images
import numpy as np
import pytest
from facade import SIDE_FILE, DataError, Datum, SourceOptions, build, engine, index, open_source, order
from facade import images as importing
from PIL import Image

REPORT = "stagerun-import.txt"


class Item(NamedTuple):
    name: str
    label: int
    several: None = None


class Given:
    """A source of these (name, label, content)."""

    kind, signature, classes = "folder", "0123", ("a", "b", "c")
    ignored: tuple[str, ...] = ()

    def __init__(self, *images: tuple[str, int, bytes | Exception]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def item(self, i: int) -> Item:
        return Item(*self._images[i][:2])

    def read(self, i: int) -> bytes:
        content = self._images[i][2]
        if isinstance(content, Exception):
            raise content
        return content


def made(source: Any, out: Path, max_bad: int = 0, **options: Any) -> Any:
    work = importing.ImportWork(source, "given", importing.ImportOptions(**options))
    return engine.run(work, str(out), engine.Job(threads=2, max_bad=max_bad))


def records(out: Path) -> dict[str, Datum]:
    return {os.fsdecode(key): Datum.FromString(value) for key, value in made_images.records(out).items()}


def test_a_folder_becomes_what_convert_imageset_makes(tmp_path):
    source = made_images.class_folders(tmp_path / "images")
    assert made(open_source(str(source), SourceOptions()), tmp_path / "out").records == 30
    found = records(tmp_path / "out")
    files = sorted(str(path.relative_to(source)) for path in source.rglob("*.JPEG"))
    shuffled = [files[i] for i in order.EveryRecord(1, 30, True).at(0, 30)]
    assert list(found) == [f"{n:08d}_{name}" for n, name in enumerate(shuffled)] and shuffled != files
    for name, record in zip(shuffled, found.values(), strict=True):
        assert record == Datum(data=(source / name).read_bytes(), label=int(name[1:9]), encoded=True)
    facts = build(str(tmp_path / "out")).facts
    assert facts.kinds == (("baseline JPEG", 30),)
    made_with = index.load(str(tmp_path / "out"))
    assert made_with is not None and made_with.facts.classes == ("n00000000", "n00000001", "n00000002")


def test_odd_images_are_taken_by_rule_and_listed(tmp_path):
    cmyk = tmp_path / "cmyk.jpg"
    Image.fromarray(np.full((20, 30, 4), 90, np.uint8), "CMYK").save(cmyk)
    whole = made_images.jpeg(1)
    source = Given(
        ("a/cmyk.JPEG", 0, cmyk.read_bytes()),
        ("a/text\n.JPEG", 1, b"hello"),
        ("a/gone.JPEG", 1, DataError("gone.JPEG: no such file")),
        ("a/whole.JPEG", 2, whole),
        ("a/below.JPEG", -1, whole),
        ("a/" + "x" * 505, 1, whole),
    )
    result = made(source, tmp_path / "out", max_bad=4, no_shuffle=True)
    # What is left out keeps its number, as in convert_imageset.
    taken = ["00000000_a/cmyk.JPEG", "00000003_a/whole.JPEG"]
    assert list(records(tmp_path / "out")) == taken
    counts = dict.fromkeys(("CMYK", "not an image", "can't be read", "bad label", "name too long"), 1)
    assert dict(result.counts) == counts and result.bad == 4
    report = (tmp_path / "out" / REPORT).read_text()
    assert "\nCMYK\ta/cmyk.JPEG" in report and "\nnot an image\ta/text?.JPEG: the file" in report
    with pytest.raises(DataError, match="4 of 6 images can't be used"):
        made(source, tmp_path / "strict")


def test_the_name_of_an_ignored_file_is_one_line(tmp_path):
    source = made_images.class_folders(tmp_path / "images")
    (source / "n00000001" / "line\nbreak.txt").touch()
    made(open_source(str(source), SourceOptions()), tmp_path / "out")
    assert (tmp_path / "out" / REPORT).read_text().endswith("\nn00000001/line?break.txt\n")


def test_names_of_any_bytes(tmp_path):
    name = os.fsdecode(b"class/\xff\xfe \xc3\xa4.jpg")
    made(Given((name, 0, made_images.jpeg(1)), (name + "2", 1, b"")), tmp_path / "out", max_bad=1, no_shuffle=True)
    assert list(records(tmp_path / "out")) == [f"00000000_{name}"]
    assert b"class/\xff\xfe \xc3\xa4.jpg2" in (tmp_path / "out" / REPORT).read_bytes()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [(40, 60), (61, 41), (9, 33)]),
        ({"resize_shorter": 20}, [(20, 30), (30, 20), (20, 73)]),
        ({"resize_shorter": 50}, [(50, 75), (74, 50), (50, 183)]),
        ({"resize_height": 16, "resize_width": 17}, [(16, 17), (16, 17), (16, 17)]),
    ],
)
def test_sizes(tmp_path, options, sizes):
    files = [made_images.jpeg(1, 40, 60), made_images.png(2, 61, 41), made_images.jpeg(3, 9, 33, 1)]
    images = [(f"{i}.jpg", i, data) for i, data in enumerate(files)]
    result = made(Given(*images), tmp_path / "out", no_shuffle=True, resize=importing.ResizeOptions(**options))
    values = made_images.records(tmp_path / "out").values()
    assert [made_images.decoded(value, 3, 3)[0].shape[:2] for value in values] == sizes
    # What is resized stays what it was.
    assert dict(result.kinds) == {"baseline JPEG": 1, "PNG": 1, "grey JPEG": 1}
    built = build(str(tmp_path / "out"), classes=Given.classes)
    assert list(zip(built.heights.tolist(), built.widths.tolist(), strict=True)) == sizes


def test_resizing_is_area_down_and_linear_up(tmp_path):
    image = made_images.picture(7, 40, 60)
    png = cv2.imencode(".png", image)[1].tobytes()
    for shorter, interpolation in ((10, cv2.INTER_AREA), (80, cv2.INTER_LINEAR)):
        made(Given(("a.png", 0, png)), tmp_path / f"{shorter}", resize=importing.ResizeOptions(resize_shorter=shorter))
        (record,) = records(tmp_path / f"{shorter}").values()
        expected = cv2.resize(image, (shorter * 3 // 2, shorter), interpolation=interpolation)
        found = made_images.decoded(record.SerializeToString(), 3, 1)[0].astype(int)
        assert np.abs(found - expected).max() <= 1


def test_raw_pixels_are_those_that_a_run_would_decode(tmp_path):
    files = [made_images.jpeg(1, 30, 40), made_images.png(2, 20, 10), made_images.jpeg(3, 12, 12, 1)]
    images = [(f"{i}.jpg", i, data) for i, data in enumerate(files)]
    made(Given(*images), tmp_path / "raw", raw=True)
    made(Given(*images), tmp_path / "encoded")
    pairs = zip(records(tmp_path / "raw").values(), records(tmp_path / "encoded").values(), strict=True)
    for raw, encoded in pairs:
        channels = raw.channels
        assert not raw.encoded and len(raw.data) == channels * raw.height * raw.width and raw.label == encoded.label
        expected = made_images.decoded(encoded.SerializeToString(), channels, 3)[0]
        assert (made_images.decoded(raw.SerializeToString(), channels, 3)[0] == expected).all()


def test_formats_of_pixels_are_stored_as_pixels(tmp_path):
    grey = made_images.picture(2, 8, 9, 1)
    for name, shape, data in (("images-idx3", (1, 8, 9), grey.tobytes()), ("labels-idx1", (1,), b"\7")):
        head = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
        (tmp_path / f"train-{name}-ubyte").write_bytes(head + data)
    source = open_source(str(tmp_path), SourceOptions())
    made(source, tmp_path / "out")
    (record,) = records(tmp_path / "out").values()
    assert (record.channels, record.height, record.width, record.label) == (1, 8, 9, 7)
    assert record.data == grey.tobytes() and not record.encoded
    made(source, tmp_path / "small", resize=importing.ResizeOptions(resize_height=4, resize_width=3))
    (record,) = records(tmp_path / "small").values()
    assert (record.channels, record.height, record.width, record.encoded) == (1, 4, 3, False)

    # CIFAR has R, G, B, which become B, G, R, one channel after the other.
    rgb = np.random.default_rng(1).integers(0, 256, (3, 32, 32), np.uint8)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes([0, 4]) + rgb.tobytes())
    (folder / "fine_label_names.txt").write_text("".join(f"c{i}\n" for i in range(100)))
    made(open_source(str(folder), SourceOptions()), tmp_path / "colours")
    (record,) = records(tmp_path / "colours").values()
    assert record.label == 4 and record.data == rgb[::-1].tobytes() and record.channels == 3


@pytest.mark.parametrize("options", [{}, {"resize": importing.ResizeOptions(resize_shorter=25)}, {"raw": True}])
def test_the_side_file_is_the_one_that_index_makes(tmp_path, options):
    """The mean too: it is that of what is stored, not of what was there before it was encoded."""
    jpeg = made_images.jpeg
    files = [jpeg(1), made_images.png(2, 33, 44), jpeg(3, 50, 50, 1), jpeg(4, 70, 30)]
    images = [(f"{i}.jpg", i % 3, data) for i, data in enumerate(files)]
    made(Given(*images), tmp_path / "out", **options)
    stored = (tmp_path / "out" / SIDE_FILE).read_bytes()
    index.save(build(str(tmp_path / "out"), threads=2, classes=Given.classes), str(tmp_path / "out"))
    assert (tmp_path / "out" / SIDE_FILE).read_bytes() == stored
