"""AlexNet's lighting: a random amount of each principal component of ImageNet's colours. Pure.

Like `order`, the same on every machine: logarithm, sine and cosine are series here, of operations whose every bit IEEE 754 fixes.
The C library's differ in their last bit from one version to the next.
"""

import math

import numpy as np

from stagerun.order import UInt64, uniform

# Random numbers for an image: two for each pair of normal ones, of which three are used.
NUMBERS = 4

# Eigenvalues and eigenvectors (columns; rows are R, G, B) of the covariance of ImageNet's pixels in units of 0 .. 1. Their source is facebookarchive/fb.resnet.torch: datasets/imagenet.lua; the method is section 4.1 of Krizhevsky, Sutskever, Hinton:
# ImageNet Classification with Deep Convolutional Neural Networks (2012).
_EIGENVALUES = (0.2175, 0.0188, 0.0045)
_EIGENVECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
_LN2 = 0.6931471805599453
_HALF_PI = 1.5707963267948966


def lighting(std: float, numbers: UInt64) -> tuple[float, float, float]:
    """(B, G, R), each a float32, to add to all pixels of an image in units of 0 .. 255. `numbers` is uint64[NUMBERS]."""
    a, b, c, d = numbers.tolist()
    first, second = normals(a, b)
    third, _ = normals(c, d)
    amounts = [std * x * value for x, value in zip((first, second, third), _EIGENVALUES, strict=True)]
    red, green, blue = (
        255.0 * (row[0] * amounts[0] + row[1] * amounts[1] + row[2] * amounts[2]) for row in _EIGENVECTORS
    )
    return float(np.float32(blue)), float(np.float32(green)), float(np.float32(red))


def normals(first: int, second: int) -> tuple[float, float]:
    """Two independent numbers of mean 0 and standard deviation 1 from two numbers of `order.draws` (Box and Muller, 1958)."""
    radius = math.sqrt(-2.0 * _log(1.0 - uniform(first)))  # of a number above 0, at most 1
    cosine, sine = _cos_sin(uniform(second))
    return radius * cosine, radius * sine


def _log(x: float) -> float:
    """Natural logarithm of x > 0: ln m = 2 artanh((m - 1) / (m + 1)) for m from sqrt(1/2) to sqrt(2). Good to 5e-16."""
    m, exponent = math.frexp(x)
    if m < 0.7071067811865476:
        m, exponent = 2 * m, exponent - 1
    z = (m - 1.0) / (m + 1.0)  # at most 0.172
    square, total = z * z, 0.0
    for k in range(23, 0, -2):
        total = total * square + 1.0 / k
    return exponent * _LN2 + 2.0 * z * total


def _cos_sin(turn: float) -> tuple[float, float]:
    """Of 2 pi `turn`, 0 <= turn < 1: Taylor's series within an eighth of a turn of the nearest quarter. Good to 1e-15."""
    quarter = math.floor(4.0 * turn + 0.5)
    x = (4.0 * turn - quarter) * _HALF_PI  # the difference is exact
    square, cosine, sine = x * x, 0.0, 0.0
    for k in range(18, 0, -2):
        cosine = 1.0 - cosine * square / (k * (k - 1))
        sine = 1.0 - sine * square / (k * (k + 1))
    sine *= x
    return ((cosine, sine), (-sine, cosine), (-cosine, -sine), (sine, -cosine))[quarter % 4]
