"""Damaged records through the loader's decoding. What is counted: RESULTS.md."""

import io
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import made_images
import numpy as np
from facade import DataError, Datum, InterpMode, ListRecords, RandomResize, RandomResizedCrop, Transform
from PIL import Image
from reliability import fuzz
from reliability.trial import Trial

from stagerun.data import jpeg

KEY = b"the key"
TRANSFORMS = (
    Transform(crop_size=32, mirror=True, random_resized_crop=RandomResizedCrop()),
    Transform(crop_size=16, mirror=True, random_resized_crop=RandomResizedCrop(interp_mode=InterpMode.AUTO)),
    Transform(crop_size=48, mirror=True),
    Transform(crop_size=24, pad=2, random_resize=RandomResize(min_size=24, max_size=40, interp_mode=InterpMode.AREA)),
)


def photo(height: int = 90, width: int = 120) -> np.ndarray:
    rng = np.random.default_rng(1)
    smooth = cv2.resize(rng.integers(0, 256, (9, 12, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
    return cv2.addWeighted(smooth, 0.8, rng.integers(0, 256, smooth.shape, np.uint8), 0.2, 0)


def pictures() -> Iterator[bytes]:
    """Encoded images of all kinds."""
    image, whole = photo(), Image.fromarray(photo()[:, :, ::-1])
    for sampling in ("4:4:4", "4:2:2", "4:2:0"):
        for more in ({}, {"progressive": True}, {"restart_marker_blocks": 3}, {"restart_marker_rows": 1}):
            yield saved(whole, "JPEG", quality=85, subsampling=sampling, **more)
    yield saved(whole.convert("L"), "JPEG", restart_marker_blocks=4)
    yield saved(whole.convert("CMYK"), "JPEG")
    yield saved(whole, "JPEG", exif=b"Exif\0\0" + bytes(60), icc_profile=bytes(500))
    yield from made_images.prepared([saved(whole, "JPEG", quality=q, subsampling="4:2:0") for q in (60, 90)])
    for mode in ("RGB", "L", "P", "RGBA", "I;16", "1"):
        yield saved(whole.convert("L").convert("I").convert(mode) if mode == "I;16" else whole.convert(mode), "PNG")
    yield cv2.imencode(".png", image, [cv2.IMWRITE_PNG_BILEVEL, 0])[1].tobytes()


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def whole_records() -> list[bytes]:
    found = [Datum(data=data, label=3, encoded=True).SerializeToString() for data in pictures()]
    found.append(Datum(channels=3, height=90, width=120, data=photo().transpose(2, 0, 1).tobytes()).SerializeToString())
    found.append(Datum(channels=1, height=90, width=120, data=photo()[:, :, 0].tobytes()).SerializeToString())
    return found


Mutation = Callable[[bytearray, np.random.Generator, bytes], None]


def changed(data: bytearray, rng: np.random.Generator, other: bytes) -> None:
    for _ in range(int(rng.integers(1, 9))):
        data[int(rng.integers(len(data)))] = int(rng.integers(256))


def cut(data: bytearray, rng: np.random.Generator, other: bytes) -> None:
    at = int(rng.integers(len(data)))
    del data[at : at + int(rng.integers(1, 1 + min(3000, len(data) - at)))]


def ended(data: bytearray, rng: np.random.Generator, other: bytes) -> None:
    del data[int(rng.integers(len(data))) :]
    data += b"\xff\xd9" if rng.integers(2) else b""


def doubled(data: bytearray, rng: np.random.Generator, other: bytes) -> None:
    at = int(rng.integers(len(data)))
    data[at:at] = data[at : at + int(rng.integers(1, 2000))]


def spliced(data: bytearray, rng: np.random.Generator, other: bytes) -> None:
    at, place, length = int(rng.integers(len(data))), int(rng.integers(len(other))), int(rng.integers(1, 2000))
    data[at : at + length] = other[place : place + length]


def resized(data: bytearray, rng: np.random.Generator, other: bytes) -> None:
    """Another size in the frame header of a JPEG, or in the first chunk of a PNG."""
    sides = [int(rng.choice([0, 1, 7, 8, 91, 119, 121, 500, 3000, 8000, 65535])) for _ in range(2)]
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        if (at := data.find(marker)) >= 0:
            data[at + 5 : at + 9] = struct.pack(">HH", *sides)
    if (at := data.find(b"IHDR")) >= 0:
        data[at + 4 : at + 12] = struct.pack(">II", *sides)


def resampled(data: bytearray, rng: np.random.Generator, other: bytes) -> None:
    """Other sampling factors, or another restart interval."""
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        if (at := data.find(marker)) >= 0 and rng.integers(2) and at + 17 < len(data):
            data[at + 11 + 3 * int(rng.integers(3))] = int(rng.choice([0x11, 0x12, 0x21, 0x22, 0x41, 0x44, 0x00, 0xFF]))
    if (at := data.find(b"\xff\xdd")) >= 0:
        data[at + 4 : at + 6] = struct.pack(">H", int(rng.choice([0, 1, 2, 3, 5, 40, 65535])))


MUTATIONS: tuple[Mutation, ...] = (changed, cut, ended, doubled, spliced, resized, resampled)


def record(whole: list[bytes], seed: int, number: int) -> bytes:
    """Record `number`: three of four damaged inside the image, the others anywhere."""
    rng = np.random.default_rng([seed, number])
    original, other = (whole[int(i)] for i in rng.integers(0, len(whole), 2))
    datum = Datum.FromString(original)
    inside = rng.integers(4) > 0
    data = bytearray(datum.data if inside else original)
    for _ in range(int(rng.choice([1, 1, 1, 2, 4]))):
        if data:
            MUTATIONS[int(rng.integers(len(MUTATIONS)))](data, rng, other)
    if not inside:
        return bytes(data)
    datum.data = bytes(data)
    return datum.SerializeToString()


def child(seed: int) -> None:
    whole, tiers = whole_records(), [tier.name for tier in jpeg.tiers() if tier.available]
    counts: Counter[str] = Counter()
    value = [whole[0]]
    records = ListRecords(value, "fuzzed")
    records.key = lambda i: KEY
    about = {"train": True, "num_classes": 10, "seed": seed, "shuffle": False}
    loaders = [
        made_images.loader(records, param, channels=channels, tier=tier, **about)
        for tier in tiers
        for param in TRANSFORMS
        for channels in ((1, 3) if param.random_resized_crop is None else (3,))
    ]
    for one in loaders:  # what is loaded or compiled at first use doesn't count as a record's memory
        with suppress(DataError):
            one.batch(0, 1)
    for number in fuzz.numbers():
        value[0] = record(whole, seed, number)
        for one in loaders:
            try:
                one.batch(number % 5, 1)
                counts["image"] += 1
            except DataError as error:
                if KEY.decode() not in error.message:
                    raise
                counts["error"] += 1
    fuzz.tell(counts)


def tried(seed: int, records: int = 500) -> Trial:
    counts, failures = fuzz.tried("reliability.records", seed, records)
    words = {"images": counts["image"], "errors": counts["error"], "failures": len(failures)}
    return Trial(records, words, wrong="; ".join(failures))


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    while True:
        yield tried(rng.randrange(2**32))


if __name__ == "__main__":
    child(int(sys.argv[1]))
