"""datum: what is in a record, and what is said of each kind of bad one."""

import cv2
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from stagerun.base.errors import DataError
from stagerun.data.datum import Fields, OtherChannels, decode, parse, picture_of
from stagerun.data.jpeg import Rectangle
from stagerun.language.proto.caffe_pb2 import Datum

RNG = np.random.default_rng(0)
PHOTO = cv2.GaussianBlur(RNG.integers(0, 256, (60, 90, 3), np.uint8), (9, 9), 0)
GREY = PHOTO[:, :, 0].copy()


def encode(image: np.ndarray, kind: str = ".jpg", *options: int) -> bytes:
    return cv2.imencode(kind, image, list(options))[1].tobytes()


def record(data: bytes, label: int = 0, encoded: bool = True) -> bytes:
    return Datum(data=data, label=label, encoded=encoded).SerializeToString()


def raw(image: np.ndarray, label: int = 0) -> bytes:
    planes = image.transpose(2, 0, 1)
    c, h, w = planes.shape
    return Datum(channels=c, height=h, width=w, data=planes.tobytes(), label=label).SerializeToString()


def refused(value: bytes, channels: int = 3, num_classes: int = 10) -> str:
    with pytest.raises(DataError) as error:
        decode(value, channels, num_classes)
    assert error.value.hint
    return error.value.render()


def test_raw_planes_become_interleaved_pixels() -> None:
    image, label = decode(raw(PHOTO, 7), 3, 10)
    assert np.array_equal(image, PHOTO) and label == 7
    image, _ = decode(raw(GREY[:, :, None]), 1, 10)
    assert image.shape == (60, 90, 1) and np.array_equal(image[:, :, 0], GREY)


def test_png_comes_back_as_blue_green_red() -> None:
    image, label = decode(record(encode(PHOTO, ".png"), 3), 3, 10)
    assert np.array_equal(image, PHOTO) and label == 3


def test_a_grey_jpeg_among_colour_images_is_repeated() -> None:
    image, _ = decode(record(encode(GREY)), 3, 10)
    assert image.shape == (60, 90, 3)
    assert np.array_equal(image[:, :, 0], image[:, :, 2])
    single, _ = decode(record(encode(GREY)), 1, 10)
    assert np.array_equal(single[:, :, 0], image[:, :, 0])


@pytest.mark.parametrize("kind", [".jpg", ".png"])
@pytest.mark.parametrize("options", [(), (cv2.IMWRITE_JPEG_PROGRESSIVE, 1), (cv2.IMWRITE_JPEG_RST_INTERVAL, 2)])
def test_a_cut_off_file_is_never_half_a_picture(kind: str, options: tuple[int, ...]) -> None:
    whole = encode(PHOTO, kind, *(options if kind == ".jpg" else ()))
    decode(record(whole), 3, 10)
    for length in {*range(20, len(whole) - 1, 97), len(whole) // 2, len(whole) - 1, len(whole) - 2}:
        assert "cut off" in refused(record(whole[:length]))


def test_every_kind_of_bad_record_is_named() -> None:
    assert "is empty" in refused(b"")
    assert "not a Caffe Datum" in refused(b"\xff" * 40)
    assert "float_data" in refused(Datum(float_data=[1.0, 2.0]).SerializeToString())
    assert "no image" in refused(Datum(label=1).SerializeToString())
    assert "neither JPEG nor PNG" in refused(record(b"GIF89a" + bytes(50)))
    garbled = bytearray(encode(PHOTO))
    garbled[2:200] = bytes(198)
    assert "neither JPEG nor PNG" in refused(record(bytes(garbled)))
    garbled = bytearray(encode(PHOTO))
    sof = garbled.find(b"\xff\xc0")
    garbled[sof + 5 : sof + 9] = bytes(4)  # height and width 0
    assert "can't be decoded" in refused(record(bytes(garbled)))


def test_raw_bytes_must_be_as_many_as_stated() -> None:
    short = Datum(channels=3, height=60, width=90, data=PHOTO.tobytes()[:-1]).SerializeToString()
    assert "3 x 60 x 90" in refused(short) and "16199" in refused(short)
    assert "encoded: true" in refused(Datum(channels=3, height=60, width=90, data=encode(PHOTO)).SerializeToString())
    assert "-1" in refused(Datum(channels=-1, height=60, width=-90, data=GREY.tobytes()).SerializeToString())


def test_channels_that_do_not_fit_are_named_with_the_way_out() -> None:
    assert "`channels: 1`" in refused(raw(GREY[:, :, None]))
    assert "`channels: 3`" in refused(raw(PHOTO), channels=1)
    assert "`channels: 3`" in refused(record(encode(PHOTO)), channels=1)
    assert "alpha" in refused(record(encode(np.dstack([PHOTO, GREY]), ".png")))
    assert "16 bits" in refused(record(encode(PHOTO.astype(np.uint16) * 256, ".png")))


def test_labels_outside_the_classes_are_refused() -> None:
    text = refused(record(encode(PHOTO), label=10))
    assert "label is 10" in text and "num_classes is 10" in text
    assert "below 0" in refused(record(encode(PHOTO), label=-1))


def usual(fields: Fields) -> tuple[object, ...]:
    return (bytes(fields.data), fields.channels, fields.height, fields.width, fields.label, fields.encoded)


def by_protobuf(value: bytes) -> tuple[object, ...] | None:
    try:
        datum = Datum.FromString(value)
    except DecodeError:
        return None
    return datum.data, datum.channels, datum.height, datum.width, datum.label, datum.encoded


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "channels": st.integers(-(2**31), 2**31 - 1), "height": st.integers(0, 1 << 20), "width": st.integers(0, 300),
            "data": st.binary(max_size=300), "label": st.integers(-(2**31), 2**31 - 1), "encoded": st.booleans(),
            "float_data": st.lists(st.floats(width=32, allow_nan=False), max_size=3),
        },
    )
)  # fmt: skip
def test_fields_are_read_as_protobuf_reads_them(fields: dict[str, object]) -> None:
    value = Datum(**fields).SerializeToString()  # type: ignore[arg-type]
    if value:
        assert usual(parse(value)) == by_protobuf(value)
        assert bool(parse(value).floats) == bool(fields.get("float_data"))


@given(st.lists(st.sampled_from([b"\x08\x03", b"\x28\x07", b"\x22\x02ab", b"\x38\x01", b"\x38\x80\x02", b"\x10\x85\x80\x00",
    b"\x48\x05", b"\x22\x05ab", b"\x28\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x28\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x28", b"\x35\0\0\x80\x3f", b"\x32\x04\0\0\x80\x3f", b"\x0b", b"\xa8\x00\x01", b"\x00"]), min_size=1, max_size=6).map(b"".join))  # fmt: skip
def test_odd_bytes_are_what_protobuf_says_they_are(value: bytes) -> None:
    expected = by_protobuf(value)
    if expected is None:
        with pytest.raises(DataError, match="not a Caffe Datum"):
            parse(value)
    else:
        assert usual(parse(value)) == expected


def test_a_png_that_claims_more_pixels_than_anybody_has_is_refused_unread() -> None:
    png = bytearray(encode(PHOTO, ".png"))
    png[16:24] = (60_000).to_bytes(4, "big") + (60_000).to_bytes(4, "big")
    assert "60000 x 60000 pixels" in refused(record(bytes(png)))


def test_a_part_of_any_kind_of_picture_is_that_part_of_the_whole() -> None:
    part = Rectangle(11, 30, 20, 41)
    for value in (raw(PHOTO), record(encode(PHOTO)), record(encode(PHOTO, ".png")), record(encode(GREY))):
        whole, _ = decode(value, 3, 10)
        assert np.array_equal(picture_of(parse(value), 3).decode(part), whole[11:31, 30:71])


def test_other_channels_are_the_recipes_mistake() -> None:
    for value in (record(encode(PHOTO)), record(encode(PHOTO, ".png")), raw(PHOTO)):
        with pytest.raises(OtherChannels, match="3 channels, the network takes 1"):
            decode(value, 1, 10)
    with pytest.raises(OtherChannels, match="1 channel, the network takes 3"):
        decode(raw(GREY[:, :, None]), 3, 10)
