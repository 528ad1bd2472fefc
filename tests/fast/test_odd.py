"""Files of every odd kind, judged: what is kept is kept byte for byte, what is converted has the pixels it should, what is bad says why."""

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import cv2
import made_images
import numpy as np
import pytest
import simplejpeg
from facade import DataError, Datum, odd
from PIL import Image, ImageOps

BGR = cv2.resize(np.random.default_rng(3).integers(0, 255, (7, 9, 3), dtype=np.uint8), (60, 40))
RGB, GREY = Image.fromarray(BGR[:, :, ::-1]), BGR[:, :, 1]


def pillow(array: np.ndarray | Image.Image, format: str, **options: Any) -> bytes:
    """Encoded by Pillow; arrays are B, G, R."""
    if isinstance(array, np.ndarray):
        array = Image.fromarray(array[..., ::-1] if array.ndim == 3 else array)
    out = io.BytesIO()
    array.save(out, format, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes, bits: int = 8, colour: int = 2, more: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + more + chunk(b"IDAT", zlib.compress(pixels, 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def opencv(data: bytes) -> np.ndarray:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    return image[:, :, None] if image.ndim == 2 else image


JPEG = pillow(BGR, "JPEG", quality=90)


@pytest.mark.parametrize(
    "kind, data",
    [
        ("baseline JPEG", JPEG),
        ("baseline JPEG", simplejpeg.encode_jpeg(BGR, 95, "BGR", "444")),
        ("baseline JPEG", JPEG + b"what a camera appends"),
        ("progressive JPEG", pillow(BGR, "JPEG", progressive=True)),
        ("grey JPEG", pillow(GREY, "JPEG")),
        ("progressive grey JPEG", pillow(GREY, "JPEG", progressive=True)),
        ("PNG", pillow(BGR, "PNG")),
        ("grey PNG", pillow(GREY, "PNG")),
    ],
)
def test_ordinary_files_are_kept_and_decoded_as_the_loader_will(kind, data):
    found = odd.judge(data, "n01/a.xyz")
    assert (found.kind, found.oddities, found.image.shape[:2]) == (kind, (), (40, 60))
    assert found.data is data
    np.testing.assert_array_equal(found.image, opencv(data))
    assert found.image.dtype == np.uint8 and found.image.shape == (40, 60, 1 if "grey" in kind else 3)


def exif(turned: int) -> bytes:
    tags = Image.Exif()
    tags[0x010F] = "a camera"
    tags[0x0112] = turned
    return tags.tobytes()


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("turned", range(2, 9))
def test_a_picture_is_stored_as_viewers_show_it(format, turned):
    data = pillow(BGR, format, exif=exif(turned))
    found = odd.judge(data, f"a.{format}")
    with Image.open(io.BytesIO(data)) as picture:
        shown = np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))[:, :, ::-1]
    assert found.oddities == ("EXIF rotation",) and found.image.shape[:2] == shown.shape[:2]
    np.testing.assert_array_equal(found.image, opencv(found.data))
    assert np.abs(found.image.astype(int) - shown).mean() < (3 if format == "JPEG" else 1e-9)
    assert odd.judge(found.data, f"a.{format}").oddities == ()  # not turned twice


def test_damaged_exif_data_turn_nothing():
    """Unless what says so is whole."""
    found = [odd.judge(pillow(BGR, "JPEG", exif=exif(n)), "a.jpg").oddities for n in (1, 9)]
    found += [odd.judge(pillow(BGR, "JPEG", exif=exif(6)[:n]), "a.jpg").oddities for n in range(30)]
    assert set(found) == {()}
    assert {odd.judge(pillow(BGR, "JPEG", exif=exif(6)[:n]), "a.jpg").image.shape[1] for n in range(30, 60)} <= {40, 60}


def test_cmyk_becomes_a_jpeg_of_three_channels_with_the_pixels_opencv_sees():
    data = pillow(RGB.convert("CMYK"), "JPEG", quality=95)
    found = odd.judge(data, "a.jpg")
    assert (found.kind, found.oddities) == ("baseline JPEG", ("CMYK",))
    assert simplejpeg.decode_jpeg_header(found.data)[2:] == ("YCbCr", "444")
    np.testing.assert_array_equal(found.image, opencv(found.data))
    assert np.abs(found.image.astype(int) - opencv(data)).mean() < 2.5


def palette(**info: Any) -> Image.Image:
    picture = Image.new("P", (60, 40))
    picture.putdata((GREY // 16).ravel().tolist())
    picture.putpalette([value for i in range(16) for value in (i * 16, 255 - i * 16, i)])
    picture.info.update(info)
    return picture


GREY16 = Image.fromarray(GREY.astype(np.uint16) * 257)
OF_PALETTE = np.dstack([GREY // 16, 255 - GREY // 16 * 16, GREY // 16 * 16])
ALPHA = Image.merge("RGBA", [*RGB.split(), Image.fromarray(np.where(GREY > 120, 0, 255).astype(np.uint8))])
WIDE = np.maximum(BGR.astype(np.int64) * 257 - 100, 0).astype(np.uint16)
SOME_ALPHA = cv2.resize(np.random.default_rng(4).integers(0, 256, (5, 4), dtype=np.uint8), (60, 40))


def on(background: tuple[int, ...], image: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Composited in floating point; `background` as the image's channels are."""
    part = (alpha if image.ndim == 2 else alpha[:, :, None]) / 255
    behind = np.array(background if image.ndim == 3 else background[0])
    return np.rint(image * part + behind * (1 - part)).astype(np.uint8)


WHITE = (255, 255, 255)
HOLES = np.where(GREY > 120, 0, 255)
KEY = tuple(int(v) for v in BGR[5, 7, ::-1])
KEYED = np.where((BGR[5, 7] == BGR).all(axis=2), 0, 255)
WIDE_KEY = b"\0" + struct.pack(">6H", 0x1233, 2, 3, 0x1234, 2, 3)

CONVERTED: list[tuple[str, Callable[[], bytes], np.ndarray, set[str]]] = [
    ("alpha", lambda: pillow(ALPHA, "PNG"), on(WHITE, BGR, HOLES), {"alpha"}),
    ("opaque alpha", lambda: pillow(RGB.convert("RGBA"), "PNG"), BGR, set()),
    ("soft alpha", lambda: pillow(Image.merge("RGBA", [*RGB.split(), Image.fromarray(SOME_ALPHA)]), "PNG"), on(WHITE, BGR, SOME_ALPHA), {"alpha"}),
    ("grey and alpha", lambda: pillow(Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(SOME_ALPHA)]), "PNG"), on(WHITE, GREY, SOME_ALPHA), {"alpha"}),
    ("16 bits and alpha", lambda: cv2.imencode(".png", np.dstack([WIDE, SOME_ALPHA.astype(np.uint16) * 257]))[1].tobytes(), on(WHITE, (WIDE >> 8).astype(np.uint8), SOME_ALPHA), {"16 bits", "alpha"}),
    ("one transparent colour", lambda: pillow(RGB, "PNG", transparency=KEY), on(WHITE, BGR, KEYED), {"alpha"}),
    ("a transparent colour that isn't there", lambda: pillow(RGB, "PNG", transparency=(1, 2, 3)), BGR, set()),
    ("one transparent colour of 16 bits", lambda: png(2, 1, WIDE_KEY, 16, 2, chunk(b"tRNS", struct.pack(">3H", 0x1234, 2, 3))), np.array([[[0, 0, 0x12], WHITE]]), {"16 bits", "alpha"}),
    ("one transparent grey of 16 bits", lambda: png(2, 1, b"\0\x12\x33\x12\x34", 16, 0, chunk(b"tRNS", b"\x12\x34")), np.array([[0x12, 255]]), {"16 bits", "alpha"}),
    ("one transparent grey of 2 bits", lambda: png(4, 1, b"\0\x1b", 2, 0, chunk(b"tRNS", b"\0\1")), np.array([[0, 255, 170, 255]]), {"fewer than 8 bits", "alpha"}),
    ("one transparent grey of 1 bit", lambda: png(2, 1, b"\0\x40", 1, 0, chunk(b"tRNS", b"\0\0")), np.array([[255, 255]]), {"fewer than 8 bits", "alpha"}),
    ("palette", lambda: pillow(palette(), "PNG"), OF_PALETTE, {"palette"}),
    ("transparent palette", lambda: pillow(palette(), "PNG", transparency=bytes(16)), np.full((40, 60, 3), 255), {"palette", "alpha"}),
    ("16 bits", lambda: cv2.imencode(".png", WIDE)[1].tobytes(), (WIDE >> 8).astype(np.uint8), {"16 bits"}),
    ("16 bits grey", lambda: pillow(GREY16, "PNG"), GREY, {"16 bits"}),
    ("1 bit", lambda: pillow(Image.fromarray(GREY > 128), "PNG"), np.where(GREY > 128, 255, 0), {"fewer than 8 bits"}),
    ("4 bits", lambda: png(4, 1, b"\0\x0f\x18", 4, 0), np.array([[0, 255, 17, 136]]), {"fewer than 8 bits"}),
    ("BMP", lambda: pillow(RGB, "BMP"), BGR, {"BMP"}),
    ("BMP of 8 bits", lambda: pillow(palette(), "BMP"), OF_PALETTE, {"BMP", "palette"}),
    ("PPM", lambda: pillow(RGB, "PPM"), BGR, {"PPM"}),
    ("PGM", lambda: pillow(Image.fromarray(GREY), "PPM"), GREY, {"PPM"}),
    ("TIFF", lambda: pillow(RGB, "TIFF", compression="tiff_lzw"), BGR, {"TIFF"}),
    ("TIFF of 16 bits", lambda: pillow(GREY16, "TIFF"), GREY, {"TIFF", "16 bits"}),
    ("CMYK TIFF", lambda: pillow(RGB.convert("CMYK"), "TIFF"), BGR, {"TIFF", "CMYK TIFF"}),
    ("WebP", lambda: pillow(RGB, "WEBP", lossless=True), BGR, {"WebP"}),
    ("transparent WebP", lambda: pillow(ALPHA, "WEBP", lossless=True, exact=True), on(WHITE, BGR, HOLES), {"WebP", "alpha"}),
    ("GIF", lambda: pillow(palette(), "GIF"), OF_PALETTE, {"GIF", "palette"}),
    ("transparent GIF", lambda: pillow(palette(), "GIF", transparency=3), on(WHITE, OF_PALETTE, np.where(GREY // 16 == 3, 0, 255)), {"GIF", "palette", "alpha"}),
    ("animated GIF", lambda: pillow(palette(), "GIF", save_all=True, append_images=[Image.new("RGB", (60, 40), "red")]), OF_PALETTE, {"GIF", "palette", "animated"}),
    ("animated PNG", lambda: pillow(RGB, "PNG", save_all=True, append_images=[Image.new("RGB", (60, 40), "red")]), BGR, {"animated"}),
    ("animated WebP", lambda: pillow(RGB, "WEBP", save_all=True, lossless=True, append_images=[Image.new("RGB", (60, 40), "red")]), BGR, {"WebP", "animated"}),
]  # fmt: skip


@pytest.mark.parametrize("make, pixels, oddities", [pytest.param(*case, id=name) for name, *case in CONVERTED])
def test_odd_formats_become_png_without_loss(make, pixels, oddities):
    found = odd.judge(make())
    assert set(found.oddities) == oddities
    assert found.kind == ("PNG" if pixels.ndim == 3 else "grey PNG")
    np.testing.assert_array_equal(found.image, pixels if pixels.ndim == 3 else pixels[:, :, None])
    np.testing.assert_array_equal(opencv(found.data), found.image)
    again = odd.judge(found.data, "a.png")
    assert again.oddities == () and again.data is found.data and again.kind == found.kind


def test_another_background_shows_through():
    red = odd.judge(pillow(ALPHA, "PNG"), background=(200, 30, 10))
    np.testing.assert_array_equal(red.image, on((10, 30, 200), BGR, HOLES))
    grey = pillow(Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(SOME_ALPHA)]), "PNG")
    assert odd.judge(grey, background=(7, 7, 7)).kind == "grey PNG"
    coloured = odd.judge(grey, background=(200, 30, 10))
    np.testing.assert_array_equal(coloured.image, on((10, 30, 200), np.dstack([GREY] * 3), SOME_ALPHA))
    assert coloured.kind == "PNG"


def test_the_name_counts_only_where_it_says_another_format():
    data = pillow(BGR, "PNG")
    assert odd.judge(data, "n02105855/n02105855_2933.JPEG").oddities == ("PNG named .JPEG",)
    assert odd.judge(data, "a.PNG").oddities == odd.judge(data, "a").oddities == odd.judge(data, "a.dat").oddities == ()
    assert odd.judge(JPEG, "a.b/c.png").oddities == ("JPEG named .png",)


def middle(data: bytes, change: bytes) -> bytes:
    half = len(data) * 3 // 4
    return data[:half] + change + data[half + 8 :]


def test_a_jpeg_that_libjpeg_warns_about_is_kept_and_counted():
    data = middle(pillow(np.tile(BGR, (4, 4, 1)), "JPEG"), b"\x01\xff\xd3\x02\x03")
    found = odd.judge(data, "a.jpg")
    assert found.oddities == ("JPEG with warnings",) and found.data is data
    np.testing.assert_array_equal(found.image, opencv(data))


def bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IIIIiiHHIIIIII", 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(64)


TIFF, PROGRESSIVE = pillow(RGB, "TIFF"), pillow(BGR, "JPEG", progressive=True)
WIDTHS = (
    struct.pack("<HHII", 0x100, kind, 1, 60) for kind in (3, 4)
)  # 16 or 32 bits, as the version of Pillow likes it
WIDTH = next(width for width in WIDTHS if width in TIFF)
SCAN = PROGRESSIVE[PROGRESSIVE.rindex(b"\xff\xda") : -2]
TILED = pillow(np.tile(BGR, (4, 4, 1)), "JPEG")
BIG = struct.pack("<HH", 65535, 65535)
BAD: list[tuple[str, str, bytes]] = [
    ("nothing", "empty", b""),
    ("a web page", "not an image", b"<html>404</html>"),
    ("PostScript", "not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
    ("zeros", "not an image", bytes(5000)),
    ("half a JPEG", "truncated", JPEG[: len(JPEG) // 2]),
    ("a JPEG's last byte", "truncated", JPEG[:-1]),
    ("three bytes of JPEG", "truncated", JPEG[:3]),
    ("a JPEG that is all markers", "truncated", b"\xff\xd8" + b"\xff" * 100),
    ("a JPEG without a picture", "damaged", b"\xff\xd8\xff\xd9"),
    ("a JPEG with a marker in its scan that libjpeg knows nothing of", "damaged", middle(TILED, b"\x01\xff\x05\x02\x03")),
    ("a JPEG of 12 bits", "unsupported", JPEG.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c")),
    ("a JPEG of 100 scans", "unsupported", PROGRESSIVE[:-2] + SCAN * 120 + PROGRESSIVE[-2:]),
    ("a JPEG of 0 rows", "damaged", JPEG.replace(b"\x08\0\x28\0\x3c", b"\x08\0\0\0\x3c")),
    ("a huge JPEG", "too many pixels", JPEG.replace(b"\x08\0\x28\0\x3c", b"\x08\xff\xff\xff\xff")),
    ("half a PNG", "truncated", pillow(BGR, "PNG")[:-500]),
    ("a PNG without its end", "truncated", pillow(BGR, "PNG")[:-12]),
    ("a PNG's changed byte", "damaged", middle(pillow(BGR, "PNG"), b"12345678")),
    ("a PNG with too few rows", "damaged", png(60, 40, bytes(181 * 20))),
    ("a PNG with a bomb behind its rows", "damaged", png(60, 40, bytes(1 << 28))),
    ("a huge PNG", "too many pixels", png(100_000, 100_000, b"")),
    ("a palette PNG's changed byte", "damaged", middle(pillow(palette(), "PNG"), b"12345678")),
    ("a huge GIF without a frame", "damaged", b"GIF89a" + BIG + bytes(30)),
    ("a GIF with a huge frame", "too many pixels", b"GIF89a" + b"\x05\0\x05\0\0\0\0" + b"," + bytes(4) + BIG + b"\0\x02\0"),
    ("half a GIF", "truncated", pillow(palette(), "GIF")[:-400]),
    ("a huge BMP", "too many pixels", bmp(60_000, -60_000)),
    ("a BMP of negative width", "too many pixels", bmp(-5, 5)),
    ("a BMP without pixels", "truncated", bmp(500, 500)),
    ("a huge WebP", "too many pixels", b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\xff\xff\xff\xff\xff\xff"),
    ("half a WebP", "damaged", pillow(RGB, "WEBP")[:200]),
    ("a huge TIFF", "too many pixels", TIFF.replace(WIDTH, struct.pack("<HHII", 0x100, 4, 1, 4_000_000))),
    ("half a TIFF", "damaged", pillow(RGB, "TIFF")[:40]),
    ("a TIFF of floats", "unsupported", pillow(Image.fromarray(GREY.astype(np.float32)), "TIFF")),
    ("a huge PGM", "too many pixels", b"P5 99999 99999 255\n" + bytes(99)),
    ("half a PGM", "truncated", pillow(Image.fromarray(GREY), "PPM")[:-10]),
]  # fmt: skip


@pytest.mark.parametrize("reason, data", [pytest.param(*case, id=name) for name, *case in BAD])
def test_what_cannot_be_used_says_why(reason, data):
    with pytest.raises(odd.BadImage) as error:
        odd.judge(data, "a.jpg")
    assert error.value.reason == reason and isinstance(error.value, DataError)
    assert error.value.message and "\n" not in error.value.message


SEEDS = [
    JPEG, pillow(RGB.convert("CMYK"), "JPEG"), pillow(BGR, "JPEG", progressive=True, exif=exif(6)), pillow(BGR, "PNG"),
    *(make() for name, make, _, _ in CONVERTED if name != "16 bits"),
]  # fmt: skip


def test_damaged_files_of_every_format_end_in_a_verdict():
    """2000 random changes and cuts: Judged or BadImage, nothing else; and what is accepted, the loader decodes alike."""
    chance = random.Random(7)
    outcomes = set()
    for _ in range(2000):
        data = bytearray(chance.choice(SEEDS))
        for _ in range(chance.choice((1, 1, 3, 20))):
            at = int(len(data) * chance.random() ** chance.choice((1, 3)))
            data[at] = chance.choice((0, 0xFF, chance.randrange(256)))
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        try:
            found = odd.judge(bytes(data), "a.jpg", 200_000)
        except odd.BadImage as error:
            assert error.reason
            outcomes.add(error.reason)
            continue
        outcomes.add(found.kind)
        record = Datum(data=found.data, encoded=True, label=0).SerializeToString()
        np.testing.assert_array_equal(made_images.decoded(record, found.image.shape[2], 1)[0], found.image)
    assert outcomes >= {"baseline JPEG", "progressive JPEG", "PNG", "grey PNG", "damaged", "truncated", "not an image"}
