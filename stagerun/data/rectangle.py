"""A part of a picture."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of an image, in pixels from the top left."""

    top: int
    left: int
    height: int
    width: int
