"""Epochs, images and iterations, converted in exact arithmetic. Pure."""

from fractions import Fraction


def iterations(epochs: float, images: int, batch_size: int) -> int:
    """Iterations nearest to `epochs` of `images`, at `batch_size` images each; halves round up; at least 1.

    The product is taken exactly, on the decimal number as written (2.3 is 23/10, not its nearest double).
    """
    exact = Fraction(repr(float(epochs))) * images / batch_size
    return max(1, int(exact + Fraction(1, 2)))


def epochs(iterations: int, images: int, batch_size: int) -> float:
    """Epochs of `images` that so many iterations take."""
    return iterations * batch_size / images
