"""loader: records that give no picture are named."""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import pytest

from stagerun.base.errors import DataError
from stagerun.base.recipe import Transform
from stagerun.data.loader import Loader
from stagerun.data.records import ListRecords
from stagerun.language.proto.caffe_pb2 import Datum

N = 3000


def raw(i: int, side: int = 8) -> bytes:
    image = np.random.default_rng(i).integers(0, 256, (side, side), np.uint8)
    return Datum(channels=1, height=side, width=side, data=image.tobytes(), label=i % 10).SerializeToString()


def records(bad: Sequence[int], value: bytes = b"\xff\xff") -> ListRecords:
    return ListRecords([value if i in bad else raw(i) for i in range(N)], "/data/toy")


def make(source: ListRecords, **more: Any) -> Loader:
    settings: dict[str, Any] = {"train": True, "shuffle": False} | more
    param = Transform(crop_size=8, mirror=settings["train"])
    return Loader(source, param, channels=1, num_classes=10, seed=1, images=N, **settings)


@pytest.mark.parametrize("train", [True, False])
def test_a_bad_record_stops_with_lmdb_and_key(train: bool) -> None:
    with pytest.raises(DataError, match=r"/data/toy: record `00000007`: .* Datum"):
        make(records([7]), train=train).batch(0, 16)
    with pytest.raises(DataError, match="`00000007`: the record is empty"):
        make(records([7], b""), train=train).batch(0, 16)
    with pytest.raises(DataError, match="2 of 32 records looked at can't be used"):
        make(records([0, N - 1]), train=train).preflight()


def test_labels_and_sizes_are_mistakes_that_name_the_record() -> None:
    colour = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    for value in (
        Datum(channels=1, height=8, width=8, data=bytes(64), label=10).SerializeToString(),
        Datum(channels=3, height=8, width=8, data=bytes(192)).SerializeToString(),
        Datum(data=colour, encoded=True).SerializeToString(),
        raw(3, side=5),
    ):
        with pytest.raises(DataError, match="`00000007`"):
            make(records([7], value)).batch(0, 16)
