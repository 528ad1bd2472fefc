"""loader: the same batches for any number of workers and threads, from any position; and where small sets stay in memory."""

from typing import Any

import cv2
import made_images
import numpy as np
import pytest
import torch
from facade import (
    Batch,
    Cache,
    DataError,
    ListRecords,
    LmdbSource,
    Loader,
    RandomResizedCrop,
    Transform,
    jpeg,
    pictures,
    write_lmdb,
)
from made_images import stored

TIERS = [tier.name for tier in jpeg.tiers() if tier.available]
IMAGES = 23
RESIZED = Transform(crop_size=24, mirror=True, random_resized_crop=RandomResizedCrop(), cutout_size=5)


def photo(i: int) -> np.ndarray:
    rng = np.random.default_rng(i)
    small = rng.integers(0, 256, (6, 8, 3), np.uint8)
    return cv2.resize(small, (60 + i % 5, 50 + i % 7), interpolation=cv2.INTER_CUBIC)


def encoded(i: int) -> bytes:
    """JPEGs plain, with restart markers, progressive and grey, and a PNG."""
    image = photo(i)
    kinds = [
        cv2.imencode(".jpg", image),
        cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_RST_INTERVAL, 2]),
        cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]),
        cv2.imencode(".jpg", image[:, :, 0]),
        cv2.imencode(".png", image),
    ]
    return bytes(kinds[i % len(kinds)][1])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("photos") / "lmdb")
    write_lmdb(path, (stored(encoded(i), i % 10) for i in range(IMAGES)))
    return LmdbSource(path, IMAGES)


def make(
    source: LmdbSource, tier: str | None = None, threads: int = 1, param: Transform = RESIZED, **more: Any
) -> Loader:
    more |= {"channels": 3, "num_classes": 10, "seed": 5, "shuffle": True}
    return made_images.loader(source, param, train=True, tier=tier, threads=threads, **more)


def same(a: Batch, b: Batch) -> bool:
    fields = ("images", "labels", "positions", "cutout")
    return all(np.array_equal(getattr(a, field), getattr(b, field)) for field in fields)


@pytest.mark.parametrize("tier", TIERS)
def test_workers_threads_ways_of_decoding_and_resumes_never_change_a_batch(photos, tier):
    device_batch, batches = 12, 12
    reference = [make(photos, "opencv").batch(n * device_batch, device_batch) for n in range(batches)]
    assert reference[0].cutout is not None
    for workers in (1, 2, 3):
        for threads in (1, 3):
            for rank in range(workers):
                mine = range(rank, batches, workers)
                with make(photos, tier, threads).stream((n * device_batch, device_batch) for n in mine) as stream:
                    assert all(same(batch, reference[n]) for n, batch in zip(mine, stream, strict=True))
    whole = np.concatenate([batch.images for batch in reference])
    for position in np.random.default_rng(1).integers(0, batches * device_batch - 8, 10).tolist():
        found = make(photos, tier).batch(position, 8)
        assert np.array_equal(found.images, whole[position : position + 8])


def test_memory_never_changes_a_batch(photos):
    param = Transform(pad=4, crop_size=40, mirror=True)
    memory = pictures.Decoded(IMAGES, 50, 60, 3)  # the size of some of them: the others are decoded each time
    plain, kept = make(photos, param=param), make(photos, param=param, threads=2, memory=memory)
    requests = [(n * 10, 10) for n in range(8)]  # several epochs
    with plain.stream(requests) as first, kept.stream(requests) as second:
        assert all(same(a, b) for a, b in zip(first, second, strict=True))
    there = [i for i in range(IMAGES) if memory.has(i)]
    assert there and all(photo(i).shape == (50, 60, 3) for i in there) and len(there) < IMAGES


WAYS_TO_HOLD = {
    "array": lambda a: a,
    "row": lambda a: a[1],
    "view of a view": lambda a: a.reshape(-1)[4:].reshape(4, -1),
    "transposed": lambda a: a[::2, 0].T,
    "tensor": torch.from_numpy,
    "part of a tensor": lambda a: torch.from_numpy(a)[2].permute(2, 0, 1),
    "memoryview": memoryview,
    "array of a memoryview": lambda a: np.asarray(memoryview(a[0])),
    "dlpack": lambda a: torch.from_dlpack(a[2]),
    "bytes in place": lambda a: np.frombuffer(a, np.uint8),
}


def test_memory_is_used_again_when_nobody_can_see_it_any_more_and_not_before(photos):
    held: list[tuple[str, object, np.ndarray]] = []
    with make(photos, threads=2).stream((n * 8, 8) for n in range(4 * len(WAYS_TO_HOLD))) as stream:
        for batch, (way, hold) in zip(stream, list(WAYS_TO_HOLD.items()) * 4, strict=True):
            part = hold(batch.images)
            held.append((way, part, np.asarray(part).copy()))
    assert [way for way, part, copy in held if not np.array_equal(np.asarray(part), copy)] == []
    with make(photos, threads=2).stream((n * 8, 8) for n in range(60)) as stream:
        places = {batch.images.__array_interface__["data"][0] for batch in stream}
    assert len(places) < 20


# -- Where the images of small sets stay: who decides what, and that nothing else changes


def png(i: int, height: int = 20, width: int = 30) -> bytes:
    image = np.random.default_rng(i).integers(0, 256, (height, width, 3), np.uint8)
    return stored(cv2.imencode(".png", image)[1].tobytes(), i % 10)


ALIKE = ListRecords([png(i) for i in range(50)], "/data/alike")
UNLIKE = ListRecords([png(i, 20 + i % 2) for i in range(50)], "/data/unlike")
MANY = 1 << 33  # workers of a node: the share of each is a few bytes


def test_small_sets_stay_in_memory_by_themselves():
    made = pictures.make_memory(ALIKE, 3, Cache.AUTO)
    assert made is not None and made.images.shape == (50, 20, 30, 3)
    assert pictures.make_memory(ALIKE, 3, Cache.AUTO, sharers=MANY) is None
    assert pictures.make_memory(ALIKE, 3, Cache.DISK) is None
    assert pictures.make_memory(UNLIKE, 3, Cache.AUTO) is None
    assert pictures.make_memory(ALIKE, 3, Cache.DEVICE) is not None  # of a CPU that is memory


def test_what_was_asked_for_and_cannot_be_is_said():
    assert pictures.make_memory(ALIKE, 3, Cache.MEMORY) is not None
    with pytest.raises(DataError, match=r"/data/alike: decoded it takes 90.0 kB .* are free"):
        pictures.make_memory(ALIKE, 3, Cache.MEMORY, sharers=MANY)
    with pytest.raises(DataError, match="/data/unlike: its images are not of one size") as error:
        pictures.make_memory(UNLIKE, 3, Cache.MEMORY)
    assert "cache: AUTO" in error.value.hint
