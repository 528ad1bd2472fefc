"""What an image file's first bytes say about it, by hand: format, size, channels, and what is odd about it. Pure.

Of JPEG (by `jpeg.header`) and PNG (W3C, third edition); others are only told apart.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.data import jpeg
from stagerun.data.jpeg import BadImage

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"P5", "PPM"),
    (b"P6", "PPM"),
)

_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class Header:
    family: str  # "JPEG", "PNG", ...
    kind: str  # "progressive grey JPEG", "grey PNG", "GIF", ...
    height: int  # as stored, before any rotation; 0 x 0 of other formats than JPEG and PNG
    width: int
    channels: int  # as stored: 4 is CMYK in a JPEG; 0 where the header doesn't say
    oddities: tuple[str, ...] = ()  # those of odd.ODDITIES that the header shows
    orientation: int = 1  # by EXIF, 1 .. 8


def family(data: bytes | memoryview) -> str:
    """The format by the first bytes, or ''."""
    data = bytes(data[:12])
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), "")


def read_header(data: bytes) -> Header:
    """BadImage if it isn't an image's, is cut off, or of a kind that can't be used."""
    name = family(data)
    if name not in ("JPEG", "PNG"):  # Pillow reads the rest
        return Header(name, name, 0, 0, 0, (name,))
    try:
        return _jpeg(data) if name == "JPEG" else read_png(data)
    except (struct.error, IndexError):
        raise BadImage("truncated", f"the {name} ends within its header") from None


def _jpeg(data: bytes) -> Header:
    found = jpeg.read_header(data)
    if found.unusual:
        raise BadImage("unsupported", "a JPEG of an unusual kind: arithmetic coding, lossless or hierarchical")
    turned = orientation(jpeg.exif_of(data))
    odd = ["EXIF rotation"] if turned > 1 else []
    if found.components == 4:
        odd.append("CMYK")
    return Header("JPEG", found.kind, found.height, found.width, found.components, tuple(odd), turned)


def read_png(data: bytes | memoryview) -> Header:
    """As `read_header`, of what begins like a PNG. struct.error if that is all."""
    length, kind, width, height, bits, colour = struct.unpack_from(">I4sIIBB", data, 8)
    if kind != b"IHDR" or length != 13:
        raise BadImage("damaged", "the PNG doesn't begin with its header")
    odd = []
    if colour == 3:
        odd.append("palette")
    elif bits == 16:
        odd.append("16 bits")
    elif bits < 8:
        odd.append("fewer than 8 bits")
    chunks: dict[bytes, bytes] = {}  # those without pixels
    for name, at, size in png_chunks(data):
        if name not in (b"IDAT", b"IEND"):
            chunks.setdefault(name, bytes(data[at : at + min(size, 1 << 16)]))
    if colour in (4, 6) or b"tRNS" in chunks:
        odd.append("alpha")
    if b"acTL" in chunks:
        odd.append("animated")
    turned = orientation(chunks.get(b"eXIf", b""))
    if turned > 1:
        odd.append("EXIF rotation")
    channels = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}.get(colour)
    if channels is None:
        raise BadImage("damaged", f"the PNG's colour type is {colour}")
    return Header("PNG", "grey PNG" if channels == 1 else "PNG", height, width, channels, tuple(odd), turned)


def png_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """(type, where its data begins, their length) of each chunk up to IEND. The last one may reach over the end."""
    at = 8
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, length
        if kind == b"IEND":
            return
        at += 12 + length


def orientation(exif: bytes) -> int:
    """1 .. 8, the orientation of Exif data (a TIFF without a picture, CIPA DC-008); 1 where it states none that is valid."""
    exif = exif.removeprefix(jpeg.EXIF)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:  # the first directory: tag, type, count and value of each entry
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, start)
        for at in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, _, turned = struct.unpack_from(order + "HHIH", exif, at)
            if tag == _ORIENTATION and kind == 3:
                return int(turned) if 1 <= turned <= 8 else 1
    except struct.error:  # damaged Exif data, of which there is a lot, doesn't make a picture unusable
        pass
    return 1
