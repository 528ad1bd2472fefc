"""loader: the same batches for any number of workers and threads, any way of decoding, from any position; memory reused safely."""

import gc
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from facade import Batch, Datum, Decoded, LmdbSource, Loader, RandomResizedCrop, Transform, write_lmdb

from stagerun.data import jpeg
from stagerun.data.stream import CHUNK, Buffers, Stream

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
def photos(tmp_path_factory: pytest.TempPathFactory) -> LmdbSource:
    path = str(tmp_path_factory.mktemp("photos") / "lmdb")
    write_lmdb(path, (Datum(data=encoded(i), label=i % 10, encoded=True).SerializeToString() for i in range(IMAGES)))
    return LmdbSource(path, IMAGES)


def make(
    source: LmdbSource,
    tier: str | None = None,
    threads: int = 1,
    param: Transform = RESIZED,
    memory: Decoded | None = None,
) -> Loader:
    return Loader(
        source, param, train=True, channels=3, num_classes=10, seed=5, images=IMAGES, shuffle=True, tier=tier, threads=threads,
        memory=memory,
    )  # fmt: skip


def same(a: Batch, b: Batch) -> bool:
    fields = ("images", "labels", "positions", "cutout")
    return all(np.array_equal(getattr(a, field), getattr(b, field)) for field in fields)


def joined(batches: list[Batch]) -> np.ndarray:
    return np.concatenate([batch.images for batch in batches])


@pytest.mark.parametrize("tier", TIERS)
def test_workers_threads_ways_of_decoding_and_resumes_never_change_a_batch(photos: LmdbSource, tier: str) -> None:
    device_batch, batches = 12, 12
    reference = [make(photos, "opencv").batch(n * device_batch, device_batch) for n in range(batches)]
    assert reference[0].cutout is not None
    for workers in (1, 2, 3):
        for threads in (1, 3):
            for rank in range(workers):
                mine = range(rank, batches, workers)
                with make(photos, tier, threads).stream((n * device_batch, device_batch) for n in mine) as stream:
                    assert all(same(batch, reference[n]) for n, batch in zip(mine, stream, strict=True))
    whole = joined(reference)
    for position in np.random.default_rng(1).integers(0, batches * device_batch - 8, 10).tolist():
        found = make(photos, tier).batch(position, 8)
        assert np.array_equal(found.images, whole[position : position + 8])


def test_memory_never_changes_a_batch(photos: LmdbSource) -> None:
    param = Transform(pad=4, crop_size=40, mirror=True)
    memory = Decoded(IMAGES, 50, 60, 3)  # the size of some of them: the others are decoded each time
    plain, kept = make(photos, param=param), make(photos, param=param, threads=2, memory=memory)
    requests = [(n * 10, 10) for n in range(8)]  # several epochs
    with plain.stream(requests) as first, kept.stream(requests) as second:
        assert all(same(a, b) for a, b in zip(first, second, strict=True))
    there = [i for i in range(IMAGES) if memory.has(i)]
    assert there and all(photo(i).shape == (50, 60, 3) for i in there) and len(there) < IMAGES


def test_batches_that_are_held_are_not_written_to(photos: LmdbSource) -> None:
    held: list[tuple[object, np.ndarray]] = []
    with make(photos, threads=2).stream((n * 8, 8) for n in range(40)) as stream:
        for n, batch in enumerate(stream):
            held.append((batch.images[3:5] if n % 2 else torch.from_numpy(batch.images)[3:5], batch.images[3:5].copy()))
    assert all(np.array_equal(np.asarray(part), copy) for part, copy in held)


WAYS_TO_HOLD = {
    "array": lambda a: a,
    "row": lambda a: a[1],
    "view of a view": lambda a: a.reshape(-1)[5:].reshape(5, -1),
    "transposed": lambda a: a[::2, 0].T,
    "tensor": torch.from_numpy,
    "part of a tensor": lambda a: torch.from_numpy(a)[2].permute(2, 0, 1),
    "memoryview": memoryview,
    "array of a memoryview": lambda a: np.asarray(memoryview(a[0])),
    "dlpack": lambda a: torch.from_dlpack(a[2]),
    "bytes in place": lambda a: np.frombuffer(a, np.uint8),
}


def test_memory_is_used_again_when_nobody_can_see_it_any_more_and_not_before() -> None:
    def address(array: np.ndarray) -> int:
        return int(array.__array_interface__["data"][0])

    buffers = {way: Buffers(3) for way in WAYS_TO_HOLD}
    first, held = {}, {}
    for way, hold in WAYS_TO_HOLD.items():
        array = buffers[way].array((4, 5, 5, 3))
        first[way], held[way] = address(array), hold(array)
    del array
    gc.collect()
    others = {way: buffers[way].array((4, 5, 5, 3)) for way in WAYS_TO_HOLD}
    assert [way for way in WAYS_TO_HOLD if address(others[way]) == first[way]] == []
    held.clear()
    gc.collect()
    assert [way for way in WAYS_TO_HOLD if address(buffers[way].array((4, 5, 5, 3))) != first[way]] == []


class Slow:
    """A maker whose chunks wait until they are let go, in any order."""

    depth, threads = 3, 3

    def __init__(self, fails: set[tuple[int, int]] = frozenset(), dies: bool = False) -> None:  # type: ignore[assignment]
        self.fails, self.begun, self.go = fails, threading.Semaphore(0), threading.Event()
        self.expected: list[tuple[int, int]] = []

    def plan(self, position: int, count: int) -> "SlowJob":
        return SlowJob(self, position, count)


class SlowJob:
    def __init__(self, maker: Slow, position: int, count: int) -> None:
        self.maker, self.position, self.count = maker, position, count

    def expect(self, first: int, last: int) -> None:
        self.maker.expected.append((self.position, first))

    def fill(self, first: int, last: int) -> None:
        self.maker.begun.release()
        if (self.position, first) in self.maker.fails:
            # Those that come later fail first.
            time.sleep(0.02 if first == 0 else 0)
            raise RuntimeError(f"{self.position}, {first}")

    def batch(self) -> Batch:
        return Batch(
            np.zeros((self.count, 1, 1, 1), np.uint8), np.zeros(self.count, np.int64), np.array([self.position])
        )


def test_the_error_of_the_first_image_is_the_one_that_is_raised() -> None:
    size = 4 * CHUNK
    for _ in range(5):
        maker = Slow(fails={(size, 0), (size, CHUNK), (size, 3 * CHUNK), (2 * size, 0), (3 * size, CHUNK)})
        stream = Stream(maker, ((n * size, size) for n in range(10)))
        assert next(stream).positions[0] == 0
        with pytest.raises(RuntimeError, match=f"{size}, 0"):
            next(stream)
        assert list(stream) == []


@pytest.mark.process
def test_an_lmdb_read_after_a_fork_gives_the_same(photos: LmdbSource, tmp_path: Path) -> None:
    import os

    values = [photos.get(i)[1] for i in range(IMAGES)]
    child = os.fork()
    if child == 0:
        os._exit(0 if [photos.get(i)[1] for i in range(IMAGES)] == values else 1)
    assert os.waitpid(child, 0)[1] == 0
