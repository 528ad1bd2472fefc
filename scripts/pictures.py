"""For scripts/dev pictures: the PNGs of folder A as small files in folder B."""

import sys
from pathlib import Path

from PIL import Image

WIDEST = 1000  # pixels


def small(picture: Image.Image) -> Image.Image:
    if picture.width > WIDEST:
        picture = picture.resize((WIDEST, picture.height * WIDEST // picture.width), Image.Resampling.LANCZOS)
    return picture.convert("RGB").quantize(32)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    for file in sorted(source.glob("*.png")):
        small(Image.open(file)).save(target / file.name, optimize=True)
