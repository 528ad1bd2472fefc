"""Where the images of small sets stay: who decides what, and that nothing else changes."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from stagerun.base.errors import DataError
from stagerun.base.recipe import Cache, Data, InterpMode, RandomResizedCrop, Source, Transform
from stagerun.data import pictures, pixels, records
from stagerun.data.jpeg import decoder
from stagerun.data.loader import Loader
from stagerun.data.pictures import Decoded, make_memory
from stagerun.data.pixels import Draw, finish
from stagerun.data.records import ListRecords, Room
from stagerun.language.proto.caffe_pb2 import Datum
from stagerun.train.images import Images, default_loader_threads
from tests.help import made_schedules


def png(i: int, height: int = 20, width: int = 30) -> bytes:
    image = np.random.default_rng(i).integers(0, 256, (height, width, 3), np.uint8)
    return Datum(data=cv2.imencode(".png", image)[1].tobytes(), label=i % 10, encoded=True).SerializeToString()


ALIKE = ListRecords([png(i) for i in range(50)], "/data/alike")
UNLIKE = ListRecords([png(i, 20 + i % 2) for i in range(50)], "/data/unlike")
NEEDED = 50 * 20 * 30 * 3


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(pictures, "available_memory", lambda: size)


def test_small_sets_stay_in_memory_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 8 * NEEDED)
    made = make_memory(ALIKE, 3, Cache.AUTO)
    assert made is not None and made.images.shape == (50, 20, 30, 3)
    assert make_memory(ALIKE, 3, Cache.AUTO, sharers=2) is None
    assert make_memory(ALIKE, 3, Cache.DISK) is None
    assert make_memory(UNLIKE, 3, Cache.AUTO) is None
    assert make_memory(ALIKE, 3, Cache.DEVICE) is not None  # of a CPU that is memory


def test_what_was_asked_for_and_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, NEEDED)
    assert make_memory(ALIKE, 3, Cache.MEMORY) is not None
    with pytest.raises(DataError, match=r"/data/alike: decoded it takes 90.0 kB .* 45.0 kB are free"):
        make_memory(ALIKE, 3, Cache.MEMORY, sharers=2)
    with pytest.raises(DataError, match="/data/unlike: its images are not of one size") as error:
        make_memory(UNLIKE, 3, Cache.MEMORY)
    assert "cache: AUTO" in error.value.hint


def test_jpegs_of_one_stage_are_nothing_to_a_stage_that_reduces_them() -> None:
    """Stages share the memory; a run that goes on in the second stage has none of the first one's pictures in it."""
    picture = cv2.resize(np.random.default_rng(1).integers(0, 256, (9, 12, 3), np.uint8), (120, 90))
    jpeg = Datum(data=cv2.imencode(".jpg", picture)[1].tobytes(), encoded=True).SerializeToString()

    def stage(mode: InterpMode, kept: Decoded | None) -> list[np.ndarray]:
        one = Loader(
            source,
            Transform(crop_size=16, random_resized_crop=RandomResizedCrop(interp_mode=mode)),
            train=True, channels=3, num_classes=10, seed=1, images=4, shuffle=True, memory=kept,
        )  # fmt: skip
        return [one.batch(n * 4, 4).images.copy() for n in range(4)]

    source = Counting([jpeg, png(1, 90, 120)] * 2)
    shared = Decoded(4, 90, 120, 3)
    assert np.array_equal(stage(InterpMode.LINEAR, shared), stage(InterpMode.LINEAR, None))
    source.reads = 0
    asked: list[int] = []
    source.expect = asked.extend  # type: ignore[method-assign]
    second = stage(InterpMode.AUTO, shared)
    assert source.reads == 2 * 4 and set(asked) <= {0, 2}  # the JPEGs each time, the PNGs never
    assert np.array_equal(second, stage(InterpMode.AUTO, None))
    assert np.array_equal(second, stage(InterpMode.AUTO, Decoded(4, 90, 120, 3)))


class Counting(ListRecords):
    """Counts the reads."""

    reads = 0

    def read(self, i: int, room: Room) -> memoryview:
        self.reads += 1
        return super().read(i, room)


def test_each_record_is_read_and_decoded_once() -> None:
    source = Counting([png(i) for i in range(50)])
    kept = Decoded(50, 20, 30, 3)
    one = Loader(
        source, Transform(pad=1, crop_size=18, mirror=True), train=True, channels=3, num_classes=10, seed=1, images=50,
        shuffle=True, memory=kept,
    )  # fmt: skip
    for n in range(20):
        one.batch(n * 10, 10)
    assert source.reads == 50 and all(kept.has(i) for i in range(50))


def test_jpegs_that_auto_reduces_are_the_same_with_memory() -> None:
    picture = cv2.resize(np.random.default_rng(1).integers(0, 256, (9, 12, 3), np.uint8), (120, 90))
    value = Datum(data=cv2.imencode(".jpg", picture)[1].tobytes(), encoded=True).SerializeToString()
    batches = []
    for kept in (None, Decoded(4, 90, 120, 3)):
        one = Loader(
            ListRecords([value] * 4),
            Transform(crop_size=16, random_resized_crop=RandomResizedCrop(interp_mode=InterpMode.AUTO)),
            train=True, channels=3, num_classes=10, seed=1, images=4, shuffle=True, memory=kept,
        )  # fmt: skip
        batches.append([one.batch(n * 8, 8).images for n in range(3)])
    assert np.array_equal(*batches)


def test_threads_by_default() -> None:
    assert [default_loader_threads("cpu", n) for n in (1, 8)] == [1, 1]
    assert [default_loader_threads("cuda", n) for n in (1, 2, 6, 64)] == [1, 1, 5, 8]


def test_what_a_gpu_keeps_takes_no_room_here() -> None:
    data = Data(train=Source(source="d", path="d", images=len(UNLIKE)), cache=Cache.DEVICE)
    stage = replace(made_schedules.stage("a", base_lr=0.1, lr_policy="fixed", max_iter=1), data=data)
    schedule = replace(made_schedules.schedule(stage), data=data)
    images = Images(schedule, torch.device("cuda"))
    images._records = {"d": UNLIKE}
    assert images.memory(stage) is None
    images = Images(schedule)
    images._records = {"d": UNLIKE}
    with pytest.raises(DataError, match="not of one size"):
        images.memory(stage)


def test_a_giant_is_not_kept_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One picture of 100 million pixels would else take its memory in each thread until the run ends."""
    for module in (records, decoder, pixels):
        monkeypatch.setattr(module, "_KEEP", 3 << 20)
    room, scratch = Room(), decoder.Scratch()
    for size in (1000, (2 << 20) + 1, 5 << 19, 1000):
        assert len(room.of(size)) == size and scratch.of(size).size == size
    kept = room.of(1).obj, scratch.of(1).base
    assert len(room.of(4 << 20)) == scratch.of(4 << 20).size == 4 << 20
    assert room.of(1).obj is kept[0] and scratch.of(1).base is kept[1]
    assert len(kept[0]) == kept[1].size == 3 << 20
    small = pixels._scratch((10, 10, 3)).base
    assert pixels._scratch((2000, 2000, 3)).shape == (2000, 2000, 3) and pixels._scratch((10, 10, 3)).base is small


def test_pixels_do_not_depend_on_opencvs_threads() -> None:
    image = np.random.default_rng(1).integers(0, 256, (600, 800, 3), np.uint8)
    draws = [Draw(size=(224, 200), interp_mode=mode, mirror=True) for mode in InterpMode]
    before = [finish(image, draw).copy() for draw in draws]
    try:
        cv2.setNumThreads(4)
        again = [finish(image, draw).copy() for draw in draws]
    finally:
        cv2.setNumThreads(0)
    assert all(np.array_equal(*pair) for pair in zip(before, again, strict=True))
