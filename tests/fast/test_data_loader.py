"""loader: batches are functions of (seed, position), in the foreground or the background, and bad records are named."""

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from stagerun.base import order
from stagerun.base.errors import DataError
from stagerun.base.recipe import Transform
from stagerun.data.loader import Batch, Loader
from stagerun.data.records import ListRecords
from stagerun.language.proto.caffe_pb2 import Datum

CROP = Transform(pad=2, crop_size=28, mirror=True)


def grey(i: int, side: int = 28) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (side, side), np.uint8)


def raw(image: np.ndarray, label: int) -> bytes:
    height, width = image.shape
    return Datum(channels=1, height=height, width=width, data=image.tobytes(), label=label).SerializeToString()


def records(n: int = 100, changed: dict[int, bytes] | None = None) -> ListRecords:
    return ListRecords([(changed or {}).get(i, raw(grey(i), i % 10)) for i in range(n)], "/data/toy_lmdb")


def loader(source: ListRecords | None = None, param: Transform = CROP, **settings: Any) -> Loader:
    source = source or records()
    defaults = {"train": True, "channels": 1, "num_classes": 10, "seed": 1, "images": len(source), "shuffle": True}
    return Loader(source, param, **(defaults | settings))


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("images", "labels", "positions"))


def test_a_batch_is_what_its_positions_say() -> None:
    found = loader(param=Transform()).batch(95, 10)  # reaches into the second epoch
    indices = order.indices(1, 100, 95, 10, True)
    assert found.images.shape == (10, 28, 28, 1)
    assert found.images.dtype == np.uint8 and found.images.flags.c_contiguous
    assert found.labels.dtype == np.int64 and found.labels.tolist() == [i % 10 for i in indices]
    assert found.positions.tolist() == list(range(95, 105))
    assert all(np.array_equal(image[:, :, 0], grey(i)) for image, i in zip(found.images, indices, strict=True))


def test_any_split_of_the_positions_gives_the_same_images() -> None:
    whole = loader().batch(64, 96)
    for worker_sizes in ([96], [32, 64], [1, 95], [24, 24, 24, 24]):
        parts, at = [], 64
        for size in worker_sizes:
            parts.append(loader().batch(at, size))  # another worker, with a loader of its own
            at += size
        assert np.array_equal(np.concatenate([part.images for part in parts]), whole.images)
        assert np.array_equal(np.concatenate([part.labels for part in parts]), whole.labels)


def test_an_evaluation_sees_centre_crops_in_key_order() -> None:
    found = loader(param=Transform(crop_size=25), train=False, shuffle=False).batch(3, 4)
    expected = np.stack([grey(i)[1:26, 1:26, None] for i in range(3, 7)])  # (28 - 25) // 2 is 1
    assert np.array_equal(found.images, expected)


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_the_background_gives_the_same_batches(depth: int) -> None:
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


def test_a_stream_reads_ahead_no_further_than_its_depth() -> None:
    asked: list[int] = []

    def requests() -> Iterator[tuple[int, int]]:
        for request in endless():
            asked.append(request[0])
            yield request

    with loader(depth=3).stream(requests()) as stream:
        next(stream)
        time.sleep(0.3)
        assert len(asked) <= 1 + 3 + 1  # handed out, ready, waiting for room


def test_closing_ends_the_thread_at_once_even_when_it_waits_for_room() -> None:
    stream = loader(depth=1).stream(endless())
    next(stream)
    time.sleep(0.05)
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 10  # on a busy machine
    assert not loader_threads()
    assert list(stream) == []
    stream.close()


def test_a_forgotten_stream_ends_its_thread() -> None:
    stream = loader(depth=1).stream(endless())
    next(stream)
    del stream
    gc.collect()
    assert not loader_threads()


def test_closing_from_another_thread_wakes_the_consumer() -> None:
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


def test_an_error_in_the_background_is_raised_in_front_after_the_good_batches() -> None:
    one = loader(records(changed={9: b""}), shuffle=False)
    stream = one.stream([(0, 4), (4, 4), (8, 4), (12, 4)])
    assert [next(stream).positions[0] for _ in range(2)] == [0, 4]
    with pytest.raises(DataError, match="/data/toy_lmdb: record `00000009`: the record is empty"):
        next(stream)
    assert list(stream) == [] and not loader_threads()


def test_too_small_images_and_odd_sizes_name_their_record() -> None:
    small = records(10, {4: raw(grey(4, 20), 0)})
    with pytest.raises(DataError, match=r"`00000004`: the image is 20 x 20 pixels .* crop_size: 28"):
        loader(small, Transform(crop_size=28), shuffle=False).batch(0, 10)
    with pytest.raises(DataError, match=r"`00000004`: the image is 20 x 20 pixels .* others are 28 x 28") as error:
        loader(small, Transform(), shuffle=False).batch(0, 10)
    assert "crop_size" in error.value.hint


def test_a_count_that_is_not_the_epochs_is_refused() -> None:
    with pytest.raises(DataError, match="holds 100 records, but the schedule says images: 90"):
        loader(images=90)


def test_preflight_passes_good_records_and_lists_every_mistake_it_sees() -> None:
    loader().preflight()
    bad = records(1000, {0: b"", 999: raw(grey(1), 12), 500: raw(grey(1), 3)[:-100], 501: b""})
    with pytest.raises(DataError) as error:
        loader(bad).preflight(samples=3)
    text = error.value.render()
    assert text.count("hint: ") == 3 and "num_classes" in text
    assert "`00000000`: the record is empty" in text and "`00000999`: the label is 12" in text and "`00000500`" in text


def test_preflight_says_one_mistake_plainly_and_many_briefly() -> None:
    with pytest.raises(DataError) as error:
        loader(records(50, {49: b""})).preflight()
    assert error.value.message == "/data/toy_lmdb: record `00000049`: the record is empty"
    with pytest.raises(DataError) as error:
        loader(num_classes=1).preflight(samples=100)
    assert "90 of 100" in error.value.message and "and 87 more" in error.value.message


def sided(values: list[bytes], kinds: dict[str, int], sides: list[tuple[int, int]]) -> ListRecords:
    """Records with what a side file would know of them."""
    source = ListRecords(values, "/data/toy_lmdb")
    heights, widths = np.array(sides, np.int32).T
    source.index = SimpleNamespace(
        facts=SimpleNamespace(kinds=tuple(kinds.items())), heights=heights, widths=widths, labels=heights * 0
    )  # type: ignore[assignment]
    return source


def png(image: np.ndarray) -> bytes:
    return Datum(data=cv2.imencode(".png", image)[1].tobytes(), label=1, encoded=True).SerializeToString()


def test_preflight_finds_the_one_picture_in_colour_among_grey_ones() -> None:
    values = [png(grey(i)) for i in range(160)]
    values[83] = png(np.dstack([grey(83)] * 3))
    with pytest.raises(DataError) as error:
        loader(sided(values, {"grey PNG": 159, "PNG": 1}, [(28, 28)] * 160)).preflight(samples=3)
    assert error.value.message.startswith("/data/toy_lmdb: record `00000083`: the image has 3 channels")
    assert error.value.hint.startswith("convert that file to grey")


def test_preflight_finds_the_one_picture_of_another_size() -> None:
    values, sides = [png(grey(i)) for i in range(160)], [(28, 28)] * 160
    values[83], sides[83] = png(grey(83, 40)), (40, 40)
    with pytest.raises(DataError, match="record `00000083`: the image is 40 x 40 pixels"):
        loader(sided(values, {"grey PNG": 160}, sides), Transform()).preflight(samples=3)
