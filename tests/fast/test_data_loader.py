"""loader: batches are functions of (seed, position), in the foreground or the background, and bad records are named."""

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cv2
import made_images
import numpy as np
import pytest
from facade import Batch, DataError, ListRecords, Loader, Transform, order
from made_images import raw, stored

CROP = Transform(pad=2, crop_size=28, mirror=True)


def grey(i: int, side: int = 28) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (side, side), np.uint8)


def records(n: int = 100, changed: dict[int, bytes] | None = None) -> ListRecords:
    return ListRecords([(changed or {}).get(i, raw(grey(i)[:, :, None], i % 10)) for i in range(n)], "/data/toy_lmdb")


def loader(source: ListRecords | None = None, param: Transform = CROP, **settings: Any) -> Loader:
    source = source or records()
    defaults = {"train": True, "channels": 1, "num_classes": 10, "seed": 1, "shuffle": True}
    return made_images.loader(source, param, **(defaults | settings))


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("images", "labels", "positions"))


def test_a_batch_is_what_its_positions_say():
    found = loader(param=Transform()).batch(95, 10)  # reaches into the second epoch
    indices = order.EveryRecord(1, 100, True).at(95, 10)
    assert found.images.shape == (10, 28, 28, 1)
    assert found.images.dtype == np.uint8 and found.images.flags.c_contiguous
    assert found.labels.dtype == np.int64 and found.labels.tolist() == [i % 10 for i in indices]
    assert found.positions.tolist() == list(range(95, 105))
    assert all(np.array_equal(image[:, :, 0], grey(i)) for image, i in zip(found.images, indices, strict=True))


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_the_background_gives_the_same_batches(depth):
    requests = [(0, 8), (40, 8), (48, 3), (990, 20)]
    one = loader(depth=depth)
    found = list(one.stream(requests))
    assert len(found) == 4
    assert all(same(batch, one.batch(*request)) for batch, request in zip(found, requests, strict=True))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def endless() -> Iterator[tuple[int, int]]:
    position = 0
    while True:
        yield position, 4
        position += 4


def test_a_stream_reads_ahead_no_further_than_its_depth():
    asked: list[int] = []

    def requests() -> Iterator[tuple[int, int]]:
        for request in endless():
            asked.append(request[0])
            yield request

    with loader(depth=3).stream(requests()) as stream:
        next(stream)
        time.sleep(0.3)
        assert len(asked) <= 1 + 3 + 1  # handed out, ready, waiting for room


@pytest.mark.parametrize("close", [True, False])
def test_a_stream_that_is_closed_or_forgotten_ends_its_thread_even_while_it_waits_for_room(close):
    stream = loader(depth=1).stream(endless())
    next(stream)
    time.sleep(0.05)
    start = time.monotonic()
    if close:
        stream.close()
        assert list(stream) == []
        stream.close()
    del stream
    gc.collect()
    assert time.monotonic() - start < 10  # on a busy machine
    assert not loader_threads()


def test_closing_from_another_thread_wakes_the_consumer():
    blocked = threading.Event()

    def requests() -> Iterator[tuple[int, int]]:
        blocked.wait(10)
        yield 0, 4

    stream = loader().stream(requests())
    got: list[Batch] = []
    consumer = threading.Thread(target=lambda: got.extend(stream))
    consumer.start()
    closer = threading.Thread(target=stream.close)
    closer.start()
    blocked.set()
    consumer.join(5)
    closer.join(5)
    assert not consumer.is_alive() and not closer.is_alive()


def test_an_error_in_the_background_is_raised_in_front_after_the_good_batches():
    one = loader(records(changed={9: b""}), shuffle=False)
    stream = one.stream([(0, 4), (4, 4), (8, 4), (12, 4)])
    assert [next(stream).positions[0] for _ in range(2)] == [0, 4]
    with pytest.raises(DataError, match="/data/toy_lmdb: record `00000009`: the record is empty"):
        next(stream)
    assert list(stream) == [] and not loader_threads()


def test_too_small_images_and_odd_sizes_name_their_record():
    small = records(10, {4: raw(grey(4, 20)[:, :, None])})
    with pytest.raises(DataError, match=r"`00000004`: the image is 20 x 20 pixels .* crop_size: 28"):
        loader(small, Transform(crop_size=28), shuffle=False).batch(0, 10)
    with pytest.raises(DataError, match=r"`00000004`: the image is 20 x 20 pixels .* others are 28 x 28") as error:
        loader(small, Transform(), shuffle=False).batch(0, 10)
    assert "crop_size" in error.value.hint


def test_preflight_passes_good_records_and_lists_every_mistake_it_sees():
    loader().preflight()
    bad = records(1000, {0: b"", 999: raw(grey(1)[:, :, None], 12), 500: raw(grey(1)[:, :, None])[:-100], 501: b""})
    for one, samples, words in (
        (
            loader(bad),
            3,
            ["`00000000`: the record is empty", "`00000999`: the label is 12", "`00000500`", "num_classes"],
        ),
        (loader(records(50, {49: b""})), 32, ["/data/toy_lmdb: record `00000049`: the record is empty\n"]),
        (loader(num_classes=1), 100, ["90 of 100 records looked at can't be used", "and 87 more"]),
    ):
        with pytest.raises(DataError) as error:
            one.preflight(samples=samples)
        assert all(word in error.value.render() for word in words), words


def sided(values: list[bytes], kinds: dict[str, int], sides: list[tuple[int, int]]) -> ListRecords:
    """Records with what a side file would know of them."""
    source = ListRecords(values, "/data/toy_lmdb")
    heights, widths = np.array(sides, np.int32).T
    source.index = SimpleNamespace(
        facts=SimpleNamespace(kinds=tuple(kinds.items())), heights=heights, widths=widths, labels=heights * 0
    )
    return source


def png(image: np.ndarray) -> bytes:
    return stored(cv2.imencode(".png", image)[1].tobytes())


def test_preflight_finds_the_one_odd_picture_of_which_the_side_file_tells():
    values, sides = [png(grey(i)) for i in range(160)], [(28, 28)] * 160
    values[83], sides[83] = png(grey(83, 40)), (40, 40)
    with pytest.raises(DataError, match=r"^/data/toy_lmdb: record `00000083`: the image is 40 x 40 pixels"):
        loader(sided(values, {"grey PNG": 160}, sides), Transform()).preflight(samples=3)
