"""Where the images of small sets stay: who decides what, and that nothing else changes."""

import cv2
import numpy as np
import pytest
from facade import Cache, DataError, Decoded, ListRecords, Loader, Transform, make_memory
from made_images import stored


def png(i: int, height: int = 20, width: int = 30) -> bytes:
    image = np.random.default_rng(i).integers(0, 256, (height, width, 3), np.uint8)
    return stored(cv2.imencode(".png", image)[1].tobytes(), i % 10)


ALIKE = ListRecords([png(i) for i in range(50)], "/data/alike")
UNLIKE = ListRecords([png(i, 20 + i % 2) for i in range(50)], "/data/unlike")
MANY = 1 << 33  # workers of a node: the share of each is a few bytes


def test_small_sets_stay_in_memory_by_themselves():
    made = make_memory(ALIKE, 3, Cache.AUTO)
    assert made is not None and made.images.shape == (50, 20, 30, 3)
    assert make_memory(ALIKE, 3, Cache.AUTO, sharers=MANY) is None
    assert make_memory(ALIKE, 3, Cache.DISK) is None
    assert make_memory(UNLIKE, 3, Cache.AUTO) is None
    assert make_memory(ALIKE, 3, Cache.DEVICE) is not None  # of a CPU that is memory


def test_what_was_asked_for_and_cannot_be_is_said():
    assert make_memory(ALIKE, 3, Cache.MEMORY) is not None
    with pytest.raises(DataError, match=r"/data/alike: decoded it takes 90.0 kB .* are free"):
        make_memory(ALIKE, 3, Cache.MEMORY, sharers=MANY)
    with pytest.raises(DataError, match="/data/unlike: its images are not of one size") as error:
        make_memory(UNLIKE, 3, Cache.MEMORY)
    assert "cache: AUTO" in error.value.hint


class Counting(ListRecords):
    """Counts the reads."""

    reads = 0

    def read(self, i: int, room: object) -> memoryview:
        self.reads += 1
        return super().read(i, room)


def test_each_record_is_read_and_decoded_once():
    source = Counting([png(i) for i in range(50)])
    kept = Decoded(50, 20, 30, 3)
    one = Loader(
        source, Transform(pad=1, crop_size=18, mirror=True), train=True, channels=3, num_classes=10, seed=1, images=50,
        shuffle=True, memory=kept,
    )  # fmt: skip
    for n in range(20):
        one.batch(n * 10, 10)
    assert source.reads == 50 and all(kept.has(i) for i in range(50))
