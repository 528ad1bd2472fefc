"""datum: what is in a record, and what is said of each kind of bad one."""

import cv2
import numpy as np
import pytest
from facade import DataError, Datum, Rectangle
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from stagerun.data.datum import Fields, OtherChannels, decode, parse, picture_of

RNG = np.random.default_rng(0)
PHOTO = cv2.GaussianBlur(RNG.integers(0, 256, (60, 90, 3), np.uint8), (9, 9), 0)
GREY = PHOTO[:, :, 0].copy()
GREY_JPEG = cv2.imdecode(cv2.imencode(".jpg", GREY)[1], cv2.IMREAD_GRAYSCALE)[:, :, None]


def encode(image: np.ndarray, kind: str = ".jpg", *options: int) -> bytes:
    return cv2.imencode(kind, image, list(options))[1].tobytes()


def record(data: bytes, label: int = 0, encoded: bool = True) -> bytes:
    return Datum(data=data, label=label, encoded=encoded).SerializeToString()


def raw(image: np.ndarray, label: int = 0) -> bytes:
    planes = image.transpose(2, 0, 1)
    c, h, w = planes.shape
    return Datum(channels=c, height=h, width=w, data=planes.tobytes(), label=label).SerializeToString()


@pytest.mark.parametrize(
    ("value", "channels", "expected"),
    [
        (raw(PHOTO, 7), 3, PHOTO),
        (raw(GREY[:, :, None], 7), 1, GREY[:, :, None]),
        (record(encode(PHOTO, ".png"), 7), 3, PHOTO),
        (record(encode(GREY), 7), 1, GREY_JPEG),
        (record(encode(GREY), 7), 3, np.dstack([GREY_JPEG] * 3)),
    ],
    ids=["raw", "raw grey", "PNG", "grey", "grey among colours"],
)
def test_a_record_becomes_rows_of_blue_green_red(value: bytes, channels: int, expected: np.ndarray) -> None:
    image, label = decode(value, channels, 10)
    assert np.array_equal(image, expected) and label == 7


@pytest.mark.parametrize("kind", [".jpg", ".png"])
@pytest.mark.parametrize("options", [(), (cv2.IMWRITE_JPEG_PROGRESSIVE, 1), (cv2.IMWRITE_JPEG_RST_INTERVAL, 2)])
def test_a_cut_off_file_is_never_half_a_picture(kind: str, options: tuple[int, ...]) -> None:
    whole = encode(PHOTO, kind, *(options if kind == ".jpg" else ()))
    decode(record(whole), 3, 10)
    for length in {*range(20, len(whole) - 1, 97), len(whole) // 2, len(whole) - 1, len(whole) - 2}:
        with pytest.raises(DataError, match="cut off"):
            decode(record(whole[:length]), 3, 10)


def garbled(start: int, length: int) -> bytes:
    data = encode(PHOTO)
    return record(data[:start] + bytes(length) + data[start + length :])


ENORMOUS = encode(PHOTO, ".png")[:16] + (60_000).to_bytes(4, "big") * 2 + encode(PHOTO, ".png")[24:]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "is empty"),
        (b"\xff" * 40, "not a Caffe Datum"),
        (Datum(float_data=[1.0, 2.0]).SerializeToString(), "float_data"),
        (Datum(label=1).SerializeToString(), "no image"),
        (record(b"GIF89a" + bytes(50)), "neither JPEG nor PNG"),
        (garbled(2, 198), "neither JPEG nor PNG"),
        (garbled(encode(PHOTO).index(b"\xff\xc0") + 5, 4), "can't be decoded"),
        (record(ENORMOUS), "60000 x 60000 pixels"),
        (
            Datum(channels=3, height=60, width=90, data=bytes(16199)).SerializeToString(),
            "says 3 x 60 x 90 (channels x height x width) bytes, but holds 16199",
        ),
        (Datum(channels=3, height=60, width=90, data=encode(PHOTO)).SerializeToString(), "encoded: true"),
        (Datum(channels=-1, height=60, width=-90, data=GREY.tobytes()).SerializeToString(), "-1"),
        (raw(GREY[:, :, None]), "`channels: 1`"),
        (record(encode(np.dstack([PHOTO, GREY]), ".png")), "alpha"),
        (record(encode(PHOTO.astype(np.uint16) * 256, ".png")), "16 bits"),
        (record(encode(PHOTO), label=10), "label is 10, but num_classes is 10"),
        (record(encode(PHOTO), label=-1), "below 0"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_every_kind_of_bad_record_is_named(value: bytes, words: str) -> None:
    with pytest.raises(DataError) as error:
        decode(value, 3, 10)
    assert error.value.hint and words in error.value.render()


@pytest.mark.parametrize("number", [1, 999, 1000, 5000])
def test_several_labels_are_read_as_protobuf_reads_them(number: int) -> None:
    floats = np.random.default_rng(number).normal(size=number).astype(np.float32)
    value = Datum(channels=1, height=2, width=2, data=b"abcd", float_data=floats).SerializeToString()
    assert parse(value).floats == tuple(floats.tolist())
    with pytest.raises(DataError):
        parse(value[:-1])


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


def test_a_part_of_any_kind_of_picture_is_that_part_of_the_whole() -> None:
    part = Rectangle(11, 30, 20, 41)
    for value in (raw(PHOTO), record(encode(PHOTO)), record(encode(PHOTO, ".png")), record(encode(GREY))):
        whole, _ = decode(value, 3, 10)
        assert np.array_equal(picture_of(parse(value), 3).decode(part), whole[11:31, 30:71])


def test_other_channels_are_the_recipes_mistake() -> None:
    for value in (record(encode(PHOTO)), record(encode(PHOTO, ".png")), raw(PHOTO)):
        with pytest.raises(OtherChannels, match="3 channels, the network takes 1") as error:
            decode(value, 1, 10)
        assert "`channels: 3`" in error.value.hint
    with pytest.raises(OtherChannels, match="1 channel, the network takes 3"):
        decode(raw(GREY[:, :, None]), 3, 10)
