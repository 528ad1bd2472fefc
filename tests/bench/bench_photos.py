"""JPEGs like ImageNet's to measure with, cut from real photographs.

Noise or gradients would not do: the cost of a JPEG is in its bytes, and in how many pixels they cover. The photographs are from four of
Debian's wallpaper packages, fetched and unpacked into .data/photos/packages, not installed. From each, pieces at random
places and scales are reduced to ImageNet's usual sizes and encoded at qualities 92 to 96; flat ones, which would be smaller
than ImageNet's pictures, are mostly left out (mean there: 107 kB). The same photographs give the same files.
"""

import argparse
import io
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

PACKAGES = ("plasma-workspace-wallpapers", "mate-backgrounds", "lomiri-wallpapers", "ukui-wallpapers")
# Of plasma's, those that are photographs; of the others, what their names say.
PLASMA = (
    "Autumn", "BytheWater", "ColdRipple", "ColorfulCups", "EveningGlow", "FallenLeaf", "Path", "OneStandsOut", "Grey",
)  # fmt: skip
OTHERS = ("_by_", "rhythm", "ukui", "2004default", "/mate/nature/", "Elephants_3840x2160")
# (width, height), as often as in ImageNet, about.
SIZES = [
    ((500, 375), 55), ((375, 500), 15), ((500, 333), 15), ((400, 300), 5), ((333, 500), 5), ((640, 480), 3), ((800, 600), 2),
]  # fmt: skip
QUALITIES = (92, 94, 95, 96, 96)
SUBSAMPLED = 0.85  # 4:2:0; the others are 4:4:4
LEAST_CONTRAST, USUAL_BYTES, SMALL_ONES = 25, 72_000, 0.15


def packages(folder: Path) -> Path:
    """The folder with the unpacked packages, which apt-get fetches as any user."""
    unpacked, partial = folder / "packages", folder / "packages.partial"
    if not unpacked.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        subprocess.run(["apt-get", "-q", "-o", "APT::Sandbox::User=", "download", *PACKAGES], cwd=partial, check=True)
        for package in partial.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(partial)], check=True)
        partial.rename(unpacked)
    return unpacked


def photographs(unpacked: Path) -> list[Path]:
    wallpapers = [f for name in PLASMA for f in unpacked.glob(f"usr/share/wallpapers/{name}/contents/images/*.jpg")]
    return sorted({*wallpapers, *(f for f in unpacked.rglob("*.jpg") if any(word in str(f) for word in OTHERS))})


def pieces(files: list[Path], rng: random.Random) -> Iterator[bytes]:
    """Without end."""
    pictures = [Image.open(file).convert("RGB") for file in files]
    sizes, weights = zip(*SIZES, strict=True)
    while True:
        for picture in pictures:
            piece = cut(picture, rng.choices(sizes, weights)[0], rng)
            quality, sampled = rng.choice(QUALITIES), rng.random() < SUBSAMPLED
            if np.asarray(piece.convert("L")).std() < LEAST_CONTRAST:
                continue
            encoded = io.BytesIO()
            piece.save(encoded, "JPEG", quality=quality, subsampling=2 if sampled else 0)
            if encoded.tell() >= USUAL_BYTES or rng.random() < SMALL_ONES:
                yield encoded.getvalue()


def cut(picture: Image.Image, size: tuple[int, int], rng: random.Random) -> Image.Image:
    """A piece of up to four times that size at a random place, reduced to it."""
    (width, height), most = size, min(picture.width / size[0], picture.height / size[1])
    scale = rng.uniform(min(1.0, most), min(4.0, most))
    w, h = int(width * scale), int(height * scale)
    x, y = rng.randint(0, picture.width - w), rng.randint(0, picture.height - h)
    return picture.crop((x, y, x + w, y + h)).resize(size, Image.Resampling.LANCZOS)


def make(folder: Path, count: int) -> Path:
    """The folder with `count` JPEGs, made if they aren't there."""
    target = folder / f"imagenet-{count}"
    if target.is_dir():
        return target
    files = photographs(packages(folder))
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    made = pieces(files, random.Random(1))
    sizes = [(partial / f"{n:05d}.jpg").write_bytes(next(made)) for n in range(count)]
    partial.rename(target)
    print(f"{target}: {count} JPEGs of {len(files)} photographs, {np.mean(sizes) / 1e3:.1f} kB on the average")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".data/photos"))
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args()
    print(make(options.folder, options.count))


if __name__ == "__main__":
    main()
