"""The rules of `stagerun data import` for an image file: keep, convert, or refuse it. Pure, on bytes.

A baseline, progressive or grey JPEG of 8 bits and a PNG of 8 bits, RGB or grey, are kept byte for byte unless EXIF turns them. Other formats
that Pillow reads safely become one of them, losslessly except for CMYK: the table is below. An unusable image is a BadImage
with one of the reasons below. Sizes are compared with the limit before anything is decoded.
"""

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

import cv2
import numpy as np
import simplejpeg
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from stagerun.base.errors import listing
from stagerun.data import jpeg
from stagerun.data.headers import Header, family, png_chunks, read_header
from stagerun.data.jpeg import BadImage
from stagerun.data.jpeg.decoder import Pixels, imdecode

# Oddities, and their treatment:
#     CMYK: a JPEG in CMYK or YCCK: B, G, R as OpenCV makes them, encoded again as JPEG of quality 95, 4:4:4
#     EXIF rotation: applied: the picture as viewers show it, encoded again, a JPEG with quality 95, 4:4:4
#     JPEG with warnings: damage, or an unusual kind, that OpenCV and Pillow both decode all the same, as in Caffe and torchvision; the bytes are kept
#     palette: to RGB, as PNG
#     alpha: composited on the background, white unless --background says otherwise; as PNG; opaque alpha is dropped and not counted
#     16 bits: the upper 8 of the 16 bits, as PNG
#     fewer than 8 bits: grey of 1, 2 or 4 bits to 8 bits, as PNG
#     animated: the first frame, as PNG
#     CMYK TIFF: to RGB as Pillow does it, as PNG
#     BMP: to PNG
#     GIF: to PNG
#     PPM: binary PGM and PPM to PNG
#     TIFF: to PNG; its orientation is part of the format, and applied
#     WebP: to PNG
#     ... named ...: a file with another format's suffix, such as `PNG named .JPEG`: goes by its content
#
# Reasons of a BadImage:
#     empty: no bytes
#     not an image: neither JPEG, PNG, BMP, GIF, PPM, TIFF nor WebP
#     truncated: the data ends before the picture does
#     damaged: the decoder gives up, or a checksum is wrong
#     too many pixels: above the limit, by the header
#     unsupported: 12-bit JPEG, floating-point TIFF, more than 100 scans, ...

_SUFFIXES = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".jpe": "JPEG", ".jfif": "JPEG", ".png": "PNG", ".bmp": "BMP", ".gif": "GIF", ".tif": "TIFF", ".tiff": "TIFF",
    ".webp": "WebP", ".ppm": "PPM", ".pgm": "PPM",
}  # fmt: skip

# Pillow's plugins by name, never Image.open: no other plugin (EPS starts a program) can come into play.
_PILLOW: dict[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "BMP": BmpImageFile,
    "GIF": GifImageFile,
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "PPM": PpmImageFile,
    "TIFF": TiffImageFile,
    "WebP": WebPImageFile,
}

QUALITY = 95
Colour = tuple[int, int, int]  # R, G, B
WHITE: Colour = (255, 255, 255)


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """`data` is to be stored: the file, or its conversion; `kind` names its encoding (as in Facts.kinds)."""

    kind: str  # "baseline JPEG", "progressive JPEG", "grey JPEG", "progressive grey JPEG", "PNG" or "grey PNG"
    oddities: tuple[str, ...]  # from the table above, or `PNG named .JPEG`
    data: bytes
    image: Pixels  # `data` decoded: uint8[height, width, 3] B, G, R, or [height, width, 1]


def judge(data: bytes, name: str = "", max_pixels: int = jpeg.MAX_PIXELS, background: Colour = WHITE) -> Judged:
    """Keep or convert an image. BadImage if it is unusable. Only the suffix of `name` matters; `background` shows behind transparent
    pixels. Memory: some 10 bytes per pixel."""
    if not data:
        raise BadImage("empty", "the file is empty")
    if not family(data):
        raise BadImage("not an image", f"the file is not {listing(tuple(_PILLOW))}")
    header = read_header(data)
    oddities = list(header.oddities)
    suffix = PurePosixPath(name).suffix
    if _SUFFIXES.get(suffix.lower(), header.family) != header.family:
        oddities.append(f"{header.family} named {suffix}")
    kind = header.kind
    if header.family in ("JPEG", "PNG"):
        _check_size(header.height, header.width, max_pixels)
    if header.family == "JPEG":
        kind, data, image = _jpeg(data, header, oddities, max_pixels)
    elif header.family == "PNG" and set(header.oddities) <= {"EXIF rotation"}:  # nothing must be taken out
        _check_png(data, header)
        image = _with_opencv(data, header)
    else:
        image = _with_pillow(data, header, oddities, max_pixels, background)
        kind, data = "PNG" if image.shape[2] == 3 else "grey PNG", encode_png(image)
    if header.orientation != 1:
        kind, data, image = _turned(kind, image, header.orientation)
    return Judged(kind, tuple(oddities), data, image)


def _turned(kind: str, image: Pixels, orientation: int) -> tuple[str, bytes, Pixels]:
    """Turn the picture by EXIF, which Caffe and torchvision don't; return its kind, encoded and decoded."""
    image = image.swapaxes(0, 1) if orientation > 4 else image
    image = image[::-1] if orientation in (3, 4, 7, 8) else image
    image = np.ascontiguousarray(image[:, ::-1] if orientation in (2, 3, 6, 7) else image)
    if not kind.endswith("JPEG"):
        return kind, encode_png(image), image
    colours, sampling, kind = ("GRAY", "Gray", "grey JPEG") if image.shape[2] == 1 else ("BGR", "444", "baseline JPEG")
    data = simplejpeg.encode_jpeg(image, QUALITY, colours, sampling)
    return kind, data, simplejpeg.decode_jpeg(data, colours)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise BadImage("damaged", f"the header says {width} x {height} pixels")
    if height * width > max_pixels:
        raise BadImage("too many pixels", f"{width} x {height} pixels are more than the limit of {max_pixels}")


def _jpeg(data: bytes, header: Header, oddities: list[str], max_pixels: int) -> tuple[str, bytes, Pixels]:
    """Return kind, encoded, and decoded."""
    if not jpeg.is_complete(data):
        raise BadImage("truncated", "the JPEG data ends before its end marker")
    if header.channels == 4:
        data = simplejpeg.encode_jpeg(_with_opencv(data, header), QUALITY, "BGR", "444")
        return "baseline JPEG", data, simplejpeg.decode_jpeg(data, "BGR")
    try:
        image = simplejpeg.decode_jpeg(data, "GRAY" if header.channels == 1 else "BGR")
    except ValueError:
        # Strict decoding stops at a warning, too, and lenient decoding ignores errors. Caffe and torchvision train on images that OpenCV
        # and Pillow both decode.
        image = _with_opencv(data, header)
        _with_pillow(data, header, [], max_pixels)
        oddities.append("JPEG with warnings")
    if image.shape[:2] != (header.height, header.width):
        raise BadImage("damaged", "the JPEG has several headers, of different sizes")
    return header.kind, data, image


def _check_png(data: bytes, header: Header) -> None:
    """Raise BadImage unless every chunk up to IEND has the right checksum: OpenCV decodes the rest of damaged files."""
    pixels, ended = 0, False
    # 16 bits each, uncompressed, and a byte per row. Decoders read all of the data, needed or not: 1 MB of zeros can
    # be 1 GB unpacked, which takes seconds, at every reading.
    most = header.height * (2 * header.channels * header.width + 8) + (1 << 16)
    for kind, at, length in png_chunks(data):
        end = at + length
        if end + 4 > len(data):
            break
        if zlib.crc32(memoryview(data)[at - 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise BadImage("damaged", f"the PNG's chunk at byte {at - 8} has a wrong checksum")
        pixels += length if kind == b"IDAT" else 0
        if pixels > most:
            raise BadImage("damaged", f"the PNG has more data than {header.width} x {header.height} pixels can be")
        ended = kind == b"IEND"
    if not ended:
        raise BadImage("truncated", "the PNG data ends before its last chunk")


def _with_opencv(data: bytes, header: Header) -> Pixels:
    """Decode as the loader does."""
    image = imdecode(data, cv2.IMREAD_UNCHANGED)
    channels = 1 if header.channels == 1 else 3
    if image.dtype != np.uint8 or image.size != header.height * header.width * channels:
        raise BadImage("damaged", f"the {header.family} can't be decoded")
    return np.asarray(image, np.uint8).reshape(header.height, header.width, channels)


def _with_pillow(
    data: bytes, header: Header, oddities: list[str], max_pixels: int, background: Colour = WHITE
) -> Pixels:
    if header.family == "PNG":
        _check_png(data, header)  # Pillow leaves the rest black where a PNG is too short
    try:
        with _PILLOW[header.family](io.BytesIO(data)) as picture:
            # A TIFF's size is first known here; a GIF's frame may be larger than its screen.
            _check_size(picture.height, picture.width, max_pixels)
            if getattr(picture, "is_animated", False) and "animated" not in oddities:
                oddities.append("animated")
            picture.seek(0)
            picture.load()
            still: Image.Image = picture
            if picture.mode in ("La", "RGBa"):
                still = picture.convert(picture.mode.upper())
            alpha = _alpha(still, data if header.family == "PNG" else b"")
            if "alpha" in oddities:  # the header declares it, opaque or not
                oddities.remove("alpha")
            still.info.pop("transparency", None)  # else convert() would mix it in
            image = _eight_bits(still, oddities)
            if alpha is None or alpha.min() == 255:
                return image
            oddities.append("alpha")
            return _composite(image, alpha, background)
    except (BadImage, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise BadImage("too many pixels", "its first frame is larger than Pillow's limit") from None
    except Exception as error:
        # A decoder of damaged bytes may stumble over anything: OSError, SyntaxError, struct.error, IndexError, ...
        # Any of them means that this file can't be decoded.
        reason = "truncated" if "truncated" in str(error) else "damaged"
        raise BadImage(reason, f"the {header.family} can't be decoded: {error or type(error).__name__}") from None


def _eight_bits(picture: Image.Image, oddities: list[str]) -> Pixels:
    """Return B, G, R or grey of 8 bits; append losses to `oddities`."""
    mode = picture.mode
    if mode in ("I", "F"):
        raise BadImage("unsupported", f"its pixels are numbers of 32 bits (Pillow's mode {mode})")
    dropped = "16 bits" if mode.startswith("I;16") else _DROPPED.get(mode)
    if dropped is not None and dropped not in oddities:
        oddities.append(dropped)
    if dropped == "16 bits":
        return np.asarray(np.asarray(picture) >> 8, np.uint8)[:, :, None]
    if mode in ("1", "L", "LA"):
        return np.asarray(picture if mode == "L" else picture.getchannel(0).convert("L"))[:, :, None].copy()
    if mode == "RGBA":  # explicit, though convert() does the same: the colours stay
        picture = Image.merge("RGB", picture.split()[:3])
    return np.asarray(picture.convert("RGB"))[:, :, ::-1].copy()


_DROPPED = {"P": "palette", "PA": "palette", "CMYK": "CMYK TIFF", "1": "fewer than 8 bits"}  # by Pillow's mode


def _alpha(picture: Image.Image, png: bytes) -> Pixels | None:
    """Return uint8[height, width], 0 of transparent pixels; None for an opaque picture. `png` is the file if it is a PNG."""
    if picture.mode in ("LA", "PA", "RGBA"):
        return np.asarray(picture.getchannel("A"))
    key = picture.info.get("transparency")
    if key is None:
        return None
    if picture.mode == "P" or not png:
        return np.asarray(picture.convert("RGBA").getchannel("A"))
    # One colour of a PNG, in its number of bits, which Pillow compares with pixels converted to 8 bits.
    bits = png[24]
    if picture.mode == "RGB" and bits == 16:
        wide = np.asarray(cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED), np.uint16)
        return np.asarray(wide[:, :, 3] >> 8, np.uint8)
    if picture.mode == "L":
        key = (key & ((1 << bits) - 1)) * 255 // ((1 << bits) - 1)
    same = np.asarray(picture.convert("L") if picture.mode == "1" else picture) == key
    return np.where(same.all(axis=2) if same.ndim == 3 else same, 0, 255).astype(np.uint8)


def _composite(image: Pixels, alpha: Pixels, background: Colour) -> Pixels:
    """Composite B, G, R or grey over the background, rounded to 8 bits. A grey image stays grey on a grey background."""
    if len(set(background)) > 1 and image.shape[2] == 1:
        image = np.repeat(image, 3, axis=2)
    behind = np.array(background[::-1], np.uint32)[: image.shape[2]]
    part = alpha.astype(np.uint32)[:, :, None]
    return np.asarray((image * part + behind * (255 - part) + 127) // 255, np.uint8)


def encode_png(image: Pixels) -> bytes:
    """Encode as PNG. BadImage if OpenCV can't."""
    done, data = cv2.imencode(".png", image)
    if not done:
        raise BadImage("damaged", "the picture can't be encoded as PNG")
    return data.tobytes()
