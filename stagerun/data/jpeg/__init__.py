"""JPEG to pixels: the header, the whole or a part, by the fastest way that the machine has."""

from stagerun.data.jpeg.choice import TierState, make_decoder, tiers
from stagerun.data.jpeg.decoder import Decoder, Rectangle
from stagerun.data.jpeg.header import EXIF, MAX_PIXELS, BadImage, Buffer, Header, exif_of, is_complete, read_header

__all__ = [
    "EXIF",
    "MAX_PIXELS",
    "BadImage",
    "Buffer",
    "Decoder",
    "Header",
    "Rectangle",
    "TierState",
    "exif_of",
    "is_complete",
    "make_decoder",
    "read_header",
    "tiers",
]
