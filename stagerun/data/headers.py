"""Headers of image files: format, size, channels and oddities of JPEG (by `jpeg.header`) and PNG (W3C, third edition); the names of other
formats."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.data import jpeg
from stagerun.data.jpeg import BadImage

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF8", "GIF"),
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
    oddities: tuple[str, ...] = ()  # oddities by `odd` that the header shows
    orientation: int = 1  # by EXIF, 1 .. 8


def family(data: bytes | memoryview) -> str:
    """Return the format by the first bytes, or ''."""
    data = bytes(data[:12])
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), "")


def read_header(data: bytes) -> Header:
    """Return the header. BadImage if it is cut off, or of an unusable kind."""
    name = family(data)
    if name not in ("JPEG", "PNG"):  # Pillow reads the rest
        return Header(name, name, 0, 0, 0, (name,))
    try:
        return _jpeg(data) if name == "JPEG" else read_png(data)
    except (struct.error, IndexError):
        raise BadImage("truncated", f"the {name} ends within its header") from None


def _jpeg(data: bytes) -> Header:
    header = jpeg.read_header(data)
    if header.unusual:
        raise BadImage("unsupported", "a JPEG of an unusual kind: arithmetic coding, lossless or hierarchical")
    turned = orientation(jpeg.exif_of(data))
    oddities = ["EXIF rotation"] if turned > 1 else []
    if header.components == 4:
        oddities.append("CMYK")
    return Header("JPEG", header.kind, header.height, header.width, header.components, tuple(oddities), turned)


def read_png(data: bytes | memoryview) -> Header:
    """Return the header of a PNG. BadImage; struct.error if it is cut off."""
    length, kind, width, height, bits, colour = struct.unpack_from(">I4sIIBB", data, 8)
    if kind != b"IHDR" or length != 13:
        raise BadImage("damaged", "the PNG doesn't begin with its header")
    oddities = []
    if colour == 3:
        oddities.append("palette")
    elif bits == 16:
        oddities.append("16 bits")
    elif bits < 8:
        oddities.append("fewer than 8 bits")
    chunks: dict[bytes, bytes] = {}  # those without pixels
    for name, at, size in png_chunks(data):
        if name not in (b"IDAT", b"IEND"):
            chunks.setdefault(name, bytes(data[at : at + min(size, 1 << 16)]))
    if colour in (4, 6) or b"tRNS" in chunks:
        oddities.append("alpha")
    if b"acTL" in chunks:
        oddities.append("animated")
    turned = orientation(chunks.get(b"eXIf", b""))
    if turned > 1:
        oddities.append("EXIF rotation")
    channels = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}.get(colour)
    if channels is None:
        raise BadImage("damaged", f"the PNG's colour type is {colour}")
    return Header("PNG", "grey PNG" if channels == 1 else "PNG", height, width, channels, tuple(oddities), turned)


def png_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, offset of its data, their length) of each chunk up to IEND. The last one may reach over the end."""
    at = 8
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, length
        if kind == b"IEND":
            return
        at += 12 + length


def orientation(exif: bytes) -> int:
    """Return the orientation, 1 .. 8, of Exif data (a TIFF without a picture, CIPA DC-008); 1 without a valid one."""
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
    except struct.error:  # damaged Exif data are frequent and leave the picture usable
        pass
    return 1
