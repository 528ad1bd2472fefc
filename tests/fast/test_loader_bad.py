"""loader: records that give no picture are named, or replaced the same way by everybody; and no input crashes it."""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import pytest

from stagerun.base.errors import DataError
from stagerun.base.recipe import Transform
from stagerun.data.bad_records import BadRecords, Undecodable, allowed, check
from stagerun.data.loader import Loader
from stagerun.data.records import ListRecords
from stagerun.language.proto.caffe_pb2 import Datum

N = 3000


def raw(i: int, side: int = 8) -> bytes:
    image = np.random.default_rng(i).integers(0, 256, (side, side), np.uint8)
    return Datum(channels=1, height=side, width=side, data=image.tobytes(), label=i % 10).SerializeToString()


def records(bad: Sequence[int], value: bytes = b"\xff\xff") -> ListRecords:
    return ListRecords([value if i in bad else raw(i) for i in range(N)], "/data/toy")


def make(source: ListRecords, bad: BadRecords | None, **more: Any) -> Loader:
    settings: dict[str, Any] = {"train": True, "shuffle": False} | more
    param = Transform(crop_size=8, mirror=settings["train"])
    return Loader(source, param, channels=1, num_classes=10, seed=1, images=N, bad=bad, **settings)


def test_a_bad_record_stops_with_lmdb_key_and_position() -> None:
    with pytest.raises(DataError, match=r"/data/toy: record `00000007`: .* Datum \(at position 3007\)"):
        make(records([7]), None).batch(3000, 16)


def test_another_record_takes_its_place_the_same_for_everybody() -> None:
    source, bad = records([7, 1500]), BadRecords(N)
    found = make(source, bad).batch(0, 16)
    clean = make(records([]), None).batch(0, 16)
    assert np.flatnonzero(found.labels != clean.labels).size <= 1
    assert [n for n in range(16) if not np.array_equal(found.images[n], clean.images[n])] == [7]
    for position, count in ((7, 1), (4, 9), (0, 16)):
        again = make(source, BadRecords(N)).batch(position, count)
        assert np.array_equal(again.images[7 - position], found.images[7])
        assert again.labels[7 - position] == found.labels[7]
    with make(source, BadRecords(N), threads=3).stream([(0, 16), (1496, 8)]) as stream:
        assert np.array_equal(next(stream).images, found.images)
    # In the next epoch it is another one: the draw belongs to the position.
    assert not np.array_equal(make(source, BadRecords(N)).batch(N + 7, 1).images, found.images[7:8])


def test_each_bad_record_is_told_once_with_key_and_position() -> None:
    bad = BadRecords(N)
    one = make(records([7, 9]), bad)
    one.batch(0, 16)
    one.batch(N, 16)
    told = bad.fresh()
    assert [(b.index, b.position) for b in told] == [(7, 7), (9, 9)]
    assert "`00000009`" in told[1].text and "position 9" in told[1].text
    assert bad.fresh() == [] and len(bad.all()) == 2


def test_more_than_one_of_a_thousand_are_too_many_and_all_of_them_are_named() -> None:
    assert (allowed(5), allowed(N), allowed(1281167)) == (1, 3, 1281)
    bad = BadRecords(N)
    one = make(records([2, 4, 6, 8]), bad)
    one.batch(0, 7)
    assert not bad.too_many()
    one.batch(7, 9)  # nothing stops here: the workers are to agree where
    assert bad.too_many()
    with pytest.raises(DataError) as error:
        check(bad.all(), allowed(N))
    assert "4 bad records" in error.value.message and error.value.hint
    assert all(f"`0000000{n}`" in error.value.message for n in (2, 4, 6, 8))


def test_labels_and_sizes_are_mistakes_of_the_recipe_and_never_replaced() -> None:
    colour = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    for value in (
        Datum(channels=1, height=8, width=8, data=bytes(64), label=10).SerializeToString(),
        Datum(channels=3, height=8, width=8, data=bytes(192)).SerializeToString(),
        Datum(data=colour, encoded=True).SerializeToString(),
        raw(3, side=5),
    ):
        with pytest.raises(DataError, match="`00000007`") as error:
            make(records([7], value), BadRecords(N)).batch(0, 16)
        assert not isinstance(error.value, Undecodable)


def test_an_evaluation_never_replaces() -> None:
    with pytest.raises(DataError, match="`00000007`: the record is empty"):
        make(records([7], b""), BadRecords(N), train=False).batch(0, 16)


def test_preflight_puts_up_with_what_the_run_would() -> None:
    make(records([0]), BadRecords(N)).preflight()
    with pytest.raises(DataError):
        make(records([0]), None).preflight()
    # Of a large set a thousandth is more than all that are looked at: two bad ones of so few are too many all the same.
    assert allowed(40_000) > 32
    with pytest.raises(DataError, match="2 of 32 records looked at can't be used"):
        make(records([0, N - 1]), BadRecords(40_000)).preflight()
    with pytest.raises(DataError, match="can't be used"):
        make(records(range(N)), BadRecords(N)).preflight()


def test_where_training_stops_at_a_bad_record_the_hint_says_that_it_needn_t() -> None:
    source = records([0])
    for use in (lambda: make(source, None).batch(0, 4), lambda: make(source, None).preflight()):
        with pytest.raises(Undecodable) as error:
            use()
        assert "`on_bad_record: REPLACE`" in error.value.hint
    with pytest.raises(Undecodable) as error:
        make(source, None, train=False).preflight()
    assert "REPLACE" not in error.value.hint, "an evaluation never does"
